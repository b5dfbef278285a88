"""Machines resumed ahead: clones that are awake, have run a first command and a first cell, and belong to nobody yet.

One that is taken becomes a sandbox by a row in the store and one frame to its agent. Until then it has an id, a
directory, a disk and a boot id of its own and no row, so that the next server ends it when this one dies; it keeps
no server alive, is no sandbox, and gives its memory up to whoever asks for a sandbox.

`missing` and `stale` are pure. Not here: making a sandbox of one (`engine`), waking a clone (`creation`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from llm4agents import limits
from llm4agents.barrier.barrier import Link
from llm4agents.config import PoolWish
from llm4agents.engine import clock, creation, parts
from llm4agents.engine import host as hosts
from llm4agents.engine.admission import Admission
from llm4agents.engine.creation import Origin, Woken
from llm4agents.engine.node import Places
from llm4agents.engine.parts import Variant
from llm4agents.engine.templates import Shape, Templates
from llm4agents.errors import CapacityError, InvalidRequestError, LLM4AgentsError
from llm4agents.guest import code
from llm4agents.guest.verbs import Agent
from llm4agents.vmm.base import Snapshot
from llm4agents.vmm.choice import Drivers

log = structlog.get_logger()

TICK_S: Final = 1.0
QUIET_S: Final = 0.1
"""How long nothing may have been started or taken before one is made: whoever asks for sandboxes comes first."""
PATIENCE_S: Final = 3.0
"""How long a busy host is waited for; one that always is must not keep the pool empty."""
DEADLINE_S: Final = 120.0
"""A dead server's pool ends by itself within this, if no server comes before."""
DEADLINE_AGAIN_S: Final = 40.0
BACK_OFF_S: Final = 10.0
"""After a failure, or after giving memory up."""
WARM_EXECS: Final = 5
WARM_CELLS: Final = ("print(6*7)", "6*7")
Kind = tuple[str, int, int]
"""Template, vCPUs, MiB: what can be asked for. Its VMM is the one that an ordinary create gets."""
Token = tuple[str, int, int]
"""Which build of a template a machine is a clone of."""


@dataclass(slots=True, eq=False)
class Pooled:
    """One machine that waits. `dead` once it has ended."""

    ident: str
    shape: Shape
    token: Token
    variant: Variant
    woken: Woken
    born_s: float
    deadline_s: float
    dead: bool = False
    watch: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Shelf:
    """What is kept of one kind."""

    wanted: int
    may_build: bool = True
    """Whether its template may be built: when it was asked for, and not again after somebody has removed it."""
    ready: list[Pooled] = field(default_factory=list)
    not_before_s: float = 0.0
    problem: str | None = None
    shape: Shape | None = None
    """What it is of here; None: not found out yet."""


def missing(shelves: Mapping[Kind, Shelf], now_s: float) -> Kind | None:
    """The kind to make one more of: the one that lacks the largest part of what is wanted; None: all are full."""
    open_ = [
        (shelf.wanted - len(shelf.ready)) / shelf.wanted
        for shelf in shelves.values()
        if len(shelf.ready) < shelf.wanted and now_s >= shelf.not_before_s
    ]
    if not open_:
        return None
    worst = max(open_)
    return next(
        kind
        for kind, shelf in shelves.items()
        if len(shelf.ready) < shelf.wanted
        and now_s >= shelf.not_before_s
        and (shelf.wanted - len(shelf.ready)) / shelf.wanted == worst
    )


def stale(shelf: Shelf, current: Token | None) -> list[Pooled]:
    """Those of a shelf that nobody must get: of another build of the template, ended, or more than are wanted."""
    gone = [one for one in shelf.ready if one.dead or one.token != current]
    kept = [one for one in shelf.ready if one not in gone]
    return gone + kept[shelf.wanted :]


def token_of(variant: Variant) -> Token | None:
    """Tells one build of a template from the next in the same place; None when it is gone."""
    try:
        found = (variant.path / parts.TEMPLATE).stat()
    except OSError:
        return None
    return str(variant.path), found.st_ino, found.st_mtime_ns


class Pool:
    """All shelves of one engine. `start` it, `close` it; one task makes machines, one at a time."""

    def __init__(
        self,
        templates: Templates,
        drivers: Drivers,
        places: Places,
        admission: Admission,
        *,
        busy: Callable[[], bool] = hosts.busy,
        link: Callable[[], Awaitable[Link | None]] | None = None,
    ) -> None:
        """`link` gives each machine the network's end it will need."""
        self._templates, self._drivers, self._places = templates, drivers, places
        self._admission, self._busy, self._link = admission, busy, link
        self._shelves: dict[Kind, Shelf] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._taken_s = self._lacking_s = 0.0

    # -- what is wanted -----------------------------------------------------------------------------------

    def start(self, wishes: Iterable[PoolWish] = ()) -> None:
        """Begin to keep `wishes`. A wish that cannot be is logged: a server must start with any setting."""
        self._admission.make_room = self.make_room
        for wish in wishes:
            try:
                self.set([wish])
            except LLM4AgentsError as error:
                log.error("pool_refused", template=wish.template, error=error.message)

    def set(self, wishes: Sequence[PoolWish]) -> None:
        """Change what is kept of these shapes; 0 ends what is there. Others stay as they are.

        Raises InvalidRequestError, TemplateNotFoundError, and then nothing has changed.
        """
        new = {kind: shelf.wanted for kind, shelf in self._shelves.items()}
        wished = {self._kind(wish): wish.wanted for wish in wishes}
        for kind, wanted in wished.items():
            if wanted:
                self._templates.check_shape(*kind)
        new |= wished
        if sum(new.values()) > limits.POOL_MAX:
            raise InvalidRequestError(
                f"a pool keeps at most {limits.POOL_MAX} machines ready, of all together"
            )
        for kind, wanted in new.items():
            shelf = self._shelves.setdefault(kind, Shelf(wanted))
            if shelf.wanted != wanted or kind in wished:
                shelf.wanted, shelf.may_build, shelf.not_before_s = wanted, True, 0.0
        if self._task is None and any(new.values()):
            self._task = asyncio.create_task(self._keep(), name="pool")
        self._wake.set()

    def _kind(self, wish: PoolWish) -> Kind:
        vcpus, memory_mib = self._templates.size(wish.template)
        return wish.template, wish.vcpus or vcpus, wish.memory_mib or memory_mib

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "template": name,
                "vcpus": vcpus,
                "memory_mib": memory_mib,
                "wanted": shelf.wanted,
                "ready": sum(not one.dead for one in shelf.ready),
                "problem": shelf.problem,
            }
            for (name, vcpus, memory_mib), shelf in self._shelves.items()
        ]

    async def close(self) -> None:
        """End everything that nobody has taken."""
        self._admission.make_room = None
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for shelf in self._shelves.values():
            self._end_all(shelf.ready, shelf)
        if self._ending:
            await asyncio.wait(self._ending)

    # -- taking one ---------------------------------------------------------------------------------------

    def take(self, shape: Shape, *, linked: bool = False) -> Pooled | None:
        """A machine of that shape, of the template as it is now; the caller owns it and what admission holds for it.

        `linked`: only one that has a link.
        """
        shelf = self._shelves.get(shape[:3])
        if shelf is None or shelf.shape != shape:
            return None
        self._taken_s = clock.boottime_s()
        self._drop_stale(shelf)
        asyncio.get_running_loop().call_later(QUIET_S, self._wake.set)
        taken = next((one for one in shelf.ready if one.woken.linked or not linked), None)  # the oldest
        if taken is None:
            return None
        shelf.ready.remove(taken)
        assert taken.watch is not None
        taken.watch.cancel()
        return taken

    async def make_room(self, needed_bytes: int) -> bool:
        """Give up machines until `needed_bytes` are free of what they held, or all; whether any was."""
        freed, ended = 0, []
        for shelf in sorted(self._shelves.values(), key=lambda shelf: -len(shelf.ready)):
            while shelf.ready and freed < needed_bytes:
                one = shelf.ready[-1]
                freed += self._admission.holds(one.ident)
                ended += self._end_all([one], shelf)
            if ended:
                # Not made anew at once: that would be ended again by the next who asks.
                shelf.not_before_s = clock.boottime_s() + BACK_OFF_S
        if ended:
            log.info("pool_made_room", machines=len(ended))
            await asyncio.wait(ended)
        return bool(ended)

    # -- keeping it full ----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            try:
                await self._look()
            except (
                Exception
            ) as error:  # a pool that has failed is a pool that is empty, not one that stands still
                log.error("pool_failed", exc_info=error)
                await asyncio.sleep(BACK_OFF_S)

    async def _look(self) -> None:
        self._wake.clear()
        for kind, shelf in list(self._shelves.items()):
            self._drop_stale(shelf)
            await self._extend(shelf)
            if shelf.wanted == 0 and not shelf.ready:
                del self._shelves[kind]
        now_s = clock.boottime_s()
        lacking = missing(self._shelves, now_s)
        if lacking is None:
            self._lacking_s = 0.0
            await self._pause(TICK_S)
        elif self._others_first():
            await asyncio.sleep(QUIET_S)  # not woken early: what woke us is what we wait for
        elif self._busy() and now_s - (self._lacking_s or now_s) < PATIENCE_S:
            self._lacking_s = self._lacking_s or now_s
            await asyncio.sleep(QUIET_S)
        else:
            self._lacking_s = 0.0
            await self._make_for(lacking)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _others_first(self) -> bool:
        since_s = clock.boottime_s() - self._taken_s
        return bool(self._admission.starting or self._admission.waiting) or since_s < QUIET_S

    async def _make_for(self, kind: Kind) -> None:
        shelf = self._shelves[kind]
        try:
            shape = shelf.shape = await self._templates.shape(*kind)
            found = self._templates.ready(shape)
            if found is None:
                if not shelf.may_build:
                    shelf.not_before_s = clock.boottime_s() + TICK_S
                    return
                found = await self._templates.variant(shape)
            shelf.may_build = False
            shelf.ready.append(await self._make(shape, *found))
            shelf.problem = None
        except (LLM4AgentsError, OSError) as error:
            shelf.problem = error.message if isinstance(error, LLM4AgentsError) else str(error)
            shelf.not_before_s = clock.boottime_s() + BACK_OFF_S
            known = isinstance(error, CapacityError)
            (log.info if known else log.warning)("pool_not_filled", template=kind[0], error=shelf.problem)

    async def _make(self, shape: Shape, variant: Variant, snapshot: Snapshot) -> Pooled:
        token = token_of(variant)
        if token is None:
            raise CapacityError(f"the template {shape.name} is being replaced")
        ident = creation.new_id()
        await self._admission.reserve(ident, shape.memory_mib)
        woken: Woken | None = None
        try:
            disks = await creation.prepare(ident, variant, self._places)
            async with self._admission.turn():
                woken = await creation.wake(
                    ident,
                    Origin(variant, snapshot),
                    disks,
                    {},
                    driver=self._drivers.of(shape.vmm),
                    places=self._places,
                    link=None if self._link is None else await self._link(),
                )
            await woken.machine.set_deadline(clock.wall_s() + DEADLINE_S)
            await warm(woken.agent, variant)
        except BaseException:
            if woken is not None:
                await asyncio.shield(_end(woken))
            self._places.remove(ident)
            self._admission.release(ident)
            raise
        now = clock.boottime_s()
        made = Pooled(ident, shape, token, variant, woken, now, now + DEADLINE_S)
        made.watch = asyncio.create_task(self._watch(made))
        return made

    async def _watch(self, one: Pooled) -> None:
        """Until it has ended, or its channel has, though nobody ended it."""
        machine = asyncio.create_task(one.woken.machine.wait())
        either: set[asyncio.Future[Any]] = {machine, asyncio.shield(one.woken.agent.session.closed)}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            machine.cancel()
        one.dead = True
        log.warning("pooled_machine_ended", template=one.shape.name, machine=one.ident)
        self._wake.set()

    def _drop_stale(self, shelf: Shelf) -> None:
        if shelf.ready and shelf.shape is not None:
            found = self._templates.ready(shelf.shape)
            self._end_all(stale(shelf, None if found is None else token_of(found[0])), shelf)

    async def _extend(self, shelf: Shelf) -> None:
        """Move the deadlines that the keepers hold, now and then."""
        now = clock.boottime_s()
        for one in list(shelf.ready):
            if one.deadline_s - now < DEADLINE_S - DEADLINE_AGAIN_S and not one.dead:
                with contextlib.suppress(LLM4AgentsError, OSError):
                    await one.woken.machine.set_deadline(clock.wall_s() + DEADLINE_S)
                    one.deadline_s = now + DEADLINE_S

    def _end_all(self, some: Iterable[Pooled], shelf: Shelf) -> list[asyncio.Task[None]]:
        tasks = []
        for one in list(some):
            shelf.ready.remove(one)
            assert one.watch is not None
            one.watch.cancel()
            task = asyncio.create_task(self._end_one(one))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            tasks.append(task)
        return tasks

    async def _end_one(self, one: Pooled) -> None:
        try:
            await _end(one.woken)
        finally:
            self._places.remove(one.ident)
            self._admission.release(one.ident)


async def _end(woken: Woken) -> None:
    with contextlib.suppress(LLM4AgentsError):
        await woken.machine.stop()
    with contextlib.suppress(LLM4AgentsError):
        await woken.agent.session.close()


async def warm(agent: Agent, variant: Variant) -> None:
    """Run a clone's first commands and cells, which are the slow ones. They leave no trace: so no cell in the clone
    of a snapshot, whose interpreter has somebody's variables."""
    for number in range(WARM_EXECS):
        # As every exec over HTTP is: a managed process, listened to and forgotten.
        ident = f"warm-{number}"
        process = await agent.start(["/bin/true"], id=ident, timeout_s=limits.EXEC_TIMEOUT_S)
        async for _ in process:
            pass
        await process.wait()
        process.detach()
        await agent.forget(ident)
    if "python" in variant.services and variant.family is None:
        for cell in WARM_CELLS:
            events = code.run(agent, cell, timeout_s=limits.EXEC_TIMEOUT_S, more={"warm": True})
            async with contextlib.aclosing(events):
                async for _ in events:
                    pass
