"""Reading and writing the store. Not here: opening and migrating it, and deciding what may follow what.

Calls are plain functions that run on the event loop: none fsyncs (WAL, synchronous=NORMAL), each takes well
under a millisecond, and between a decision and its write nothing else can run.
"""

from __future__ import annotations

import builtins
import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    Connection,
    Engine,
    RowMapping,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import OperationalError

from llm4agents.errors import CapacityError, ConflictError
from llm4agents.store.schema import events, meta, sandboxes

CHECKPOINT_WRITES: Final = 400

TERMINAL: Final = ("killed", "failed")
OnTransition: TypeAlias = "Callable[[SandboxRow, str | None, str, str | None, Stamp], None]"
"""(row as it is now, from state or None at its birth, to state, reason, when)"""
InTransition: TypeAlias = "Callable[[Connection, SandboxRow, Stamp], None]"
"""(connection, row as it is still, until when that state was one that ran)"""
Events: TypeAlias = "list[dict[str, Any]]"
Rows: TypeAlias = "list[SandboxRow]"
"""A method of Store is called `list`."""


@dataclass(slots=True)
class SandboxRow:
    """One sandbox as stored; columns as in `schema.sandboxes`."""

    id: str
    template: str
    state: str
    created_at: float
    life_ends_at: float
    idle_timeout_s: float
    vcpus: int
    memory_mib: int
    disk_gib: int
    metadata: dict[str, str] = field(default_factory=dict)
    template_key: str | None = None
    reason: str | None = None
    ending: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    accelerator: str | None = None
    boot_id: str | None = None
    record: dict[str, Any] | None = None
    life_s: float = 86_400.0
    on_timeout: str = "kill"
    auto_resume: bool = True
    keep_s: float = 2_592_000.0
    paused_at: float | None = None
    pause: dict[str, Any] | None = None
    disk: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None
    parent: str | None = None
    network: Any = None
    protect: list[str] | None = None
    vmm: str | None = None
    nested: bool = False
    project: str = "default"
    traffic: dict[str, Any] | None = None
    defaults: dict[str, Any] | None = None
    volumes: list[dict[str, Any]] | None = None

    @classmethod
    def of(cls, row: RowMapping) -> SandboxRow:
        return cls(**row)

    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Stamp:
    """When something happened: wall clock, CLOCK_BOOTTIME, and the host boot the latter belongs to."""

    wall_ns: int
    monotonic_ns: int
    host_boot_id: str

    @property
    def wall_s(self) -> float:
        return self.wall_ns / 1e9


_INSERT_EVENT = insert(events).values(
    sandbox=bindparam("sandbox"),
    sequence=select(func.coalesce(func.max(events.c.sequence), 0) + 1)
    .where(events.c.sandbox == bindparam("sandbox"))
    .scalar_subquery(),
    boot_id=bindparam("boot_id"),
    from_state=bindparam("from_state"),
    to_state=bindparam("to_state"),
    reason=bindparam("reason"),
    wall_ns=bindparam("wall_ns"),
    monotonic_ns=bindparam("monotonic_ns"),
    host_boot_id=bindparam("host_boot_id"),
    project=bindparam("project"),
)


class Store:
    """The open store. `close()` it."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self.path = path
        self._engine = engine
        self._connection = engine.connect()
        self._writes = 0
        self.on_transition: list[OnTransition] = []
        """Called after each transition has been stored, in the order of registration; must not raise or wait."""
        self.before_close: list[Callable[[], None]] = []
        """Called before it is closed: the last moment to write."""
        self.in_transition: list[InTransition] = []
        """Called in the transaction of each transition, before its event: what they write stands or falls with it."""

    def close(self) -> None:
        for act in self.before_close:
            act()
        self._connection.close()
        self._engine.dispose()

    # sandboxes

    def add(self, row: SandboxRow, stamp: Stamp) -> None:
        """Insert a new sandbox and its first event."""
        with self._writing():
            self._connection.execute(insert(sandboxes), row.columns())
            self._event(row, None, row.state, row.reason, stamp)
        self._writes += 1
        for told in self.on_transition:
            told(row, None, row.state, row.reason, stamp)

    def transition(
        self,
        row: SandboxRow,
        to_state: str,
        reason: str | None,
        stamp: Stamp,
        *,
        ran_until: Stamp | None = None,
        **changes: Any,
    ) -> None:
        """Move `row` to `to_state` with `changes` of other columns, in one transaction with its event; `row` follows.

        `ran_until`: when its machine really ended, if that was before `stamp` (a dead server's successor knows).
        Raises ConflictError when the stored state is not the one `row` has: someone else moved it.
        """
        values, from_state = {**changes, "state": to_state, "reason": reason}, row.state
        boot_id = changes.get("boot_id", row.boot_id)
        with self._writing():
            done = self._connection.execute(
                update(sandboxes)
                .where(and_(sandboxes.c.id == row.id, sandboxes.c.state == row.state))
                .values(**values)
            )
            if done.rowcount != 1:
                raise ConflictError(f"{row.id} is no longer {row.state}")
            for act in self.in_transition:
                act(self._connection, row, ran_until or stamp)
            self._event(row, row.state, to_state, reason, stamp, boot_id)
        for name, value in values.items():
            setattr(row, name, value)
        self._writes += 1
        for told in self.on_transition:
            told(row, from_state, to_state, reason, stamp)

    def change(self, row: SandboxRow, **changes: Any) -> None:
        """Change columns of `row` other than its state; `row` follows."""
        with self._writing():
            self._connection.execute(update(sandboxes).where(sandboxes.c.id == row.id).values(**changes))
        for name, value in changes.items():
            setattr(row, name, value)
        self._writes += 1

    def get(self, sandbox: str) -> SandboxRow | None:
        rows = self._rows(select(sandboxes).where(sandboxes.c.id == sandbox))
        return rows[0] if rows else None

    def alive(self, project: str | None = None) -> Rows:
        """Every sandbox (of a project) that has not ended, oldest first."""
        query = select(sandboxes).where(sandboxes.c.state.not_in(TERMINAL))
        if project is not None:
            query = query.where(sandboxes.c.project == project)
        return self._rows(query.order_by(sandboxes.c.created_at))

    def paused(self) -> Rows:
        return self._rows(select(sandboxes).where(sandboxes.c.state == "paused"))

    def layers(self) -> set[str]:
        """The disk layers that some sandbox lies on."""
        query = select(sandboxes.c.disk).where(
            and_(sandboxes.c.state.not_in(TERMINAL), sandboxes.c.disk.is_not(None))
        )
        with self._connection.begin():
            chains = [disk for disk in self._connection.execute(query).scalars() if disk]
        return {str(layer) for chain in chains for layer in chain["layers"]}

    def lying_on(self, template_key: str) -> builtins.list[str]:
        """The sandboxes that have not ended and were cloned from that variant of a template."""
        query = select(sandboxes.c.id).where(
            and_(sandboxes.c.state.not_in(TERMINAL), sandboxes.c.template_key == template_key)
        )
        with self._connection.begin():
            return [str(ident) for ident in self._connection.execute(query).scalars()]

    def list(
        self,
        *,
        states: tuple[str, ...] = (),
        metadata: Mapping[str, str] | None = None,
        limit: int,
        after: str | None = None,
        project: str | None = None,
    ) -> Rows:
        """Newest first; those older than the sandbox `after`. `metadata`: each given pair must be there."""
        query = select(sandboxes).order_by(sandboxes.c.created_at.desc(), sandboxes.c.id.desc()).limit(limit)
        if project is not None:
            query = query.where(sandboxes.c.project == project)
        if states:
            query = query.where(sandboxes.c.state.in_(states))
        for key, value in (metadata or {}).items():
            query = query.where(sandboxes.c.metadata[key].as_string() == value)
        if after is not None:
            edge = select(sandboxes.c.created_at).where(sandboxes.c.id == after).scalar_subquery()
            query = query.where(
                (sandboxes.c.created_at < edge)
                | (and_(sandboxes.c.created_at == edge, sandboxes.c.id < after))
            )
        return self._rows(query)

    def events(self, sandbox: str) -> Events:
        """Every transition of a sandbox, in order."""
        query = select(events).where(events.c.sandbox == sandbox).order_by(events.c.sequence)
        with self._connection.begin():
            return [dict(row) for row in self._connection.execute(query).mappings()]

    def events_after(
        self, after: int, limit: int, sandbox: str | None = None, project: str | None = None
    ) -> Events:
        """Transitions of every sandbox (of one, of a project's) with an id above `after`, as they were written."""
        query = select(events).where(events.c.id > after).order_by(events.c.id).limit(limit)
        if project is not None:
            query = query.where(events.c.project == project)
        if sandbox is not None:
            query = query.where(events.c.sandbox == sandbox)
        with self._connection.begin():
            return [dict(row) for row in self._connection.execute(query).mappings()]

    def last_event(self) -> int:
        """The id of the newest transition, 0 when there is none."""
        with self._connection.begin():
            return int(self._connection.execute(select(func.coalesce(func.max(events.c.id), 0))).scalar_one())

    def forget_ended(self, before: float) -> int:
        """Delete ended sandboxes whose end was before `before` (wall seconds). Their events stay: money needs them."""
        with self._connection.begin():
            done = self._connection.execute(
                delete(sandboxes).where(and_(sandboxes.c.state.in_(TERMINAL), sandboxes.c.ended_at < before))
            )
        self._writes += 1
        return int(done.rowcount)

    # meta

    def meta(self, key: str) -> str | None:
        with self._connection.begin():
            return self._connection.execute(
                select(meta.c.value).where(meta.c.key == key)
            ).scalar_one_or_none()

    def set_meta(self, key: str, value: str) -> None:
        with self._connection.begin():
            self._connection.execute(delete(meta).where(meta.c.key == key))
            self._connection.execute(insert(meta), {"key": key, "value": value})

    # for the other modules of this room

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction; all of it stands or none. Raises CapacityError when the disk is full."""
        with self._writing():
            yield self._connection
        self._writes += 1

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._connection.begin():
            yield self._connection

    # keeping the log short

    def checkpoint_due(self) -> bool:
        return self._writes >= CHECKPOINT_WRITES

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database. Fsyncs: for a thread, never for the event loop."""
        self._writes = 0
        with closing(sqlite3.connect(self.path, timeout=1.0)) as connection:
            try:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except sqlite3.OperationalError as error:
                raise CapacityError(
                    f"the store {self.path} cannot be written: {error}", hint="is its disk full? free space"
                ) from error

    # inside

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._connection.begin():
                yield
        except OperationalError as error:
            # SQLITE_FULL, and SQLITE_IOERR of a write-ahead log that could not grow.
            if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in (
                sqlite3.SQLITE_FULL,
                sqlite3.SQLITE_IOERR,
            ):
                raise CapacityError(
                    f"the store {self.path} cannot be written: {error.orig}",
                    hint="is its disk full? free space, or llm4agents prune",
                ) from error
            raise

    def _rows(self, query: Select[Any]) -> Rows:
        with self._connection.begin():
            return [SandboxRow.of(row) for row in self._connection.execute(query).mappings()]

    def _event(
        self,
        row: SandboxRow,
        from_state: str | None,
        to_state: str,
        reason: str | None,
        stamp: Stamp,
        boot_id: str | None = None,
    ) -> None:
        self._connection.execute(
            _INSERT_EVENT,
            {
                "sandbox": row.id,
                "boot_id": boot_id or row.boot_id,
                "from_state": from_state,
                "to_state": to_state,
                "reason": reason,
                "wall_ns": stamp.wall_ns,
                "monotonic_ns": stamp.monotonic_ns,
                "host_boot_id": stamp.host_boot_id,
                "project": row.project,
            },
        )
