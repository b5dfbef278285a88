"""Waiting for a descriptor in asyncio. One function."""

from __future__ import annotations

import asyncio


async def readable(fd: int) -> None:
    """Return when `fd` can be read (a pidfd: when its process has ended). One waiter per descriptor."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await ready
    finally:
        loop.remove_reader(fd)
