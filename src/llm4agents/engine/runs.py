"""One run of a job, carried from its due time to its end: whatever server does it, and however often it is killed.

The run's process has an id before it exists (`JOB.SEQUENCE`), and the guest starts none twice under one id: so who
takes over a run that was `starting` starts it, and hears if it had been. One that was `running` is attached to again.
A run in a paused sandbox sleeps with it; it does not wake it. Not here: when runs are due, webhooks (`jobs`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, Protocol

import structlog

from llm4agents import limits
from llm4agents.engine import calls, clock, lifecycle, processes
from llm4agents.engine.live import Live
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    GuestError,
    LLM4AgentsError,
    NotFoundError,
    QuotaError,
    SandboxDiedError,
    SandboxNotFoundError,
    SandboxPausedError,
    ServerUnavailableError,
    UnknownOutcomeError,
)
from llm4agents.store import SandboxRow
from llm4agents.store.jobs import JobRow, JobStore, RunRow

log = structlog.get_logger()

RETRY_S: Final = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
"""Between the tries to start a run on a node that is full."""
TRIES_MAX: Final = 5
"""Of a start that ends in an error which may be the sandbox's own."""


class Sandboxes(Protocol):
    """What is needed of the engine."""

    async def access(self, sandbox: str) -> Live: ...
    def live(self, sandbox: str) -> Live: ...
    def get(self, sandbox: str) -> SandboxRow: ...
    async def kill(self, sandbox: str, reason: str = ...) -> SandboxRow: ...
    async def pause(self, sandbox: str, reason: str = ...) -> SandboxRow: ...


class Over(Exception):
    """The run has come to an end of this kind (`failed`, `lost`, `cancelled`), for this reason."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


def command_of(spec: dict[str, Any]) -> processes.Command:
    """What a job runs. Code is a Python program of its own, not a cell: it shares no variables with any."""
    if spec.get("code") is not None:
        argv = ["/usr/bin/env", "python3", "-u", "-c", spec["code"]]
    elif spec.get("command") is not None:
        argv = calls.shell(spec["command"])
    else:
        argv = list(spec["argv"])
    return processes.Command(
        argv=argv,
        env=spec.get("env") or {},
        cwd=spec.get("cwd"),
        user=spec.get("user", "user"),
        timeout_s=spec.get("timeout_s"),
    )


class Carrier:
    """Carries one run. `changed(sandbox)` waits for that sandbox's next transition."""

    def __init__(
        self,
        job: JobRow,
        run: RunRow,
        sandboxes: Sandboxes,
        store: JobStore,
        changed: Callable[[str], Awaitable[None]],
        *,
        fresh: bool,
    ) -> None:
        """`fresh`: no other server can have begun it."""
        self.job, self.run = job, run
        self._sandboxes, self._store, self._changed = sandboxes, store, changed
        self._fresh = fresh

    async def carry(self) -> None:
        """To its end, which is then recorded as `exited` (with a result), `failed`, `lost` or `cancelled`.

        Raises ServerUnavailableError when this server stops first: the next one goes on.
        """
        try:
            if self.run.state == "starting":
                await self._start()
            while self.run.state == "running":
                with contextlib.suppress(SandboxPausedError):
                    await self._watch(await self._awake())
        except Over as over:
            self._record(over.state, {"reason": over.reason})

    @property
    def cancelled(self) -> bool:
        return self.job.state == "cancelled"

    # -- starting

    async def _start(self) -> None:
        tries = 0
        while self.run.state == "starting":
            if tries:
                await self._later(RETRY_S[min(tries, len(RETRY_S)) - 1])
            tries += 1
            try:
                row = self._sandboxes.get(self.job.sandbox)
            except SandboxNotFoundError:
                raise Over("failed", "its sandbox is gone") from None
            if row.state in lifecycle.TERMINAL:
                raise Over("failed", f"its sandbox ended: {row.reason or row.state}")
            if self.cancelled:
                await self._give_up(row.state)
                continue
            try:
                await self._try(tries)
            except (CapacityError, QuotaError, ConflictError, NotFoundError, UnknownOutcomeError) as error:
                # No room, a sandbox in between two states, or it is not known whether it has begun: once more.
                self._note(error.message)

    async def _try(self, tries: int) -> None:
        """Start it, or find that it was. Raises Over when it cannot be started, else what `_start` waits for."""
        live = await self._resumed()
        self._fresh = False
        try:
            command = command_of(self.job.spec)
            await processes.start(live, command, id=self.run.process, tag=f"job {self.job.id}")
        except ConflictError:
            await processes.get(live, self.run.process)  # a dead server has started it
        except (CapacityError, ServerUnavailableError, SandboxPausedError, SandboxDiedError):
            raise
        except GuestError as error:
            raise Over("failed", error.message) from None
        except LLM4AgentsError as error:
            if isinstance(error, UnknownOutcomeError) and tries < TRIES_MAX:
                raise
            raise Over("failed", error.message) from None
        self._began()

    async def _resumed(self) -> Live:
        try:
            return await self._sandboxes.access(self.job.sandbox)
        except (CapacityError, QuotaError, ServerUnavailableError, SandboxDiedError):
            raise
        except LLM4AgentsError as error:
            if self._sandboxes.get(self.job.sandbox).state == "paused":
                # It is not resumed by itself, or its memory cannot be used any more.
                raise Over("failed", error.message) from None
            raise

    async def _give_up(self, state: str) -> None:
        """Cancelled: over if it surely has not begun, else `running`, to be killed, if it has."""
        if self._fresh:
            raise Over("cancelled", "cancelled before it was started")
        if state != "running":
            return
        with contextlib.suppress(SandboxPausedError, SandboxDiedError, ConflictError, CapacityError):
            try:
                await processes.get(self._sandboxes.live(self.job.sandbox), self.run.process)
            except NotFoundError:
                raise Over("cancelled", "cancelled before it was started") from None
            self._began()

    def _began(self) -> None:
        self._store.change_run(self.run, state="running", started_at=clock.wall_s(), result=None)

    def _note(self, why: str) -> None:
        log.info("job_waits", sandbox=self.job.sandbox, job=self.job.id, why=why)
        self._store.change_run(self.run, result={"waits": why[:500]})

    async def _later(self, seconds: float) -> None:
        """Wait for a change of the sandbox, or for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed(self.job.sandbox)

    # -- watching

    async def _awake(self) -> Live:
        """The sandbox, when it runs (again)."""
        while True:
            state = self._sandboxes.get(self.job.sandbox).state
            if state == "running":
                try:
                    return self._sandboxes.live(self.job.sandbox)
                except LLM4AgentsError:
                    await self._later(0.5)  # between two states
                    continue
            if state in lifecycle.TERMINAL:
                self._lost()
            await self._changed(self.job.sandbox)

    async def _watch(self, live: Live) -> None:
        """Hold the sandbox open until the run ends, and record how."""
        try:
            if self.cancelled:
                await kill(live, self.run.process)
            async with processes.attach(live, self.run.process, output=False) as attached:
                status = await attached.wait()
                end = attached.offset
                result = {**processes.ending(status), **await kept_output(live, self.run.process, end)}
                self._record("cancelled" if self.cancelled else "exited", result)
                with contextlib.suppress(LLM4AgentsError):
                    await processes.forget(live, self.run.process)
        except (SandboxPausedError, ServerUnavailableError, CapacityError, QuotaError):
            raise
        except SandboxNotFoundError:
            raise Over("lost", "its sandbox is gone") from None
        except NotFoundError:
            raise Over("lost", "its process is not known in the sandbox any more") from None
        except LLM4AgentsError as error:
            # A machine that ended, a channel that broke, a full disk: the sandbox's state will tell, perhaps later.
            log.info("job_watch_broke", sandbox=self.job.sandbox, job=self.job.id, error=error.message)
            if self._sandboxes.get(self.job.sandbox).state in lifecycle.TERMINAL:
                self._lost()
            await self._later(1.0)

    def _lost(self) -> NoReturn:
        reason = self._sandboxes.get(self.job.sandbox).reason
        raise Over("lost", f"its sandbox ended: {reason or 'killed'}")

    def _record(self, state: str, result: dict[str, Any]) -> None:
        now = clock.wall_s()
        self._store.change_run(self.run, state=state, ended_at=now, result=result)
        log.info(
            "job_run_ended", sandbox=self.job.sandbox, job=self.job.id, run=self.run.process, state=state
        )


async def kill(live: Live, process: str) -> None:
    """Kill it and all it has started; it is not forgotten."""
    async with processes.attach(live, process, output=False) as attached:
        attached.kill()
        await attached.settle()


async def kept_output(live: Live, process: str, end: int) -> dict[str, Any]:
    """The last limits.JOB_OUTPUT_BYTES_KEPT of what it has said, both channels as they came."""
    said = bytearray()
    begin = max(0, end - limits.JOB_OUTPUT_BYTES_KEPT)
    async with processes.attach(live, process, from_offset=begin) as attached:
        begin = attached.offset
        with contextlib.suppress(TimeoutError):  # a guest that sends no end of it
            async with (
                asyncio.timeout(limits.STALL_TIMEOUT_S),
                contextlib.aclosing(aiter(attached)) as pieces,
            ):
                async for _, _, data in pieces:
                    said += data[: limits.JOB_OUTPUT_BYTES_KEPT - len(said)]
    return {"output_b64": base64.b64encode(said).decode("ascii"), "output_start": begin, "output_end": end}
