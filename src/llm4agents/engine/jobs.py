"""Jobs: commands that are started now, at a time or again and again, and go on when nobody watches.

One timer for all of them; what is due is read from the store, so that a schedule survives pauses and servers. A beat
that was missed, because no server lived or the sandbox was busy with the last one, is made up for by one run.
Not here: carrying a run to its end (`runs`), when something is due (`schedule`), one try of a webhook (`webhooks`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import string
from typing import Any, Final

import structlog

from llm4agents import limits
from llm4agents.engine import clock, lifecycle, processes, schedule, webhooks
from llm4agents.engine.runs import Carrier, Sandboxes, kill
from llm4agents.engine.secrets import Secrets
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    SandboxNotFoundError,
    ServerUnavailableError,
)
from llm4agents.store import SandboxRow, Store
from llm4agents.store.jobs import JOB_OVER, OPEN, JobRow, JobStore, RunRow
from llm4agents.store.store import Stamp

log = structlog.get_logger()

SLEEP_S_MAX: Final = 20.0
"""The timer looks at the wall clock at least this often: it may be stepped."""
FULL_RETRY_S: Final = 5.0
TELLS_AT_ONCE: Final = 8
TELLS_KEPT: Final = 5
"""Tries of a webhook that are remembered with their answers; they are counted all."""
FORGET_S: Final = 30 * 86_400
_ALPHABET: Final = string.ascii_lowercase + string.digits


def new_id() -> str:
    return "job_" + "".join(secrets.choice(_ALPHABET) for _ in range(16))


class Jobs:
    """Every job of a node. `start` it after the sandboxes have been taken over, `close` it before they are left."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        store: Store,
        sealing: Secrets,
        *,
        webhooks_on: bool,
        refuse: webhooks.Refuse = lambda address: None,
    ) -> None:
        """`sealing`: what webhooks are signed with lies sealed in the store. `refuse`: which addresses no webhook goes
        to, of a job whose maker does not run this host."""
        self._sandboxes, self._store, self._webhooks_on = sandboxes, JobStore(store), webhooks_on
        self._refuse, self._sealing = refuse, sealing
        self._carried: dict[str, JobRow] = {}
        """Jobs of which a run is under way."""
        self._tells: dict[int, RunRow] = {}
        self._telling: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._poke = asyncio.Event()
        self._news = asyncio.Event()
        self._changes: dict[str, asyncio.Event] = {}
        self._started = False
        store.on_transition.append(self._transition)

    # -- its own life

    def start(self) -> None:
        """Go on with what a former server left, and with the clock."""
        self._started = True
        self._store.forget_ended(clock.wall_s() - FORGET_S)
        for job, run in self._store.open_runs():
            self._take(job, run, fresh=False)
        for job in self._store.find(states=("running",)):
            last = self._store.last_run(job.id)
            if job.id not in self._carried and last is not None:
                self._finish(job, last)  # its server died between the end of the run and what follows from it
        for job in self._store.find(states=("waiting",)):
            self._end_with_sandbox(job)
        self._tells = {run.id: run for run in self._store.to_tell()}
        self._spawn(self._clock())

    async def close(self) -> None:
        """Let go of every run; their processes go on, and the next server finds them."""
        self._started = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def busy(self) -> bool:
        """Whether this server is needed: something runs, is scheduled, or must still be told."""
        return bool(self._carried or self._tells) or self._store.busy()

    # -- what can be asked for

    def add(
        self,
        sandbox: str,
        spec: dict[str, Any],
        *,
        at: float | None,
        every_s: float | None,
        guarded: bool = False,
    ) -> tuple[JobRow, str | None]:
        """A new job, and the secret its webhook's messages are signed with, which is told this once. `guarded`: its
        webhook does not go to what is the host's own (`refuse`).

        Raises SandboxNotFoundError, ConflictError (it has ended), InvalidRequestError, CapacityError (too many jobs).
        """
        row = self._sandboxes.get(sandbox)
        if row.state in lifecycle.TERMINAL:
            raise ConflictError(f"{sandbox} has ended and can have no jobs", hint="create a new sandbox")
        if self._store.count(sandbox) >= limits.JOBS_PER_SANDBOX_MAX:
            raise CapacityError(
                f"{sandbox} has {limits.JOBS_PER_SANDBOX_MAX} jobs that are not over", hint="cancel some"
            )
        secret = None
        if spec.get("webhook") is not None:
            if not self._webhooks_on:
                raise InvalidRequestError(
                    "webhooks are off on this server (LLM4AGENTS_WEBHOOKS=off)", hint="poll the job's runs"
                )
            webhooks.check_url(spec["webhook"], self._refuse if guarded else None)
            secret = secrets.token_urlsafe(32)
        now = clock.wall_s()
        first = schedule.first(at, every_s, now)
        ident = new_id()
        stored = {**spec, "at": at, "every_s": every_s, "beat": first, "guarded": guarded}
        if secret is not None:
            stored["sealed"] = self._sealing.seal(f"webhook/{ident}", secret.encode()).hex()
        job = JobRow(ident, sandbox, stored, "waiting", now, next_at=first)
        self._store.add(job)
        self._store.forget_older(sandbox, limits.JOBS_ENDED_KEPT)
        log.info("job_added", sandbox=sandbox, job=job.id, next_at=first)
        self._poke.set()
        return job, secret

    def get(self, sandbox: str, job: str) -> JobRow:
        """Raises NotFoundError."""
        found = self._store.get(job)
        if found is None or found.sandbox != sandbox:
            raise NotFoundError(
                f"{sandbox} has no job {job[:80]!r}", hint=f"llm4agents job ls {sandbox} shows them"
            )
        return self._carried.get(job, found)

    def find(
        self,
        sandbox: str | None,
        states: tuple[str, ...],
        limit: int,
        project: str | None = None,
        after: str | None = None,
    ) -> list[JobRow]:
        """Newest first, those older than the job `after`; of a sandbox, of a project's, or all."""
        return self._store.find(sandbox=sandbox, states=states, limit=limit, project=project, after=after)

    def runs(self, job: JobRow, limit: int) -> list[RunRow]:
        """Newest first; limits.JOB_RUNS_KEPT are kept."""
        return self._store.runs(job.id, limit)

    def last_run(self, job: JobRow) -> RunRow | None:
        return self._store.last_run(job.id)

    async def wait(self, sandbox: str, job: str, sequence: int, wait_s: float) -> JobRow:
        """The job, when its run number `sequence` has ended, or no run will come, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    news = self._news  # taken before looking: what comes after that sets it
                    found, last = self.get(sandbox, job), self._store.last_run(job)
                    ended = last is None or last.state not in OPEN
                    if ended and (found.state in JOB_OVER or (last and last.sequence >= sequence)):
                        return found
                    await news.wait()
        return self.get(sandbox, job)

    async def output(self, job: JobRow, sequence: int | None, start: int, wait_s: float) -> dict[str, Any]:
        """What a run (None: the newest) has said from offset `start` on: in base64, where it begins and ends, and
        whether more may come. `wait_s`: how long to wait for something while there is nothing.

        Raises NotFoundError.
        """
        found = [run for run in self._store.runs(job.id) if sequence in (None, run.sequence)][:1]
        if not found:
            raise NotFoundError(f"{job.id} has no run {sequence or ''}".strip(), hint="its runs show them")
        run = found[0]
        if run.state == "running":
            with contextlib.suppress(NotFoundError):  # it has ended in this moment
                live = await self._sandboxes.access(job.sandbox)
                now = await processes.output(live, run.process, start, wait_s)
                said = b"".join(base64.b64decode(piece["data_b64"]) for piece in now["data"])
                return _output(run, said, now["offset"] - len(said), now["running"] or now["more"])
            run = next(one for one in self._store.runs(job.id) if one.sequence == run.sequence)
        kept = run.result or {}
        said = base64.b64decode(kept.get("output_b64", ""))
        begin = max(start, kept.get("output_start", 0))
        return _output(
            run, said[begin - kept.get("output_start", 0) :], begin, run.state in ("starting", "running")
        )

    async def cancel(self, sandbox: str, job: str) -> JobRow:
        """No more runs; one under way is killed (in a paused sandbox: as soon as that is resumed)."""
        found = self.get(sandbox, job)
        if found.state in JOB_OVER:
            return found
        self._store.change(found, state="cancelled", next_at=None, ended_at=clock.wall_s())
        log.info("job_cancelled", sandbox=sandbox, job=job)
        run = self._store.last_run(job)
        if run is not None and run.state == "running":
            with contextlib.suppress(LLM4AgentsError):
                await kill(self._sandboxes.live(sandbox), run.process)
        self._wake(sandbox)
        self._tell_waiters()
        return found

    def run_now(self, sandbox: str, job: str) -> JobRow:
        """Have a waiting job run at once; its rhythm stays. Raises ConflictError when it is not waiting."""
        found = self.get(sandbox, job)
        if found.state != "waiting":
            raise ConflictError(f"{job} is {found.state}", hint="only a job that waits can be run now")
        self._store.change(found, next_at=clock.wall_s())
        self._poke.set()
        return found

    # -- the clock

    async def _clock(self) -> None:
        while True:
            self._poke.clear()
            now = clock.wall_s()
            try:
                for job in self._store.due(now):
                    try:
                        if not self._end_with_sandbox(job):
                            self._begin(job)
                    except CapacityError:
                        raise
                    except Exception as error:  # one job's misfortune is no other's: the clock goes on
                        log.error("job_not_begun", job=job.id, exc_info=error)
            except CapacityError as error:  # no room to write it down: not begun, and due still
                log.warning("job_not_begun", error=error.message)
            tells = [
                run for run in self._tells.values() if run.id not in self._telling and _tell_at(run) <= now
            ]
            for run in tells[: TELLS_AT_ONCE - len(self._telling)]:
                self._telling.add(run.id)
                self._spawn(self._tell(run))
            dues = [_tell_at(run) for run in self._tells.values() if run.id not in self._telling]
            if (due := self._store.next_due()) is not None:
                dues.append(due)
            pause = schedule.sleep_s([due for due in dues if due > now], now, SLEEP_S_MAX)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._poke.wait()

    def _begin(self, job: JobRow) -> None:
        run = RunRow(job.id, 0, due_at=job.next_at or clock.wall_s(), state="starting")
        self._store.begin(job, run, keep=limits.JOB_RUNS_KEPT)
        log.info("job_run", sandbox=job.sandbox, job=job.id, run=run.process)
        self._take(job, run, fresh=True)

    def _take(self, job: JobRow, run: RunRow, *, fresh: bool) -> None:
        self._carried[job.id] = job
        self._spawn(self._carry(job, run, fresh))

    async def _carry(self, job: JobRow, run: RunRow, fresh: bool) -> None:
        try:
            while True:
                try:
                    await Carrier(job, run, self._sandboxes, self._store, self._changed, fresh=fresh).carry()
                    if run.state == "exited":
                        await self._after_exit(job, run)
                    self._finish(job, run)
                    return
                except CapacityError as error:
                    # The store cannot be written. Each step can be done again.
                    log.warning("job_not_written", job=job.id, error=error.message)
                    await asyncio.sleep(FULL_RETRY_S)
        except ServerUnavailableError:
            pass  # this server stops; the next one goes on
        finally:
            self._carried.pop(job.id, None)
            self._poke.set()
            self._tell_waiters()

    def _tell_waiters(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _after_exit(self, job: JobRow, run: RunRow) -> None:
        """`on_exit`: done before the run is `done`, so that a server that dies in between does it again."""
        act = job.spec.get("on_exit")
        if job.state == "cancelled":
            return
        try:
            if act == "kill":
                await self._sandboxes.kill(job.sandbox, f"{job.id} ended")
            elif act == "pause" and self._sandboxes.get(job.sandbox).state == "running":
                await self._sandboxes.pause(job.sandbox, f"{job.id} ended")
        except ServerUnavailableError:
            raise
        except LLM4AgentsError as error:
            log.warning("job_on_exit_failed", sandbox=job.sandbox, job=job.id, error=error.message)
            self._store.change_run(run, result={**(run.result or {}), "on_exit_error": error.message[:500]})

    def _finish(self, job: JobRow, run: RunRow) -> None:
        """The run is over, the job waits for its next or is over too, and the webhook is due: one transaction."""
        now = clock.wall_s()
        following = schedule.following(job.spec["beat"], job.spec["every_s"], now)
        if self._sandbox_over(job.sandbox):
            following = None
        changes: dict[str, Any] = {"state": "done" if run.state == "exited" else run.state}
        if job.state == "running":
            changes |= {
                "job_state": "ended" if following is None else "waiting",
                "job_next_at": following,
                "job_ended_at": now if following is None else None,
            }
        if job.spec.get("webhook"):
            changes["told"] = {"tries": 0, "next_at": now, "answered": None, "last": []}
            self._tells[run.id] = run
        self._store.change_run(run, job, **changes)

    # -- webhooks

    async def _tell(self, run: RunRow) -> None:
        try:
            job = self._store.get(run.job)
            told = dict(run.told or {})
            now = clock.wall_s()
            if job is None or not self._webhooks_on:
                self._told(run, {**told, "next_at": None})
                return
            told["tries"] += 1
            entry: dict[str, Any] = {"at": now}
            try:
                message = {"id": run.process, "type": "job.run", **describe_run(run, job)}
                entry["status"] = await webhooks.deliver(
                    job.spec["webhook"],
                    message,
                    self._secret(job),
                    int(now),
                    self._refuse if job.spec.get("guarded") else None,
                )
                told |= {"answered": clock.wall_s(), "next_at": None}
            except Exception as error:
                # Whatever it is: what is not written down as tried would be tried again at once, and for ever.
                if not isinstance(error, webhooks.WebhookError | LLM4AgentsError):
                    log.error("webhook_failed", job=run.job, exc_info=error)
                entry["error"] = str(error) or type(error).__name__
                told["next_at"] = schedule.retry_at(told["tries"], clock.wall_s())
            told["last"] = [*told["last"], entry][-TELLS_KEPT:]
            self._told(run, told)
        finally:
            self._telling.discard(run.id)
            self._poke.set()

    def _secret(self, job: JobRow) -> str:
        """Of its webhook. Raises HostSetupError when the key it is sealed with is lost: until that is back."""
        if (plain := job.spec.get("secret")) is not None:  # of an older version
            return str(plain)
        return self._sealing.unseal(f"webhook/{job.id}", bytes.fromhex(job.spec["sealed"])).decode()

    def _told(self, run: RunRow, told: dict[str, Any]) -> None:
        with contextlib.suppress(CapacityError):  # then it is told once more
            self._store.change_run(run, told=told)
        if told["next_at"] is None:
            self._tells.pop(run.id, None)

    # -- sandboxes that change

    def _transition(self, row: SandboxRow, _: str | None, to: str, __: str | None, ___: Stamp) -> None:
        self._wake(row.id)
        if self._started and to in lifecycle.TERMINAL:
            # Not from within the act of the transition: it writes.
            asyncio.get_running_loop().call_soon(self._all_over, row.id)

    def _all_over(self, sandbox: str) -> None:
        with contextlib.suppress(CapacityError):  # the clock, or the next server, finds it
            for job in self._store.find(sandbox=sandbox, states=("waiting",)):
                self._end_with_sandbox(job)

    def _end_with_sandbox(self, job: JobRow) -> bool:
        """End a waiting job whose sandbox has ended: nothing can run any more."""
        if not self._sandbox_over(job.sandbox):
            return False
        self._store.change(job, state="ended", next_at=None, ended_at=clock.wall_s())
        self._tell_waiters()
        return True

    def _sandbox_over(self, sandbox: str) -> bool:
        try:
            return self._sandboxes.get(sandbox).state in lifecycle.TERMINAL
        except SandboxNotFoundError:
            return True

    async def _changed(self, sandbox: str) -> None:
        await self._changes.setdefault(sandbox, asyncio.Event()).wait()

    def _wake(self, sandbox: str) -> None:
        if (event := self._changes.pop(sandbox, None)) is not None:
            event.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("job_task_failed", exc_info=error)


def _output(run: RunRow, said: bytes, begin: int, more: bool) -> dict[str, Any]:
    return {
        "process": run.process,
        "sequence": run.sequence,
        "state": run.state,
        "start": begin,
        "offset": begin + len(said),
        "data_b64": base64.b64encode(said).decode("ascii"),
        "more": more,
    }


def _tell_at(run: RunRow) -> float:
    return float((run.told or {}).get("next_at") or 0.0)


def describe(job: JobRow, last: RunRow | None) -> dict[str, Any]:
    """A job as the wire has it: without its secret."""
    hidden = ("secret", "sealed", "beat", "guarded")
    return {
        "id": job.id,
        "sandbox": job.sandbox,
        **{name: value for name, value in job.spec.items() if name not in hidden},
        "state": job.state,
        "created_at": job.created_at,
        "next_at": job.next_at,
        "ended_at": job.ended_at,
        "runs": 0 if last is None else last.sequence,
        "last": None if last is None else describe_run(last, job),
    }


def describe_run(run: RunRow, job: JobRow) -> dict[str, Any]:
    """A run as the wire, and a webhook's message, have it."""
    return {
        "job": job.id,
        "sandbox": job.sandbox,
        "process": run.process,
        "sequence": run.sequence,
        "state": run.state,
        "due_at": run.due_at,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "result": run.result,
        "told": run.told,
    }
