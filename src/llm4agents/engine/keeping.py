"""How long a pause is kept: one timer, for the pause whose time is over first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from llm4agents.engine import clock
from llm4agents.store import SandboxRow, Store

LOOK_AGAIN_S = 3600.0
"""At least so often, so that a clock that was stepped is noticed."""
AGAIN_S = 60.0


def due(rows: Iterable[SandboxRow], wall_s: float) -> tuple[list[str], float | None]:
    """The paused sandboxes whose time is over, and when (wall seconds) the next one's is. Pure."""
    ends = {row.id: row.paused_at + row.keep_s for row in rows if row.paused_at is not None}
    return (
        [ident for ident, end in ends.items() if end <= wall_s],
        min((end for end in ends.values() if end > wall_s), default=None),
    )


class Keeper:
    """`expire(sandbox)` is awaited for each pause whose time is over."""

    def __init__(self, store: Store, expire: Callable[[str], Awaitable[None]]) -> None:
        self._store, self._expire = store, expire
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Set the timer by what the store says now."""
        self.stop()
        over, following = due(self._store.paused(), clock.wall_s())
        if over:
            self._task = asyncio.create_task(self._end(over))
            following = clock.wall_s() + AGAIN_S  # one that could not be ended is tried again
        if following is not None:
            wait = min(max(0.0, following - clock.wall_s()), LOOK_AGAIN_S)
            self._timer = asyncio.get_running_loop().call_later(wait, self.look)

    async def _end(self, over: list[str]) -> None:
        for sandbox in over:
            await self._expire(sandbox)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
