"""A base's memory and a checkpoint's pages as one full snapshot, which lies on nothing. Blocks: for a thread."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from llm4agents.errors import CapacityError, CorruptSnapshotError, LLM4AgentsError
from llm4agents.vmm.base import Snapshot
from llm4agents.vmm.qemu import memory, snapshot

_MAGIC: Final = 0x3153_4547_4150_344C  # "L4PAGES1", as the shim writes it (shim/src/pages.rs)
_HEADER: Final = memory.PAGE
_ZERO: Final = 1 << 63


def merge(base: Snapshot, diff: Snapshot, directory: Path) -> Snapshot:
    """Write into `directory` (must not exist) the full snapshot of the machine that `diff` was taken of.

    Raises CorruptSnapshotError, CapacityError; then nothing is left.
    """
    directory.mkdir(mode=0o700)
    try:
        with (directory / snapshot.MEMORY).open("xb") as target:
            with (base.path / snapshot.MEMORY).open("rb") as source:
                size = os.fstat(source.fileno()).st_size
                target.truncate(size)
                for start, end in memory.extents(source.fileno(), size):
                    _copy(source.fileno(), target.fileno(), start, start, end - start)
            with (diff.path / snapshot.PAGES).open("rb") as pages:
                for first, count, at in _runs(pages.fileno(), size // memory.PAGE, diff.path):
                    place, length = first * memory.PAGE, count * memory.PAGE
                    if at is None:
                        _zero(target.fileno(), place, length)
                    else:
                        _copy(pages.fileno(), target.fileno(), at, place, length)
            os.fsync(target.fileno())
            used = os.fstat(target.fileno()).st_blocks * 512
        shutil.copyfile(diff.path / snapshot.STATE, directory / snapshot.STATE)
        whole = replace(base, path=directory, memory_bytes=used, bare=True)
        snapshot.write_manifest(whole)
        return whole
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, LLM4AgentsError):
            raise CapacityError(f"the snapshot could not be written: {error.strerror}") from error
        raise


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


def _zero(target: int, place: int, length: int) -> None:
    zeros = bytes(min(length, 1 << 20))
    while length:
        done = os.pwrite(target, zeros[: min(length, len(zeros))], place)
        place, length = place + done, length - done
