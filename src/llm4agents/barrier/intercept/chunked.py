"""A reader of the chunked coding that accepts its grammar and nothing else. Pure.

Takes the place of h11's, whose older releases (the ones mitmproxy 11 is pinned to) skip two bytes after a chunk without
looking at them. Extensions and trailers are read over: what is sent on is chunked anew, without them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

LINE_BYTES_MAX = 1_024
TRAILER_BYTES_MAX = 16_384
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


class BadChunk(ValueError):
    """The body breaks the coding: where it ends is not certain."""


class Buffer(Protocol):
    """h11's ReceiveBuffer."""

    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    def maybe_extract_at_most(self, count: int) -> bytearray | None: ...


@dataclass(frozen=True, slots=True)
class End:
    """The body has ended."""


class Reader:
    """Call it with the buffer: bytes of the body, End, or None when more must come. Raises BadChunk."""

    def __init__(self) -> None:
        self._left = 0
        self._state = "size"
        self._trailers = 0

    def __call__(self, buffer: Buffer) -> bytes | End | None:
        while True:
            if self._state == "data":
                data = buffer.maybe_extract_at_most(self._left)
                if not data:
                    return None
                self._left -= len(data)
                if self._left == 0:
                    self._state = "after"
                return bytes(data)
            if self._state == "after":
                if len(buffer) < 2:
                    if len(buffer) and bytes(buffer)[:1] != b"\r":
                        raise BadChunk("a chunk does not end in CRLF")
                    return None
                if bytes(buffer.maybe_extract_at_most(2) or b"") != b"\r\n":
                    raise BadChunk("a chunk does not end in CRLF")
                self._state = "size"
            line = self._line(buffer)
            if line is None:
                return None
            if self._state == "size":
                match = _SIZE.fullmatch(line)
                if match is None:
                    raise BadChunk("a chunk's size is no hexadecimal number")
                self._left = int(match[1], 16)
                self._state = "data" if self._left else "trailers"
            elif line == b"":
                self._state = "done"
                return End()
            else:
                self._trailers += len(line)
                if self._trailers > TRAILER_BYTES_MAX or not _TRAILER.fullmatch(line):
                    raise BadChunk("a malformed trailer")

    def _line(self, buffer: Buffer) -> bytes | None:
        start = bytes(buffer)[: LINE_BYTES_MAX + 2]
        end = start.find(b"\n")
        if end < 0:
            if len(start) > LINE_BYTES_MAX:
                raise BadChunk("a chunk's line is too long")
            return None
        if end == 0 or start[end - 1] != 0x0D:
            raise BadChunk("a chunk's line does not end in CRLF")
        buffer.maybe_extract_at_most(end + 1)
        return start[: end - 1]
