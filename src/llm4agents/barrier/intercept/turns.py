"""Whose turn it is: one process reads the requests of many sandboxes, and what one of them sends holds no other up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PIECE_BYTES_MAX = 65_535
_PIECE_BYTES_MIN = 2_048
_SLICE_S = 0.004


class Turns:
    """Of one sandbox. Its connections' bytes are worked on for a while, then everybody else has a turn: so what a
    neighbour waits for does not grow with how many connections this one has."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._worked = 0.0

    async def take(self, work: Callable[[], Awaitable[None]]) -> float:
        """How many seconds of a processor it took."""
        async with self._lock:
            began = time.thread_time()
            await work()
            took = time.thread_time() - began
            self._worked += took
            if self._worked > _SLICE_S:
                self._worked = 0.0
                await asyncio.sleep(0)
        return took


def piece(before: int, took: float) -> int:
    """How many bytes are read at once, after `before` of them took so long: bytes that are much work come in small
    pieces, and so hold up others for little at a time."""
    if took > 2 * _SLICE_S:
        return max(_PIECE_BYTES_MIN, before // 2)
    return min(PIECE_BYTES_MAX, before * 2)
