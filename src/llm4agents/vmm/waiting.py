"""Waiting in asyncio for a descriptor, or for a file to be made. Nothing here runs on a clock."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_IN_CREATE, _IN_ONLYDIR = 0x100, 0x0100_0000


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


@contextlib.contextmanager
def watched(directory: Path) -> Iterator[int]:
    """A descriptor that can be read once something has been made in `directory` since; OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify")
    try:
        if libc.inotify_add_watch(fd, os.fsencode(directory), _IN_CREATE | _IN_ONLYDIR) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))
        yield fd
    finally:
        os.close(fd)
