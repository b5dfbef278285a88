"""The first message of a TLS client, read from hostile bytes. Pure.

    found = examine(data)           # Hello, or how many bytes are needed before it is worth asking again
                                    # raises NotHello (it is no TLS at all), Refused (it is, and not as it should be)

A hello may be spread over records and segments; nothing is decrypted, and nothing after the hello is looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HELLO_BYTES_MAX = 32_768
"""Of the message; browsers with post-quantum keys send 2 KiB."""
_RECORD_BYTES_MAX = 16_384
_RECORDS_MAX = 64
_HOST = re.compile(rb"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?)*")
_SNI, _ALPN, _ECH, _ESNI = 0, 16, 0xFE0D, 0xFFCE
ACCESS_DENIED, INTERNAL_ERROR, DECODE_ERROR = 49, 80, 50


class NotHello(Exception):
    """These bytes begin no TLS connection."""


class Refused(Exception):
    """TLS, but a hello that is let through nowhere; the words say why."""


@dataclass(frozen=True, slots=True)
class Hello:
    name: str | None
    """Server name as sent, in lower case; None: not sent."""
    alpn: tuple[str, ...]
    ech: bool
    """Whether it has an encrypted client hello, real or greased: nobody without the key can tell them apart."""
    size: int
    """Bytes of the connection it took."""


def alert(description: int) -> bytes:
    """A fatal alert in a record of its own, as every TLS client understands it before the handshake."""
    return bytes((21, 3, 3, 0, 2, 2, description))


def examine(data: bytes) -> Hello | int:
    """Raises NotHello, Refused."""
    message = bytearray()
    at = 0
    for _ in range(_RECORDS_MAX):
        head = data[at : at + 5]
        if head and head[0] != 22:
            if at == 0:
                raise NotHello
            raise Refused("something else between the pieces of the client hello")
        if len(head) > 1 and head[1] != 3:
            raise NotHello if at == 0 else Refused("a record of another version")
        if len(head) < 5:
            return at + 5
        length = head[3] << 8 | head[4]
        if not 1 <= length <= _RECORD_BYTES_MAX:
            raise NotHello if at == 0 else Refused("a record of no valid length")
        message += data[at + 5 : at + 5 + length]
        if message and message[0] != 1:
            raise NotHello if at == 0 else Refused("no client hello")
        at += 5 + length
        if len(message) >= 4:
            size = message[1] << 16 | message[2] << 8 | message[3]
            if not 38 <= size <= HELLO_BYTES_MAX:
                raise Refused(f"a client hello of {size} bytes")
            if len(message) >= 4 + size:
                return _hello(bytes(message[4 : 4 + size]), at)
        if len(data) < at:
            return at
    raise Refused("a client hello in too many pieces")


class _Reader:
    """Takes lengths at their word only as far as there are bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise Refused("a client hello that is shorter than it says")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))

    @property
    def more(self) -> bool:
        return self.at < len(self.data)


def _hello(body: bytes, size: int) -> Hello:
    reader = _Reader(body)
    reader.take(2 + 32)
    if len(reader.vector(1)) > 32:
        raise Refused("a session id too long")
    if len(reader.vector(2)) < 2:
        raise Refused("no cipher suites")
    reader.vector(1)
    name: str | None = None
    alpn: tuple[str, ...] = ()
    seen: set[int] = set()
    if reader.more:
        extensions = _Reader(reader.vector(2))
        if reader.more:
            raise Refused("bytes after the client hello's extensions")
        while extensions.more:
            kind, value = extensions.number(2), extensions.vector(2)
            if kind in seen:
                raise Refused(f"extension {kind} twice")
            seen.add(kind)
            if kind == _SNI:
                name = _server_name(value)
            elif kind == _ALPN:
                alpn = _protocols(value)
    return Hello(name, alpn, bool(seen & {_ECH, _ESNI}), size)


def _server_name(value: bytes) -> str:
    reader = _Reader(value)
    names = _Reader(reader.vector(2))
    if reader.more:
        raise Refused("bytes after the server name")
    kind, name = names.number(1), names.vector(2).lower()
    if kind != 0 or names.more:
        raise Refused("not exactly one server name")
    if len(name) > 253 or not _HOST.fullmatch(name):
        raise Refused("a server name that is no host name")
    return name.decode("ascii")


def _protocols(value: bytes) -> tuple[str, ...]:
    reader = _Reader(value)
    names = _Reader(reader.vector(2))
    if reader.more:
        raise Refused("bytes after the protocol names")
    found = []
    while names.more:
        name = names.vector(1)
        if not name:
            raise Refused("an empty protocol name")
        found.append(name.decode("latin-1"))
    return tuple(found)
