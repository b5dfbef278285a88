"""Classic pcap files (Ethernet, microseconds, whole packets): two that take turns, so that the newest are kept.

A writer that was killed leaves a record half written at most; readers stop before it, and the next writer cuts it off.
Standard library only: the capture process imports this.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

CURRENT, OLDER = "capture.pcap", "capture.1.pcap"
SNAP_BYTES: Final = 262_144
HEADER: Final = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, SNAP_BYTES, 1)
RECORD: Final = struct.Struct("<IIII")
_BUFFER_BYTES = 262_144


class Writer:
    """Appends to the files in `directory`, together at most `bytes_max`. `lost`: what a full disk refused."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._directory, self._half = directory, max(bytes_max // 2, 2 * len(HEADER))
        self._path = directory / CURRENT
        self._waiting = bytearray()
        self._count = 0
        self.lost = 0
        self._size = self._begin()

    def _begin(self) -> int:
        """The size of the current file, whole records only; 0 when it is to be begun."""
        try:
            with self._path.open("r+b") as file:
                end = len(HEADER) + sum(len(record) for record in records(file))
                file.truncate(end)
                return end
        except (FileNotFoundError, ValueError):
            return 0

    def add(self, at_ns: int, packet: bytes, length: int) -> None:
        """`length`: what it had on the wire."""
        seconds, nanoseconds = divmod(at_ns, 10**9)
        size = RECORD.size + len(packet)
        if self._size + len(self._waiting) + size > self._half:
            self.flush()
            if self._size > len(HEADER):
                self._turn()
        self._waiting += (
            RECORD.pack(seconds & 0xFFFF_FFFF, nanoseconds // 1_000, len(packet), length) + packet
        )
        self._count += 1
        if len(self._waiting) >= _BUFFER_BYTES:
            self.flush()

    def _turn(self) -> None:
        try:
            self._path.replace(self._directory / OLDER)
            self._size = 0
        except OSError:
            self.lost += 1

    def flush(self) -> None:
        """What was added is in the file now."""
        if not self._waiting:
            return
        data = bytes(self._waiting) if self._size else HEADER + self._waiting
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                if os.write(fd, data) != len(data):
                    os.ftruncate(fd, self._size)
                    raise OSError(28, "the disk is full")
            finally:
                os.close(fd)
            self._size += len(data)
        except OSError:
            self.lost += self._count
        self._waiting.clear()
        self._count = 0


def records(file: BinaryIO) -> Iterator[bytes]:
    """Every whole record of an open file, its header included. Raises ValueError for what is no such file."""
    if file.read(len(HEADER)) != HEADER:
        raise ValueError("not one of our pcap files")
    while True:
        head = file.read(RECORD.size)
        if len(head) < RECORD.size:
            return
        length = RECORD.unpack(head)[2]
        if length > SNAP_BYTES:
            return
        packet = file.read(length)
        if len(packet) < length:
            return
        yield head + packet


def whole(directory: Path) -> Iterator[bytes]:
    """Both files as one, in pieces, as they are now. Nothing when there is none. Blocking I/O."""
    files = _opened(directory)
    try:
        if files:
            yield HEADER
        for file in files:
            held = bytearray()
            try:
                for record in records(file):
                    held += record
                    if len(held) >= _BUFFER_BYTES:
                        yield bytes(held)
                        held.clear()
            except ValueError:
                continue
            yield bytes(held)
    finally:
        for file in files:
            file.close()


def _opened(directory: Path) -> list[BinaryIO]:
    """The older first. The current one is opened first, and again when it has become the older meanwhile."""
    while True:
        newer, older = _open(directory / CURRENT), _open(directory / OLDER)
        same = (
            newer is not None and older is not None and os.path.sameopenfile(newer.fileno(), older.fileno())
        )
        found = [file for file in (older, newer) if file is not None]
        if not same:
            return found
        for file in found:
            file.close()


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None
