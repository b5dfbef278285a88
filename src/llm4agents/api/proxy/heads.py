"""What is changed in the heads of requests and answers on their way through. Pure.

Towards the guest: it sees itself as `localhost:PORT`, since that is the one name that every dev server takes
for its own, and is told the client's names in X-Forwarded-*. Towards the client: what the guest says of its own
origin (redirects, cookies' paths) is moved to where the client sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from llm4agents.api.proxy import address
from llm4agents.api.proxy.address import Target
from llm4agents.api.proxy.admission import is_our_cookie

Fields = list[tuple[bytes, bytes]]

_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_HANDSHAKE = frozenset(
    {
        b"sec-websocket-key",
        b"sec-websocket-version",
        b"sec-websocket-extensions",
        b"sec-websocket-protocol",
        b"sec-websocket-accept",
    }
)
_FORWARDED = frozenset(
    {b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-prefix", b"forwarded"}
)
# Under a path prefix the guest shares an origin with this server and with other sandboxes: it has no say over it.
_OF_THE_WHOLE_ORIGIN = frozenset(
    {b"strict-transport-security", b"clear-site-data", b"service-worker-allowed", b"alt-svc"}
)
_OWN_NAMES = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1", "::"})  # noqa: S104
_COOKIE_PATH = re.compile(rb"(;\s*path\s*=\s*)(/[^;]*)", re.IGNORECASE)
_COOKIE_DOMAIN = re.compile(rb";\s*domain\s*=[^;]*", re.IGNORECASE)


def named(fields: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """The values of a header."""
    return [value for key, value in fields if key.lower() == name]


def _hop(fields: Fields) -> set[bytes]:
    """The names that belong to one connection: the known ones and those that Connection lists."""
    tokens = b",".join(named(fields, b"connection")).lower().split(b",")
    return {*_HOP, *(token.strip() for token in tokens)}


def request(scope: Mapping[str, Any], target: Target) -> Fields:
    """The headers for the guest: without Transfer-Encoding, which is the sender's to choose."""
    fields: Fields = scope["headers"]
    out = _hop(fields) | _HANDSHAKE | _FORWARDED | {b"host"}
    own = target.authority.encode()
    public = (_scheme(scope), address.header(scope, b"host"))
    sent: Fields = [(b"host", own)]
    for name, value in fields:
        if name in out:
            continue
        if name == b"origin" and value == b"%b://%b" % public:
            # Same origin stays same origin, for servers that compare the two.
            value = b"http://" + own
        sent.append((name, value))
    # What a client says of itself in these is not passed on; what a trusted proxy says is in the scope by now.
    client = scope.get("client")
    sent += [
        (b"x-forwarded-for", client[0].encode() if client and client[0] else b"unknown"),
        (b"x-forwarded-host", public[1]),
        (b"x-forwarded-proto", public[0]),
    ]
    if target.prefix:
        sent.append((b"x-forwarded-prefix", target.prefix.encode()))
    return sent


def _scheme(scope: Mapping[str, Any]) -> bytes:
    return b"https" if scope.get("scheme") in ("https", "wss") else b"http"


def answer(fields: Fields, scope: Mapping[str, Any], target: Target) -> Fields:
    """The guest's headers for the client. The server adds its own Date, so the guest's is left out."""
    out = _hop(fields) | _HANDSHAKE | {b"date"}
    if b"transfer-encoding" in (name.lower() for name, _ in fields):
        out.add(b"content-length")  # RFC 9112, 6.3: the other one holds
    if target.form != "host":
        out |= _OF_THE_WHOLE_ORIGIN
    host = address.header(scope, b"host").decode("latin-1").lower()
    sent: Fields = []
    for name, value in fields:
        name = name.lower()
        if name in out:
            continue
        if name in (b"location", b"content-location"):
            value = location(value.decode("latin-1"), target, host).encode("latin-1")
        elif name == b"set-cookie":
            if is_our_cookie(value):
                continue
            value = cookie(value, target.prefix.encode())
        sent.append((name, value))
    return sent


def location(value: str, target: Target, public_host: str) -> str:
    """Where a redirect of the guest's leads for the client; only what points to the guest's own origin is changed."""
    try:
        parts = urlsplit(value)
        own = parts.netloc and _is_own(parts.scheme, parts.hostname, parts.port, target)
    except ValueError:
        return value
    if parts.netloc:
        if not own and parts.netloc.lower() != public_host:
            return value
        if parts.scheme not in ("", "http", "https"):
            return value
        rest = parts._replace(scheme="", netloc="").geturl()
        rest = rest if rest.startswith("/") else f"/{rest}"
    elif parts.scheme or not value.startswith("/"):
        return value  # relative to the page, or mailto: and the like
    else:
        rest = value
    if rest.startswith("//"):
        return value  # without its host this would name another one
    if target.prefix and rest.partition("?")[0] != target.prefix and not rest.startswith(target.prefix + "/"):
        return target.prefix + rest
    return rest


def _is_own(scheme: str, host: str | None, port: int | None, target: Target) -> bool:
    if port is None:
        port = 443 if scheme == "https" else 80
    return (host or "") in _OWN_NAMES and port == target.port


def cookie(value: bytes, prefix: bytes) -> bytes:
    """A cookie for the host alone that the client sees, and for the guest's paths, wherever they lie there."""

    def moved(found: re.Match[bytes]) -> bytes:
        path = found[2].strip()
        inside = path == prefix or path.startswith(prefix + b"/")
        return found[1] + (path if inside else prefix + path)

    value = _COOKIE_DOMAIN.sub(b"", value)
    return _COOKIE_PATH.sub(moved, value) if prefix else value
