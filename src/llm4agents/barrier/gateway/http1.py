"""The first request head of an HTTP/1.x client, read from hostile bytes. Pure.

    likely(data)      # True, False, or None: too few bytes to tell
    examine(data)     # Head, or None: not whole yet; raises Refused with the reason

Strict where parsers are known to disagree: what two programs could read in two ways is refused, not interpreted.
Only the first head of a connection is looked at: the rest is between the guest and an origin it may talk to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD_BYTES_MAX = 32_768
_METHOD_BYTES_MAX = 24
_HEADERS_MAX = 200
_NO_REQUEST = "a request line that is not METHOD TARGET HTTP/1.x"
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_STARTS = re.compile(rb"[A-Z][A-Z!#$%&'*+.^_`|~0-9a-z-]*")
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.([01])")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_HOST = re.compile(rb"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?")


class Refused(Exception):
    """A request that is let through nowhere; `.status` is the answer's."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


@dataclass(frozen=True, slots=True)
class Head:
    method: str
    target: str
    """As sent: `/path?query` or `*`."""
    host: str
    """Without port, brackets and a last dot, in lower case."""
    port: int | None
    upgrade: str | None

    @property
    def path(self) -> str:
        """Without the query, which may hold what is nobody's business."""
        return self.target.partition("?")[0].partition("#")[0]


def likely(data: bytes) -> bool | None:
    """Whether this begins like a request (a method and a space)."""
    match = _STARTS.match(data[: _METHOD_BYTES_MAX + 1])
    if match is None:
        return None if not data else False
    end = match.end()
    if end > _METHOD_BYTES_MAX:
        return False
    if end == len(data):
        return None
    return data[end : end + 1] == b" " and not data.startswith(b"PRI * HTTP/2"[: len(data)])


def examine(data: bytes) -> Head | None:
    """The head, once it is whole. Raises Refused; also for one that is longer than HEAD_BYTES_MAX."""
    end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
    bare = data.find(b"\n\n", 0, HEAD_BYTES_MAX)
    if bare >= 0 and (end < 0 or bare < end):
        raise Refused("line ends that are not CRLF")  # else it would wait for an end that does not come
    if end < 0:
        if len(data) >= HEAD_BYTES_MAX:
            raise Refused(f"a request head of more than {HEAD_BYTES_MAX} bytes", 431)
        line_end = data.find(b"\r\n")
        if line_end >= 0 and not _LINE.fullmatch(data[:line_end]):
            raise Refused(_NO_REQUEST)  # `EHLO x`: else it would wait for a head that does not come
        return None
    lines = data[:end].split(b"\r\n")
    line = _LINE.fullmatch(lines[0])
    if line is None:
        raise Refused(_NO_REQUEST)
    method, target, minor = line[1].decode("ascii"), line[2].decode("ascii"), line[3]
    return _judge(method, target, minor == b"1", _headers(lines[1:]))


def _headers(lines: list[bytes]) -> dict[bytes, list[bytes]]:
    if len(lines) > _HEADERS_MAX:
        raise Refused(f"more than {_HEADERS_MAX} headers", 431)
    found: dict[bytes, list[bytes]] = {}
    for line in lines:
        if line[:1] in (b" ", b"\t"):
            raise Refused("a folded header")
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise Refused("a header without a proper name")
        if not _VALUE.fullmatch(value):
            raise Refused("a header with control characters")
        found.setdefault(name.lower(), []).append(value.strip(b" \t"))
    return found


def _judge(method: str, target: str, persistent: bool, headers: dict[bytes, list[bytes]]) -> Head:
    if method.upper() == "CONNECT":
        raise Refused("CONNECT: this is no proxy, connect to the host itself", 403)
    if method.upper() == "TRACE":
        raise Refused("TRACE would echo what was put into the request", 403)
    if target == "*":
        if method != "OPTIONS":
            raise Refused("a target of * for a method other than OPTIONS")
    elif not target.startswith("/"):
        raise Refused("an absolute target: this is no proxy, send the path and a Host header", 403)
    hosts = headers.get(b"host", [])
    if len(hosts) != 1:
        raise Refused("no Host header" if not hosts else f"{len(hosts)} Host headers")
    match = _HOST.fullmatch(hosts[0].lower())
    if match is None:
        raise Refused("a Host header that is no host")
    port = int(match[2]) if match[2] else None
    if port is not None and not 0 < port < 65_536:
        raise Refused("a Host header with no valid port")
    host = match[1].decode("ascii").strip("[]").removesuffix(".")
    _framing(persistent, headers)
    upgrades = headers.get(b"upgrade", [])
    return Head(method, target, host, port, upgrades[0].decode("latin-1") if upgrades else None)


def _framing(persistent: bool, headers: dict[bytes, list[bytes]]) -> None:
    """Where a body would end must have one reading."""
    lengths, codings = headers.get(b"content-length", []), headers.get(b"transfer-encoding", [])
    if len(lengths) > 1 or (lengths and not re.fullmatch(rb"[0-9]{1,19}", lengths[0])):
        raise Refused("a Content-Length that is not one number")
    if codings and lengths:
        raise Refused("both Content-Length and Transfer-Encoding")
    if codings and not persistent:
        raise Refused("Transfer-Encoding in HTTP/1.0")
    if codings and (len(codings) > 1 or codings[0].lower() != b"chunked"):
        raise Refused("a Transfer-Encoding other than chunked")
    odd = [name for name in headers if b"_" in name and name.replace(b"_", b"-") in _FRAMING]
    if odd:
        raise Refused("a header that some servers would take for another")


_FRAMING = {b"content-length", b"transfer-encoding", b"host"}
