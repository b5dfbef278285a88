"""Which port of which sandbox a request means. Pure.

`/v1/sandboxes/ID/ports/PORT/PATH`, or any path when the Host begins with `PORT-ID.` (the `_` of the id as `-`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llm4agents.errors import InvalidRequestError

_PATH = re.compile(rb"/v1/sandboxes/(sbx_[a-z0-9]{20})/ports/([0-9]+)(/.*)?", re.DOTALL)
_HOST = re.compile(rb"([0-9]+)-sbx-([a-z0-9]{20})(?:\..*)?")
TUNNEL = b"/tcp"
"""Of the path form: a WebSocket there is the raw tunnel, whatever the guest serves under that name."""
WAIT = b"/wait"
"""Of the path form: a GET there is a question to us (does it listen?), not to the guest."""


@dataclass(frozen=True, slots=True)
class Target:
    """A port of a sandbox. `path` is raw and begins with `/`; None: the prefix itself, without its slash."""

    sandbox: str
    port: int
    path: bytes | None
    prefix: str = ""
    """What stands before the guest's own paths in the client's URL; empty when the host name says the port."""

    @property
    def authority(self) -> str:
        """How the guest's server is called by a browser beside it: what dev servers take for themselves."""
        return f"localhost:{self.port}"


def of(scope: Mapping[str, Any]) -> Target | None:
    """The target of a request, None when it is not for a port. Raises InvalidRequestError for a bad port."""
    raw = raw_path(scope)
    if found := _HOST.fullmatch(header(scope, b"host").lower()):
        return Target(f"sbx_{found[2].decode()}", _port(found[1]), raw or b"/")
    found = _PATH.fullmatch(raw)
    if found is None or (found[3] == WAIT and scope["type"] == "http" and scope["method"] == "GET"):
        return None
    sandbox, port = found[1].decode(), _port(found[2])
    return Target(sandbox, port, found[3], f"/v1/sandboxes/{sandbox}/ports/{port}")


def raw_path(scope: Mapping[str, Any]) -> bytes:
    """The path as it was sent, still percent-encoded."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0]


def header(scope: Mapping[str, Any], name: bytes) -> bytes:
    """The first header of that (lower-case) name, or nothing."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


def _port(digits: bytes) -> int:
    if len(digits) > 5 or not 1 <= int(digits) <= 65_535:
        raise InvalidRequestError(f"{digits[:20].decode()} is not a TCP port", hint="1 to 65535")
    return int(digits)
