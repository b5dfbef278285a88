"""Jobs and their runs, as stored. Not here: when a job is due (`engine.schedule`), running one (`engine.jobs`).

A job is `waiting` (for its time), `running`, `ended` (no run will follow) or `cancelled`. A run is `starting` (its
process has an id and may or may not have begun), `running`, `exited` (its result is known, what follows from it is
not done yet), and then for good `done`, `failed` (could not be started), `lost` (its end is not known) or `cancelled`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, and_, delete, func, insert, or_, select, update

from llm4agents.errors import ConflictError
from llm4agents.store.schema import job_runs, jobs, sandboxes
from llm4agents.store.store import Store

OPEN: Final = ("starting", "running", "exited")
"""States of a run that something must still be done for."""
JOB_OVER: Final = ("ended", "cancelled")


@dataclass(slots=True)
class JobRow:
    """One job; columns as in `schema.jobs`."""

    id: str
    sandbox: str
    spec: dict[str, Any]
    state: str
    created_at: float
    next_at: float | None = None
    ended_at: float | None = None


@dataclass(slots=True)
class RunRow:
    """One run of a job; columns as in `schema.job_runs`. `id` is given by the store."""

    job: str
    sequence: int
    due_at: float
    state: str
    process: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    result: dict[str, Any] | None = None
    told: dict[str, Any] | None = None
    id: int = field(default=0)


def _job(row: RowMapping) -> JobRow:
    return JobRow(**row)


def _run(row: RowMapping) -> RunRow:
    return RunRow(**row)


class JobStore:
    """Queries of the two tables; each call is one transaction unless it says otherwise."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # jobs

    def add(self, job: JobRow) -> None:
        with self._store.writing() as connection:
            connection.execute(insert(jobs), {name: getattr(job, name) for name in job.__slots__})

    def get(self, job: str) -> JobRow | None:
        with self._store.reading() as connection:
            row = connection.execute(select(jobs).where(jobs.c.id == job)).mappings().first()
            return None if row is None else _job(row)

    def find(
        self,
        *,
        sandbox: str | None = None,
        states: tuple[str, ...] = (),
        limit: int = 1000,
        project: str | None = None,
        after: str | None = None,
    ) -> list[JobRow]:
        """Newest first; those older than the job `after`."""
        query = select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit)
        if after is not None:
            edge = select(jobs.c.created_at).where(jobs.c.id == after).scalar_subquery()
            query = query.where(
                or_(jobs.c.created_at < edge, and_(jobs.c.created_at == edge, jobs.c.id < after))
            )
        if sandbox is not None:
            query = query.where(jobs.c.sandbox == sandbox)
        if project is not None:
            query = query.where(
                jobs.c.sandbox.in_(select(sandboxes.c.id).where(sandboxes.c.project == project))
            )
        if states:
            query = query.where(jobs.c.state.in_(states))
        with self._store.reading() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def due(self, now: float) -> list[JobRow]:
        """Waiting jobs whose time has come, the longest due first."""
        query = select(jobs).where(and_(jobs.c.state == "waiting", jobs.c.next_at <= now))
        with self._store.reading() as connection:
            return [_job(row) for row in connection.execute(query.order_by(jobs.c.next_at)).mappings()]

    def next_due(self) -> float | None:
        query = select(func.min(jobs.c.next_at)).where(jobs.c.state == "waiting")
        with self._store.reading() as connection:
            found = connection.execute(query).scalar_one()
            return None if found is None else float(found)

    def change(self, job: JobRow, **changes: Any) -> None:
        """Change columns; `job` follows."""
        with self._store.writing() as connection:
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(**changes))
        _follow(job, changes)

    def forget_ended(self, before: float) -> None:
        """Jobs, with their runs, that were over before `before`."""
        over = and_(jobs.c.state.in_(JOB_OVER), jobs.c.ended_at < before)
        with self._store.writing() as connection:
            connection.execute(delete(job_runs).where(job_runs.c.job.in_(select(jobs.c.id).where(over))))
            connection.execute(delete(jobs).where(over))

    def forget_older(self, sandbox: str, keep: int) -> None:
        """A sandbox's jobs that are over, with their runs, but the `keep` that ended last."""
        over = and_(jobs.c.sandbox == sandbox, jobs.c.state.in_(JOB_OVER))
        older = (
            select(jobs.c.id)
            .where(over)
            .order_by(jobs.c.ended_at.desc(), jobs.c.id)
            .offset(keep)
            .limit(10_000)
        )
        with self._store.reading() as connection:
            found = connection.execute(older).scalars().all()
        if found:
            with self._store.writing() as connection:
                for job in found:
                    connection.execute(delete(job_runs).where(job_runs.c.job == job))
                    connection.execute(delete(jobs).where(jobs.c.id == job))

    # runs

    def begin(self, job: JobRow, run: RunRow, *, keep: int) -> None:
        """The job is `running` from now on and `run` is its newest, of process `JOB.SEQUENCE`; only `keep` runs stay.

        Raises ConflictError when it is not `waiting` any more.
        """
        with self._store.writing() as connection:
            done = connection.execute(
                update(jobs)
                .where(and_(jobs.c.id == job.id, jobs.c.state == "waiting"))
                .values(state="running", next_at=None)
            )
            if done.rowcount != 1:
                raise ConflictError(f"{job.id} is not waiting to run")
            run.sequence = self._newest(connection, job.id) + 1
            run.process = f"{job.id}.{run.sequence}"
            columns = {name: getattr(run, name) for name in run.__slots__ if name != "id"}
            run.id = int(connection.execute(insert(job_runs), columns).lastrowid)
            connection.execute(
                delete(job_runs).where(
                    and_(job_runs.c.job == job.id, job_runs.c.sequence <= run.sequence - keep)
                )
            )
        job.state, job.next_at = "running", None

    def change_run(self, run: RunRow, job: JobRow | None = None, **changes: Any) -> None:
        """Change columns of a run; with `job`, columns of that named `job_…` too, in the same transaction."""
        ours = {name: value for name, value in changes.items() if not name.startswith("job_")}
        theirs = {name[4:]: value for name, value in changes.items() if name.startswith("job_")}
        with self._store.writing() as connection:
            if ours:
                connection.execute(update(job_runs).where(job_runs.c.id == run.id).values(**ours))
            if job is not None and theirs:
                connection.execute(update(jobs).where(jobs.c.id == job.id).values(**theirs))
        _follow(run, ours)
        if job is not None:
            _follow(job, theirs)

    def runs(self, job: str, limit: int = 1000) -> list[RunRow]:
        """Newest first."""
        query = select(job_runs).where(job_runs.c.job == job).order_by(job_runs.c.sequence.desc())
        with self._store.reading() as connection:
            return [_run(row) for row in connection.execute(query.limit(limit)).mappings()]

    def open_runs(self, sandbox: str | None = None) -> list[tuple[JobRow, RunRow]]:
        """Runs that something must still be done for, of every sandbox or of one."""
        query = (
            select(job_runs, jobs.c.id.label("job_id"))
            .join(jobs, jobs.c.id == job_runs.c.job)
            .where(job_runs.c.state.in_(OPEN))
        )
        if sandbox is not None:
            query = query.where(jobs.c.sandbox == sandbox)
        with self._store.reading() as connection:
            found = [dict(row) for row in connection.execute(query).mappings()]
        return [
            (job, RunRow(**{name: value for name, value in row.items() if name != "job_id"}))
            for row in found
            if (job := self.get(row["job_id"])) is not None
        ]

    def last_run(self, job: str) -> RunRow | None:
        return next(iter(self.runs(job, 1)), None)

    def to_tell(self) -> list[RunRow]:
        """Runs whose webhook has not been answered and not been given up."""
        waiting = job_runs.c.told["next_at"].as_float()
        query = select(job_runs).where(and_(job_runs.c.told.is_not(None), waiting.is_not(None)))
        with self._store.reading() as connection:
            return [_run(row) for row in connection.execute(query).mappings()]

    def count(self, sandbox: str) -> int:
        """Jobs of a sandbox that are not over."""
        query = (
            select(func.count())
            .select_from(jobs)
            .where(and_(jobs.c.sandbox == sandbox, jobs.c.state.not_in(JOB_OVER)))
        )
        with self._store.reading() as connection:
            return int(connection.execute(query).scalar_one())

    def busy(self) -> bool:
        """Whether some job still waits for its time or runs."""
        query = select(jobs.c.id).where(jobs.c.state.not_in(JOB_OVER)).limit(1)
        with self._store.reading() as connection:
            return connection.execute(query).first() is not None

    @staticmethod
    def _newest(connection: Connection, job: str) -> int:
        query = select(func.coalesce(func.max(job_runs.c.sequence), 0)).where(job_runs.c.job == job)
        return int(connection.execute(query).scalar_one())


def _follow(row: Any, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        setattr(row, name, value)
