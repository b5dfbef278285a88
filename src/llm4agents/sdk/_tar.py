"""A local directory as a tar stream, piece by piece: what `files.upload` of a directory sends. Blocking I/O.

Links stay links, names any bytes; owners of this machine mean nothing in the sandbox and are not sent.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from llm4agents.errors import InvalidRequestError

PIECE_BYTES = 262_144
LINKS_MAX = 100_000
"""Files with several names whose first name is remembered; those past it are sent as files of their own."""


class Packer:
    """`read` gives the next piece, of whatever size, and b"" at the end; `done` of `total` bytes of content."""

    def __init__(self, top: Path) -> None:
        self.done = 0
        self._top = os.fspath(top)
        self._links: dict[tuple[int, int], str] = {}
        self._pieces = self._all()
        self._total: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all files, as they were when it was first asked for."""
        if self._total is None:
            self._total, once = 0, set()
            for entry, _ in _walk(self._top):
                if entry.is_file(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_nlink > 1:  # sent once, whatever its names
                        if (found.st_dev, found.st_ino) in once:
                            continue
                        once.add((found.st_dev, found.st_ino))
                    self._total += found.st_size
        return self._total

    def read(self, size: int) -> bytes:
        try:
            return next(self._pieces, b"")
        except OSError as error:
            raise InvalidRequestError(
                f"{error.filename or self._top} cannot be read: {error.strerror}",
                path=str(error.filename or self._top),
            ) from error

    def _all(self) -> Iterator[bytes]:
        held = bytearray()  # headers and small files together: fewer, larger pieces
        for entry, name in _walk(self._top):
            for piece in self._member(entry, name):
                held += piece
                if len(held) >= PIECE_BYTES:
                    yield bytes(held)
                    held.clear()
        yield bytes(held) + bytes(2 * tarfile.BLOCKSIZE)

    def _member(self, entry: os.DirEntry[str], name: str) -> Iterator[bytes]:
        found = entry.stat(follow_symlinks=False)
        info = tarfile.TarInfo(name)
        info.mode = stat.S_IMODE(found.st_mode)
        seconds, nanoseconds = divmod(found.st_mtime_ns, 1_000_000_000)
        info.mtime = max(0, seconds)
        if nanoseconds or seconds < 0:
            sign, whole = ("-", -found.st_mtime_ns) if seconds < 0 else ("", found.st_mtime_ns)
            info.pax_headers = {"mtime": f"{sign}{whole // 10**9}.{whole % 10**9:09}"}
        if entry.is_symlink():
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry.path)  # noqa: PTH115, byte for byte
        elif entry.is_dir(follow_symlinks=False):
            info.type = tarfile.DIRTYPE
        elif not stat.S_ISREG(found.st_mode):
            return  # a socket, FIFO or device of this machine means nothing there
        elif first := self._links.get((found.st_dev, found.st_ino)):
            info.type, info.linkname = tarfile.LNKTYPE, first
        else:
            if found.st_nlink > 1 and len(self._links) < LINKS_MAX:
                self._links[found.st_dev, found.st_ino] = name
            with open(entry.path, "rb", buffering=0) as file:  # noqa: PTH123
                info.size = os.fstat(file.fileno()).st_size
                yield _header(info)
                left = info.size
                while left:
                    # One that has shrunk is filled up: its header has been sent.
                    piece = file.read(min(left, PIECE_BYTES)) or bytes(min(left, PIECE_BYTES))
                    left -= len(piece)
                    self.done += len(piece)
                    yield piece
            yield bytes(-info.size % tarfile.BLOCKSIZE)
            return
        yield _header(info)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _walk(top: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Each entry below `top` with its name from there, a directory right before what is in it."""
    open_ = [(os.scandir(top), "")]
    try:
        while open_:
            entries, prefix = open_[-1]
            entry = next(entries, None)
            if entry is None:
                open_.pop()[0].close()
                continue
            name = prefix + entry.name
            yield entry, name
            if entry.is_dir(follow_symlinks=False):
                open_.append((os.scandir(entry.path), f"{name}/"))
    finally:
        for entries, _ in open_:
            entries.close()
