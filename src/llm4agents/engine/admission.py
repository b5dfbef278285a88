"""Whether this node takes one more sandbox, and who waits until it does. `decide` and `charge_bytes` are pure.

Each machine is charged what it is expected to need before it is started, and holds the charge until it has ended:
all charges together stay below the host's memory less a reserve, whatever is free at the moment, since a clone
touches its memory only later. Beside that, what is really available must not fall below a floor: then nothing is
ended, but nothing new is started either.

Not here: the host's figures (`host`), what a machine is started with (`creation`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from llm4agents import limits
from llm4agents.engine.host import Host
from llm4agents.errors import CapacityError
from llm4agents.store import SandboxRow
from llm4agents.store.store import Stamp

log = structlog.get_logger()

VMM_MIB: Final = 40
"""The VMM itself, without guest memory and translation cache: code, heap, stacks."""
QUEUE_MAX: Final = 1_024
LOOK_S: Final = 0.25
"""How often those who wait are looked at again while nothing ends: what other programs hold changes too."""
_MIB: Final = 1 << 20
_FREED: Final = ("paused", "killed", "failed")


@dataclass(frozen=True, slots=True)
class Policy:
    """`commit`: the part of a guest's memory (and translation cache) that it is charged; 1.0 = never overcommit."""

    commit: float = limits.MEMORY_COMMIT
    reserve_mib: int | None = None
    """Memory left to the host; None: 5% of it, 512 MiB at least."""

    def reserve_bytes(self, host: Host) -> int:
        if self.reserve_mib is not None:
            return self.reserve_mib * _MIB
        return max(512 * _MIB, host.memory_total_bytes // 20)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not. `final`: no waiting helps."""

    message: str
    hint: str
    needed_bytes: int
    free_bytes: int
    final: bool = False
    memory: bool = True
    """Whether it is memory that is short."""

    def error(self, more: str = "") -> CapacityError:
        return CapacityError(
            self.message + more, hint=self.hint, needed_bytes=self.needed_bytes, free_bytes=self.free_bytes
        )


def charge_bytes(memory_mib: int, commit: float) -> int:
    """What a machine of `memory_mib` is charged: the part of what it can touch, and the VMM."""
    return int((memory_mib + limits.TB_SIZE_MIB) * _MIB * commit) + VMM_MIB * _MIB


def decide(now: Host, policy: Policy, *, held_bytes: int, charge: int, whole: int) -> Refusal | None:
    """Whether machines of `charge` bytes together can be started beside those that hold `held_bytes`.

    `whole`: all that the largest of them could ever touch; a machine this host could not give that is never started.
    """
    reserve = policy.reserve_bytes(now)
    room = now.memory_total_bytes - reserve
    if whole > room:
        return Refusal(
            f"this host can never hold it: {whole // _MIB} MiB with its overhead, of {room // _MIB} MiB "
            "that sandboxes may have together",
            "ask for less memory",
            whole,
            room,
            final=True,
        )
    free = room - held_bytes
    if charge > free:
        return Refusal(
            f"this node is full: {charge // _MIB} MiB are to be set aside, {max(0, free) // _MIB} of "
            f"{room // _MIB} MiB are free",
            "end or pause sandboxes (llm4agents ls), ask for less memory, wait (wait_s), or let more be promised "
            "than there is (LLM4AGENTS_MEMORY_COMMIT)",
            charge,
            max(0, free),
        )
    # The floor is half of the reserve: what the host itself takes of the other half is no reason to refuse.
    spare = now.memory_available_bytes - reserve // 2
    if charge > spare:
        return Refusal(
            f"the host is short of memory: {now.memory_available_bytes // _MIB} MiB are available, "
            f"{(charge + reserve // 2) // _MIB} are needed to start one more; what runs goes on",
            "end or pause sandboxes (llm4agents ls), or end other programs",
            charge,
            max(0, spare),
        )
    if now.disk_free_bytes < limits.DISK_FREE_BYTES_MIN:
        return Refusal(
            f"not enough disk: {now.disk_free_bytes // _MIB} MiB free, {limits.DISK_FREE_BYTES_MIN // _MIB} "
            "are needed",
            "free space, or llm4agents prune",
            limits.DISK_FREE_BYTES_MIN,
            now.disk_free_bytes,
            memory=False,
        )
    return None


@dataclass(slots=True, eq=False)
class _Waiter:
    wanted: Mapping[str, int]
    memory_mib: int
    project: str | None
    done: asyncio.Future[None]


class Admission:
    """Who holds how much, by id. One per engine, on its event loop.

    `look` reads the host; `others_bytes` is what else of ours stays in memory (templates); `make_room(bytes)`, set
    by the pool, gives up that much of what nobody has asked for.
    """

    def __init__(
        self, policy: Policy, look: Callable[[], Host], others_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self.policy = policy
        self.make_room: Callable[[int], Awaitable[bool]] | None = None
        self._look, self._others_bytes = look, others_bytes
        self._held: dict[str, int] = {}
        self._waiting: deque[_Waiter] = deque()
        self._looking: asyncio.TimerHandle | None = None
        self._slots = asyncio.Semaphore(starts_at_once(os.cpu_count() or 1))
        self.starting = 0
        """How many starts are under way or wait for their turn."""

    # -- memory -------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values()) + self._others_bytes()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def holds(self, ident: str) -> int:
        return self._held.get(ident, 0)

    async def reserve(
        self, ident: str, memory_mib: int, *, wait_s: float = 0.0, project: str | None = None
    ) -> None:
        """Set aside what a machine of `memory_mib` needs, under `ident`, until `release(ident)`; a transition of
        sandbox `ident` to paused, killed or failed releases it too. Idempotent for one that holds already.

        First come first served within a `project`; what is another's and too large for now holds up nobody. Without one
        all who wait are first. Raises CapacityError when there is no room within `wait_s`.
        """
        await self.reserve_all([ident], memory_mib, wait_s=wait_s, project=project)

    async def reserve_all(
        self, idents: list[str], memory_mib: int, *, wait_s: float = 0.0, project: str | None = None
    ) -> None:
        """The same for several machines of one shape: all of them or none."""
        charge = charge_bytes(memory_mib, self.policy.commit)
        wanted = {ident: charge for ident in idents if ident not in self._held}
        if not wanted:
            return
        refusal = self._refusal(wanted, memory_mib)
        if not self._before(project):
            if refusal is not None and await self._made_room(refusal):
                refusal = self._refusal(wanted, memory_mib)
            if refusal is None and not self._before(project):
                self._held.update(wanted)
                return
        if refusal is not None and (refusal.final or wait_s <= 0):
            raise refusal.error()
        mine = self._before(project)
        if wait_s <= 0 or len(self._waiting) >= QUEUE_MAX or mine >= QUEUE_MAX // 4:
            raise CapacityError(
                f"this node is full: {len(self._waiting)} creates are waiting for room",
                hint="wait (wait_s), or end or pause sandboxes",
            )
        await self._wait(wanted, memory_mib, wait_s, project)

    def _before(self, project: str | None) -> int:
        """How many who wait are to be let in before one of that project."""
        if project is None:
            return len(self._waiting)
        return sum(waiter.project in (project, None) for waiter in self._waiting)

    async def _wait(
        self, wanted: Mapping[str, int], memory_mib: int, wait_s: float, project: str | None
    ) -> None:
        waiter = _Waiter(wanted, memory_mib, project, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._look_later()
        try:
            async with asyncio.timeout(wait_s):
                await waiter.done
        except BaseException as error:
            admitted = waiter.done.done() and not waiter.done.cancelled()
            if admitted:
                for ident in wanted:
                    self.release(ident)
            else:
                self._waiting.remove(waiter)
                self._admit_waiting()  # who stood behind this one may fit
            if isinstance(error, TimeoutError):
                refusal = self._refusal(wanted, memory_mib)
                more = f"; waited {wait_s:g} s"
                raise (
                    refusal.error(more) if refusal else CapacityError("others were first" + more)
                ) from error
            raise

    def hold(self, ident: str, memory_mib: int) -> None:
        """Charge a machine that runs already (an adopted one), room or not."""
        self._held[ident] = charge_bytes(memory_mib, self.policy.commit)

    @contextlib.asynccontextmanager
    async def building(self, ident: str, memory_mib: int) -> AsyncIterator[None]:
        """All the memory of a machine that is booted for a template, while it is. It stands in no queue."""
        wanted = {ident: charge_bytes(memory_mib, 1.0)}
        refusal = self._refusal(wanted, memory_mib)
        if refusal is not None and await self._made_room(refusal):
            refusal = self._refusal(wanted, memory_mib)
        if refusal is not None:
            raise refusal.error()
        self._held.update(wanted)
        try:
            yield
        finally:
            self.release(ident)

    def rename(self, ident: str, to: str) -> None:
        """What `ident` holds is `to`'s from now on."""
        self._held[to] = self._held.pop(ident)

    def release(self, ident: str) -> None:
        """Idempotent."""
        if self._held.pop(ident, None) is not None:
            self._admit_waiting()

    def on_transition(
        self, row: SandboxRow, _from: str | None, to: str, _why: str | None, _at: Stamp
    ) -> None:
        """A listener of the store: what a sandbox holds follows its life."""
        if to in _FREED:
            self.release(row.id)

    def _refusal(self, wanted: Mapping[str, int], memory_mib: int) -> Refusal | None:
        charge, whole = sum(wanted.values()), charge_bytes(memory_mib, 1.0)
        return decide(self._look(), self.policy, held_bytes=self.held_bytes, charge=charge, whole=whole)

    async def _made_room(self, refusal: Refusal) -> bool:
        if refusal.final or not refusal.memory or self.make_room is None:
            return False
        return await self.make_room(refusal.needed_bytes - refusal.free_bytes)

    def _admit_waiting(self) -> None:
        """Let in whoever fits, in order; nobody overtakes one of his own project, or of none."""
        held_up: set[str | None] = set()
        for one in list(self._waiting):
            if one.project in held_up:
                continue
            if self._refusal(one.wanted, one.memory_mib) is not None:
                if one.project is None:
                    return
                held_up.add(one.project)
                continue
            self._waiting.remove(one)
            if not one.done.done():
                self._held.update(one.wanted)
                one.done.set_result(None)

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._admit_waiting()
        if self._waiting:
            self._look_later()

    # -- turns --------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A turn to start (restore, wake) one machine: so many at once that the host's cores are kept busy and a
        crowd's starts do not outlast their own deadlines. In order of arrival."""
        self.starting += 1
        try:
            async with self._slots:
                yield
        finally:
            self.starting -= 1

    def describe(self) -> dict[str, int | float]:
        """For people: bytes of memory that sandboxes may have together, that are held, that are free."""
        now = self._look()
        room = now.memory_total_bytes - self.policy.reserve_bytes(now)
        return {
            "memory_bytes": room,
            "held_bytes": self.held_bytes,
            "free_bytes": max(0, room - self.held_bytes),
            "available_bytes": now.memory_available_bytes,
            "commit": self.policy.commit,
            "waiting": len(self._waiting),
        }


def starts_at_once(cores: int) -> int:
    """Each start is mostly computing (the VMM's and the guest's), with short waits in between."""
    return cores + 1
