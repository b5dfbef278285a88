"""The engine: every sandbox of one node, and what can be asked of it. One per server, on one event loop.

Not here: HTTP (api), what a caller may wish for (`wish`), how each step is done (`creation`, `adoption`, `live`,
`templates`, `calls`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import structlog

from llm4agents.barrier.vault import Vault
from llm4agents.config import Settings
from llm4agents.engine import (
    adoption,
    clock,
    contact,
    creation,
    isolation,
    lifecycle,
    names,
    parts,
    top,
)
from llm4agents.engine import host as hosts
from llm4agents.engine.acts import Acts
from llm4agents.engine.admission import Admission, Policy
from llm4agents.engine.audit import Audit
from llm4agents.engine.building.builds import Builds
from llm4agents.engine.creation import Origin
from llm4agents.engine.feed import Feed
from llm4agents.engine.invites import Invites
from llm4agents.engine.jobs import Jobs
from llm4agents.engine.keeping import Keeper, due
from llm4agents.engine.keys import Keys
from llm4agents.engine.live import Live
from llm4agents.engine.logs import Logs
from llm4agents.engine.metrics import Metrics
from llm4agents.engine.network import Networks, own_addresses
from llm4agents.engine.node import Node, Places
from llm4agents.engine.pool import Pool
from llm4agents.engine.projects import Projects
from llm4agents.engine.protecting import Protecting
from llm4agents.engine.quotas import Quotas, share_of
from llm4agents.engine.reach import Reach
from llm4agents.engine.repeats import Repeats
from llm4agents.engine.secrets import Secrets
from llm4agents.engine.templates import Templates
from llm4agents.engine.usage import Meter
from llm4agents.engine.volume_files import VolumeFiles
from llm4agents.engine.volumes import Volumes
from llm4agents.engine.wish import Wish
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    HostSetupError,
    LLM4AgentsError,
    ProtocolError,
    SandboxDiedError,
    SandboxNotFoundError,
    ServerUnavailableError,
)
from llm4agents.guest.verbs import Agent
from llm4agents.images.cache import tree_bytes
from llm4agents.images.progress import Progress, silent
from llm4agents.store import SandboxRow, Store, open_store
from llm4agents.vmm.base import Capabilities
from llm4agents.vmm.choice import Drivers, canonical

log = structlog.get_logger()

FORGET_S = 30 * 86_400
"""How long ended sandboxes are listed; their events stay."""


class Engine(Acts):
    """Open it with `start`, end it with `close`. All methods belong to one event loop."""

    def __init__(self, settings: Settings, store: Store, drivers: Drivers | None = None) -> None:
        """`drivers`: those of this host, unless a test has others."""
        super().__init__()
        self.settings = settings
        self.store = store
        self.drivers = drivers or Drivers(settings)
        self.admission = Admission(
            Policy(settings.memory_commit, settings.memory_reserve_mib),
            lambda: hosts.host(settings.state),
            lambda: self.templates.held_bytes,
        )
        store.on_transition.append(self.admission.on_transition)
        self.templates = Templates(settings, self.drivers, self.admission)
        self.places = Places(settings.state, settings.run_dir)
        self.secrets = Secrets(store, Vault(settings.state, settings.vault_key))
        self.protecting = Protecting(self.templates.cache, self.drivers, self.admission, self.places.machines)
        self.projects = Projects(store)
        self.keys = Keys(store, self.projects)
        self.invites = Invites(store, self.projects, self.keys)
        self.quotas = Quotas(store, self.projects)
        self.audit = Audit(store)
        self.repeats = Repeats(store, self.secrets)
        self.feed = Feed(store)
        self.metrics = Metrics(store)
        self.logs = Logs(settings.state / "logs", self.places.run, store)
        self.reach = Reach(settings.network_private, own_addresses)
        self.jobs = Jobs(self, store, self.secrets, webhooks_on=settings.webhooks, refuse=self.reach.refused)
        self.meter = Meter(store, lambda row: tree_bytes(self.places.sandboxes / row.id))
        self.networks = Networks(settings, store, self.places, self.secrets, self.templates)
        self.pool = Pool(self.templates, self.drivers, self.places, self.admission, link=self.networks.link)
        self.builds = Builds(
            self.templates.workshop,
            self.templates,
            self.networks,
            self.drivers,
            settings.state / "builds",
            (settings.registry, settings.registries),
        )
        self.builds.find, self.builds.room = names.ref, self.check_more_templates
        self.builds.charged = self.quotas.building
        self.templates.rebuild = self.builds.rebuild
        self.creating = 0
        self._live: dict[str, Live] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._creators: set[asyncio.Task[Any]] = set()
        self._unwritten: list[Callable[[], None]] = []
        self._closing = False
        self.volumes = Volumes(store, settings.state, free_bytes=self._free_bytes, still=self._still)
        self.volumes.quota_bytes = self.quotas.volumes_bytes
        self.node = Node(
            self.drivers,
            store,
            self.places,
            self.templates,
            self.protecting,
            self._on_deadline,
            self._free_bytes,
            self._unwritten.append,
            self.networks,
            self.volumes,
        )
        self.volume_files = VolumeFiles(self.node, self.volumes, self.admission)
        self.templates.users_of = store.lying_on
        self._keeper = Keeper(store, self._expire)

    @classmethod
    def open(cls, settings: Settings) -> Engine:
        """An engine on the store of `settings.state`. Raises what `open_store` does."""
        return cls(settings, open_store(settings.state / "store.db"))

    # -- the engine's own life ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over what an old server left. Works on a host without a VMM too: then nothing can be created."""
        for directory in (self.places.machines, self.places.sandboxes):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.networks.start()
        # What a dead builder left may be a whole Debian: a slow disk takes minutes to forget it.
        self._spawn(asyncio.to_thread(self.templates.cache.sweep))
        self.meter.leave_out_stops(self.places.run)
        for live in await adoption.adopt_all(self.node):
            self.admission.hold(live.row.id, live.row.memory_mib)
            self._enter(live)
        for row in self.store.alive():
            if row.state == "paused" and row.ending is not None:
                await self.kill(row.id, row.ending)  # its server died while it ended it
        self.volumes.settle()
        self.meter.start()
        self._spawn(self.meter.run())
        self.jobs.start()
        self._keeper.look()
        if self.store.forget_ended(clock.wall_s() - FORGET_S):
            self.networks.sweep()
        self.logs.sweep(lambda sandbox: self.store.get(sandbox) is not None)
        self.pool.start(self.settings.pool)

    async def close(self, *, keep: bool) -> None:
        """End every sandbox, or (`keep`) leave them to the next server: their deadlines hold meanwhile."""
        self._closing = True
        await self.jobs.close()
        await self.builds.close()
        for creator in list(self._creators):
            creator.cancel()
        while self._creators:
            await asyncio.wait(self._creators)
        await self.pool.close()
        await self.volume_files.close()
        while self._acts:  # what they make is ended, paused or left below
            await asyncio.wait(self._acts)
        if keep:
            await asyncio.gather(*(self._leave(live) for live in list(self._live.values())))
        else:
            await asyncio.gather(*(self._stop_one(live) for live in list(self._live.values())))
        await self.networks.close(keep=keep)
        self._keeper.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.feed.close()
        await self.drivers.close()

    async def _stop_one(self, live: Live) -> None:
        """A sandbox that wants to be paused at its time is paused when its server stops, the others end."""
        if live.row.on_timeout == "pause":
            try:
                # It is not the project that wants it now: what is above its quota afterwards is counted, not lost.
                await self.pause(live.row.id, "server stopped", always=True)
            except LLM4AgentsError as error:
                # It is not ended for that: its keeper stops it at its time, and the next server pauses it.
                log.warning("left_running", sandbox=live.row.id, error=error.message)
                if not live.ending:
                    await self._leave(live)
            return
        await self.kill(live.row.id, "server stopped")

    async def _leave(self, live: Live) -> None:
        live.ending = True
        live.stop_watching()
        live.interrupt(ServerUnavailableError("the server was stopped; the sandbox lives on"))
        with contextlib.suppress(LLM4AgentsError, OSError):
            await live.write_deadline()
            await live.agent.session.quiesce(timeout=2.0)
        with contextlib.suppress(LLM4AgentsError):
            await live.agent.session.close()
        await live.machine.detach()

    @property
    def alive(self) -> int:
        """How many sandboxes live or are being made."""
        return len(self._live) + self.creating

    # -- sandboxes ----------------------------------------------------------------------------------------

    async def create(self, wish: Wish, progress: Progress = silent) -> SandboxRow:
        """A running sandbox. Builds the template first if it must, which `progress` tells.

        Raises InvalidRequestError, TemplateNotFoundError, CapacityError, HostSetupError, BootError, and
        VersionMismatchError when its guest would have to trust this node's CA and does not.
        """
        if self._closing:
            raise ServerUnavailableError("this server is stopping", hint="call again; the next one starts")
        if wish.nested:
            self.check_nested()
        parts.check_shape(wish.vcpus, wish.memory_mib, os.cpu_count() or 1)
        shape = await self.templates.shape(
            wish.template,
            wish.vcpus,
            wish.memory_mib,
            vmm=None if wish.vmm is None else canonical(wish.vmm),
            nested=wish.nested,
        )
        can = await self.drivers.can(shape.vmm)
        if can.accelerator != "kvm" and (wish.require_kvm or self.settings.require_kvm):
            raise HostSetupError(
                f"KVM is required and cannot be used: {can.why_not_kvm}",
                hint="leave out --require-kvm (LLM4AGENTS_REQUIRE_KVM) to run in software emulation",
            )
        asked = await self.networks.asked(wish.network, progress, wish.project)
        if asked.wish.intercepts:
            variant, _ = self.templates.ready(shape) or await self.templates.variant(shape, progress)
            parts.check_ca(variant, self.templates.authority().digest)
        self._settle()
        share = share_of(wish.project, wish.vcpus, wish.memory_mib, wish.bounds.disk_mib)
        self.quotas.check_room(share)
        self.quotas.check_rate(wish.project)
        self.creating += 1
        creator = asyncio.current_task()
        assert creator is not None
        self._creators.add(creator)
        # A machine of the pool runs already: its processes have seen the paths that would be covered.
        pooled = None if wish.protect or wish.volumes else self.pool.take(shape, linked=asked.needs_link)
        ident, live = pooled.ident if pooled is not None else creation.new_id(), None
        env = {**asked.environment, **wish.env}
        self.quotas.charge(ident, share)
        try:
            if pooled is not None:
                row = wish.row(ident, asked, pooled.variant, can.accelerator)
                live = await creation.hand_over(
                    row,
                    pooled.variant,
                    pooled.woken,
                    env,
                    age_s=clock.boottime_s() - pooled.born_s,
                    store=self.store,
                    places=self.places,
                    on_deadline=self._on_deadline,
                    free_bytes=self._free_bytes,
                    bounds_files=can.bounds_files,
                )
            else:
                await self.admission.reserve(ident, wish.memory_mib, wait_s=wish.wait_s, project=wish.project)
                variant, snapshot = self.templates.ready(shape) or await self.templates.variant(
                    shape, progress
                )
                row = wish.row(ident, asked, variant, can.accelerator)
                row.volumes = await self.volumes.claim(ident, wish.project, wish.volumes, variant.left_slots)
                protection = await self.protecting.of(row, variant, snapshot)
                async with self.admission.turn():
                    live = await creation.create(
                        row,
                        Origin(variant, snapshot),
                        env,
                        link=await self.networks.link(needed=asked.needs_link),
                        driver=self.drivers.of(variant.vmm),
                        store=self.store,
                        places=self.places,
                        on_deadline=self._on_deadline,
                        free_bytes=self._free_bytes,
                        protection=protection,
                        volumes=self.volumes.of(row),
                    )
            self._enter(live)
            if asked.files:
                await self.networks.furnish(ident, live.agent, asked)
            return live.row
        finally:
            if live is None:
                self.admission.release(ident)
                self.quotas.release(ident, share)
                if wish.volumes:
                    self.volumes.release(ident)
            self._creators.discard(creator)
            self.creating -= 1
            if self.store.checkpoint_due():
                self._spawn(asyncio.to_thread(self.store.checkpoint))

    def get(self, sandbox: str) -> SandboxRow:
        """The row of a sandbox, alive or ended. Raises SandboxNotFoundError."""
        row = self.find(sandbox)
        if row is None:
            raise SandboxNotFoundError(f"there is no sandbox {sandbox}", hint="llm4agents ls shows them")
        return row

    def find(self, sandbox: str) -> SandboxRow | None:
        live = self._live.get(sandbox)
        return live.row if live is not None else self.store.get(sandbox)

    def live(self, sandbox: str) -> Live:
        """The running sandbox. Raises SandboxNotFoundError, SandboxDiedError (with why it ended)."""
        live = self._live.get(sandbox)
        if live is None:
            row = self.get(sandbox)
            raise SandboxDiedError(
                f"{sandbox} {lifecycle.why_not(row.state, 'use')}"  # type: ignore[arg-type]
                + (f": {row.reason}" if row.reason else ""),
                hint="create a new sandbox",
            )
        return live

    @contextlib.asynccontextmanager
    async def use(self, sandbox: str, what: str) -> AsyncIterator[Agent]:
        """The agent of a running sandbox, which is held open meanwhile. See `Live.use`."""
        async with (await self.access(sandbox)).use(what) as agent:
            yield agent

    async def kill(self, sandbox: str, reason: str = "killed by request") -> SandboxRow:
        """End a sandbox, running or paused; one that has ended stays as it is. Raises SandboxNotFoundError."""
        self.get(sandbox)
        live, lock = self._live.get(sandbox), self._moving.get(sandbox)
        if live is not None and lock is not None and lock.locked() and not live.ending:
            # What is being done to it may wait for a guest that does not answer; without its machine it does not.
            with contextlib.suppress(CapacityError):
                self.store.change(live.row, ending=reason)
            with contextlib.suppress(LLM4AgentsError):
                await live.machine.stop()
        async with self._alone(sandbox):
            live = self._live.get(sandbox)
            if live is None:
                row = self.get(sandbox)
                if row.state == "paused":
                    self._end_paused(row, reason)
                return row
            await self._end(live, "killed", reason)
            return live.row

    async def _expire(self, sandbox: str) -> None:
        """The time a pause is kept for is over."""
        async with self._alone(sandbox):  # one that is being resumed is not paused any more then
            row = self.store.get(sandbox)
            if row is not None and row.state == "paused" and due([row], clock.wall_s())[0]:
                self._end_paused(row, f"kept paused for {row.keep_s:g} s")

    def _end_paused(self, row: SandboxRow, reason: str) -> None:
        with contextlib.suppress(CapacityError):  # a full disk holds up no kill: this is what frees it
            self.store.change(row, ending=reason)
        self.meter.ending(row)
        self.places.remove(row.id)
        self.networks.left(row.id, forget=True)
        now = clock.stamp()
        self._unwritten.append(
            partial(self.store.transition, row, "killed", reason, now, ended_at=now.wall_s)
        )
        self._settle()
        self._sweep_layers()

    async def _end(self, live: Live, state: str, reason: str) -> None:
        if live.ending:
            await live.ended.wait()
            return
        live.ending = True
        live.stop_watching()
        # Written before the act: a server that dies in between leaves its successor the intent.
        with contextlib.suppress(CapacityError):
            self.store.change(live.row, ending=reason)
        live.end_error = live.end_error or SandboxDiedError(f"{live.row.id} ended: {reason}")
        try:
            await live.flush_volumes()
            with contextlib.suppress(LLM4AgentsError):
                await asyncio.shield(live.machine.stop())
            with contextlib.suppress(LLM4AgentsError):
                await live.agent.session.close()
            now = clock.stamp()
            self.meter.ending(live.row)
            self.logs.keep_console(live.row.id)
            self.networks.left(live.row.id, forget=True)
            self.places.remove(live.row.id)
            forked = live.row.disk is not None
            self._unwritten.append(
                partial(self.store.transition, live.row, state, reason, now, ended_at=now.wall_s, record=None)
            )
            self._settle()
            if forked:
                self._sweep_layers()
            log.info("ended", sandbox=live.row.id, state=state, reason=reason)
        finally:
            self._live.pop(live.row.id, None)
            live.ended.set()

    def _settle(self) -> None:
        """Write what could not be written while the disk was full; ends come first in `places.remove`."""
        while self._unwritten:
            try:
                self._unwritten[0]()
            except CapacityError as error:
                log.error("store_is_full", error=error.message, waiting=len(self._unwritten))
                return
            del self._unwritten[0]

    def _on_deadline(self, live: Live, reason: str) -> None:
        self._spawn(self._at_deadline(live, reason))

    # -- watching ------------------------------------------------------------------------------------------

    def _enter(self, live: Live) -> None:
        self._live[live.row.id] = live
        self.networks.entered(live.row)
        self._spawn(self._watch_machine(live))
        self._spawn(self._watch_session(live))
        self._spawn(self._watch_events(live))
        if live.settling:
            self._spawn(self._watch_settling(live))

    async def _watch_machine(self, live: Live) -> None:
        ended = await live.machine.wait()
        if not live.ending:
            killed = ended.reason == "deadline" or live.row.ending is not None
            words = live.row.ending or ("deadline" if killed else f"the machine {contact.exit_words(ended)}")
            await self._end(live, "killed" if killed else "failed", words)

    async def _watch_session(self, live: Live) -> None:
        error = await asyncio.shield(live.agent.session.closed)
        if live.ending:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await live.machine.wait()
                return  # `_watch_machine` tells why
        broke = isinstance(error, ProtocolError)
        why = error.message if error is not None else "the channel was closed"
        await self._end(live, "failed", f"{'protocol error' if broke else 'channel lost'}: {why}")

    async def _watch_settling(self, live: Live) -> None:
        try:
            await asyncio.gather(*live.settling)
        except LLM4AgentsError as error:
            if not live.ending and not live.agent.session.closed.done():  # else `_watch_session` tells why
                await self._end(live, "failed", f"it did not take what its create asked for: {error.message}")
        finally:
            live.settling = []

    async def _watch_events(self, live: Live) -> None:
        async for event in live.machine.events():
            if event.kind == "disk_full" and not live.disk_full:  # a monitor gone mad says it without end
                log.warning("disk_full", sandbox=live.row.id, detail=event.detail)
                live.disk_is_full()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_task_failed", exc_info=error)

    # -- the node ------------------------------------------------------------------------------------------

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.settings.state).free

    async def capabilities(self) -> Capabilities | None:
        """Of the VMM that an ordinary create gets; None where none can run."""
        try:
            return await self.drivers.can((await self.drivers.pick()).name)
        except HostSetupError:
            return None

    async def top(self, project: str | None = None) -> list[dict[str, Any]]:
        """What each sandbox (of a project) that lives takes now (`engine.top`)."""
        return await top.sandboxes(self.store.alive(project), self._live)

    async def isolation(self, sandbox: str) -> dict[str, Any]:
        """How its processes are confined (`engine.isolation`). Raises what `live` does, ConflictError."""
        if self.get(sandbox).state == "paused":
            raise ConflictError(f"{sandbox} is paused: it has no process", hint="resume it first")
        live = self.live(sandbox)
        top, layers = self.places.chain(live.row)
        return await isolation.of(live, self.networks.barrier.processes(), (top, *layers))

    def usage(self) -> dict[str, Any]:
        """Disk use of this node, by part, in bytes that are allocated. Blocks: for a thread."""
        entries = [*self.templates.cache.du()]
        data = [{"name": entry.name, "path": str(entry.path), "bytes": entry.bytes} for entry in entries]
        for name, path in (
            ("sandboxes", self.places.sandboxes),
            ("volumes", self.volumes.files.root),
            ("store", self.store.path),
        ):
            size = path.stat().st_blocks * 512 if path.is_file() else tree_bytes(path)  # none yet: nothing
            data.append({"name": name, "path": str(path), "bytes": size})
        return {"data": data, "total_bytes": sum(entry["bytes"] for entry in data)}

    async def prune(self, *, everything: bool) -> dict[str, Any]:
        """Remove what nothing refers to; with `everything` also every template that no sandbox is using."""
        removed: list[str] = []
        if everything:
            used = {live.row.template for live in self._live.values()}
            for name in sorted({variant.name for variant in self.templates.list()} - used):
                await self.templates.remove(name)
                removed.append(f"template {name}")
        removed += self.protecting.prune(self.store.alive(), everything=everything)
        removed += await asyncio.to_thread(self.builds.prune, everything=everything)
        pruned = await self.templates.cache.prune()
        forgotten = self.store.forget_ended(clock.wall_s() - (0 if everything else FORGET_S))
        if forgotten:
            removed.append(f"{forgotten} ended sandboxes from the list")
            self.networks.sweep()  # their audits and captures
        return {"removed": removed + pruned.removed, "bytes": pruned.bytes}
