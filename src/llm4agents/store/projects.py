"""Projects in the store. Not here: what they may have (`engine.quotas`)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from llm4agents.errors import ConflictError
from llm4agents.store.schema import projects, volumes
from llm4agents.store.store import Store


@dataclass(slots=True)
class ProjectRow:
    """One project; times in unix seconds."""

    id: str
    name: str
    created_at: float
    disabled_at: float | None = None
    quotas: dict[str, Any] = field(default_factory=dict)


def add(store: Store, row: ProjectRow) -> None:
    """Raises ConflictError when one has that name."""
    try:
        with store.writing() as connection:
            connection.execute(insert(projects), {one.name: getattr(row, one.name) for one in fields(row)})
    except IntegrityError:
        raise ConflictError(
            f"there is a project {row.name}", hint="llm4agents project ls shows them"
        ) from None


def rows(store: Store) -> list[ProjectRow]:
    """Every project, oldest first: `default` before all others."""
    with store.reading() as connection:
        found = connection.execute(select(projects).order_by(projects.c.created_at, projects.c.id)).mappings()
        return [ProjectRow(**row) for row in found]


def change(store: Store, row: ProjectRow, **changes: Any) -> None:
    """Change columns of a project; `row` follows."""
    with store.writing() as connection:
        connection.execute(update(projects).where(projects.c.id == row.id).values(**changes))
    for name, value in changes.items():
        setattr(row, name, value)


def owner_of_volume(store: Store, volume: str) -> str | None:
    """The project of the volume of that id."""
    with store.reading() as connection:
        found = connection.execute(
            select(volumes.c.project).where(volumes.c.id == volume)
        ).scalar_one_or_none()
        return None if found is None else str(found)
