"""sys.stdout and sys.stderr of a worker, and the connection they (and results) are written to.

Python-level output becomes frames directly, in order. What C code and child processes write to descriptors 1
and 2 goes into pipes that the zygote empties onto the same connection; `Connection.settle` waits for it, so
that `print("a"); os.system("echo b"); print("c")` comes out in order.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import select
import threading
import time
from array import array
from collections.abc import Callable
from termios import FIONREAD
from typing import Any

from .wire import (
    ATOMIC_BYTES_MAX,
    BIG,
    LATE,
    LATE_CHARS_MAX,
    PUMPING,
    SENT,
    Window,
    frame,
    text_frames,
)

_INFLIGHT_BYTES_MAX = 65_536


class Connection:
    """Where events of the running cell go; `fd` is None between cells. Blocks when the host does not read."""

    def __init__(
        self, window: Window, index: int, lock_fd: int, pipes: tuple[int, int], nudge: Callable[[], None]
    ) -> None:
        self.fd: int | None = None
        self.sending = False
        """In the middle of a frame of several writes: a signal must not break it off."""
        self._window = window
        self._bytes = window.b
        self._index = index
        self._lock_fd = lock_fd
        self._pipes = pipes
        self._nudge = nudge
        self._poll = select.poll()
        for pipe in pipes:
            self._poll.register(pipe, select.POLLIN)

    def settle(self) -> None:
        """Wait until what was written to descriptors 1 and 2 before this call is on the connection."""
        flags = self._bytes
        if not self._readable() and not flags[PUMPING] and not flags[LATE]:
            return
        size = array("i", [0])
        target = _INFLIGHT_BYTES_MAX
        for pipe in self._pipes:
            fcntl.ioctl(pipe, FIONREAD, size)
            target += size[0]
        start = self._window.w[SENT]
        if flags[LATE]:
            self._nudge()
        while self._readable() or flags[PUMPING] or flags[LATE]:
            # More than was there and in flight has been read, and the zygote reads only when all before is sent:
            # something in the background writes for ever, and what was there before is out.
            if (self._window.w[SENT] - start) & 0xFFFFFFFF > target:
                return
            time.sleep(0.0003)
            if flags[LATE] and not flags[PUMPING]:
                self._nudge()  # it was read while no cell ran, and put aside a moment ago

    def _readable(self) -> bool:
        try:
            return bool(self._poll.poll(0))
        except RuntimeError:  # another thread is asking this moment; ask again
            return True

    def text(self, stream: str, text: str) -> None:
        self.settle()
        for data in text_frames(stream, text):
            self._write(data)

    def event(self, event: dict[str, Any]) -> None:
        data = frame(event)
        if len(data) < ATOMIC_BYTES_MAX:
            self._write(data)
        else:
            self._write_big(data)

    def raw(self, data: bytes) -> None:
        """One ready frame, below ATOMIC_BYTES_MAX."""
        self._write(data)

    def _write(self, data: bytes) -> None:
        fd = self.fd
        if fd is None:
            return
        try:
            os.write(fd, data)
        except OSError:  # the host is gone; the zygote sees it too and interrupts the cell
            self.fd = None

    def _write_big(self, data: bytes) -> None:
        if self.fd is None:
            return
        self.sending = True
        fcntl.lockf(self._lock_fd, fcntl.LOCK_EX, 1, self._index)
        self._bytes[BIG] = 1
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError:
            self.fd = None
        finally:
            self._bytes[BIG] = 0
            fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, self._index)
            self.sending = False
        if self._bytes[PUMPING]:
            self._nudge()


class Stream(io.TextIOBase):
    """A text stream, line-buffered like a terminal's, that writes events; in a forked child, its descriptor."""

    def __init__(self, name: str, fd: int, connection: Connection) -> None:
        self.name = f"<{name}>"
        self._kind = name
        self._fd = fd
        self._connection = connection
        self._held = ""
        self._lock = threading.RLock()  # re-entrant: a signal handler may print
        self._child = False
        self.other: Stream | None = None
        self._buffer = _Bytes(self)

    encoding = "utf-8"
    errors = "replace"
    newlines = None
    mode = "w"

    @property
    def buffer(self) -> _Bytes:
        return self._buffer

    @property
    def line_buffering(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def reconfigure(self, **_: Any) -> None:
        """Accepted and without effect: always UTF-8, always line-buffered."""

    def close(self) -> None:
        """A cell that closes its stdout has only flushed it: later cells still need it."""
        self.flush()

    def write(self, text: str, /) -> int:
        if text.__class__ is not str:
            if not isinstance(text, str):
                raise TypeError(f"write() argument must be str, not {type(text).__name__}")
            text = str(text)
        with self._lock:
            held = self._held + text if self._held else text
            if "\n" in text or len(held) > 8192:
                self._held = ""
                self._emit(held)
            else:
                self._held = held
        return len(text)

    def flush(self) -> None:
        with self._lock:
            held = self._held
            if held:
                self._held = ""
                self._emit(held)

    def _emit(self, text: str) -> None:
        other = self.other
        if other is not None and other._held:
            other.flush()
        if self._child:
            data = memoryview(text.encode("utf-8", "replace"))
            while data:
                data = data[os.write(self._fd, data) :]
        elif self._connection.fd is None:
            # Between cells (a thread left behind): kept for the next cell, within reason.
            if len(text) < LATE_CHARS_MAX:
                self._held = text
        else:
            self._connection.text(self._kind, text)

    def to_descriptor(self) -> None:
        """In a forked child: the connection is the parent's; write to the descriptor from now on."""
        self._lock = threading.RLock()
        self._child = True
        self._held = ""


class _Bytes(io.BufferedIOBase):
    """`sys.stdout.buffer`: bytes in, decoded, in order with the text."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.raw = self

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(self._decode(view.tobytes()))
        return view.nbytes

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()
