"""Guest memory on the host: the sealed memfd clones map privately, and the sparse file it comes from.

While a template is built its memory is a memfd QEMU writes to (`create`). Freezing writes the pages that are
not zero to a sparse file (`save`). Cloning needs that memory in a file nobody can change, and QEMU before 8.2
opens it read-write: so it is loaded once per server into a memfd that is then sealed (`load_sealed`).
All of it blocks: call it in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from llm4agents.errors import CapacityError, VersionMismatchError
from llm4agents.vmm.pages import MEMFD

PAGE = 4096
_CHUNK = 1 << 20
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(size: int, name: str = MEMFD) -> int:
    """An empty memfd of `size` bytes that can be sealed later."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def seal(fd: int) -> None:
    """No one can write to it, change its size or lift this, whatever they are allowed otherwise."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def of_file(path: Path) -> int:
    """A sealed memfd with the bytes of `path`: readable by a process that may not read the file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        fd = create(size, "llm4agents-file")
        try:
            offset = 0
            while offset < size:
                done = os.sendfile(fd, file.fileno(), offset, size - offset)
                if done == 0:
                    break
                offset += done
            seal(fd)
        except BaseException:
            os.close(fd)
            raise
    return fd


def extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of every stretch that is not a hole."""
    offset = 0
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        offset = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, offset


def save(memory_fd: int, path: Path) -> int:
    """Write the pages that are not zero to the sparse file `path`, durably; returns their bytes."""
    size = os.fstat(memory_fd).st_size
    written = 0
    with path.open("xb") as file:
        out = file.fileno()
        os.ftruncate(out, size)
        view = memoryview(mmap.mmap(memory_fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
        zeros = bytes(_CHUNK)
        for start, end in extents(memory_fd, size):
            for at in range(start, end, _CHUNK):
                chunk = view[at : min(at + _CHUNK, end)]
                if chunk == zeros[: len(chunk)]:
                    continue
                for first, last in _nonzero_runs(chunk, zeros[:PAGE]):
                    written += _pwrite_all(out, chunk[first:last], at + first)
        os.fsync(out)
    return written


def _nonzero_runs(chunk: memoryview, zero_page: bytes) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for at in range(0, len(chunk), PAGE):
        if chunk[at : at + PAGE] == zero_page:
            if start is not None:
                yield start, at
                start = None
        elif start is None:
            start = at
    if start is not None:
        yield start, len(chunk)


def _pwrite_all(fd: int, data: memoryview, offset: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
    return done


def load_sealed(path: Path, size: int) -> int:
    """The memory file `path` as a sealed memfd.

    Raises VersionMismatchError when the file is not of `size` bytes (cut off, or another machine's) and
    CapacityError when the host has no memory for it.
    """
    with path.open("rb") as file:
        source = file.fileno()
        if os.fstat(source).st_size != size:
            raise VersionMismatchError(
                f"{path} is {os.fstat(source).st_size} bytes, not the {size} its manifest says",
                hint="remove the template and build it again",
            )
        fd = create(size)
        try:
            with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as target:
                for start, end in extents(source, size):
                    _fill(source, target, start, end)
            seal(fd)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise CapacityError(
                    f"this host has no memory left to hold the template {path.parent}"
                ) from error
            raise
        except BaseException:
            os.close(fd)
            raise
    return fd


def _fill(source: int, target: mmap.mmap, start: int, end: int) -> None:
    view = memoryview(target)
    try:
        for at in range(start, end, _CHUNK):
            part = view[at : min(at + _CHUNK, end)]
            try:
                done = 0
                while done < len(part):
                    count = os.preadv(source, [part[done:]], at + done)
                    if count == 0:
                        raise VersionMismatchError("the memory of the snapshot was cut off while it was read")
                    done += count
            finally:
                part.release()
    finally:
        view.release()
