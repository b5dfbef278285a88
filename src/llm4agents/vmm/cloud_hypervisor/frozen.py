"""A frozen machine's files, as Cloud Hypervisor has them and as `vmm.snapshot` keeps them.

Its snapshot is `config.json` (made anew for each clone, `api.clone`), `state.json` (the devices) and `memory-ranges`
(the guest's memory, all of it, in order). We keep `memory` (that file without its zero pages) and `state`
(state.json, byte for byte). It reads memory-ranges by its data and leaves holes alone; so for a clone
it has nothing but holes, for a resume the pages of the diff, and the rest is what is mapped privately: the base.

What the VMM wrote is read as hostile: no links, no devices, bounded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from llm4agents.errors import (
    CapacityError,
    HostSetupError,
    VmmError,
)
from llm4agents.vmm import memory, merge, pages, snapshot
from llm4agents.vmm.base import Snapshot
from llm4agents.vmm.checkpoint import STATE_BYTES_MAX

CONFIG, STATE, RANGES = "config.json", "state.json", "memory-ranges"


def read_state(io: int) -> bytes:
    """state.json below the open directory `io`, as the VMM left it. Raises VmmError when it is none."""
    raw = _read(io, STATE, STATE_BYTES_MAX)
    try:
        whole = json.loads(raw)
    except ValueError as error:
        raise VmmError(f"Cloud Hypervisor wrote a state that is not whole: {error}") from error
    if not isinstance(whole, dict) or "snapshots" not in whole:
        raise VmmError("Cloud Hypervisor wrote something else than the state of its devices")
    return raw


def in_one_file(state: bytes, size: int) -> bytes:
    """The state of a booted machine, for its memory of `size` bytes in one file.

    Above 3 GiB a machine's memory lies in two pieces, on either side of the hole for devices. Booted, each is a file of
    its own, and the state has both at the beginning of one (seen: a clone would get the low memory twice). Raises
    VmmError when they are not what memory-ranges has in its order.
    """
    try:
        whole = json.loads(state)
        manager = whole["snapshots"]["memory-manager"]["snapshot_data"]
        inner = json.loads(manager["state"])
        pieces = sorted(inner["guest_ram_mappings"], key=lambda piece: int(piece["gpa"]))
        written = [(int(each["gpa"]), int(each["length"])) for each in inner["memory_ranges"]["data"]]
        if written != [(piece["gpa"], piece["size"]) for piece in pieces]:
            raise ValueError(f"{written} was written of {pieces}")
        at = 0
        for piece in pieces:
            piece["file_offset"] = at
            at += int(piece["size"])
        if at != size:
            raise ValueError(f"it has {at} bytes and not {size}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VmmError(
            f"the memory of a snapshot of Cloud Hypervisor is not understood: {error!r}"
        ) from error
    if len(pieces) == 1:
        return state
    manager["state"] = json.dumps(inner)
    return json.dumps(whole).encode()


def _read(io: int, name: str, size_max: int) -> bytes:
    fd = open_written(io, name)
    try:
        size = os.fstat(fd).st_size
        if not 0 < size <= size_max:
            raise VmmError(f"Cloud Hypervisor wrote {size} bytes as {name}")
        raw = b""
        while len(raw) < size and (part := os.pread(fd, size - len(raw), len(raw))):
            raw += part
        return raw
    finally:
        os.close(fd)


def open_written(io: int, name: str) -> int:
    """A file the VMM wrote; the caller closes it. Raises VmmError when there is none, or it is none."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=io)
    except OSError as error:
        raise VmmError(f"Cloud Hypervisor did not write {name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise VmmError(f"Cloud Hypervisor left something that is no file as {name}")
    return fd


def save_memory(io: int, path: Path) -> int:
    """memory-ranges as the sparse file `path`, durably, without its zero pages; returns their bytes. Blocks."""
    fd = open_written(io, RANGES)
    try:
        return memory.save(fd, path)
    finally:
        os.close(fd)


def clear(io: int) -> None:
    """Remove a snapshot's files below `io`, which must not be there for the next one."""
    for name in (CONFIG, STATE, RANGES):
        try:
            os.unlink(name, dir_fd=io)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise VmmError(f"{name} of Cloud Hypervisor cannot be removed: {error.strerror}") from error


def forbid_memory(io: int) -> None:
    """Put an empty memory-ranges there: a snapshot writes config.json and state.json and then fails at it.

    So a clone's devices are had without its memory, which would be written in full.
    """
    os.close(os.open(RANGES, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=io))


def check_forbidden(io: int) -> None:
    """Raises VmmError when a VMM wrote over the memory-ranges that `forbid_memory` put there."""
    found = os.stat(RANGES, dir_fd=io, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_size:
        raise VmmError("this Cloud Hypervisor overwrites a memory file that is there already")


def write(io: int, name: str, data: bytes, owner: int | None) -> None:
    """A new file below `io`, of the VMM's own uid `owner`."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=io)
    try:
        if owner is not None:
            os.fchown(fd, owner, owner)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)


def write_restore(io: int, config: dict[str, Any], state: bytes, ranges_fd: int, owner: int | None) -> None:
    """What `api.restore` reads. `ranges_fd`: the number the VMM has `ranges`' descriptor under."""
    write(io, CONFIG, json.dumps(config).encode(), owner)
    write(io, STATE, state, owner)
    os.symlink(f"/proc/self/fd/{ranges_fd}", RANGES, dir_fd=io)


def ranges(size: int) -> int:
    """A memfd of `size` bytes that is all holes; the caller closes it."""
    fd = os.memfd_create("llm4agents-ranges", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def read(base: Snapshot, diff: Snapshot | None, ranges_fd: int) -> bytes:
    """The devices' state of `diff`, else of `base`; the pages of `diff` go to their places in `ranges_fd`. Blocks.

    Every byte of a diff is checked first. Also a page of zeros is data: the base has something else there.
    Raises HostSetupError (a base that is not whole), CorruptSnapshotError, CapacityError.
    """
    if diff is None:
        path = base.path / snapshot.STATE
        try:
            return path.read_bytes()
        except OSError as error:
            raise HostSetupError(
                f"{base.path} is not whole: {error.strerror}", hint="build the template again"
            ) from error
    with contextlib.ExitStack() as stack:
        state = _checked(diff, snapshot.STATE, diff.state_bytes, stack)
        changed = _checked(diff, snapshot.PAGES, diff.pages_bytes, stack)
        try:
            merge.spread(changed.fileno(), ranges_fd, diff.spec.memory_mib << 20, diff.path)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise CapacityError(
                    "this host has no memory left for what the sandbox has changed"
                ) from error
            raise
        state.seek(0)
        return state.read()


def _checked(diff: Snapshot, name: str, size: int, stack: contextlib.ExitStack) -> BinaryIO:
    path = diff.path / name
    try:
        file = stack.enter_context(path.open("rb"))
    except OSError as error:
        raise snapshot.corrupt(path, error.strerror or "it cannot be opened") from error
    if os.fstat(file.fileno()).st_size != size:
        raise snapshot.corrupt(path, f"it has {os.fstat(file.fileno()).st_size} bytes and not {size}")
    snapshot.check_part(diff, name, hashlib.file_digest(file, "sha256").hexdigest())
    return file


async def save_pages(pid: int, base_fd: int, out_fd: int) -> pages.Copied:
    """Write to `out_fd` the pages in which a clone's memory differs from `base_fd`, the file it has mapped privately.

    Raises as `pages.save`.
    """
    return await pages.save_at(pid, mapped(pid, os.fstat(base_fd).st_size), base_fd, out_fd)


def mapped(pid: int, size: int) -> list[pages.Place]:
    """Where a clone has its memory: a file of `size` bytes, all of it, privately. Raises VmmError when it has not."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError as error:
        raise pages.unreadable(error) from error
    places = pages.of_file(maps, size)
    if places is None:
        raise VmmError(f"process {pid} has not mapped its memory of {size} bytes as a clone does")
    return places
