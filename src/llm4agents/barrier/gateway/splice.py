"""Bytes between two connected sockets, untouched: both ways, half-closes passed on, nothing kept but what waits.

One buffer serves every flow: what was read is written at once, and only what the other end does not take at that moment
is copied and waited with; until it is gone nothing more is read from that side. Decides nothing about who may talk.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from llm4agents import limits
from llm4agents.barrier import sockets
from llm4agents.barrier.gateway.meter import Meter

_BUFFER = memoryview(bytearray(limits.SPLICE_BUFFER_BYTES))


class Backlog:
    """What the flows of one sandbox have read and not yet written, together: past a bound they read in small pieces."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class _Way:
    """One direction."""

    __slots__ = ("count", "ended", "held", "left", "out", "source")

    def __init__(self, source: socket.socket, out: socket.socket) -> None:
        self.source, self.out = source, out
        self.left: memoryview | None = None
        """Read and not yet written."""
        self.count = 0
        self.ended = False
        """The source has said that no more will come."""
        self.held: asyncio.TimerHandle | None = None
        """Waits for the meter."""


class Relay:
    """Owns both sockets from `start` on. `on_end(reason)` is called once: None for an orderly end."""

    __slots__ = ("_back", "_backlog", "_forth", "_loop", "_meter", "_on_end", "active_at", "over")

    def __init__(
        self,
        client: socket.socket,
        origin: socket.socket,
        on_end: Callable[[str | None], None],
        meter: Meter | None = None,
        backlog: Backlog | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._forth, self._back = _Way(client, origin), _Way(origin, client)
        self._meter, self._on_end = meter, on_end
        self._backlog = backlog or Backlog()
        self.over = False
        self.active_at = self._loop.time()

    @property
    def bytes_out(self) -> int:
        """From the guest."""
        return self._forth.count

    @property
    def bytes_in(self) -> int:
        return self._back.count

    @property
    def half_closed(self) -> bool:
        return self._forth.ended or self._back.ended

    def start(self) -> None:
        for way in (self._forth, self._back):
            self._loop.add_reader(way.source.fileno(), self._read, way)

    def idle_for(self, now: float) -> float:
        return now - self.active_at

    def cut(self, reason: str) -> None:
        """End at once; both sides get a RST."""
        self._end(reason)

    def _read(self, way: _Way) -> None:
        room = limits.SPLICE_BUFFER_BYTES
        if self._backlog.bytes > limits.SPLICE_BACKLOG_BYTES:
            room = limits.SPLICE_SMALL_BYTES
        meter = self._meter
        if meter is not None:
            room = min(room, meter.room(self._loop.time()))
            if not room:
                self._hold(way, meter)
                return
        try:
            count = way.source.recv_into(_BUFFER, room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end("the connection broke")
            return
        self.active_at = self._loop.time()
        if not count:
            self._loop.remove_reader(way.source.fileno())
            way.ended = True
            self._finish(way)
            return
        way.count += count
        if meter is not None:
            meter.take(count)
        try:
            done = way.out.send(_BUFFER[:count])
        except (BlockingIOError, InterruptedError):
            done = 0
        except OSError:
            self._end("the connection broke")
            return
        if done < count:
            way.left = memoryview(bytes(_BUFFER[done:count]))
            self._backlog.bytes += count - done
            self._loop.remove_reader(way.source.fileno())
            self._loop.add_writer(way.out.fileno(), self._write, way)

    def _write(self, way: _Way) -> None:
        assert way.left is not None
        try:
            done = way.out.send(way.left)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end("the connection broke")
            return
        self.active_at = self._loop.time()
        self._backlog.bytes -= done
        if done < len(way.left):
            way.left = way.left[done:]
            return
        way.left = None
        self._loop.remove_writer(way.out.fileno())
        self._loop.add_reader(way.source.fileno(), self._read, way)

    def _hold(self, way: _Way, meter: Meter) -> None:
        if meter.spent:
            self._end("the rule's bytes are used up")
            return
        self._loop.remove_reader(way.source.fileno())
        way.held = self._loop.call_later(meter.wait(), self._resume, way)

    def _resume(self, way: _Way) -> None:
        way.held = None
        if not self.over:
            self._loop.add_reader(way.source.fileno(), self._read, way)

    def _finish(self, way: _Way) -> None:
        """Pass an end on; when both ways have ended, so has the flow."""
        if self._forth.ended and self._back.ended:
            self._end(None)
            return
        try:
            way.out.shutdown(socket.SHUT_WR)
        except OSError:
            self._end("the connection broke")

    def _end(self, reason: str | None) -> None:
        if self.over:
            return
        self.over = True
        for way in (self._forth, self._back):
            fd = way.source.fileno()
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            if way.held is not None:
                way.held.cancel()
            if way.left is not None:
                self._backlog.bytes -= len(way.left)
                way.left = None
        for way in (self._forth, self._back):
            if reason is None:
                way.source.close()
            else:
                sockets.reset(way.source)
        self._on_end(reason)
