"""Every error this package raises on purpose, under one root.

A caller needs to know two things about a failure: what to do, and whether the thing it asked for may
have happened. The second is a property of the class (`outcome`), so that a retry can be decided
without reading words:

    LLM4AgentsError
    ├── NotStartedError          outcome "not_started": nothing ran, nothing was charged; safe to retry
    │   ├── InvalidRequestError      the call itself is wrong (also a ValueError)
    │   │   ├── TooLargeError            its body, or (HeadTooLargeError) its head
    │   │   ├── AmbiguousRequestError    its length is said in two ways
    │   │   ├── MethodNotAllowedError    the path has other methods
    │   │   └── MediaTypeError           its body is not of a type that is taken there
    │   ├── MisdirectedError         the request is for another host than this server is
    │   ├── SlowRequestError         the request did not arrive in the time it has
    │   ├── AuthenticationError      no key, or one that is not known, is revoked or has expired
    │   ├── ForbiddenError           the key is good, and this is not for it
    │   ├── QuotaError               the project has as much of it as it may have, or asks too fast
    │   ├── ProtectedPathError       the file would be one that a machine obeys without being asked
    │   ├── NotFoundError            no sandbox, template, file or process of that name
    │   │   ├── SandboxNotFoundError
    │   │   ├── TemplateNotFoundError
    │   │   └── PathNotFoundError
    │   ├── ConflictError            it exists, or its state forbids the call (killed, wrong version)
    │   ├── PortRefusedError         nothing listens on that port of the sandbox
    │   ├── CapacityError            this node is full, or out of disk or memory
    │   ├── HostSetupError           a host package, device or permission is missing; says which
    │   ├── ServerUnavailableError   no server answers and none could be started; names its log
    │   ├── VersionMismatchError     a store, snapshot or server of another version
    │   ├── BootError                the VM never became ready; carries the tail of its console
    │   ├── TemplateBuildError       a step of a template's build failed: names it, with what it said last
    │   └── UnsupportedPlatformError not Linux: only a remote server can be used from here
    ├── UnknownOutcomeError      outcome "unknown": it may have run, wholly or in part
    │   ├── SandboxDiedError         the VM ended under the call; says why when that is known
    │   ├── TimedOutError            the deadline passed (also a TimeoutError); what ran was ended
    │   ├── ConnectionLostError      the server or the channel went away in mid-call
    │   ├── PortError                the server on a port of the sandbox broke off, or is none of that kind
    │   ├── ProtocolError            the guest broke the protocol; its session was ended
    │   ├── GuestError               the guest's agent failed in a way it could describe (errno)
    │   └── VmmError                 the virtual machine monitor refused a command
    └── ProgramFailedError       outcome "finished": raised by `.check()` on a result, and only there

Non-zero exits and Python exceptions inside a sandbox are results, not errors of ours.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar, Literal

Outcome = Literal["not_started", "unknown", "finished"]


class LLM4AgentsError(Exception):
    """Something this package was asked to do was not done, or not known to be done.

    `code` is stable and travels over HTTP; `hint` says what to do next; `details` is JSON-able.
    """

    code: ClassVar[str] = "error"
    outcome: ClassVar[Outcome] = "unknown"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str = "", *, hint: str | None = None, **details: Any) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.hint = hint
        self.details = details
        super().__init__(self.message if hint is None else f"{self.message} ({hint})")


class NotStartedError(LLM4AgentsError):
    """Nothing ran; the call is safe to repeat."""

    code = "not_started"
    outcome = "not_started"


class InvalidRequestError(NotStartedError, ValueError):
    """The request itself is wrong."""

    code = "invalid_request"
    http_status = 400


class TooLargeError(InvalidRequestError):
    """The request is larger than it may be."""

    code = "too_large"
    http_status = 413


class HeadTooLargeError(TooLargeError):
    """The request's head is larger than it may be."""

    code = "head_too_large"
    http_status = 431


class MethodNotAllowedError(InvalidRequestError):
    """The path has no such method."""

    code = "method_not_allowed"
    http_status = 405


class MediaTypeError(InvalidRequestError):
    """The request's body is not of a type that is taken there."""

    code = "unsupported_media_type"
    http_status = 415


class MisdirectedError(NotStartedError):
    """This server is not the host that the request is for."""

    code = "misdirected"
    http_status = 421


class SlowRequestError(NotStartedError):
    """The request did not arrive in the time it has."""

    code = "slow_request"
    http_status = 408


class AmbiguousRequestError(InvalidRequestError):
    """Where the request ends is not the same for everybody: nothing that follows it on its connection is believed."""

    code = "ambiguous_request"


class AuthenticationError(NotStartedError):
    """Who calls is not known."""

    code = "unauthenticated"
    http_status = 401


class ForbiddenError(NotStartedError):
    """Who calls may not do this."""

    code = "forbidden"
    http_status = 403


class QuotaError(NotStartedError):
    """The project may not have more of this."""

    code = "quota"
    http_status = 429


class ProtectedPathError(NotStartedError):
    """That path is protected: nothing was written there."""

    code = "protected_path"
    http_status = 403


class NotFoundError(NotStartedError):
    """There is nothing of that name."""

    code = "not_found"
    http_status = 404


class SandboxNotFoundError(NotFoundError):
    """There is no sandbox of that id."""

    code = "sandbox_not_found"


class TemplateNotFoundError(NotFoundError):
    """There is no template of that name."""

    code = "template_not_found"


class PathNotFoundError(NotFoundError, FileNotFoundError):
    """There is no such file or directory in the sandbox."""

    code = "path_not_found"


class ConflictError(NotStartedError):
    """The state of the thing forbids this call."""

    code = "conflict"
    http_status = 409


class PortRefusedError(NotStartedError):
    """Nothing listens on that port of the sandbox."""

    code = "port_refused"
    http_status = 502


class CapacityError(NotStartedError):
    """This node has no room for it."""

    code = "capacity"
    http_status = 503


class HostSetupError(NotStartedError):
    """The host lacks something that is needed."""

    code = "host_setup"
    http_status = 503


class ServerUnavailableError(NotStartedError):
    """No server answers."""

    code = "server_unavailable"
    http_status = 503


class VersionMismatchError(NotStartedError):
    """Made by another version, and not readable by this one."""

    code = "version_mismatch"
    http_status = 409


class CorruptSnapshotError(NotStartedError):
    """A snapshot on disk is not what was written: a part is missing, short or changed."""

    code = "corrupt_snapshot"
    http_status = 409


class BootError(NotStartedError):
    """The virtual machine did not become ready."""

    code = "boot_failed"
    http_status = 503


class TemplateBuildError(NotStartedError):
    """A step of the template's build failed; there is no template."""

    code = "template_build_failed"
    http_status = 422


class UnsupportedPlatformError(NotStartedError):
    """This platform can only use a remote server."""

    code = "unsupported_platform"
    http_status = 501


class UnknownOutcomeError(LLM4AgentsError):
    """It may have run, wholly or in part."""

    code = "unknown_outcome"
    outcome = "unknown"


class SandboxDiedError(UnknownOutcomeError):
    """The sandbox ended while the call was running."""

    code = "sandbox_died"
    http_status = 410


class SandboxPausedError(UnknownOutcomeError):
    """The sandbox was paused while the call was running; what it had started goes on after a resume."""

    code = "sandbox_paused"
    http_status = 409


class TimedOutError(UnknownOutcomeError, TimeoutError):
    """The deadline of the call passed; what it had started was ended."""

    code = "timed_out"
    http_status = 504


class ConnectionLostError(UnknownOutcomeError):
    """The other side went away in the middle of the call."""

    code = "connection_lost"
    http_status = 502


class PortError(UnknownOutcomeError):
    """The server on a port of the sandbox broke the connection off, or does not speak what it was spoken to in."""

    code = "port_failed"
    http_status = 502


class ProtocolError(UnknownOutcomeError):
    """The guest sent what the protocol does not allow; its session was ended."""

    code = "protocol_error"
    http_status = 502


class GuestError(UnknownOutcomeError, OSError):
    """The guest's kernel refused what the call asked for."""

    code = "guest_error"
    http_status = 422


class ProgramFailedError(LLM4AgentsError):
    """The program ran in the sandbox and failed."""

    code = "program_failed"
    outcome = "finished"
    http_status = 422


class VmmError(UnknownOutcomeError):
    """The virtual machine monitor refused a command."""

    code = "vmm_refused"


def disk_full(number: int | None) -> CapacityError | None:
    """In our words, when that errno says that a disk of the host has no room; None when it says anything else."""
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return CapacityError("the host's disk is full", hint="free space, or llm4agents prune")


def all_errors() -> dict[str, type[LLM4AgentsError]]:
    """Every class by its `code`, for carrying errors over HTTP and back."""
    found: dict[str, type[LLM4AgentsError]] = {}
    todo: list[type[LLM4AgentsError]] = [LLM4AgentsError]
    while todo:
        cls = todo.pop()
        found[cls.code] = cls
        todo.extend(cls.__subclasses__())
    return found


def to_wire(error: LLM4AgentsError) -> dict[str, Any]:
    """The problem-details body (RFC 9457 with `code`, `outcome`, `hint`, `details`) of an error."""
    return {
        "type": "about:blank",
        "title": (type(error).__doc__ or "").strip().splitlines()[0],
        "status": error.http_status,
        "detail": error.message,
        "code": error.code,
        "outcome": error.outcome,
        "hint": error.hint,
        "details": error.details,
    }


def from_wire(body: dict[str, Any], status: int) -> LLM4AgentsError:
    """The error a problem-details body describes; one of an unknown code keeps what it says."""
    cls = all_errors().get(str(body.get("code")), None)
    if cls is None:
        cls = InvalidRequestError if 400 <= status < 500 else UnknownOutcomeError
    hint, details = body.get("hint"), body.get("details")
    error = cls(
        str(body.get("detail") or body.get("title") or f"HTTP {status}"),
        hint=None if hint is None else str(hint),
    )
    error.details = details if isinstance(details, dict) else {}
    return error
