"""One running sandbox in this server's memory: its machine, its agent, who uses it, when it ends.

Not here: making one (`creation`), taking one over (`adoption`), the table of all (`engine`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from llm4agents import limits
from llm4agents.engine import clock, deadlines, lifecycle
from llm4agents.engine.contact import died
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    ConnectionLostError,
    LLM4AgentsError,
    ProtocolError,
    SandboxDiedError,
    UnknownOutcomeError,
)
from llm4agents.guest.verbs import Agent
from llm4agents.store import SandboxRow
from llm4agents.vmm.base import Machine

if TYPE_CHECKING:
    from llm4agents.engine.contexts import Contexts

DEADLINE_SYNC_S = 1.0
"""The deadline the shim keeps follows activity by at most this: a file written per call would cost too much."""


@dataclass(slots=True, eq=False)
class Live:
    """`on_deadline(live, reason)` is called once when its time is up; `free_bytes()` tells the host's free disk."""

    row: SandboxRow
    machine: Machine
    agent: Agent
    on_deadline: Callable[[Live, str], None]
    free_bytes: Callable[[], int]
    env: Mapping[str, str] | None = None
    """What the create asked for; the interpreter, older than the clone, gets it with each cell. None after an
    adoption: the guest knows it (`calls.code_stream`)."""
    contexts: Contexts | None = None
    """Code contexts, once somebody has asked for one (`contexts.of`)."""
    settling: list[asyncio.Task[None]] = field(default_factory=list)
    """What a pooled machine is still being told of its sandbox: the engine ends it when that fails."""
    busy: int = 0
    last_used_s: float = field(default_factory=clock.boottime_s)
    """CLOCK_BOOTTIME of the end of the last call."""
    gate: Callable[[], Awaitable[Live]] | None = None
    """While it is being paused or photographed: waits that out and gives the sandbox to use then (after a pause
    another `Live`). Calls that were under way before go on, or end with the pause."""
    ending: bool = False
    pages_bytes: int = 0
    """What its memory took on disk when it was last to be paused."""
    disk_full: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    end_error: LLM4AgentsError | None = None
    forgetting: list[str] = field(default_factory=list)
    """Processes that nobody needs any more and the guest has not been told of (`processes.forget_soon`)."""
    _users: set[asyncio.Task[object]] = field(default_factory=set)
    _timer: asyncio.TimerHandle | None = None
    _sync: asyncio.TimerHandle | None = None
    _syncing: asyncio.Task[None] | None = None
    _watching: bool = True
    """Not while it stands still for a pause or a photograph: calls that end meanwhile move no deadline."""

    # -- use ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(self, what: str) -> AsyncIterator[Agent]:
        """Hold the sandbox open for one call. Errors that came with its end are told as that end.

        Raises ConflictError when it is not running, CapacityError while the host's disk is full.
        """
        if self.gate is not None:
            live = await self.gate()
            if live is not self:
                async with live.use(what) as agent:
                    yield agent
                return
        if self.ending or not lifecycle.can(self.row.state, "use"):  # type: ignore[arg-type]
            raise ConflictError(f"{self.row.id} {lifecycle.why_not(self.row.state, 'use')}")  # type: ignore[arg-type]
        if self.disk_full:
            await self._leave_disk_full()
        task = asyncio.current_task()
        assert task is not None
        self._users.add(task)
        self.busy += 1
        self._schedule_sync()
        try:
            yield self.agent
        except asyncio.CancelledError:
            # Not the caller's cancellation but ours (`interrupt`): say why instead.
            if self.end_error is not None and task.uncancel() == 0:
                raise self.end_error from None
            raise
        except GeneratorExit:
            # Interrupted while what it had yielded was on its way: the caller still hears why.
            if self.end_error is not None and task not in self._users and task.cancelling():
                task.uncancel()
                raise self.end_error from None
            raise
        except (ConnectionLostError, ProtocolError) as error:
            if self.ending:
                raise self.ended_words(what) from error
            raise await died(self.machine, error, f"{self.row.id}: {what}") from error
        finally:
            self._users.discard(task)
            self.busy -= 1
            self.last_used_s = clock.boottime_s()
            self._schedule_sync()

    def ended_words(self, what: str) -> LLM4AgentsError:
        """The error of a call, or of an act, that its end came into."""
        return self.end_error or SandboxDiedError(
            f"{self.row.id} ended during {what}: {self.row.reason or 'killed'}"
        )

    def interrupt(self, error: LLM4AgentsError) -> None:
        """Fail every call that is under way with `error`."""
        self.end_error = error
        # Each once: one that is cancelled twice could not tell ours from its caller's.
        users, self._users = self._users, set()
        for task in users:
            task.cancel()

    # -- a full disk on the host --------------------------------------------------------------------------

    def disk_is_full(self) -> None:
        """The machine stands before a write the host has no room for; it can go on when there is room."""
        self.disk_full = True
        self.interrupt(
            UnknownOutcomeError(
                f"{self.row.id} stands still: the host's disk is full",
                hint="free space on the host; the next call lets the sandbox go on where it was",
            )
        )

    async def _leave_disk_full(self) -> None:
        if self.free_bytes() < limits.DISK_FREE_BYTES_MIN:
            raise CapacityError(
                f"{self.row.id} stands still: the host's disk is full",
                hint="free space on the host, then call again; nothing is lost",
            )
        self.disk_full, self.end_error = False, None
        await self.machine.resume()

    # -- deadlines ----------------------------------------------------------------------------------------

    def watch_deadlines(self) -> None:
        """Begin to keep its time. Also after `row.idle_timeout_s` has changed."""
        self._watching = True
        self._arm()
        self._schedule_sync(now=True)

    def _deadline(self) -> tuple[float, str]:
        return deadlines.next_deadline(
            life_ends_wall_s=self.row.life_ends_at,
            idle_timeout_s=self.row.idle_timeout_s,
            idle_since_s=None if self.busy else self.last_used_s,
            boottime_s=clock.boottime_s(),
            wall_s=clock.wall_s(),
        )

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait, _ = self._deadline()
        loop = asyncio.get_running_loop()
        # Long waits in slices, so that a clock that was stepped or a host that slept is noticed.
        self._timer = loop.call_later(min(max(0.0, wait), 60.0), self._due)

    def _due(self) -> None:
        wait, reason = self._deadline()
        if wait > 0:
            self._arm()
        elif not self.ending:
            self.on_deadline(self, reason)

    def _schedule_sync(self, *, now: bool = False) -> None:
        if self.ending or not self._watching:
            return
        if now and self._sync is not None:
            self._sync.cancel()
            self._sync = None
        if self._sync is None:
            delay = 0.0 if now else DEADLINE_SYNC_S
            self._sync = asyncio.get_running_loop().call_later(delay, self._start_sync)

    def _start_sync(self) -> None:
        self._sync = None
        if not self.ending:
            self._arm()
            self._syncing = asyncio.create_task(self._sync_deadline())

    async def _sync_deadline(self) -> None:
        with contextlib.suppress(LLM4AgentsError, OSError):  # it ended meanwhile, or the disk is full
            await self.write_deadline()

    @property
    def overdue(self) -> bool:
        return self._deadline()[0] <= 0

    async def write_deadline(self, *, at_least_s: float = 0.0) -> None:
        """Tell the shim when its time is up, as of now, or `at_least_s` from now if that is later."""
        wait = max(self._deadline()[0], at_least_s)
        # One that is to be paused is only stopped by its keeper when no server lives: the next one pauses it.
        act: Literal["stop", "kill"] = "stop" if self.row.on_timeout == "pause" else "kill"
        await self.machine.set_deadline(clock.wall_s() + wait, act=act)

    async def flush_volumes(self) -> None:
        """What its processes have written to volumes is in them, and nothing comes after; as far as the guest lets
        us."""
        writes = any(entry.get("mode") == "rw" for entry in self.row.volumes or ())
        if not writes or self.disk_full or self.agent.session.closed.done():
            return  # a guest that stands still for room on the host would be waited for in vain
        with contextlib.suppress(LLM4AgentsError, OSError, TimeoutError):
            await self.write_deadline(at_least_s=limits.VOLUME_FLUSH_S)
            async with asyncio.timeout(limits.VOLUME_FLUSH_S):
                await self.agent.freeze(fs=True)

    def stop_watching(self) -> None:
        self._watching = False
        for handle in (self._timer, self._sync):
            if handle is not None:
                handle.cancel()
        if self._syncing is not None:
            self._syncing.cancel()
