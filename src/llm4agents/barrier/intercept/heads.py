"""The head of an HTTP/1 request, read so strictly that no server behind us can read it otherwise. Pure.

mitmproxy's parser is lenient where it shows traffic to people (bare line feeds, folded headers, several lengths);
what two parsers can read in two ways is what smuggling is made of, so here it is refused, and the connection with it.
What is not refused is made plain: one Host, one length, no hop-by-hop headers but the ones that mean something to us.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from llm4agents import limits

Fields = list[tuple[bytes, bytes]]

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}) ([!-~\x80-\xff]+) HTTP/(1\.[01])")
# Blanks around the value are taken off afterwards: a pattern that has them would try every way to tell them from the
# value's own.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\0")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_-]{1,63})*")
_HOP = (b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"keep-alive", b"te", b"trailer",
        b"http2-settings")  # fmt: skip


class BadHead(Exception):
    """The request is refused with `status`, and the connection closed: its bytes have no certain meaning."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


@dataclass(slots=True)
class Head:
    method: str
    target: bytes
    version: str
    """`1.0` or `1.1`."""
    fields: Fields
    length: int | None
    """Of the body; None when it is chunked."""

    def get(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.fields if key.lower() == name), None)


def end_of(buffer: bytes, seen: int = 0) -> int | None:
    """How many bytes of `buffer` are the first head, its blank line included; None while that is not there.

    `seen`: how many of them were there when it was asked last: a head in crumbs is not read from its beginning.

    Raises BadHead for line ends that are not CRLF and for a head that is too long.
    """
    start = max(0, seen - 3)
    found = buffer.find(b"\r\n\r\n", start)
    size = len(buffer) if found < 0 else found + 4
    if _BARE.search(buffer, start, size):
        raise BadHead(400, "a line does not end in CRLF, or has a control character in it")
    if size > limits.INTERCEPT_HEAD_BYTES_MAX:
        raise BadHead(431, f"the request's head is longer than {limits.INTERCEPT_HEAD_BYTES_MAX} bytes")
    return None if found < 0 else size


def parse(raw: bytes) -> Head:
    """The head in `raw` (all of it, with the blank line). Raises BadHead."""
    line, *lines = raw[:-4].split(b"\r\n")
    match = _LINE.fullmatch(line)
    if match is None:
        raise BadHead(400, "the request line is not METHOD TARGET HTTP/1.x")
    method, target, version = match[1].decode(), match[2], match[3].decode()
    fields: Fields = []
    for text in lines:
        if text[:1] in (b" ", b"\t"):
            raise BadHead(400, "a header is folded over lines")
        field = _FIELD.fullmatch(text)
        if field is None:
            raise BadHead(400, "a header line is malformed")
        fields.append((field[1], field[2].strip(b" \t")))
    if len(fields) > limits.INTERCEPT_HEADERS_MAX:
        raise BadHead(431, f"more than {limits.INTERCEPT_HEADERS_MAX} headers")
    names = [name.lower() for name, _ in fields]
    if names.count(b"host") > 1:
        raise BadHead(400, "more than one Host header")
    if any(name not in _FRAMING and _like(name) in _FRAMING for name in names):
        raise BadHead(400, "a header that some servers would take for another")
    if b"host" not in names and version == "1.1":
        raise BadHead(400, "no Host header")
    return Head(method, target, version, fields, _length(version, fields))


def _length(version: str, fields: Fields) -> int | None:
    lengths = [value for name, value in fields if name.lower() == b"content-length"]
    codings = [value for name, value in fields if name.lower() == b"transfer-encoding"]
    if lengths and codings:
        raise BadHead(400, "both Content-Length and Transfer-Encoding")
    if len(lengths) > 1 or len(codings) > 1:
        raise BadHead(400, "the length is given twice")
    if codings:
        if version == "1.0" or codings[0].lower() != b"chunked":
            raise BadHead(400, "the only Transfer-Encoding of a request is chunked, in HTTP/1.1")
        return None
    if not lengths:
        return 0
    if not re.fullmatch(rb"0|[1-9][0-9]{0,18}", lengths[0]):
        raise BadHead(400, "Content-Length is no number")
    return int(lengths[0])


def origin_form(head: Head, scheme: str) -> tuple[bytes, bytes | None]:
    """The target as path and query, and the authority it names (absolute form) or None. Raises BadHead."""
    target = head.target
    if target.startswith(b"/"):
        return target, None
    if target == b"*" and head.method == "OPTIONS":
        return target, None
    match = re.fullmatch(rb"(?i:(https?))://([^/?#@]+)([/?][^#]*)?", target)
    if match is None:
        raise BadHead(400, "the request's target is neither a path nor an http address")
    if match[1].lower().decode() != scheme:
        raise BadHead(
            400, f"the request's target says {match[1].decode().lower()} on a connection of {scheme}"
        )
    path = match[3] or b"/"
    return (path if path.startswith(b"/") else b"/" + path), match[2]


def authority(raw: bytes) -> tuple[str, int | None]:
    """`host[:port]` as (name or address in lower case without a trailing dot, port). Raises BadHead."""
    try:
        text = raw.decode("ascii").lower()
    except UnicodeDecodeError:
        raise BadHead(400, "the Host header is not ASCII") from None
    match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(?::([0-9]{1,5}))?", text)
    if match is None:
        raise BadHead(400, "the Host header is not a host")
    host = match[1].strip("[]") if match[1].startswith("[") else match[1].removesuffix(".")
    if not match[1].startswith("[") and not _NAME.fullmatch(host):
        raise BadHead(400, "the Host header is not a host")
    return host, None if match[2] is None else int(match[2])


def is_websocket(head: Head) -> bool:
    """Whether it asks for a WebSocket, in every particular (RFC 6455, 4.1)."""
    key = head.get(b"sec-websocket-key")
    return (
        head.method == "GET"
        and head.version == "1.1"
        and head.length == 0
        and (head.get(b"upgrade") or b"").lower() == b"websocket"
        and b"upgrade" in _tokens(head.get(b"connection"))
        and head.get(b"sec-websocket-version") == b"13"
        and key is not None
        and re.fullmatch(rb"[A-Za-z0-9+/]{22}==", key) is not None
    )


def plain(head: Head, host: bytes) -> Fields:
    """The headers as they are sent on: `Host` first and once, hop-by-hop ones gone, `Upgrade` only for a WebSocket
    (and that without extensions, so that its messages can be read)."""
    websocket = is_websocket(head)
    fields: Fields = [(b"Host", host)]
    wanted = _tokens(head.get(b"connection"))
    for name, value in head.fields:
        lower = name.lower()
        if lower in (b"host", b"connection", *_HOP) or _like(lower) in _ELSEWHERE:
            continue
        if lower in (b"upgrade", b"sec-websocket-extensions") and (not websocket or lower != b"upgrade"):
            continue
        fields.append((name, value))
    if websocket:
        fields.append((b"Connection", b"Upgrade"))
    elif b"close" in wanted:
        fields.append((b"Connection", b"close"))
    elif b"keep-alive" in wanted:
        fields.append((b"Connection", b"keep-alive"))
    return fields


_OVERRIDES = (b"x-http-method-override", b"x-http-method", b"x-method-override")
_ELSEWHERE = frozenset(
    b"x-original-url x-rewrite-url x-original-uri x-forwarded-uri x-forwarded-path x-forwarded-prefix x-original-host "
    b"x-forwarded-host x-forwarded-server x-host x-http-host-override x-original-method x-forwarded-method "
    b"forwarded".split()
)
"""What servers behind a proxy take for path, host or method in place of those that were judged. Not sent on: a guest
is no such proxy."""
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host"))


def _like(lower: bytes) -> bytes:
    """A header's name as those servers see it that keep letters and digits of it: they make variables of headers."""
    return re.sub(rb"[^a-z0-9]", b"-", lower)


def overrides(head: Head) -> list[str]:
    """The methods that some servers would act by instead of the one in the request line: in a header or as `_method`
    in the query, however these are spelt for some. Raises BadHead."""
    found = [value for name, value in head.fields if _like(name.lower()) in _OVERRIDES]
    for part in re.split(rb"[&;]", head.target.partition(b"?")[2]):
        key, _, value = part.partition(b"=")
        # As PHP reads a name: to its end at a NUL, without blanks before it, with `_` for what no variable has.
        key = unquote_to_bytes(key.replace(b"+", b" ")).partition(b"\0")[0].lstrip(b" ")
        if re.fullmatch(rb"[_.\[]method(\[.*)?", key, re.DOTALL) and value:
            found.append(unquote_to_bytes(value.replace(b"+", b" ")).strip())
    for value in found:
        if not re.fullmatch(rb"[A-Za-z]{1,20}", value):
            raise BadHead(400, "a header that overrides the method names none")
    return [value.decode().upper() for value in found]


def closes(head: Head) -> bool:
    """Whether the guest expects the connection to end with the answer."""
    wanted = _tokens(head.get(b"connection"))
    return b"close" in wanted or (head.version == "1.0" and b"keep-alive" not in wanted)


def _tokens(value: bytes | None) -> set[bytes]:
    return {token.strip().lower() for token in (value or b"").split(b",")}


def is_value(value: bytes) -> bool:
    """Whether it can be a header's value: nothing in it ends the line."""
    return re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", value) is None
