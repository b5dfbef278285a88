"""What is done to a sandbox as a whole: pause, resume, fork, snapshot, its time. One act at a time for each.

Not here: how each is done (`pausing`, `forking`), and the table of all sandboxes (`engine`, whose half this is).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog

from llm4agents.config import Settings
from llm4agents.engine import attached, clock, creation, forking, lifecycle, names, pausing
from llm4agents.engine.admission import Admission
from llm4agents.engine.attached import Mount
from llm4agents.engine.building.builds import Builds
from llm4agents.engine.keeping import Keeper
from llm4agents.engine.live import Live
from llm4agents.engine.network import Asked
from llm4agents.engine.node import Node, Places
from llm4agents.engine.parts import Variant
from llm4agents.engine.quotas import Quotas, Share
from llm4agents.engine.templates import Templates
from llm4agents.engine.traffic import Traffic
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    HostSetupError,
    LLM4AgentsError,
    SandboxDiedError,
    ServerUnavailableError,
)
from llm4agents.images.progress import Progress, silent
from llm4agents.store import SandboxRow, Store

log = structlog.get_logger()
T = TypeVar("T")

PAUSE_AGAIN_S = 30.0
"""After a pause at a sandbox's time failed."""


def _check_volumes(row: SandboxRow, leave: bool) -> None:
    if not leave and (entries := attached.writable(row)):
        raise ConflictError(
            f"{row.id} writes to {entries[0]['name']}, which has one writer",
            hint='leave it out of what is made (volumes="leave"), or give that a clone of the volume',
        )


class Acts(ABC):
    """The half of the engine that moves sandboxes from state to state."""

    settings: Settings
    store: Store
    places: Places
    templates: Templates
    node: Node
    admission: Admission
    quotas: Quotas
    builds: Builds
    _live: dict[str, Live]
    _keeper: Keeper
    _closing: bool

    def __init__(self) -> None:
        self._moving: dict[str, asyncio.Lock] = {}
        self._photographing = 0
        self._snapshots: set[str] = set()
        """Templates that are being made of a sandbox."""
        self._acts: set[asyncio.Task[Any]] = set()

    @abstractmethod
    def get(self, sandbox: str) -> SandboxRow: ...

    @abstractmethod
    def live(self, sandbox: str) -> Live: ...

    @abstractmethod
    async def _end(self, live: Live, state: str, reason: str) -> None: ...

    @abstractmethod
    def _enter(self, live: Live) -> None: ...

    @abstractmethod
    def _spawn(self, work: Any) -> None: ...

    @abstractmethod
    def _settle(self) -> None: ...

    def check_nested(self) -> None:
        """Raises HostSetupError where nested sandboxes are refused."""
        if self.settings.nested == "refuse":
            raise HostSetupError(
                "this server's operator refuses nested sandboxes (LLM4AGENTS_NESTED=refuse)",
                hint="leave out nested=True (--nested)",
            )

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """An act is done although whoever asked for it goes away: a resume broken off would cost the memory."""
        task = asyncio.create_task(work)
        self._acts.add(task)
        task.add_done_callback(self._act_done)
        return await asyncio.shield(task)

    def _act_done(self, task: asyncio.Task[Any]) -> None:
        self._acts.discard(task)
        if not task.cancelled():
            task.exception()  # is its caller's to tell, if there still is one

    async def access(self, sandbox: str) -> Live:
        """The running sandbox for a call about to be made; one that is paused is resumed first, if it may be.

        Waits while it is being paused, resumed or photographed. Raises what `live` does, ConflictError when it is
        paused and must be resumed by hand, and what `resume` raises.
        """
        while True:
            lock = self._moving.get(sandbox)
            if lock is not None and lock.locked():
                async with lock:
                    pass
                continue
            if (live := self._live.get(sandbox)) is not None:
                return live
            row = self.get(sandbox)
            if row.state in ("pausing", "resuming"):
                self._settle()
                if self.get(sandbox).state == row.state:
                    raise CapacityError(
                        f"{sandbox} is {row.state}, and the store cannot be written",
                        hint="free space on the host",
                    )
                continue
            if row.state != "paused":
                return self.live(sandbox)  # raises, and says why
            if not row.auto_resume:
                raise ConflictError(
                    f"{sandbox} is paused and is not resumed by itself", hint="resume it, then call again"
                )
            await self.resume(sandbox)

    def still(self, sandbox: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Within it nothing is done to the sandbox as a whole: it stays paused, if it is."""
        return self._alone(sandbox)

    @contextlib.asynccontextmanager
    async def _alone(self, sandbox: str) -> AsyncIterator[None]:
        """One act on a sandbox at a time: pause, resume, fork, snapshot, end."""
        lock = self._moving.setdefault(sandbox, asyncio.Lock())
        try:
            async with lock:
                self._settle()
                yield
        finally:
            if not lock.locked() and self._moving.get(sandbox) is lock and sandbox not in self._live:
                row = self.store.get(sandbox)
                if row is None or row.state in lifecycle.TERMINAL:
                    self._moving.pop(sandbox, None)
                    self.places.remove(sandbox)  # what the act was still writing when its machine died

    def _check(self, sandbox: str, action: lifecycle.Action) -> SandboxRow:
        """Its row. Raises ConflictError when its state forbids `action`, SandboxDiedError when it has ended."""
        row = self.get(sandbox)
        if row.state in lifecycle.TERMINAL:
            self.live(sandbox)
        if not lifecycle.can(row.state, action):  # type: ignore[arg-type]
            raise ConflictError(f"{sandbox} {lifecycle.why_not(row.state, action)}")  # type: ignore[arg-type]
        return row

    @contextlib.contextmanager
    def _held(self, live: Live) -> Iterator[None]:
        """New calls wait at the gate while something is done to the sandbox as a whole."""
        live.gate = partial(self.access, live.row.id)
        try:
            yield
        finally:
            if not live.ending:  # else they go on to what comes after it
                live.gate = None

    async def pause(
        self, sandbox: str, reason: str = "paused by request", *, always: bool = False
    ) -> SandboxRow:
        """Put a running sandbox to disk; one that is paused stays as it is.

        Calls under way end with SandboxPausedError. Raises CapacityError when the disk has no room, QuotaError when its
        project may have no more there (unless `always`): it runs on.
        """
        return await self._to_the_end(self._pause(sandbox, reason, always))

    async def _pause(self, sandbox: str, reason: str, always: bool) -> SandboxRow:
        async with self._alone(sandbox):
            if self.get(sandbox).state == "paused":
                return self.get(sandbox)
            self._check(sandbox, "pause")
            live = self.live(sandbox)
            with self._held(live):
                try:
                    room = partial(self.quotas.pause, live.row)
                    await pausing.pause(self.node, live, reason, (lambda _: None) if always else room)
                finally:
                    if live.row.state == "paused":
                        self.node.networks.left(sandbox, forget=False)
                        self._live.pop(sandbox, None)
                        live.ended.set()
            self._keeper.look()
            self._spawn(self._compact(sandbox))
            return live.row

    async def _compact(self, sandbox: str) -> None:
        async with self._alone(sandbox):
            row = self.store.get(sandbox)
            if row is not None and await pausing.compact(self.node, row):
                self._sweep_layers()

    def _sweep_layers(self) -> None:
        """Layers nobody lies on go when no act is under way that is about to lie on one."""
        if not self._photographing:
            self.places.sweep_layers(self.store.layers())

    async def resume(
        self,
        sandbox: str,
        *,
        cold: bool = False,
        idle_timeout_s: float | None = None,
        progress: Progress = silent,
    ) -> SandboxRow:
        """Let a paused sandbox run on where it was; one that runs stays as it is. `cold` boots its disk instead.

        Raises VersionMismatchError and CorruptSnapshotError (its memory cannot be used: `cold` can), CapacityError.
        """
        if self._closing:
            raise ServerUnavailableError("this server is stopping", hint="call again; the next one starts")
        return await self._to_the_end(self._resume(sandbox, cold, idle_timeout_s, progress))

    async def _resume(
        self, sandbox: str, cold: bool, idle_timeout_s: float | None, progress: Progress
    ) -> SandboxRow:
        async with self._alone(sandbox):
            row = self.get(sandbox)
            live = self._live.get(sandbox)
            if live is not None and cold:
                raise ConflictError(f"{sandbox} runs", hint="pause it first: a cold resume boots its disk")
            if live is None:
                self._check(sandbox, "resume")
                if row.nested:
                    self.check_nested()
                with self.quotas.resuming(row):
                    await self.admission.reserve(sandbox, row.memory_mib, project=row.project)
                    try:
                        async with self.admission.turn():
                            if cold:
                                live = await pausing.resume_cold(self.node, row, progress)
                            else:
                                live = await pausing.resume(self.node, row)
                    except BaseException:
                        self.admission.release(sandbox)
                        raise
                    self._enter(live)
            if idle_timeout_s is not None:
                self._set_timeout(live, idle_timeout_s)
            return live.row

    async def fork(
        self,
        sandbox: str,
        count: int,
        *,
        idle_timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        leave_volumes: bool = False,
    ) -> list[SandboxRow]:
        """`count` sandboxes that are what this one is now, running or paused; it goes on. All of them or none.

        They have the volumes it only reads. Raises ConflictError when it writes to one, unless they are to do without
        (`leave_volumes`)."""
        if self._closing:
            raise ServerUnavailableError("this server is stopping", hint="call again; the next one starts")
        return await self._to_the_end(self._fork(sandbox, count, idle_timeout_s, metadata, leave_volumes))

    async def _fork(
        self,
        sandbox: str,
        count: int,
        idle_timeout_s: float | None,
        metadata: Mapping[str, str] | None,
        leave_volumes: bool,
    ) -> list[SandboxRow]:
        async with self._photographed(sandbox, "fork") as (row, live):
            _check_volumes(row, leave_volumes)
            if row.nested:
                self.check_nested()
            idents = [creation.new_id() for _ in range(count)]
            share = replace(Share.of(row), runs=True)
            with self.quotas.room(dict.fromkeys(idents, share)):
                self.quotas.check_rate(row.project, count)
                await self.admission.reserve_all(idents, row.memory_mib, project=row.project)
                try:
                    made = await forking.fork(
                        self.node,
                        row,
                        live,
                        idents,
                        turn=self.admission.turn,
                        idle_timeout_s=idle_timeout_s,
                        metadata=metadata,
                    )
                except BaseException:
                    for ident in idents:
                        self.admission.release(ident)
                    raise
            for child in made:
                self._enter(child)
        return [child.row for child in made]

    async def snapshot(
        self, sandbox: str, name: str, description: str = "", leave_volumes: bool = False
    ) -> Variant:
        """Make the template `name` of a running or paused sandbox, without its volumes. Raises ConflictError when
        there is one, or the sandbox writes to a volume and `leave_volumes` is not said."""
        self.templates.check_free(name)
        row = self._check(sandbox, "snapshot")
        self.check_more_templates(name)
        _check_volumes(row, leave_volumes)
        if row.state == "paused" and self.places.env(sandbox):
            # Its environment is in the memory on disk; only its own agent can take it out.
            await self.resume(sandbox)
            try:
                return await self.snapshot(sandbox, name, description, leave_volumes)
            finally:
                await self.pause(sandbox, row.reason or "paused by request", always=True)  # it had its place
        self._snapshots.add(name)
        try:
            return await self._to_the_end(self._snapshot(sandbox, name, description, leave_volumes))
        finally:
            self._snapshots.discard(name)

    def check_more_templates(self, ref: str) -> None:
        """Before the template of that ref is made: may its project have one more? Raises QuotaError."""
        project = names.project_of(ref)
        if project is not None and self.quotas.bound(project, "templates") is not None:
            own = {one.name for one in self.templates.list() if names.project_of(one.name) == project}
            own |= self.builds.names(project) | {
                one for one in self._snapshots if names.project_of(one) == project
            }
            self.quotas.check(project, "templates", len(own), 0 if ref in own else 1)

    async def _snapshot(self, sandbox: str, name: str, description: str, leave_volumes: bool) -> Variant:
        async with self._photographed(sandbox, "snapshot") as (row, live):
            _check_volumes(row, leave_volumes)
            return await forking.snapshot(self.node, row, live, name, description)

    @contextlib.asynccontextmanager
    async def _photographed(
        self, sandbox: str, action: lifecycle.Action
    ) -> AsyncIterator[tuple[SandboxRow, Live | None]]:
        self._photographing += 1
        try:
            async with self._alone(sandbox):
                row = self._check(sandbox, action)
                live = self._live.get(sandbox)
                with contextlib.nullcontext() if live is None else self._held(live):
                    yield row, live
        finally:
            self._photographing -= 1
            self._sweep_layers()  # of one that failed, or whose sandbox ended meanwhile

    @contextlib.asynccontextmanager
    async def _still(self, sandbox: str) -> AsyncIterator[None]:
        """Within it nothing of a sandbox moves: of one that runs, its processes, file systems and processors; one
        that is paused is not resumed. Raises ConflictError while it is being made, SandboxDiedError."""
        async with self._alone(sandbox):
            row, live = self.store.get(sandbox), self._live.get(sandbox)
            if live is not None:
                with self._held(live):
                    async with pausing.standing_still(live, "a copy of its volume", sync=True):
                        yield
            elif row is None or row.state == "creating":
                raise ConflictError(
                    f"{sandbox} is being made, with that volume", hint="try again in a moment"
                )
            else:
                yield

    async def attach(self, sandbox: str, mount: Mount) -> SandboxRow:
        """Give a paused sandbox one more volume, which is mounted when it is resumed. Raises ConflictError when it
        runs, or somebody else has the volume."""
        return await self._to_the_end(self._attach(sandbox, mount))

    async def _attach(self, sandbox: str, mount: Mount) -> SandboxRow:
        async with self._alone(sandbox):
            row = self._paused(sandbox, "attached to")
            await self.node.volumes.attach(row, mount)
            return row

    async def detach(self, sandbox: str, volume: str) -> SandboxRow:
        """Take a volume from a paused sandbox; it is free at once. Raises NotFoundError, ConflictError when it runs."""
        return await self._to_the_end(self._detach(sandbox, volume))

    async def _detach(self, sandbox: str, volume: str) -> SandboxRow:
        async with self._alone(sandbox):
            row = self._paused(sandbox, "detached from")
            self.node.volumes.detach(row, volume, self.places.chain(row)[0])
            return row

    def _paused(self, sandbox: str, act: str) -> SandboxRow:
        row = self._check(sandbox, "extend")
        if row.state != "paused":
            raise ConflictError(
                f"a volume is {act} a paused sandbox, and {sandbox} is {row.state}", hint="pause it"
            )
        return row

    async def update_network(
        self, sandbox: str, value: Any, progress: Progress = silent
    ) -> tuple[SandboxRow, int]:
        """Give a running or paused sandbox another network; the row, and how many connections that ended.

        When it returns, what the new one does not allow is over. Raises what `Networks.asked` and `update` do.
        """
        project = self._check(sandbox, "extend").project
        asked = await self.node.networks.asked(value, progress, project)
        return await self._to_the_end(self._update_network(sandbox, asked))

    async def _update_network(self, sandbox: str, asked: Asked) -> tuple[SandboxRow, int]:
        async with self._alone(sandbox):
            row = self._check(sandbox, "extend")
            live = self._live.get(sandbox)
            row = live.row if live is not None else row
            try:
                return row, await self.node.networks.update(row, asked)
            finally:
                # Also when a worker is yet to hear of it.
                if row.network == asked.network and asked.environment:
                    await self._furnish(row, live, asked)

    async def _furnish(self, row: SandboxRow, live: Live | None, asked: Asked) -> None:
        env = {**asked.environment, **self.places.env(row.id)}
        self.places.keep_env(row.id, env)
        if live is not None:
            variant, _ = await self.templates.by_key(row.template, row.template_key, loadable=False)
            live.env = env
            await live.agent.set_env({**variant.environment, **env})
            await self.node.networks.furnish(row.id, live.agent, asked)

    def set_timeout(
        self,
        sandbox: str,
        idle_timeout_s: float | None = None,
        *,
        on_timeout: str | None = None,
        keep_s: float | None = None,
        auto_resume: bool | None = None,
    ) -> SandboxRow:
        """Change the idle timeout (counted from now), what happens at it, and how long a pause is kept."""
        row = self._check(sandbox, "extend")
        live = self._live.get(sandbox)
        row = live.row if live is not None else row
        wanted = {"on_timeout": on_timeout, "keep_s": keep_s, "auto_resume": auto_resume}
        if changes := {name: value for name, value in wanted.items() if value is not None}:
            self.store.change(row, **changes)
            self._keeper.look()
        if live is None:
            if idle_timeout_s is not None:
                self.store.change(row, idle_timeout_s=idle_timeout_s)
        else:
            self._set_timeout(live, row.idle_timeout_s if idle_timeout_s is None else idle_timeout_s)
        return row

    def set_traffic(self, sandbox: str, *, public: bool | None = None, rotate: bool = False) -> SandboxRow:
        """Who may reach its ports from now on: anybody (`public`), and whether what was given out holds no more."""
        row = self._check(sandbox, "extend")
        live = self._live.get(sandbox)
        row = live.row if live is not None else row
        changed = Traffic.of(row.traffic).changed(public=public, rotate=rotate)
        self.store.change(row, traffic=changed.stored())
        return row

    def _set_timeout(self, live: Live, idle_timeout_s: float) -> None:
        self.store.change(live.row, idle_timeout_s=idle_timeout_s)
        live.last_used_s = clock.boottime_s()
        if live.gate is None:  # else its time is kept again when what is done to it is over
            live.watch_deadlines()

    async def _at_deadline(self, live: Live, reason: str) -> None:
        if live.row.on_timeout != "pause":
            async with self._alone(live.row.id):
                if self._live.get(live.row.id) is not live:
                    return
                if live.overdue:
                    await self._end(live, "killed", reason)
                else:  # an act or a call was before it
                    live.watch_deadlines()
            return
        try:
            if live.pages_bytes:  # it was refused: it is not stopped and copied for nothing again
                self.quotas.check_pause(live.row, live.pages_bytes)
            await self.pause(live.row.id, reason)
        except SandboxDiedError:
            return
        except LLM4AgentsError as error:
            # Whatever keeps it from being paused, it is not ended for it: once more in a while.
            log.warning("not_paused_at_its_time", sandbox=live.row.id, error=error.message)
            asyncio.get_running_loop().call_later(PAUSE_AGAIN_S, live.watch_deadlines)
