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
    """Forget what is older than `before` (unix seconds), and the oldest of what is more than `keep`: of those projects
    that have most, so that no project's calls push out what others did; how many went."""
    with store.writing() as connection:
        gone = int(connection.execute(delete(audit).where(audit.c.at < before)).rowcount)
        ends = connection.execute(select(func.min(audit.c.id), func.max(audit.c.id))).one()
        if ends[0] is None or ends[1] - ends[0] < keep:
            return gone
        counted = select(audit.c.project, func.count()).group_by(audit.c.project)
        counts = {str(project): int(count) for project, count in connection.execute(counted)}
        share = _share(list(counts.values()), keep)
        for project, count in counts.items():
            if count > share:
                mine = select(audit.c.id).where(audit.c.project == project).order_by(audit.c.id)
                last = connection.execute(mine.offset(count - share - 1).limit(1)).scalar_one()
                rows = (audit.c.project == project) & (audit.c.id <= last)
                gone += int(connection.execute(delete(audit).where(rows)).rowcount)
        return gone


def _share(counts: list[int], keep: int) -> int:
    """As many as each may keep so that all together are at most `keep`; who has less has less. Pure."""
    left, share = keep, keep
    for at, count in enumerate(sorted(counts)):
        share = left // (len(counts) - at)
        if count > share:
            return share
        left -= count
    return max(counts, default=0)
