"""Rows of `secrets`: names, versions and sealed bytes. Not here: sealing (`barrier.vault`), who may ask (`engine`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, and_, delete, func, insert, select, update

from llm4agents.errors import CapacityError
from llm4agents.store.schema import secrets
from llm4agents.store.store import Store


@dataclass(frozen=True, slots=True)
class SecretRow:
    """One secret; times in unix seconds. Its versions count from 1, anew when it is removed and made again."""

    project: str
    name: str
    version: int
    sealed: bytes = field(repr=False)
    created_at: float
    updated_at: float


def put(
    store: Store,
    name: str,
    seal: Callable[[int], bytes],
    now: float,
    *,
    most: int,
    project: str = "default",
) -> SecretRow:
    """Make the secret or give it a new version; `seal` makes that version's bytes.

    Raises CapacityError when there are `most` already, and whatever `seal` does; then nothing has changed.
    """
    with store.writing() as connection:
        old = connection.execute(select(secrets).where(_of(project, name))).mappings().first()
        if old is None:
            count = select(func.count()).select_from(secrets).where(secrets.c.project == project)
            if connection.execute(count).scalar_one() >= most:
                raise CapacityError(f"there are {most} secrets already", hint="llm4agents secret rm")
            row = SecretRow(project, name, 1, seal(1), now, now)
            connection.execute(
                insert(secrets),
                {
                    "project": project,
                    "name": name,
                    "version": 1,
                    "sealed": row.sealed,
                    "created_at": now,
                    "updated_at": now,
                },
            )
            return row
        version = int(old["version"]) + 1
        row = SecretRow(project, name, version, seal(version), float(old["created_at"]), now)
        connection.execute(
            update(secrets)
            .where(_of(project, name))
            .values(version=version, sealed=row.sealed, updated_at=now)
        )
        return row


def rows(store: Store, project: str | None = None) -> list[SecretRow]:
    """Every secret (of a project), by name."""
    query = select(secrets).order_by(secrets.c.name, secrets.c.project)
    if project is not None:
        query = query.where(secrets.c.project == project)
    with store.reading() as connection:
        found = connection.execute(query).mappings()
        return [SecretRow(**row) for row in found]


def get(store: Store, name: str, project: str = "default") -> SecretRow | None:
    with store.reading() as connection:
        row = connection.execute(select(secrets).where(_of(project, name))).mappings().first()
    return None if row is None else SecretRow(**row)


def remove(store: Store, name: str, project: str = "default") -> bool:
    """Whether there was one."""
    with store.writing() as connection:
        return connection.execute(delete(secrets).where(_of(project, name))).rowcount == 1


def _of(project: str, name: str) -> ColumnElement[bool]:
    return and_(secrets.c.project == project, secrets.c.name == name)
