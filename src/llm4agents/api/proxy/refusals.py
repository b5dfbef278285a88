"""What is answered when a port cannot be reached: a page for people, a problem for programs. Pure.

Behind a name of its own a port looks to its clients like a server behind a gateway, and what is wrong with the sandbox
is that gateway's 502; under our own paths it is our API's answer. `message` is for E2B's clients, which read it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from starlette.responses import Response

from llm4agents.api.answers import dump
from llm4agents.api.proxy.address import Target
from llm4agents.api.proxy.admission import is_followed
from llm4agents.errors import (
    AuthenticationError,
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    LLM4AgentsError,
    PortError,
    PortRefusedError,
    SandboxDiedError,
    SandboxNotFoundError,
    ServerUnavailableError,
    to_wire,
)

_AGAIN_S: Final = 2
_NOT_FOUND, _NOT_OPEN = "The sandbox was not found", "The sandbox is running but port is not open"
_OF_THE_SANDBOX = frozenset({404, 409, 410})

_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:34rem;margin:18vh auto 0;padding:0 1.5rem;color:#1c2024;"
    "background:#fff}h1{font-size:1.4rem;line-height:1.3}p{margin:.6rem 0}code{font:.9em ui-monospace,monospace;"
    "overflow-wrap:anywhere}.of{color:#60646c;font-size:.9rem}a{color:#0b63c5}"
    "@media(prefers-color-scheme:dark){body{color:#edeef0;background:#111113}.of{color:#b0b4ba}a{color:#70b8ff}}"
)
_DIGEST: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_CSP: Final = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'"
)


@dataclass(frozen=True, slots=True)
class _Words:
    title: str
    said: str
    again: bool = False


def refusal(error: LLM4AgentsError, target: Target | None, scope: Mapping[str, Any]) -> Response:
    """The answer to a request that `error` is the end of."""
    status = _status(error, target)
    headers = {"cache-control": "no-store"}
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if status == 503 or isinstance(error, PortRefusedError):
        headers["retry-after"] = str(_AGAIN_S)
    if is_followed(scope):
        return _page(error, target, status, headers)
    body = {**to_wire(error), "status": status}
    if target is not None and target.form != "path" and status == 502:
        body["sandboxId"] = target.sandbox
        body["message"] = _for_e2b(error)
    return Response(dump(body), status, headers, "application/problem+json")


def _status(error: LLM4AgentsError, target: Target | None) -> int:
    status = error.http_status
    return 502 if target is not None and target.form != "path" and status in _OF_THE_SANDBOX else status


def _for_e2b(error: LLM4AgentsError) -> str:
    if isinstance(error, PortRefusedError):
        return _NOT_OPEN
    if isinstance(error, SandboxNotFoundError):
        return _NOT_FOUND
    return f"{_NOT_FOUND}: {error.message}" if error.http_status in _OF_THE_SANDBOX else error.message


def _page(error: LLM4AgentsError, target: Target | None, status: int, headers: dict[str, str]) -> Response:
    words = _words(error, target)
    of = (
        ""
        if target is None
        else f'<p class="of">Port {target.port} of <code>{escape(target.sandbox)}</code></p>'
    )
    again = f'<meta http-equiv="refresh" content="{_AGAIN_S}">' if words.again else ""
    retry = '<p><a href="">Try again</a></p>' if words.again else ""
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="robots" content="noindex">'
        f"{again}<title>{escape(words.title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(words.title)}</h1><p>{escape(words.said)}</p>{retry}{of}</main></body></html>"
    )
    headers |= {
        "content-security-policy": _CSP,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(html, status, headers, "text/html; charset=utf-8")


def _words(error: LLM4AgentsError, target: Target | None) -> _Words:
    port = "this port" if target is None else f"port {target.port}"
    if isinstance(error, ForbiddenError | AuthenticationError):
        return _Words(
            "This is not open to you",
            f"{_sentence(error.message)} Sandboxes are private: "
            "a signed link, or the sandbox's owner's making it public, lets you in.",
        )
    if isinstance(error, SandboxNotFoundError):
        return _Words("There is no such sandbox", "It never was, or it ended long ago.")
    if isinstance(error, SandboxDiedError):
        return _Words("This sandbox has ended", _sentence(error.message))
    if isinstance(error, PortRefusedError):
        return _Words(
            f"Nothing listens on {port} yet",
            f"The sandbox runs, and no server in it listens on {port}. This page looks again by itself.",
            again=True,
        )
    if isinstance(error, PortError):
        return _Words("The server in the sandbox did not answer as it should", _sentence(error.message))
    if isinstance(error, ConflictError):
        return _Words("This sandbox is paused", f"{_sentence(error.message)} Its owner can resume it.")
    if isinstance(error, InvalidRequestError):
        return _Words("This address is wrong", _sentence(error.message))
    if isinstance(error, ServerUnavailableError) or error.http_status == 503:
        return _Words("Not just now", _sentence(error.message), again=True)
    return _Words("This did not work", _sentence(error.message))


def _sentence(words: str) -> str:
    """An error's message as a person is to read it."""
    words = words.strip()[:500]
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")
