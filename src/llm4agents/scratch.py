"""Directories for what is not finished, each held by the process that made it, and swept once that process has died.

Held by a lock of the kernel's: pids say nothing between containers that share a directory, and are used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def held(top: Path) -> Iterator[Path]:
    """A new directory (0700) in `top`, which is made too; ours until the end, when what is in it is the caller's to
    have removed. Raises OSError."""
    top.mkdir(parents=True, exist_ok=True)
    fd = None
    while fd is None:  # again, where a sweeper came first and removes it
        path = top / f"{os.getpid()}-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        fd = _locked(path)
    try:
        yield path
    finally:
        os.close(fd)


@contextlib.contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Whether nobody holds `path`, and nobody will as long as this lasts."""
    fd = None
    # No directory, somebody else's, or a file system that locks none: not ours to take.
    with contextlib.suppress(OSError):
        fd = _locked(path)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _locked(path: Path) -> int | None:
    """An open descriptor of the directory, with its lock; None when another has that, or has removed it."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.lstat()):
            kept, fd = fd, -1
            return kept
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if fd >= 0:
            os.close(fd)
    return None
