"""Rows of `usage`, and where the stretch of a state that is not closed yet began. Append-only.

Not here: what is metered and when a row is written (`engine.usage`). Everything is found in the store itself, so
that it makes no difference which server, or which life of it, writes the next row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select

from llm4agents.store.schema import events, usage
from llm4agents.store.store import SandboxRow, Stamp, Store


@dataclass(frozen=True, slots=True)
class Open:
    """The part of a sandbox's present state that no row of usage tells of yet."""

    since: Stamp
    event: int
    """`events.sequence` of the transition that began the state."""
    sequence: int
    """Of the next row."""


# Built once: they run in every transition.
_BEGAN = (
    select(
        events.c.to_state, events.c.sequence, events.c.wall_ns, events.c.monotonic_ns, events.c.host_boot_id
    )
    .where(events.c.sandbox == bindparam("of"))
    .order_by(events.c.sequence.desc())
    .limit(1)
)
_LAST = (
    select(
        usage.c.boot_id,
        usage.c.sequence,
        usage.c.event,
        usage.c.to_ns,
        usage.c.end_boottime_ns,
        usage.c.host_boot_id,
    )
    .where(usage.c.sandbox == bindparam("of"))
    .order_by(usage.c.id.desc())
    .limit(1)
)
_INSERT = insert(usage)


def open_stretch(connection: Connection, row: SandboxRow) -> Open | None:
    """Where the next row of `row`'s present state begins; None when the last event is not of that state."""
    began = connection.execute(_BEGAN, {"of": row.id}).first()
    last = connection.execute(_LAST, {"of": row.id}).first()
    if began is None or began.to_state != row.state:
        return None
    since = Stamp(began.wall_ns, began.monotonic_ns, began.host_boot_id)
    sequence = 1
    if last is not None:
        if last.boot_id == boot_of(row):
            sequence = last.sequence + 1
        if last.event == began.sequence:
            since = Stamp(last.to_ns, last.end_boottime_ns, last.host_boot_id)
    return Open(since, began.sequence, sequence)


def boot_of(row: SandboxRow) -> str:
    return row.boot_id or "none"


def append(
    connection: Connection,
    row: SandboxRow,
    stretch: Open,
    until: Stamp,
    duration_ns: int,
    disk_bytes: int,
    state: str | None = None,
) -> None:
    """One row, in the caller's transaction. A key that exists raises IntegrityError, which undoes it all.

    `state`: what it was in, if that is not the state of `row`.
    """
    boot = boot_of(row)
    connection.execute(
        _INSERT,
        {
            "key": f"{row.id}:{boot}:{stretch.sequence}",
            "sandbox": row.id,
            "boot_id": boot,
            "sequence": stretch.sequence,
            "state": state or row.state,
            "vcpus": row.vcpus,
            "memory_mib": row.memory_mib,
            "disk_bytes": disk_bytes,
            "from_ns": stretch.since.wall_ns,
            "to_ns": until.wall_ns,
            "duration_ns": duration_ns,
            "event": stretch.event,
            "end_boottime_ns": until.monotonic_ns,
            "host_boot_id": until.host_boot_id,
            "project": row.project,
        },
    )


def rows(
    store: Store, *, sandbox: str | None, after: int, limit: int, project: str | None = None
) -> list[dict[str, Any]]:
    """Rows with an id above `after`, in the order they were written."""
    query = select(usage).where(usage.c.id > after).order_by(usage.c.id).limit(limit)
    if project is not None:
        query = query.where(usage.c.project == project)
    if sandbox is not None:
        query = query.where(usage.c.sandbox == sandbox)
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def totals(store: Store, sandbox: str | None, project: str | None = None) -> list[dict[str, Any]]:
    """Per sandbox and state: `duration_ns`, and that times vCPUs and MiB, as integers."""
    query = select(
        usage.c.sandbox,
        usage.c.state,
        func.sum(usage.c.duration_ns).label("duration_ns"),
        func.sum(usage.c.duration_ns * usage.c.vcpus).label("vcpu_ns"),
        func.sum(usage.c.duration_ns * usage.c.memory_mib).label("memory_mib_ns"),
    ).group_by(usage.c.sandbox, usage.c.state)
    if project is not None:
        query = query.where(usage.c.project == project)
    if sandbox is not None:
        query = query.where(usage.c.sandbox == sandbox)
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(query.order_by(usage.c.sandbox)).mappings()]
