"""Rows of `volumes` and of who holds them. Not here: files (`images.volumes`), what is done with them
(`engine.volumes`).

A hold is taken in one transaction with the look at the others, so of many who want to write one gets it. Holders are
sandboxes, running or paused, until they have ended; a volume that is being made of another one; a machine that reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from llm4agents.errors import ConflictError, NotFoundError, QuotaError
from llm4agents.store.schema import volume_holds, volumes
from llm4agents.store.store import Store

Mode = Literal["rw", "ro", "copy"]
Kind = Literal["volume", "snapshot"]


@dataclass(frozen=True, slots=True)
class VolumeRow:
    """A volume, or a snapshot of one, which nothing writes to. `size_bytes`: what can be written to it at least."""

    id: str
    project: str
    name: str
    kind: Kind
    size_bytes: int
    created_at: float
    source: str | None
    state: str
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hold:
    volume: str
    holder: str
    mode: Mode
    at: float


def add(store: Store, row: VolumeRow, *, most: int, most_bytes: int | None) -> None:
    """Insert it, in state `creating`. Raises ConflictError when the project has one of that name, QuotaError when it
    has `most`, or would have more than `most_bytes` of all of them together."""
    try:
        with store.writing() as connection:
            _check_room(connection, row.project, most=most, more_bytes=row.size_bytes, most_bytes=most_bytes)
            connection.execute(insert(volumes), {name: getattr(row, name) for name in row.__slots__})
    except IntegrityError:
        raise ConflictError(
            f"there is a volume {row.name} already", hint="give another name, or llm4agents volume rm"
        ) from None


def _check_room(
    connection: Connection, project: str, *, most: int | None, more_bytes: int, most_bytes: int | None
) -> None:
    query = select(func.count(), func.coalesce(func.sum(volumes.c.size_bytes), 0))
    count, used = connection.execute(query.where(volumes.c.project == project)).one()
    if most is not None and count >= most:
        raise QuotaError(
            f"the project has {count} volumes, which is as many as it may have",
            hint="llm4agents volume rm",
            quota="volumes",
            limit=most,
            used=int(count),
        )
    if most_bytes is not None and int(used) + more_bytes > most_bytes:
        raise QuotaError(
            f"the project's volumes may have {most_bytes >> 20} MiB together, and would have "
            f"{(int(used) + more_bytes) >> 20}",
            hint="remove volumes or make a smaller one; the operator can give more",
            quota="volumes_mib",
            limit=most_bytes >> 20,
            used=int(used) >> 20,
        )


def get(store: Store, volume: str) -> VolumeRow | None:
    return _first(store, volumes.c.id == volume)


def named(store: Store, project: str, name: str) -> VolumeRow | None:
    return _first(store, and_(volumes.c.project == project, volumes.c.name == name))


def rows(
    store: Store,
    project: str | None = None,
    *,
    name: str | None = None,
    limit: int | None = None,
    after: str | None = None,
) -> list[VolumeRow]:
    """Newest first; those older than the volume `after`."""
    query = select(volumes).order_by(volumes.c.created_at.desc(), volumes.c.id.desc()).limit(limit)
    if project is not None:
        query = query.where(volumes.c.project == project)
    if name is not None:
        query = query.where(volumes.c.name == name)
    if after is not None:
        edge = select(volumes.c.created_at).where(volumes.c.id == after).scalar_subquery()
        query = query.where(
            (volumes.c.created_at < edge) | and_(volumes.c.created_at == edge, volumes.c.id < after)
        )
    with store.reading() as connection:
        return [VolumeRow(**row) for row in connection.execute(query).mappings()]


def ready(store: Store, volume: str) -> None:
    """What was being made is there."""
    with store.writing() as connection:
        connection.execute(update(volumes).where(volumes.c.id == volume).values(state="ready"))


def resized(store: Store, volume: str, size_bytes: int, *, most_bytes: int | None) -> None:
    """Nobody may hold it. Raises ConflictError, QuotaError."""
    with store.writing() as connection:
        row = _ready(connection, volume)
        _refuse_held(connection, row, "resized")
        more = size_bytes - row.size_bytes
        _check_room(connection, row.project, most=None, more_bytes=more, most_bytes=most_bytes)
        connection.execute(update(volumes).where(volumes.c.id == volume).values(size_bytes=size_bytes))


def deleting(store: Store, volume: str) -> None:
    """From here on it is gone, whatever happens. Raises ConflictError, with who holds it, NotFoundError."""
    with store.writing() as connection:
        _refuse_held(connection, _ready(connection, volume), "deleted")
        connection.execute(update(volumes).where(volumes.c.id == volume).values(state="deleting"))


def forget(store: Store, volume: str) -> None:
    with store.writing() as connection:
        connection.execute(delete(volumes).where(volumes.c.id == volume))
        connection.execute(delete(volume_holds).where(_either(volume)))


def hold(store: Store, volume: str, holder: str, mode: Mode, now: float) -> VolumeRow:
    """Let `holder` have it: one that writes, or many that read. The row. Raises ConflictError, with who has it."""
    with store.writing() as connection:
        row = _ready(connection, volume)
        if row.kind == "snapshot" and mode == "rw":
            raise ConflictError(
                f"{row.name} is a snapshot, which nothing writes to",
                hint="attach it read-only, or llm4agents volume clone it",
            )
        others = [other for other in _holds(connection, volume) if other.holder != holder]
        if against := conflict(mode, others):
            raise _held(row, against, "attached to write" if mode == "rw" else "attached")
        mine = and_(volume_holds.c.volume == volume, volume_holds.c.holder == holder)
        connection.execute(delete(volume_holds).where(mine))
        connection.execute(
            insert(volume_holds), {"volume": volume, "holder": holder, "mode": mode, "at": now}
        )
    return row


def conflict(mode: Mode, others: Sequence[Hold]) -> list[Hold]:
    """The holds that keep another of `mode` away. A copy is made beside whatever there is: it sees to that itself, and
    keeps new writers away. Pure."""
    if mode == "copy":
        return []
    return [other for other in others if mode == "rw" or other.mode == "rw"]


def release(store: Store, holder: str, volume: str | None = None) -> None:
    """Let go of what `holder` has, or of one of it. Idempotent."""
    where = volume_holds.c.holder == holder
    if volume is not None:
        where = and_(where, volume_holds.c.volume == volume)
    with store.writing() as connection:
        connection.execute(delete(volume_holds).where(where))


def holds(store: Store, volume: str | None = None) -> list[Hold]:
    """Of a volume, or all there are."""
    with store.reading() as connection:
        return _holds(connection, volume)


def _holds(connection: Connection, volume: str | None) -> list[Hold]:
    query = select(volume_holds).order_by(volume_holds.c.at, volume_holds.c.holder)
    if volume is not None:
        query = query.where(volume_holds.c.volume == volume)
    return [Hold(**row) for row in connection.execute(query).mappings()]


def _ready(connection: Connection, volume: str) -> VolumeRow:
    found = connection.execute(select(volumes).where(volumes.c.id == volume)).mappings().first()
    if found is None or found["state"] == "deleting":
        raise NotFoundError(f"there is no volume {volume}", hint="llm4agents volume ls shows them")
    row = VolumeRow(**found)
    if row.state != "ready":
        raise ConflictError(f"{row.name} is still being made", hint="wait until its state is `ready`")
    return row


def _refuse_held(connection: Connection, row: VolumeRow, act: str) -> None:
    if against := _holds(connection, row.id):
        raise _held(row, against, act)


def _held(row: VolumeRow, by: Sequence[Hold], act: str) -> ConflictError:
    most = ", ".join(f"{hold.holder} ({hold.mode})" for hold in by[:5]) + (", …" if len(by) > 5 else "")
    return ConflictError(
        f"{row.name} cannot be {act}: it is held by {most}",
        hint="kill that sandbox, or pause it and detach the volume",
        volume=row.id,
        holders=[{"holder": hold.holder, "mode": hold.mode} for hold in by[:100]],
    )


def _first(store: Store, where: ColumnElement[bool]) -> VolumeRow | None:
    with store.reading() as connection:
        found = connection.execute(select(volumes).where(where)).mappings().first()
    return None if found is None else VolumeRow(**found)


def _either(volume: str) -> ColumnElement[bool]:
    return (volume_holds.c.volume == volume) | (volume_holds.c.holder == volume)
