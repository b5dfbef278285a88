"""What the runner's processes and the host say to each other: framing, bounds, shared state, three syscalls.

Not for deciding anything. Frames to the host are u32 little-endian length + JSON
(docs/design/interfaces.md, "The interpreter in the guest").
"""

from __future__ import annotations

import ctypes
import json
import os
from json.encoder import encode_basestring
from struct import Struct
from typing import Any, Final

REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024
ATOMIC_BYTES_MAX: Final = 32 * 1024
"""A frame up to this size is one skb of a unix stream socket (Linux cuts at 48 KiB with the default send
buffer), so two processes can write such frames on one connection without a lock."""
TEXT_CHARS_MAX: Final = 30_000
RESULT_TEXT_CHARS_MAX: Final = 1024 * 1024
IMAGE_BYTES_MAX: Final = 16 * 1024 * 1024
BUNDLE_CHARS_MAX: Final = 26 * 1024 * 1024
"""All representations of one value together: a message has to stay under the host's 32 MiB."""
TRACEBACK_CHARS_MAX: Final = 256 * 1024
LATE_CHARS_MAX: Final = 64 * 1024
GRACE_S: Final = 5.0
"""From a timeout's interrupt to the end of a worker that does not obey it."""
RESTART_GRACE_S: Final = 2.0
"""The same for a restart; a quarter of it if the cell had been interrupted before."""
REQUEST_WAIT_MS: Final = 10_000
CONTEXTS_MAX: Final = 16
HALF_READ_MAX: Final = 32

LENGTH: Final = Struct("<I")
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def frame(event: dict[str, Any]) -> bytes:
    """One event as it goes over the socket; raises what json raises for values it does not know."""
    body = _encode(event).encode("utf-8", "replace")
    return LENGTH.pack(len(body)) + body


def text_frames(stream: str, text: str) -> list[bytes]:
    """`text` as stdout or stderr events, none larger than ATOMIC_BYTES_MAX."""
    if len(text) <= TEXT_CHARS_MAX:
        body = f'{{"type":"{stream}","text":{encode_basestring(text)}}}'.encode("utf-8", "replace")
        if len(body) < ATOMIC_BYTES_MAX:
            return [LENGTH.pack(len(body)) + body]
        half = len(text) // 2
        return text_frames(stream, text[:half]) + text_frames(stream, text[half:])
    found: list[bytes] = []
    for start in range(0, len(text), TEXT_CHARS_MAX):
        found += text_frames(stream, text[start : start + TEXT_CHARS_MAX])
    return found


def error_frame(name: str, value: str, traceback: str) -> bytes:
    return frame({"type": "error", "name": name, "value": value, "traceback": traceback})


def end_frame(status: str, count: int) -> bytes:
    body = f'{{"type":"end","status":"{status}","execution_count":{count}}}'.encode()
    return LENGTH.pack(len(body)) + body


# One slot's window of the memory that the zygote and a worker share: bytes, then words.
BUSY, PUMPING, BIG, LATE, CAUSE, THREADED = range(6)
"""Bytes. BUSY: a cell is running. PUMPING: the zygote holds output of it that is not sent yet. BIG: the
worker is in the middle of a frame larger than one skb. LATE: the zygote keeps output that came between cells.
CAUSE: why the zygote sent SIGINT. THREADED: a cell has left a thread running."""
SEQ, CAUSE_SEQ, COUNT, SENT = 2, 3, 4, 5
"""32-bit words. SEQ numbers the slot's cells for ever; CAUSE_SEQ is the cell CAUSE is about; COUNT is the
execution count; SENT counts bytes pumped, modulo 2**32."""
NO_CAUSE, INTERRUPT, TIMEOUT, RESTART = range(4)
WINDOW_BYTES: Final = 64


class Window:
    """One slot's shared bytes (`b`) and 32-bit words (`w`); plain loads and stores, no syscall."""

    __slots__ = ("b", "w")

    def __init__(self, memory: memoryview, index: int) -> None:
        self.b = memory[index * WINDOW_BYTES : (index + 1) * WINDOW_BYTES]
        self.w = self.b.cast("I")


class _EpollEvent(ctypes.Structure):
    # The kernel's struct is packed on x86-64 and nowhere else.
    _pack_ = 1 if os.uname().machine == "x86_64" else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_int64))


_libc = ctypes.CDLL(None, use_errno=True)
_epoll_ctl = _libc.epoll_ctl
_timerfd_settime = _libc.timerfd_settime
_EPOLL_ADD, _EPOLL_DEL, _EPOLLONESHOT = 1, 2, 1 << 30
_OFF = (ctypes.c_long * 4)()
HANGUP_TAG: Final = 0x100000
"""Slot n's hang-ups come out of the epoll as descriptor HANGUP_TAG + n."""


class HangupWatch:
    """Tells an epoll's owner that *this* process's peer is gone, without the owner having the descriptor."""

    def __init__(self, epoll_fd: int, index: int) -> None:
        self._epoll_fd = epoll_fd
        self._event = _EpollEvent(_EPOLLONESHOT, HANGUP_TAG + index)
        self._ref = ctypes.byref(self._event)

    def add(self, fd: int) -> None:
        _epoll_ctl(self._epoll_fd, _EPOLL_ADD, fd, self._ref)

    def remove(self, fd: int) -> None:
        _epoll_ctl(self._epoll_fd, _EPOLL_DEL, fd, self._ref)


def timer_create() -> int:
    """A monotonic, non-blocking timer as a descriptor (os.timerfd_create comes with Python 3.13)."""
    fd = int(_libc.timerfd_create(1, os.O_CLOEXEC | os.O_NONBLOCK))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    return fd


def timer_set(fd: int, seconds: float) -> None:
    """Start (or, with 0, stop) the timer."""
    if seconds <= 0:
        _timerfd_settime(fd, 0, _OFF, None)
        return
    whole = int(seconds)
    spec = (ctypes.c_long * 4)(0, 0, whole, max(1, int((seconds - whole) * 1e9)))
    _timerfd_settime(fd, 0, spec, None)
