"""The frame codec of docs/design/protocol.md, as the host sees it. Pure: bytes in, frames out, no I/O.

Not here: what frames mean (`channel`, `stream`), what their maps hold (`maps`). Everything decoded comes
from a guest and is hostile: the decoder holds at most one buffer of fixed size, delivers nothing that is not
a whole valid frame of its session, and once it has seen anything else it has an `error` and is finished.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from llm4agents.errors import ProtocolError
from llm4agents.limits import FRAME_PAYLOAD_BYTES_MAX, HUNT_BYTES_MAX, RECV_BYTES_MAX

MAGIC: Final = b"L4Agent\x01"
NONCE_BYTES: Final = 8
HEADER: Final = struct.Struct("<IIIBBH")
TRAILER: Final = struct.Struct("<I")
FRAME_BYTES_MAX: Final = HEADER.size + FRAME_PAYLOAD_BYTES_MAX + TRAILER.size
PAD: Final = bytes(FRAME_BYTES_MAX)
"""Finishes any frame a dead host left torn, so that the preamble after it is seen."""


class FrameType(IntEnum):
    HELLO = 1
    HELLO_ACK = 2
    OPEN = 3
    REPLY = 4
    DATA = 5
    EOF = 6
    CREDIT = 7
    END = 8
    ERROR = 9
    CANCEL = 10
    SIGNAL = 11
    EVENT = 12
    QUIESCE = 13
    QUIESCED = 14
    UNQUIESCE = 15
    RESIZE = 16
    DETACH = 17


class Frame(NamedTuple):
    """One whole frame. `type` is a plain int: a guest may send any."""

    stream: int
    type: int
    flags: int
    payload: bytes


def session_tag(nonce: bytes) -> int:
    """The tag every frame of a session carries: the low 32 bits of its nonce."""
    return int.from_bytes(nonce[:4], "little")


def preamble(nonce: bytes) -> bytes:
    """The 16 bytes a session begins with. `nonce` is 8 bytes whose tag is not 0."""
    if len(nonce) != NONCE_BYTES or session_tag(nonce) == 0:
        raise ValueError("a nonce is 8 bytes whose low 32 bits are not 0")
    return MAGIC + nonce


def header_check(length: int, session: int, stream: int, kind: int, flags: int) -> int:
    folded = length ^ length >> 16 ^ session ^ session >> 16 ^ stream ^ stream >> 16
    return (folded ^ kind << 8 ^ flags ^ 0x4C34) & 0xFFFF


def encode_header(session: int, stream: int, kind: int, flags: int, length: int) -> bytes:
    """Header alone, for callers that send payload and trailer from where they lie."""
    if length > FRAME_PAYLOAD_BYTES_MAX:
        raise ValueError(f"a frame holds {FRAME_PAYLOAD_BYTES_MAX} bytes, not {length}")
    return HEADER.pack(
        length, session, stream, kind, flags, header_check(length, session, stream, kind, flags)
    )


def encode(session: int, stream: int, kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return encode_header(session, stream, kind, flags, len(payload)) + payload + TRAILER.pack(session)


class Decoder:
    """Finds the preamble with our nonce, then decodes the frames after it.

    Either `feed(bytes)`, or without a copy: receive into `room()`, then `advance(n)`. Both return the frames
    that became whole, in order. When `error` is set, what was returned up to then was good and nothing
    follows.
    """

    def __init__(self, nonce: bytes) -> None:
        self._buffer = bytearray(FRAME_BYTES_MAX + RECV_BYTES_MAX)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._discarded = 0
        self.error: ProtocolError | None = None
        self.expect(nonce)

    def expect(self, nonce: bytes) -> None:
        """Look for the preamble of `nonce` from here on; what was discarded before still counts."""
        self._preamble = preamble(nonce)
        self._tag = session_tag(nonce)
        self.in_session = False

    def room(self) -> memoryview:
        """Where to receive into; at least RECV_BYTES_MAX long. Valid until `advance`."""
        return self._view[self._end : self._end + RECV_BYTES_MAX]

    def advance(self, count: int) -> list[Frame]:
        """`count` bytes were received into `room()`."""
        if self.error is not None:
            return []
        self._end += count
        if not self.in_session and not self._find_preamble():
            frames = []
        else:
            frames = self._frames()
        if self._start:
            # A frame's head at most: whole frames never wait here.
            rest = self._end - self._start
            self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
        return frames

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        frames: list[Frame] = []
        view = memoryview(data)
        while view.nbytes:
            room = self.room()
            count = min(len(room), view.nbytes)
            room[:count] = view[:count]
            view = view[count:]
            frames += self.advance(count)
        return frames

    def _find_preamble(self) -> bool:
        at = self._buffer.find(self._preamble, self._start, self._end)
        skipped_to = at if at >= 0 else max(self._start, self._end - len(self._preamble) + 1)
        self._discarded += skipped_to - self._start
        self._start = skipped_to
        if self._discarded > HUNT_BYTES_MAX:
            self.error = ProtocolError(
                f"the guest sent {self._discarded} bytes and no answer to our greeting"
            )
            return False
        if at < 0:
            return False
        self._start += len(self._preamble)
        self.in_session = True
        return True

    def _frames(self) -> list[Frame]:
        frames: list[Frame] = []
        view, end, tag, at = self._view, self._end, self._tag, self._start
        while end - at >= HEADER.size:
            length, session, stream, kind, flags, check = HEADER.unpack_from(view, at)
            if (
                length > FRAME_PAYLOAD_BYTES_MAX
                or session != tag
                or check != header_check(length, session, stream, kind, flags)
            ):
                self.error = ProtocolError("the guest sent a frame with a wrong header")
                break
            payload_at = at + HEADER.size
            trailer_at = payload_at + length
            if end - trailer_at < TRAILER.size:
                break
            if TRAILER.unpack_from(view, trailer_at)[0] != tag:
                self.error = ProtocolError("the guest sent a frame with a wrong trailer")
                break
            frames.append(Frame(stream, kind, flags, bytes(view[payload_at:trailer_at])))
            at = trailer_at + TRAILER.size
        self._start = at
        return frames
