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
        raw = bytes(buffer)
        found, at = self._read(raw)
        buffer.maybe_extract_at_most(at)
        return found

    def _read(self, raw: bytes) -> tuple[bytes | End | None, int]:
        """What is in there, and how much of it was taken. Many small chunks are taken at once: each by itself would
        cost its sender six bytes and us a way through the whole proxy."""
        pieces: list[bytes] = []
        at = 0
        try:
            while True:
                if self._state == "data":
                    piece = raw[at : at + self._left]
                    if not piece:
                        break
                    pieces.append(piece)
                    at += len(piece)
                    self._left -= len(piece)
                    if self._left:
                        break
                    self._state = "after"
                if self._state == "after":
                    end = raw[at : at + 2]
                    if end != b"\r\n":
                        if len(end) == 2 or end not in (b"", b"\r"):
                            raise BadChunk("a chunk does not end in CRLF")
                        break
                    at += 2
                    self._state = "size"
                if self._state in ("trailers", "done") and pieces:
                    break  # the end is told by itself
                line = self._line(raw, at)
                if line is None:
                    break
                if self._state == "size":
                    match = _SIZE.fullmatch(line)
                    if match is None:
                        raise BadChunk("a chunk's size is no hexadecimal number")
                    at += len(line) + 2
                    self._left = int(match[1], 16)
                    self._state = "data" if self._left else "trailers"
                    continue
                at += len(line) + 2
                if line == b"":
                    self._state = "done"
                    return End(), at
                self._trailers += len(line)
                if self._trailers > TRAILER_BYTES_MAX or not _TRAILER.fullmatch(line):
                    raise BadChunk("a malformed trailer")
        except BadChunk:
            if not pieces:  # else they are told first, and this when it is called again
                raise
        return b"".join(pieces) or None, at

    @staticmethod
    def _line(raw: bytes, at: int) -> bytes | None:
        end = raw.find(b"\n", at, at + LINE_BYTES_MAX + 2)
        if end < 0:
            if len(raw) - at > LINE_BYTES_MAX:
                raise BadChunk("a chunk's line is too long")
            return None
        if end == at or raw[end - 1] != 0x0D:
            raise BadChunk("a chunk's line does not end in CRLF")
        return raw[at : end - 1]
