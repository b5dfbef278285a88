"""Reading the files of a volume while no sandbox has it, in a machine of its own that can do nothing else.

What is on a volume is a guest's, so a guest's kernel reads it: a clone of `base` of the smallest shape, without a
network, has it read-only, and its agent serves the file verbs. The machine has no row: it ends when nobody has asked
for a while, and a dead server's is swept with what else has no row.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from llm4agents import limits
from llm4agents.engine import attached, clock, creation, trees
from llm4agents.engine.admission import Admission
from llm4agents.engine.attached import Attached, Mount
from llm4agents.engine.creation import Origin, Woken
from llm4agents.engine.node import Node
from llm4agents.engine.volumes import READER, Volumes
from llm4agents.errors import CapacityError, LLM4AgentsError
from llm4agents.guest.trees import Packed
from llm4agents.guest.verbs import Agent
from llm4agents.store import volumes as table
from llm4agents.store.volumes import VolumeRow

__all__ = ["Packed", "VolumeFiles", "inside", "outside", "tar_out"]
log = structlog.get_logger()
PLACE: Final = "/mnt/volume"
TEMPLATE: Final = "base"


def inside(path: str) -> str:
    """Where the machine has a path of the volume, whose root is `/`; nothing leads out of it but its own links.
    Pure."""
    plain = posixpath.normpath("/" + path.lstrip("/"))
    return PLACE if plain == "/" else PLACE + plain


def outside(path: str) -> str:
    """The reverse of `inside`. Pure."""
    return (path.removeprefix(PLACE) or "/") if path == PLACE or path.startswith(PLACE + "/") else path


def tar_out(agent: Agent, path: str, exclude: Sequence[str]) -> AsyncGenerator[bytes | Packed | None, None]:
    """Of a directory of the volume, as `engine.trees.tar_out` gives one of a sandbox."""
    return trees.packing(agent, inside(path), exclude=exclude, user="root")


@dataclass(slots=True)
class _Reader:
    ident: str
    project: str
    woken: Woken
    users: int = 0
    timer: asyncio.TimerHandle | None = None
    ended: bool = False
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class VolumeFiles:
    """One per engine."""

    def __init__(self, node: Node, volumes: Volumes, admission: Admission) -> None:
        self._node, self._volumes, self._admission = node, volumes, admission
        self._readers: dict[str, _Reader] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._starting: Counter[str] = Counter()
        self._ending: set[asyncio.Task[None]] = set()
        self._closing = False
        volumes.evict = self.evict

    @contextlib.asynccontextmanager
    async def use(self, volume: VolumeRow) -> AsyncIterator[Agent]:
        """An agent that has the volume at PLACE, read-only.

        Raises ConflictError (a sandbox writes to it: its own files are to be asked), CapacityError, BootError.
        """
        lock = self._locks.setdefault(volume.id, asyncio.Lock())
        async with lock:
            reader = self._readers.get(volume.id)
            if reader is None or reader.ended:
                with self._counted(volume.project):
                    await self._make_room(volume.project)
                    reader = self._readers[volume.id] = await self._start(volume)
            reader.users += 1
            if reader.timer is not None:
                reader.timer.cancel()
                reader.timer = None
        try:
            with contextlib.suppress(LLM4AgentsError):
                await reader.woken.machine.set_deadline(clock.wall_s() + limits.VOLUME_READER_S)
            yield reader.woken.agent
        finally:
            reader.users -= 1
            if reader.users == 0 and not reader.ended:
                loop = asyncio.get_running_loop()
                reader.timer = loop.call_later(limits.VOLUME_READER_IDLE_S, self._idle, volume.id, reader)

    @contextlib.contextmanager
    def _counted(self, project: str) -> Iterator[None]:
        self._starting[project] += 1
        try:
            yield
        finally:
            self._starting[project] -= 1
            if not self._starting[project]:
                del self._starting[project]

    async def _make_room(self, project: str) -> None:
        """Of one more reader of the project, which is counted as starting. Raises CapacityError."""
        mine = [
            (ident, one) for ident, one in self._readers.items() if one.project == project and not one.ended
        ]
        if len(mine) + self._starting[project] <= limits.VOLUME_READERS_PER_PROJECT_MAX:
            return
        idle = next((found for found in mine if found[1].users == 0), None)
        if idle is None:
            raise CapacityError(
                f"files of {limits.VOLUME_READERS_PER_PROJECT_MAX} volumes of the project are being read",
                hint="wait for one of these calls to end",
                retry_after_s=1,
            )
        await self._end(*idle)

    async def evict(self, volume: str) -> None:
        """End the machine that reads it, unless somebody waits for its answer."""
        reader = self._readers.get(volume)
        if reader is not None and reader.users == 0:
            await self._end(volume, reader)

    async def close(self) -> None:
        self._closing = True
        for volume, reader in list(self._readers.items()):
            await self._end(volume, reader)
        if self._ending:
            await asyncio.wait(self._ending)

    async def _start(self, volume: VolumeRow) -> _Reader:
        ident = READER + secrets.token_hex(8)
        shape = await self._node.templates.shape(TEMPLATE, 1, limits.MEMORY_MIB_MIN)
        found = self._node.templates.ready(shape) or await self._node.templates.variant(shape)
        variant, snapshot = found
        places = self._node.places
        table.hold(self._node.store, volume.id, ident, "ro", clock.wall_s())
        try:
            await self._admission.reserve(ident, shape.memory_mib, project=volume.project)
            entry = attached.add((), volume.id, volume.name, Mount(volume.id, PLACE, "ro"))
            disk = Attached((entry,), self._volumes.files)
            disks = await creation.prepare(ident, variant, places)
            top = places.disk(ident, disks[1].path.name)
            async with self._admission.turn():
                woken = await creation.wake(
                    ident,
                    Origin(variant, snapshot),
                    (*disks, *await disk.disks(top, fresh=True)),
                    {},
                    driver=self._node.drivers.of(variant.vmm),
                    places=places,
                    volumes=disk.request(),
                )
        except BaseException:
            self._forget(volume.id, ident)
            raise
        reader = _Reader(ident, volume.project, woken)
        watch = asyncio.create_task(self._watch(volume.id, reader))
        reader.tasks.add(watch)
        return reader

    async def _watch(self, volume: str, reader: _Reader) -> None:
        await reader.woken.machine.wait()
        if not reader.ended:
            log.warning("volume_reader_ended", volume=volume)
            await self._end(volume, reader, watched=True)

    def _idle(self, volume: str, reader: _Reader) -> None:
        if reader.users == 0 and not reader.ended:
            task = asyncio.create_task(self._end(volume, reader))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end(self, volume: str, reader: _Reader, *, watched: bool = False) -> None:
        if reader.ended:
            return
        reader.ended = True
        if reader.timer is not None:
            reader.timer.cancel()
        if not watched:
            for task in reader.tasks:
                task.cancel()
        with contextlib.suppress(LLM4AgentsError):
            await asyncio.shield(reader.woken.machine.stop())
        with contextlib.suppress(LLM4AgentsError):
            await reader.woken.agent.session.close()
        if self._readers.get(volume) is reader:
            del self._readers[volume]
        self._forget(volume, reader.ident)

    def _forget(self, volume: str, ident: str) -> None:
        self._node.places.remove(ident)
        self._admission.release(ident)
        with contextlib.suppress(LLM4AgentsError):
            table.release(self._node.store, ident, volume)
