"""How calls fail: the problem-details body, and what each status means. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from llm4agents import errors
from llm4agents.api.schema.kinds import Answer

CODES: Final = tuple(sorted(code for code in errors.all_errors() if code not in ("error", "not_started")))


class Problem(Answer):
    """Problem details (RFC 9457). `code` says what went wrong and is stable; `outcome` whether it may have happened."""

    type: Literal["about:blank"]
    title: str = Field(description="What this kind of problem is.")
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="What went wrong this time.")
    code: str = Field(
        description="Stable: what programs look at. A later server may have more of them.",
        json_schema_extra={"x-known-values": list(CODES)},
    )
    outcome: Literal["not_started", "unknown", "finished"] = Field(
        description="`not_started`: nothing ran and nothing was charged, safe to repeat. `unknown`: it may have run, "
        "wholly or in part. `finished`: it ran to its end."
    )
    hint: str | None = Field(description="What to do next.")
    details: dict[str, Any] = Field(description="Facts for programs; which ones depends on the code.")


class ErrorLine(Problem):
    """The last line of a stream that failed after its head was sent: a problem, told from other lines by `outcome`."""

    type: Literal["error"]  # type: ignore[assignment]


WORDS: Final[dict[int, tuple[str, str]]] = {
    400: ("BadRequest", "The request is wrong; `detail` says where."),
    401: ("Unauthenticated", "No API key, or one that is not known, is revoked or has expired."),
    403: ("Forbidden", "The key is good and not for this; or the path is protected."),
    404: ("NotFound", "There is nothing of that name, or it is another project's."),
    405: ("MethodNotAllowed", "The path has no such method; `Allow` says which it has."),
    408: ("SlowRequest", "The request did not arrive in the time it has."),
    409: ("Conflict", "Its state forbids the call, or the same is under way."),
    410: ("SandboxDied", "The sandbox ended while the call was running."),
    413: ("TooLarge", "The request's body is larger than it may be."),
    415: ("UnsupportedMediaType", "The body is not of a type that this takes."),
    421: ("Misdirected", "This server is not the host that the request is for."),
    422: ("Refused", "The guest's kernel refused it, or a step failed; `details` says which and how."),
    429: (
        "Quota",
        "The project has as much of it as it may have, or asks too fast; then `Retry-After` says when.",
    ),
    431: ("HeadTooLarge", "The request's head is larger than it may be."),
    500: ("Failed", "The server failed, or a virtual machine monitor refused a command."),
    501: ("UnsupportedPlatform", "This platform can only use a remote server."),
    502: ("Broken", "The guest, or what runs in it, broke off or does not speak what it was spoken to in."),
    503: ("Unavailable", "No room on the node, the host lacks something, or the server is stopping."),
    504: ("TimedOut", "The deadline of the call passed; what it had started was ended."),
}
"""Status → name of the component, words."""

ALWAYS: Final = (400, 408, 421, 429, 431, 500, 503)
WITH_KEY: Final = (401, 403)
WITH_BODY: Final = (413, 415)
BY_REACH: Final = {"server": (), "sandbox": (404, 409), "guest": (404, 409, 410, 422, 502, 504)}


def codes_of(status: int) -> list[str]:
    """The codes that come with a status."""
    known = errors.all_errors()
    return [code for code in CODES if known[code].http_status == status]


def example(status: int) -> dict[str, Any]:
    """A problem of that status."""
    known = errors.all_errors()
    found = next((known[code] for code in codes_of(status)), errors.UnknownOutcomeError)
    return {**errors.to_wire(found()), "status": status}
