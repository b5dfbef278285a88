"""A base's memory and a checkpoint's pages as one full snapshot, which lies on nothing. Blocks: for a thread."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from llm4agents.errors import CorruptSnapshotError
from llm4agents.vmm import memory, snapshot
from llm4agents.vmm.base import Snapshot

_MAGIC: Final = 0x3153_4547_4150_344C  # "L4PAGES1", as the shim writes it (shim/src/pages.rs)
_HEADER: Final = memory.PAGE
_ZERO: Final = 1 << 63
_WINDOW: Final = 1 << 20
WORD_BYTES_MIN: Final = 8
"""Shorter ones are not looked for: they would be found by chance."""


def merge(base: Snapshot, diff: Snapshot, directory: Path, forget: Iterable[bytes] = ()) -> Snapshot:
    """Write into `directory` (must not exist) the full snapshot of the machine that `diff` was taken of.

    Each of `forget` is overwritten with zeros wherever the machine's own pages hold it, in use or left behind in
    what was freed, also torn at the edge of a page. What the base holds already is none of the machine's secrets,
    and is left alone: it may be code. Raises CorruptSnapshotError, CapacityError, HostSetupError; then nothing is left.
    """
    directory.mkdir(mode=0o700)
    try:
        with (directory / snapshot.MEMORY).open("x+b") as target:
            with (base.path / snapshot.MEMORY).open("rb") as source:
                size = os.fstat(source.fileno()).st_size
                target.truncate(size)
                for start, end in memory.extents(source.fileno(), size):
                    _copy(source.fileno(), target.fileno(), start, start, end - start)
                words = _unknown_to(source.fileno(), size, forget)
            with (diff.path / snapshot.PAGES).open("rb") as pages:
                for first, count, at in _runs(pages.fileno(), size // memory.PAGE, diff.path):
                    place, length = first * memory.PAGE, count * memory.PAGE
                    if at is None:
                        _zero(target.fileno(), place, length)
                    else:
                        _copy(pages.fileno(), target.fileno(), at, place, length)
                        _forget(target.fileno(), place, length, words)
            os.fsync(target.fileno())
            used = os.fstat(target.fileno()).st_blocks * 512
        shutil.copyfile(diff.path / snapshot.STATE, directory / snapshot.STATE)
        whole = replace(base, path=directory, memory_bytes=used, bare=True)
        snapshot.write_manifest(whole)
        return whole
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise snapshot.unwritten("the snapshot", error) from error


def spread(pages: int, target: int, size: int, path: Path) -> None:
    """Write the pages of the open diff `pages` to their places in `target`, also those that are zero; the rest is left.

    `size`: of the machine's memory, bytes. `path`: for messages. Raises CorruptSnapshotError.
    """
    for first, count, at in _runs(pages, size // memory.PAGE, path):
        place, length = first * memory.PAGE, count * memory.PAGE
        if at is None:
            _zero(target, place, length)
            continue
        os.lseek(target, place, os.SEEK_SET)
        while length:  # not copy_file_range: `target` may be of another kind of file system
            done = os.sendfile(target, pages, at, length)
            if done == 0:
                raise CorruptSnapshotError(f"the pages of {path} ended early")
            at, length = at + done, length - done


def _runs(fd: int, pages_max: int, path: Path) -> Iterator[tuple[int, int, int | None]]:
    """(first page, count, where its data is in the file or None for zeros) of every run."""
    size = os.fstat(fd).st_size
    magic, pages, runs, _ = struct.unpack("<4Q", os.pread(fd, 32, 0).ljust(32, b"\0"))
    table = os.pread(fd, runs * 16, size - runs * 16) if 0 <= runs * 16 <= size - _HEADER else b""
    if magic != _MAGIC or pages != pages_max or len(table) != runs * 16:
        raise CorruptSnapshotError(f"the pages of {path} are not whole")
    at = _HEADER
    for first, count in struct.iter_unpack("<QQ", table):
        zero, count = bool(count & _ZERO), count & ~_ZERO
        if first + count > pages_max or (not zero and at + count * memory.PAGE > size - runs * 16):
            raise CorruptSnapshotError(f"the pages of {path} are not whole")
        yield first, count, None if zero else at
        if not zero:
            at += count * memory.PAGE


def _copy(source: int, target: int, offset: int, place: int, length: int) -> None:
    while length:
        done = os.copy_file_range(source, target, min(length, 1 << 26), offset, place)
        if done == 0:
            raise CorruptSnapshotError("a part of the snapshot ended early")
        offset, place, length = offset + done, place + done, length - done


def _unknown_to(fd: int, size: int, words: Iterable[bytes]) -> list[bytes]:
    """Those of `words` that are long enough to be one's own and that the memory in `fd` does not hold."""
    left = {word for word in words if len(word) >= WORD_BYTES_MIN}
    for start, end in memory.extents(fd, size):
        for at in range(start, end, _WINDOW):
            # Overlapping, so that none is missed between two windows.
            window = os.pread(fd, min(_WINDOW + 65_536, end - at), at)
            left -= {word for word in left if word in window}
    return sorted(left, key=len, reverse=True)


def _forget(target: int, place: int, length: int, words: list[bytes]) -> None:
    if not words:
        return
    for at in range(place, place + length, _WINDOW):
        size = min(_WINDOW, place + length - at)
        held = bytearray(os.pread(target, size, at))
        before = bytes(held)
        for word in words:
            found = held.find(word)
            while found >= 0:
                held[found : found + len(word)] = bytes(len(word))
                found = held.find(word, found + len(word))
            _forget_torn(held, word)
        if held != before:
            _write(target, bytes(held), at)


def _forget_torn(held: bytearray, word: bytes) -> None:
    """The part of `word` that ends a page or begins one: pages that are neighbours for a process lie anywhere."""
    first, last = word[:WORD_BYTES_MIN], word[-WORD_BYTES_MIN:]
    for page in range(0, len(held), memory.PAGE):
        end = page + memory.PAGE
        found = held.find(first, max(page, end - len(word) + 1), end)
        if found >= 0 and word.startswith(held[found:end]):
            held[found:end] = bytes(end - found)
        found = held.rfind(last, page, min(end, page + len(word) - 1))
        if found >= 0 and word.endswith(held[page : found + len(last)]):
            held[page : found + len(last)] = bytes(found + len(last) - page)


def _write(target: int, data: bytes, place: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(target, rest, place)
        rest, place = rest[done:], place + done


def _zero(target: int, place: int, length: int) -> None:
    zeros = bytes(min(length, 1 << 20))
    while length:
        done = os.pwrite(target, zeros[: min(length, len(zeros))], place)
        place, length = place + done, length - done
