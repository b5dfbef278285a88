"""Volumes: disks that outlive sandboxes. Made, copied, made larger, removed; and who may have which.

A row says what there is to be before a file is touched (`creating`, `deleting`), so a server that dies in between
leaves its successor one thing to finish or to forget (`settle`). Not here: what of it a sandbox's machine gets
(`attached`), reading one that no machine has (`volume_files`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog

from llm4agents import limits
from llm4agents.engine import attached, clock
from llm4agents.engine.attached import Attached, Mount
from llm4agents.engine.lifecycle import TERMINAL
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
)
from llm4agents.images.process import in_thread
from llm4agents.images.volumes import MIB, Files, file_bytes
from llm4agents.store import SandboxRow, Store
from llm4agents.store import volumes as table
from llm4agents.store.volumes import Kind, VolumeRow

__all__ = ["ID", "VolumeRow", "Volumes"]
log = structlog.get_logger()

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
ID: Final = re.compile(r"vol_[a-z0-9]{20}")
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
READER: Final = "volume-"
"""Begins the ids of machines that read volumes (`volume_files`)."""
Still = Callable[[str], contextlib.AbstractAsyncContextManager[None]]
"""Within it nothing of that sandbox moves, its file systems are whole, and it is not resumed."""


def new_id() -> str:
    return "vol_" + "".join(secrets.choice(_ALPHABET) for _ in range(20))


def check_name(name: str) -> str:
    """Raises InvalidRequestError."""
    if not NAME.fullmatch(name) or ID.fullmatch(name):
        raise InvalidRequestError(
            f"{name[:80]!r} is no name of a volume: 1 to 63 of a-z, 0-9, `.`, `_`, `-`, a letter or digit first"
        )
    return name


def check_size(size_mib: int) -> int:
    """Bytes. Raises InvalidRequestError."""
    if not limits.VOLUME_MIB_MIN <= size_mib <= limits.VOLUME_MIB_MAX:
        raise InvalidRequestError(
            f"size_mib={size_mib} is not possible: {limits.VOLUME_MIB_MIN} to {limits.VOLUME_MIB_MAX}"
        )
    return size_mib * MIB


class Volumes:
    """Those of one node. Belongs to the engine's event loop."""

    def __init__(self, store: Store, state: Path, *, free_bytes: Callable[[], int], still: Still) -> None:
        self._store, self._free_bytes, self._still = store, free_bytes, still
        self.files = Files(state / "volumes")
        self.quota_bytes: Callable[[str], int | None] = lambda project: None
        """What a project's volumes may have together; None: no bound. Set by who knows the projects."""
        self.evict: Callable[[str], Awaitable[None]] | None = None
        """Ends the machine that reads a volume, if one does and nobody waits for it (`volume_files`)."""
        self._promised = 0
        """Bytes that what is being copied now is going to take."""
        store.on_transition.append(self._on_transition)

    # -- looking -------------------------------------------------------------------------------------------

    def get(self, volume: str, project: str | None = None) -> VolumeRow:
        """By id, or with a `project` also by name. Raises NotFoundError."""
        row = table.get(self._store, volume)
        if row is None and project is not None:
            row = table.named(self._store, project, volume)
        if row is None or row.state == "deleting" or (project is not None and row.project != project):
            raise NotFoundError(f"there is no volume {volume[:80]}", hint="llm4agents volume ls shows them")
        return row

    def rows(
        self, project: str | None, *, name: str | None, limit: int, after: str | None
    ) -> list[VolumeRow]:
        """Newest first; `project` None: of every one."""
        found = table.rows(self._store, project, name=name, limit=limit, after=after)
        return [row for row in found if row.state != "deleting"]

    def describe(self, row: VolumeRow, holds: Sequence[table.Hold] | None = None) -> dict[str, Any]:
        """As the wire has it; `holds`: all there are, if they are known. A machine that reads is no attachment."""
        found = table.holds(self._store, row.id) if holds is None else holds
        held = [hold for hold in found if hold.volume == row.id and hold.holder.startswith("sbx_")]
        return {
            "id": row.id,
            "name": row.name,
            "kind": row.kind,
            "state": row.state,
            "size_mib": row.size_bytes // MIB,
            "allocated_bytes": self.files.allocated_bytes(row.id),
            "created_at": row.created_at,
            "source": row.source,
            "metadata": row.metadata,
            "attached": [{"sandbox": hold.holder, "mode": hold.mode} for hold in held],
        }

    def describe_all(self, rows: Sequence[VolumeRow]) -> list[dict[str, Any]]:
        by_volume: dict[str, list[table.Hold]] = {}
        for hold in table.holds(self._store):
            by_volume.setdefault(hold.volume, []).append(hold)
        return [self.describe(row, by_volume.get(row.id, [])) for row in rows]

    # -- making and removing -------------------------------------------------------------------------------

    async def create(
        self, project: str, name: str, size_mib: int, metadata: Mapping[str, str] | None = None
    ) -> VolumeRow:
        """An empty one. Raises InvalidRequestError, ConflictError (the name is taken), QuotaError, CapacityError."""
        row = self._new(project, name, "volume", check_size(size_mib), None, metadata)
        self._check_room(file_bytes(row.size_bytes))
        self._add(row)
        try:
            await self.files.make(row.id, row.size_bytes)
        except BaseException:
            self._undo(row)
            raise
        return self._ready(row)

    async def copy(
        self,
        source: VolumeRow,
        name: str,
        *,
        kind: Kind,
        size_mib: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> VolumeRow:
        """A snapshot or a clone of it as it is now, whoever has it: a sandbox that writes to it stands still meanwhile,
        with its file systems whole. Raises as `create`, ConflictError while it is being attached."""
        size = source.size_bytes if size_mib is None else check_size(size_mib)
        if size < source.size_bytes:
            raise InvalidRequestError(f"{source.name} has {source.size_bytes // MIB} MiB: a copy has no less")
        row = self._new(source.project, name, kind, size, source.id, metadata)
        more = self.files.allocated_bytes(source.id)
        # Of a snapshot that is all; a clone can be filled.
        self._check_room(more if kind == "snapshot" else max(more, file_bytes(size)))
        self._add(row)
        self._promised += more
        try:
            table.hold(self._store, source.id, row.id, "copy", clock.wall_s())
            async with self._writers_still(source):
                copied = await in_thread(lambda _: self.files.copy(source.id, row.id, row.size_bytes))
            await in_thread(lambda _: self.files.appear(copied, row.id))
        except BaseException:
            self._undo(row)
            raise
        finally:
            self._promised -= more
        table.release(self._store, row.id)
        return self._ready(row)

    @contextlib.asynccontextmanager
    async def _writers_still(self, source: VolumeRow) -> AsyncIterator[None]:
        """There is one at most, and with our hold no other comes."""
        writer = next((h.holder for h in table.holds(self._store, source.id) if h.mode == "rw"), None)
        if writer is None:
            yield
            return
        async with self._still(writer):
            yield

    async def resize(self, row: VolumeRow, size_mib: int) -> VolumeRow:
        """Make it larger, while nobody has it: what is in it grows when a sandbox next has it to write."""
        size = check_size(size_mib)
        if row.kind == "snapshot":
            raise ConflictError(f"{row.name} is a snapshot, which does not change", hint="clone it, larger")
        if size < row.size_bytes:
            raise InvalidRequestError(
                f"{row.name} has {row.size_bytes // MIB} MiB, and a volume only grows",
                hint="copy what you need into a smaller one",
            )
        self._check_room(file_bytes(size) - file_bytes(row.size_bytes))
        await self._evict(row.id)
        # The row first: a file that is longer than its row says would be a quota that is not kept; one that is shorter
        # is made longer by `settle`.
        table.resized(self._store, row.id, size, most_bytes=self.quota_bytes(row.project))
        await in_thread(lambda _: self.files.grow(row.id, size))
        return replace(row, size_bytes=size)

    async def delete(self, row: VolumeRow) -> None:
        """Raises ConflictError while somebody has it, and says who."""
        await self._evict(row.id)
        table.deleting(self._store, row.id)
        await asyncio.shield(in_thread(lambda _: self.files.remove(row.id)))
        table.forget(self._store, row.id)
        log.info("volume_deleted", volume=row.id)

    def _new(
        self,
        project: str,
        name: str,
        kind: Kind,
        size: int,
        source: str | None,
        metadata: Mapping[str, str] | None,
    ) -> VolumeRow:
        now = clock.wall_s()
        name = check_name(name)
        return VolumeRow(new_id(), project, name, kind, size, now, source, "creating", dict(metadata or {}))

    def _add(self, row: VolumeRow) -> None:
        most_bytes = self.quota_bytes(row.project)
        table.add(self._store, row, most=limits.VOLUMES_MAX, most_bytes=most_bytes)

    def _ready(self, row: VolumeRow) -> VolumeRow:
        table.ready(self._store, row.id)
        log.info("volume_made", volume=row.id, kind=row.kind, source=row.source)
        return replace(row, state="ready")

    def _undo(self, row: VolumeRow) -> None:
        self.files.remove(row.id)
        with contextlib.suppress(CapacityError):  # the next server forgets it
            table.forget(self._store, row.id)

    def _check_room(self, more: int) -> None:
        """Every volume can be filled: what they do not take yet counts as taken."""
        rows = [row for row in table.rows(self._store) if row.kind == "volume"]
        owed = sum(max(0, file_bytes(row.size_bytes) - self.files.allocated_bytes(row.id)) for row in rows)
        free = self._free_bytes() - owed - self._promised - limits.DISK_FREE_BYTES_MIN
        if more > free:
            raise CapacityError(
                f"the host's disk has room for {max(0, free) // MIB} MiB more of volumes, and this takes {more // MIB}",
                hint="make a smaller one, or free space: llm4agents volume ls, llm4agents du",
            )

    async def _evict(self, volume: str) -> None:
        if self.evict is not None:
            await self.evict(volume)

    # -- who has which -------------------------------------------------------------------------------------

    async def claim(
        self, sandbox: str, project: str, mounts: Sequence[Mount], left_slots: Sequence[str] = ()
    ) -> list[dict[str, Any]] | None:
        """`row.volumes` of a sandbox about to be made of a template with `left_slots`, which has them from here on
        until its row says that it has ended (or `release`). Raises NotFoundError, ConflictError (with who has it)."""
        found = attached.left(left_slots)
        try:
            for mount in mounts:
                found.append(await self._claim(sandbox, project, found, mount))
        except BaseException:
            self.release(sandbox)
            raise
        return attached.stored(found)

    async def _claim(
        self, sandbox: str, project: str, others: Sequence[Mapping[str, Any]], mount: Mount
    ) -> dict[str, Any]:
        row = self.get(mount.volume, project)
        if mount.mode == "rw":
            await self._evict(row.id)
        entry = attached.add(others, row.id, row.name, mount)
        table.hold(self._store, row.id, sandbox, mount.mode, clock.wall_s())
        return entry

    def share(self, parent: SandboxRow, child: str) -> list[dict[str, Any]] | None:
        """What a fork has of its parent's: those that are only read. In its memory there are the others, too. Raises
        ConflictError."""
        reading = [entry for entry in attached.entries(parent) if entry["mode"] == "ro"]
        try:
            for entry in reading:
                table.hold(self._store, entry["volume"], child, "ro", clock.wall_s())
        except BaseException:
            self.release(child)
            raise
        slots = {entry["slot"] for entry in parent.volumes or ()} - {entry["slot"] for entry in reading}
        return attached.stored([*reading, *attached.left(sorted(slots))])

    async def attach(self, row: SandboxRow, mount: Mount) -> None:
        """One more for a paused sandbox, which has it mounted when it runs again."""
        (plain,) = attached.wanted([mount], row.protect or ())
        entry = await self._claim(row.id, row.project, row.volumes or [], plain)
        try:
            self._store.change(row, volumes=[*(row.volumes or []), entry])
        except BaseException:
            table.release(self._store, row.id, entry["volume"])
            raise

    def detach(self, row: SandboxRow, volume: str, top: Path) -> None:
        """From a paused sandbox. Raises NotFoundError."""
        wanted = (volume, self._id_of(volume, row.project))
        entry = next((entry for entry in attached.entries(row) if entry["volume"] in wanted), None)
        if entry is None:
            raise NotFoundError(
                f"{row.id} has no volume {volume[:80]}", hint="llm4agents show says which it has"
            )
        rest = [other for other in row.volumes or [] if other is not entry]
        # The row first: one that is held for nobody is found by `settle`.
        self._store.change(row, volumes=[*rest, *attached.left([entry["slot"]])])
        attached.overlay(top, entry["slot"]).unlink(missing_ok=True)
        table.release(self._store, row.id, entry["volume"])

    def _id_of(self, name: str, project: str) -> str:
        row = table.named(self._store, project, name)
        return name if row is None else row.id

    def release(self, sandbox: str) -> None:
        """Of one whose row was never written. Idempotent."""
        with contextlib.suppress(CapacityError):  # `settle` does it
            table.release(self._store, sandbox)

    def _on_transition(self, row: SandboxRow, _: str | None, to_state: str, *__: object) -> None:
        if to_state in TERMINAL and row.volumes:
            self.release(row.id)

    def of(self, row: SandboxRow, overlays: Mapping[str, Path] | None = None) -> Attached:
        for entry in attached.writable(row):
            if (volume := table.get(self._store, entry["volume"])) is not None:
                self.files.cut(volume.id, volume.size_bytes)
        return Attached(tuple(attached.entries(row)), self.files, overlays or {})

    # -- after a server that died --------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish or forget what was half done; let go of what nobody has any more. Before anything is asked of it, and
        after the sandboxes have been taken over."""
        for row in table.rows(self._store):
            if row.state != "ready":
                self.files.remove(row.id)
                table.forget(self._store, row.id)
                log.info("volume_forgotten", volume=row.id, state=row.state)
            elif self.files.path(row.id).exists():
                with contextlib.suppress(LLM4AgentsError, OSError):
                    self.files.grow(row.id, row.size_bytes)
        alive = {row.id: row for row in self._store.alive()}
        for hold in table.holds(self._store):
            sandbox = alive.get(hold.holder)
            has = () if sandbox is None else (entry["volume"] for entry in attached.entries(sandbox))
            if hold.volume not in has:
                table.release(self._store, hold.holder, hold.volume)
        gone = self.files.sweep({row.id for row in table.rows(self._store)})
        if gone:
            log.info("swept_volumes", files=gone)
