"""Rows of the control plane's audit: appended, read, trimmed. Not here: which calls get one (`api.access.record`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, insert, select

from llm4agents.store.schema import audit
from llm4agents.store.store import Store


def add(store: Store, rows: Sequence[dict[str, Any]]) -> None:
    """All of them in one transaction."""
    with store.writing() as connection:
        connection.execute(insert(audit), list(rows))


def page(
    store: Store,
    *,
    project: str | None,
    before: int | None,
    limit: int,
    actor: str | None = None,
    since: float | None = None,
) -> list[dict[str, Any]]:
    """The newest first, those with an id below `before`; of a project, or of all."""
    query = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if project is not None:
        query = query.where(audit.c.project == project)
    if before is not None:
        query = query.where(audit.c.id < before)
    if actor is not None:
        query = query.where(audit.c.actor == actor)
    if since is not None:
        query = query.where(audit.c.at >= since)
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def trim(store: Store, *, before: float, keep: int) -> int:
    """Forget what is older than `before` (unix seconds), and all but the newest `keep`; how many went."""
    with store.writing() as connection:
        newest = int(connection.execute(select(func.coalesce(func.max(audit.c.id), 0))).scalar_one())
        done = connection.execute(delete(audit).where((audit.c.at < before) | (audit.c.id <= newest - keep)))
        return int(done.rowcount)
