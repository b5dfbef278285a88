"""API keys in the store: digests alone. Not here: what a key looks like and who may have one (`engine.keys`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import delete, insert, select, update

from llm4agents.store.schema import api_keys
from llm4agents.store.store import Store


@dataclass(slots=True)
class KeyRow:
    """One key; times in unix seconds."""

    id: str
    project: str
    name: str
    digest: bytes = field(repr=False)
    scopes: list[str]
    created_at: float
    created_by: str | None = None
    expires_at: float | None = None
    revoked_at: float | None = None
    used_at: float | None = None


def add(store: Store, row: KeyRow) -> None:
    with store.writing() as connection:
        connection.execute(insert(api_keys), {one.name: getattr(row, one.name) for one in fields(row)})


def rows(store: Store) -> list[KeyRow]:
    """Every one, oldest first."""
    with store.reading() as connection:
        found = connection.execute(select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)).mappings()
        return [KeyRow(**row) for row in found]


def change(store: Store, row: KeyRow, **changes: Any) -> None:
    """Change columns of a key; `row` follows."""
    with store.writing() as connection:
        connection.execute(update(api_keys).where(api_keys.c.id == row.id).values(**changes))
    for name, value in changes.items():
        setattr(row, name, value)


def remove(store: Store, keys: Collection[str]) -> None:
    with store.writing() as connection:
        for key in keys:
            connection.execute(delete(api_keys).where(api_keys.c.id == key))
