"""Removing a directory that a VMM has had to write to: however deep what is in there, and no link is followed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path


def remove(path: Path) -> None:
    """Idempotent; does not raise, and leaves what cannot be removed. Nobody writes to it any more."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    # What is deeper than Python's calls or the descriptors we may have is left: a taken-over monitor can make it so.
    with contextlib.suppress(OSError):
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            while _flattened(top):
                pass
        finally:
            os.close(top)
        path.rmdir()


def _flattened(top: int) -> bool:
    """Empty the directories that are in `top`, whose own directories come there; whether there is more to do."""
    done = False
    for name in _names(top):
        with contextlib.suppress(NotADirectoryError, OSError):
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                for inner in _names(below):
                    done = _gone(inner, below, top) or done
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=top)
            done = True
            continue
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=top)
            done = True
    return done


def _names(directory: int) -> list[str]:
    with os.scandir(directory) as found:
        return [entry.name for entry in found]


def _gone(name: str, where: int, top: int) -> bool:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=where)
        return True
    with contextlib.suppress(OSError):
        os.rename(name, f".{secrets.token_hex(8)}", src_dir_fd=where, dst_dir_fd=top)
        return True
    return False
