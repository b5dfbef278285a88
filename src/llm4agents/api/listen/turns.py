"""Whose turn it is: bytes that are much work hold up nobody but who sent them.

A read of 256 KiB can be 40,000 frames or chunks, seconds of one processor. So a connection's bytes are given to its
protocol in pieces, and what is left after a few milliseconds waits, with the connection unread, for a turn that comes
when everybody else has had as long.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from llm4agents import limits


class Turns:
    """Of a listener: one of those who wait goes on at a time, and together they have half of the time at most."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(limits.LISTEN_SLICE_S, self._next)

    def _next(self) -> None:
        self._timer = None
        began = time.monotonic()
        try:
            self._waiting.popleft()()
        finally:
            if self._waiting and self._timer is None:
                took = time.monotonic() - began
                self._timer = asyncio.get_running_loop().call_later(took, self._next)


class Fed:
    """One connection's bytes on their way to `take`, which gets none while `unread` says that nobody wants them."""

    def __init__(self, turns: Turns, take: Callable[[bytes], None], unread: Callable[[], bool]) -> None:
        self._turns, self._take, self._unread = turns, take, unread
        self._held, self._waits = bytearray(), False
        self._piece = limits.LISTEN_PIECE_BYTES
        self._transport: asyncio.Transport | None = None

    def __len__(self) -> int:
        """Bytes that wait."""
        return len(self._held)

    def feed(self, transport: asyncio.BaseTransport, data: bytes) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._held += data
        if not self._waits:
            self._work()

    def again(self) -> None:
        """To be called after others had the connection read again."""
        if self._transport is None or not (self._waits or self._held):
            return
        self._transport.pause_reading()
        if not self._waits:
            self._waits = True
            asyncio.get_running_loop().call_soon(self._work)

    def drop(self) -> None:
        """Nobody wants the rest."""
        self._held.clear()

    def _work(self) -> None:
        self._waits, began = False, time.monotonic()
        transport = self._transport
        assert transport is not None
        at = began
        while self._held and not transport.is_closing() and not self._unread():
            piece = bytes(self._held[: self._piece])
            del self._held[: self._piece]
            self._take(piece)
            before, at = at, time.monotonic()
            if at - before > limits.LISTEN_SLICE_S:
                self._piece = max(limits.LISTEN_PIECE_BYTES // 8, self._piece // 2)
            else:
                self._piece = min(limits.LISTEN_PIECE_BYTES * 16, self._piece * 2)
            if self._held and at - began > limits.LISTEN_SLICE_S:
                self._waits = True
                break
        if self._waits:
            transport.pause_reading()
            self._turns.wait(self._work)
        elif transport.is_closing():
            self._held.clear()
        elif not self._unread():
            transport.resume_reading()
