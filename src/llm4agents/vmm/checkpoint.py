"""What a checkpoint of a machine is on disk, and how it becomes one that survives the host: copy, digest, fsync.

Not here: when a machine is paused (engine), how its pages are found (`vmm.pages`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llm4agents import limits
from llm4agents.errors import ConflictError, VmmError
from llm4agents.vmm import pages, snapshot
from llm4agents.vmm.base import MachineRecord, Snapshot

_READ_BYTES = 1 << 20
STATE_BYTES_MAX = 64 << 20
"""Devices of a machine of ours take 20 KB; a monitor gone mad fills this much of the host's memory and no more."""


class MachineCheckpoint:
    """See `vmm.base.Checkpoint`."""

    def __init__(self, frozen: Snapshot, copied: pages.Copied) -> None:
        self._frozen, self.copied = frozen, copied

    @property
    def path(self) -> Path:
        return self._frozen.path

    @property
    def pages_bytes(self) -> int:
        return self._frozen.pages_bytes

    @property
    def state_bytes(self) -> int:
        return self._frozen.state_bytes

    async def durable(self, *, sync: bool = True, also: Awaitable[None] | None = None) -> Snapshot:
        try:
            # Each in a thread of its own: a digest is processor, an fsync is disk, and two of those are one commit.
            names = (snapshot.PAGES, snapshot.STATE)
            digests = [asyncio.to_thread(_digest, self.path / name) for name in names]
            syncs = [asyncio.to_thread(snapshot.sync_path, self.path / name) for name in names if sync]
            found = await _all(*digests, *syncs, *([also] if also is not None else []))
            parts = {name: digest for name, digest in zip(names, found, strict=False) if digest is not None}
            self._frozen = replace(self._frozen, parts=parts)
            await asyncio.to_thread(_finish, self._frozen, sync)
        except BaseException as error:
            await self.discard()
            raise snapshot.unwritten("the checkpoint", error) from error
        return self._frozen

    async def discard(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.path, ignore_errors=True)


async def over(
    base: Snapshot, directory: Path, record: MachineRecord, identity: dict[str, str] | None
) -> Snapshot:
    """What a checkpoint of that machine will be. Raises ConflictError unless the machine is a clone of `base`.

    `identity`: of a machine that was booted. One may be of another VMM than its base was; its kernel is in its pages.
    """
    digest = await asyncio.to_thread(snapshot.digest, base.path)
    if record.extra.get("base", digest) != digest:
        raise ConflictError(f"the machine {record.id} is no clone of {base.path}")
    own = identity or record.extra.get("identity") or base.identity
    same = {**own, "kernel": base.identity.get("kernel", "")}
    return Snapshot(directory, base.spec, same, 0, kind="diff", base=digest)


async def make(
    directory: Path,
    frozen: Snapshot,
    save_state: Callable[[int], Awaitable[None]],
    save_pages: Callable[[int], Awaitable[pages.Copied]],
) -> MachineCheckpoint:
    """Fill `directory` with what the two callbacks write; `frozen` says what it will be a snapshot of.

    `save_state` gets a descriptor of memory, `save_pages` one of the file. Raises CapacityError, HostSetupError (a
    disk that cannot be written though it has room) and what they do; then the directory is gone.
    """
    async with snapshot.making(directory, "the checkpoint"):
        state_bytes = await _state(directory / snapshot.STATE, save_state)
        out = os.open(directory / snapshot.PAGES, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copied = await save_pages(out)
            size = os.fstat(out).st_size
        finally:
            os.close(out)
    frozen = replace(
        frozen, memory_bytes=copied.pages * pages.PAGE, pages_bytes=size, state_bytes=state_bytes
    )
    return MachineCheckpoint(frozen, copied)


async def _state(path: Path, save: Callable[[int], Awaitable[None]]) -> int:
    """Let `save` write into memory, and that to `path`: a full disk is then our error and not the monitor's."""
    kept = os.memfd_create("llm4agents-state", os.MFD_CLOEXEC)
    try:
        await save(kept)
        size = os.fstat(kept).st_size
        if not 0 < size <= STATE_BYTES_MAX:
            raise VmmError(f"the monitor wrote {size} bytes as the state of its devices")
        body = os.pread(kept, size, 0)
    finally:
        os.close(kept)
    with path.open("xb", buffering=0) as file:
        path.chmod(0o600)
        rest = memoryview(body)
        while rest:
            rest = rest[file.write(rest) :]
    return size


async def _all(*work: Awaitable[str | None]) -> list[str | None]:
    """What each came to; none is left running when one fails or we are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await asyncio.wait(tasks)  # threads: they cannot be cancelled, and must not write to what is removed
        raise


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _finish(frozen: Snapshot, sync: bool) -> None:
    snapshot.write_manifest(frozen, sync=sync)
    if sync:
        snapshot.sync_path(frozen.path.parent)


class Parts:
    """The parts of a diff that is being loaded, open; every byte is checked while the machine starts."""

    def __init__(self, diff: Snapshot) -> None:
        self._diff = diff
        self._stack = contextlib.ExitStack()

    async def __aenter__(self) -> Parts:
        """Raises CorruptSnapshotError when a part is gone or of another size."""
        try:
            self._pages = self._open(snapshot.PAGES, self._diff.pages_bytes)
            self.state = self._open(snapshot.STATE, self._diff.state_bytes)
        except BaseException:
            self._stack.close()
            raise
        self._checking = asyncio.ensure_future(asyncio.to_thread(self._check))
        return self

    async def __aexit__(self, *_: object) -> None:
        # A thread cannot be cancelled, and must not read from a descriptor that is another's by then.
        await asyncio.wait([self._checking])
        self._checking.exception()
        self._stack.close()

    def _open(self, name: str, size: int) -> int:
        path = self._diff.path / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise snapshot.corrupt(path, error.strerror or "it cannot be opened") from error
        self._stack.callback(os.close, fd)
        if os.fstat(fd).st_size != size:
            raise snapshot.corrupt(path, f"it has {os.fstat(fd).st_size} bytes and not {size}")
        return fd

    def _check(self) -> None:
        for name, fd in ((snapshot.STATE, self.state), (snapshot.PAGES, self._pages)):
            snapshot.check_part(self._diff, name, _digest_at(fd))

    async def checked(self) -> None:
        """Return when all parts are known to be what was written; raises CorruptSnapshotError."""
        await asyncio.shield(self._checking)

    async def fill(self, pid: int, places: Sequence[pages.Place] | None = None) -> None:
        """Write the pages into the memory of `pid`, and return when all of them are also known to be right.

        `places`: where that memory is; None: it is named (`pages.MEMFD`) and may have yet to be mapped.
        """
        size = self._diff.spec.memory_mib << 20
        work = (
            pages.load(pid, size, self._pages, timeout_s=limits.RESTORE_TIMEOUT_S)
            if places is None
            else pages.load_at(pid, places, self._pages)
        )
        filling = asyncio.ensure_future(work)
        try:
            await asyncio.gather(filling, asyncio.shield(self._checking))
        finally:
            filling.cancel()
            await asyncio.wait([filling])


def _digest_at(fd: int) -> str:
    """Of a whole file, from its beginning, without moving where `fd` stands."""
    found, offset = hashlib.sha256(), 0
    while part := os.pread(fd, _READ_BYTES, offset):
        found.update(part)
        offset += len(part)
    return found.hexdigest()
