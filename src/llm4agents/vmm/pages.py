"""A live machine's own memory pages: copied out of its process, written into one that is starting.

A clone maps its template's memory privately, so what it has written since are the pages of that mapping that are
no longer the file's. The bytes are moved by the shim's binary (`shim/src/pages.rs`): it gets descriptors that we
were allowed to open, and our event loop goes on. Not here: digests, manifests, what a machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm4agents import binaries
from llm4agents.errors import (
    ConflictError,
    CorruptSnapshotError,
    SandboxDiedError,
    VmmError,
    disk_full,
)

PAGE = 4096
MEMFD = "llm4agents-ram"
"""Name of the memfd that is a machine's memory: how its mapping is found."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_DAMAGED = 3
_PRIVATE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p ([0-9a-f]+) \S+ (\d+)")
_MAPPING = re.compile(rf"^([0-9a-f]+)-([0-9a-f]+) (rw-[ps]) \S+ (\S+) (\d+) +/memfd:{MEMFD} ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy holds: pages with data, pages that became zero, stretches; and pages that were compared."""

    pages: int
    zero_pages: int
    runs: int
    looked_at: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """Where a machine's memory is in its process."""

    address: int
    private: bool
    inode: int


def mapping(maps: str, size: int) -> Mapping | None:
    """The mapping of a machine's memory of `size` bytes, from the text of /proc/PID/maps. Pure."""
    for found in _MAPPING.finditer(maps):
        start, end = int(found[1], 16), int(found[2], 16)
        if end - start == size:
            return Mapping(start, found[3].endswith("p"), int(found[5]))
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a machine's memory in its process; parts follow one another as the guest's memory does."""

    address: int
    bytes: int


def of_file(maps: str, size: int) -> list[Place] | None:
    """Where a file of `size` bytes is mapped privately and as a whole, in one part or several, in the text of
    /proc/PID/maps: a clone's memory, whatever file that is. None when there is no such. Pure."""
    parts = []
    for line in maps.splitlines():
        found = _PRIVATE.match(line)
        if found is not None and found[4] != "0":
            start, end, offset = (int(found[place], 16) for place in (1, 2, 3))
            parts.append((int(found[4]), offset, Place(start, end - start)))
    for inode in dict.fromkeys(inode for inode, _, _ in parts):
        at = 0
        whole: list[Place] = []
        for offset, place in sorted(
            ((offset, place) for of, offset, place in parts if of == inode), key=lambda each: each[0]
        ):
            if offset != at:
                break
            at += place.bytes
            whole.append(place)
        else:
            if at == size:
                return whole
    return None


def anonymous(maps: str, size: int) -> list[int]:
    """Addresses of the writable private mappings of no file that have just `size` bytes. Pure."""
    found = (_PRIVATE.match(line) for line in maps.splitlines())
    return [
        int(each[1], 16)
        for each in found
        if each is not None and each[4] == "0" and int(each[2], 16) - int(each[1], 16) == size
    ]


async def save_at(pid: int, places: Sequence[Place], base_fd: int, out_fd: int) -> Copied:
    """As `save`, of a process whose memory is at `places`."""
    with contextlib.ExitStack() as stack:
        memory, pagemap = _opened(stack, pid)
        words = ["--save-pages", *map(str, (memory, pagemap, base_fd, out_fd)), *_words(places)]
        return Copied(*await _run(words, [memory, pagemap, base_fd, out_fd]))


async def save_whole(pid: int, places: Sequence[Place], out_fd: int) -> int:
    """Write all pages of `pid` at `places` that are not zero to the empty sparse file `out_fd`, which gets the size of
    the memory. It must stand still. Returns how many; raises as `save`."""
    os.ftruncate(out_fd, sum(place.bytes for place in places))
    with contextlib.ExitStack() as stack:
        memory, pagemap = _opened(stack, pid)
        words = ["--save-memory", *map(str, (memory, pagemap, out_fd)), *_words(places)]
        return (await _run(words, [memory, pagemap, out_fd]))[0]


async def load_at(pid: int, places: Sequence[Place], pages_fd: int) -> int:
    """As `load`, into a process whose memory is at `places`."""
    with contextlib.ExitStack() as stack:
        try:
            memory = _open(stack, f"/proc/{pid}/mem", os.O_RDWR)
        except OSError as error:
            raise unreadable(error) from error
        words = ["--load-pages-at", *map(str, (memory, pages_fd)), *_words(places)]
        return (await _run(words, [memory, pages_fd]))[0]


def _opened(stack: contextlib.ExitStack, pid: int) -> tuple[int, int]:
    """Descriptors of a process's memory and page map, for reading."""
    try:
        memory = _open(stack, f"/proc/{pid}/mem", os.O_RDONLY)
        return memory, _open(stack, f"/proc/{pid}/pagemap", os.O_RDONLY)
    except OSError as error:
        raise unreadable(error) from error


def _words(places: Sequence[Place]) -> list[str]:
    return [str(number) for place in places for number in (place.address, place.bytes // PAGE)]


async def save(pid: int, size: int, base_fd: int, out_fd: int) -> Copied:
    """Write to `out_fd` the pages in which the memory (`size` bytes) of process `pid` differs from `base_fd`.

    It must stand still. Raises CapacityError (disk full), ConflictError (its memory may not be read),
    SandboxDiedError (it has ended).
    """
    with contextlib.ExitStack() as stack:
        try:
            memory = _open(stack, f"/proc/{pid}/mem", os.O_RDONLY)
            pagemap = _open(stack, f"/proc/{pid}/pagemap", os.O_RDONLY)
            found = mapping(Path(f"/proc/{pid}/maps").read_text(), size)
        except OSError as error:
            raise unreadable(error) from error
        if found is None:
            raise VmmError(f"process {pid} has no memory of {size} bytes that is a machine's")
        words = ["--save-pages", *map(str, (memory, pagemap, base_fd, out_fd, found.address, size // PAGE))]
        return Copied(*await _run(words, [memory, pagemap, base_fd, out_fd]))


async def save_shared(memory_fd: int, size: int, base_fd: int, out_fd: int) -> Copied:
    """As `save`, of a machine whose memory is the file `memory_fd` itself."""
    words = ["--save-pages", *map(str, (memory_fd, -1, base_fd, out_fd, 0, size // PAGE))]
    return Copied(*await _run(words, [memory_fd, base_fd, out_fd]))


async def load(pid: int, size: int, pages_fd: int, *, timeout_s: float) -> int:
    """Write the pages of the file `pages_fd` into process `pid` as soon as its memory of `size` bytes is mapped.

    Returns how many. Raises CorruptSnapshotError (not a file of pages, or for another size), ConflictError and
    SandboxDiedError as `save`, VmmError when the memory does not appear in time.
    """
    with contextlib.ExitStack() as stack:
        try:
            memory = _open(stack, f"/proc/{pid}/mem", os.O_RDWR)
            maps = _open(stack, f"/proc/{pid}/maps", os.O_RDONLY)
        except OSError as error:
            raise unreadable(error) from error
        numbers = (maps, memory, pages_fd, size // PAGE, round(timeout_s * 1000))
        return (await _run(["--load-pages", *map(str, numbers)], [maps, memory, pages_fd]))[0]


def file_of(pid: int, size: int) -> tuple[int, bool]:
    """The memfd that process `pid` has as its machine's memory (a descriptor; the caller closes it), and whether
    privately: then it is the sealed memory that it was cloned from, whichever server loaded it.

    Raises as `save`, and VmmError when it is a clone of something that is not sealed.
    """
    try:
        found = mapping(Path(f"/proc/{pid}/maps").read_text(), size)
        for entry in Path(f"/proc/{pid}/fd").iterdir() if found is not None else ():
            with contextlib.suppress(FileNotFoundError):
                if found is None or entry.stat().st_ino != found.inode or MEMFD not in str(entry.readlink()):
                    continue
                fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
                sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
                if os.fstat(fd).st_size == size and sealed == found.private:
                    return fd, found.private
                os.close(fd)
    except OSError as error:
        raise unreadable(error) from error
    raise VmmError(f"process {pid} has no memory of {size} bytes that can be told apart from its template's")


def readable_children(uid: int | None) -> bool:
    """Whether we may read and write the memory of a process we start (as `uid`). By trying; blocks some ms."""
    child = subprocess.Popen(
        ["/bin/cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        user=uid,
        group=uid,
        extra_groups=[] if uid is not None else None,
        env={},
    )
    try:
        # It stands still: a page written back while it runs would take from it what it has written meanwhile.
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        found = re.search(r"^([0-9a-f]+)-[0-9a-f]+ rw-p .*\[stack\]$", maps, re.MULTILINE)
        if found is None:
            return False
        address = int(found[1], 16)
        with contextlib.ExitStack() as stack:
            memory = _open(stack, f"/proc/{child.pid}/mem", os.O_RDWR)
            pagemap = _open(stack, f"/proc/{child.pid}/pagemap", os.O_RDONLY)
            last = _top_page(maps, address)
            entry = int.from_bytes(os.pread(pagemap, 8, last // PAGE * 8), "little")
            page = os.pread(memory, PAGE, last)
            return entry >> 63 == 1 and os.pwrite(memory, page, last) == len(page) == PAGE
    except OSError:
        return False
    finally:
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()


def _top_page(maps: str, start: int) -> int:
    """The last page of the mapping that begins at `start`: of a stack, one that is there."""
    line = next(line for line in maps.splitlines() if line.startswith(f"{start:x}-"))
    return int(line.partition("-")[2].partition(" ")[0], 16) - PAGE


def unreadable(error: OSError) -> ConflictError | SandboxDiedError:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return SandboxDiedError("the virtual machine has ended")
    return ConflictError(
        f"the memory of the virtual machine may not be read: {error.strerror}",
        hint="a machine that an earlier server of an ordinary user started can only be ended or paused by its disk",
    )


def _open(stack: contextlib.ExitStack, path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


async def _run(words: list[str], fds: list[int]) -> list[int]:
    """The figures the copier says. It ends with the call, also with a cancelled one."""
    process = await asyncio.create_subprocess_exec(
        str(binaries.path(binaries.SHIM)),
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=fds,
        env={},
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
    if process.returncode == 0:
        return [int(word) for word in out.split()]
    number, _, said = err.decode(errors="replace").strip().partition(" ")
    if process.returncode == _DAMAGED:
        raise CorruptSnapshotError(f"the pages of the snapshot are not what was written: {said}")
    code = int(number) if number.isdecimal() else 0
    if full := disk_full(errno.ENOSPC if code == errno.EFBIG else code):
        raise full
    if code in (errno.EIO, errno.ESRCH) and words[0].startswith("--load-pages"):
        raise SandboxDiedError("the virtual machine ended while its memory was filled")
    raise VmmError(f"the memory of the virtual machine could not be copied: {said or 'no reason was given'}")
