"""The audit of a sandbox as it was written (`gateway.audit`): looked through, and followed. Never written here.

The gateway is its one writer, and may be killed in the middle of a line: what is no whole record is passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

KINDS: Final = ("dns", "connection", "request", "packet", "policy", "gateway")
_LINE_BYTES_MAX = 65_536
_PIECE_BYTES = 262_144
_LOOK_S = 1.0
"""How often a follower looks whether the sandbox has ended (news of the file wake it at once)."""
_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records. `after`: of a later moment than that (unix seconds)."""

    verdict: str | None = None
    kinds: tuple[str, ...] = ()
    after: float | None = None

    def fits(self, record: dict[str, Any]) -> bool:
        at = record.get("at")
        return (
            (self.verdict is None or record.get("verdict") == self.verdict)
            and (not self.kinds or record.get("kind") in self.kinds)
            and (self.after is None or (isinstance(at, int | float) and at > self.after))
        )


def read(directory: Path, sandbox: str, wanted: Wanted, limit: int) -> list[dict[str, Any]]:
    """The newest `limit` records that are wanted, oldest first. Blocking I/O."""
    found: deque[dict[str, Any]] = deque(maxlen=limit)
    for file in _opened(directory, sandbox):
        with file:
            lines = _Lines()
            while piece := file.read(_PIECE_BYTES):
                found.extend(record for record in lines.feed(piece) if wanted.fits(record))
    return list(found)


async def follow(
    directory: Path, sandbox: str, wanted: Wanted, limit: int, over: Callable[[], bool]
) -> AsyncGenerator[dict[str, Any], None]:
    """The newest `limit` records, then those that come; ends when `over()` and all has been told.

    Only what is asked for is read: a slow reader holds nothing but its place in the file. When both files have turned
    while it was away, what was in between is missing.
    """
    with _News(directory) as news:
        place: BinaryIO | None = None
        try:
            files = await asyncio.to_thread(_opened, directory, sandbox)
            lines, newest = _Lines(), deque[dict[str, Any]](maxlen=limit)
            for file in files:
                lines = _Lines()
                while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                    newest.extend(record for record in lines.feed(piece) if wanted.fits(record))
                if file is files[-1] and Path(file.name).name == f"{sandbox}.jsonl":
                    place = file
                else:
                    file.close()
            for record in newest:
                yield record
            while True:
                last = over()
                progress = True
                while progress:
                    progress = False
                    if place is None:
                        place, lines = _open(directory / f"{sandbox}.jsonl"), _Lines()
                    if place is None:
                        break
                    while piece := await asyncio.to_thread(place.read, _PIECE_BYTES):
                        for record in lines.feed(piece):
                            if wanted.fits(record):
                                yield record
                    if _turned(place, directory / f"{sandbox}.jsonl"):
                        place.close()
                        place, progress = None, True
                if last:
                    return
                await news.wait(_LOOK_S)
        finally:
            if place is not None:
                place.close()


class _Lines:
    """Records of a file that is read in pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        for line in whole:
            if self._skipping:
                self._skipping = False
                continue
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
        if len(self._rest) > _LINE_BYTES_MAX:
            self._rest, self._skipping = b"", True


def _opened(directory: Path, sandbox: str) -> list[BinaryIO]:
    """Both files, the older first; the newer is opened first, and again when it has become the older meanwhile."""
    while True:
        newer, older = _open(directory / f"{sandbox}.jsonl"), _open(directory / f"{sandbox}.1.jsonl")
        found = [file for file in (older, newer) if file is not None]
        if len(found) < 2 or not os.path.sameopenfile(found[0].fileno(), found[1].fileno()):
            return found
        for file in found:
            file.close()


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb", buffering=0)
    except OSError:
        return None


def _turned(file: BinaryIO, path: Path) -> bool:
    """Whether another file has its name by now."""
    try:
        found = path.stat()
    except OSError:
        return False
    mine = os.fstat(file.fileno())
    return (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino)


class _News:
    """Wakes when something is written in a directory (inotify); where that is not to be had, at intervals."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._fd, self._news = directory, -1, asyncio.Event()

    def __enter__(self) -> _News:
        self._begin()
        return self

    def _begin(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return
        mask = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE
        if libc.inotify_add_watch(fd, os.fsencode(self._directory), mask) < 0:
            os.close(fd)  # no gateway has run yet: tried again at the next look
            return
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._heard)

    def _heard(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._fd, 65_536):
                pass
        self._news.set()

    async def wait(self, timeout_s: float) -> None:
        if self._fd < 0:
            self._begin()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
