"""Which port of which sandbox a request means. Pure.

By path: `/v1/sandboxes/ID/ports/PORT/PATH`. By host: any path, when the Host is `PORT-ID.DOMAIN` (the `_` of the id as
`-`). By headers: any path on a host of the server's own, with `X-Sandbox-ID` and `X-Sandbox-Port` (or E2B's).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from llm4agents.config import Settings
from llm4agents.errors import InvalidRequestError

_PATH = re.compile(rb"/v1/sandboxes/(sbx_[a-z0-9]{20})/ports/([0-9]+)(/.*)?", re.DOTALL)
_LABEL = re.compile(r"([0-9]+)-sbx-([a-z0-9]{20})")
_ID = re.compile(rb"sbx[_-]([a-z0-9]{20})")
_AUTHORITY = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*)(?::[0-9]{0,5})?")
TUNNEL = b"/tcp"
"""Of the path form: a WebSocket there is the raw tunnel, whatever the guest serves under that name."""
WAIT = b"/wait"
"""Of the path form: a GET there is a question to us (does it listen?), not to the guest."""
BY_HEADERS: Final = ((b"x-sandbox-id", b"x-sandbox-port"), (b"e2b-sandbox-id", b"e2b-sandbox-port"))
LOCAL: Final = "localhost"
Form = Literal["path", "host", "headers"]


@dataclass(frozen=True, slots=True)
class Names:
    """What this server is called: `domain`, below which ports have their names, and its own hosts, on which headers
    may name a port (None: any host, since nobody has said what it is called)."""

    domain: str = LOCAL
    own: frozenset[str] | None = None

    @classmethod
    def of(cls, settings: Settings) -> Names:
        domain = plain(settings.domain or "") or LOCAL
        if settings.domain is None and settings.public_url is None:
            return cls(domain)
        public = urlsplit(settings.public_url or "").hostname or ""
        listen = (settings.listen or "").rpartition(":")[0].strip("[]")
        hosts = {domain, f"api.{domain}", f"sandbox.{domain}", public, plain(listen)}
        return cls(domain, frozenset(filter(None, hosts)))

    def is_own(self, host: str) -> bool:
        # One word is a name of this machine's (a container's, or what clients of the unix socket write).
        return self.own is None or host in self.own or "." not in host or _is_ip(host)


@dataclass(frozen=True, slots=True)
class Target:
    """A port of a sandbox. `path` is raw and begins with `/`; None: the prefix itself, without its slash."""

    sandbox: str
    port: int
    path: bytes | None
    prefix: str = ""
    """What stands before the guest's paths in the client's URL; empty when it is not the path that says the port."""
    form: Form = "path"

    @property
    def authority(self) -> str:
        """How the guest's server is called by a browser beside it: what dev servers take for themselves."""
        return f"localhost:{self.port}"


def of(scope: Mapping[str, Any], names: Names) -> Target | None:
    """The target of a request, None when it is not for a port.

    Raises InvalidRequestError for a bad port, a Host that is none, more than one of it, and a request line that names
    another host than the Host header does.
    """
    raw, host = raw_path(scope), host_of(scope)
    label, _, rest = host.partition(".")
    if rest == names.domain and (found := _LABEL.fullmatch(label)):
        return Target(f"sbx_{found[2]}", _port(found[1]), _absolute(raw), form="host")
    by_path = _PATH.fullmatch(raw)
    if by_path is not None:
        if by_path[3] == WAIT and scope["type"] == "http" and scope["method"] == "GET":
            return None
        sandbox, port = by_path[1].decode(), _port(by_path[2].decode())
        return Target(sandbox, port, by_path[3], f"/v1/sandboxes/{sandbox}/ports/{port}")
    return _by_headers(scope, names, host, raw)


def _by_headers(scope: Mapping[str, Any], names: Names, host: str, raw: bytes) -> Target | None:
    for ident, port in BY_HEADERS:
        ids, ports = values(scope, ident), values(scope, port)
        if not (ids or ports) or not names.is_own(host):
            continue
        said, id_words = f"{ident.decode()} and {port.decode()}", "one sandbox's id and one port"
        found = _ID.fullmatch(ids[0]) if len(ids) == len(ports) == 1 else None
        if found is None or not ports[0].isdigit():
            raise InvalidRequestError(f"the headers {said} go together: {id_words}")
        return Target(f"sbx_{found[1].decode()}", _port(ports[0].decode()), _absolute(raw), form="headers")
    return None


def host_of(scope: Mapping[str, Any]) -> str:
    """The Host, in lower case, without port and final dot; empty when there is none. Raises InvalidRequestError."""
    said = values(scope, b"host")
    if len(said) > 1:
        raise InvalidRequestError("this request has more than one Host")
    found = _AUTHORITY.fullmatch(said[0].strip()) if said else None
    if said and found is None:
        raise InvalidRequestError("the Host of this request is no host name")
    return "" if found is None else plain(found[1].decode())


def plain(host: str) -> str:
    """A host name in the one form that is compared: lower case, no final dot (which means the same name)."""
    return host.lower().removesuffix(".")


def raw_path(scope: Mapping[str, Any]) -> bytes:
    """The path as it was sent, still percent-encoded."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0]


def header(scope: Mapping[str, Any], name: bytes) -> bytes:
    """The first header of that (lower-case) name, or nothing."""
    return next(iter(values(scope, name)), b"")


def values(scope: Mapping[str, Any], name: bytes) -> list[bytes]:
    """The headers of that (lower-case) name."""
    return [bytes(value) for key, value in scope["headers"] if key == name]


def _absolute(raw: bytes) -> bytes:
    """RFC 9112, 3.2.2: a request line with a whole URL would hold against the Host. No client of ours sends one."""
    if raw and not raw.startswith(b"/"):
        raise InvalidRequestError(
            "this server is no proxy", hint="the request line has a path, not a whole URL"
        )
    return raw or b"/"


def _port(digits: str) -> int:
    if len(digits) > 5 or not 1 <= int(digits) <= 65_535:
        raise InvalidRequestError(f"{digits[:20]} is not a TCP port", hint="1 to 65535")
    return int(digits)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
