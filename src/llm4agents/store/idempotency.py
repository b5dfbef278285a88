"""Answers that were given under an idempotency key. Not here: which calls have one (`api.access.repeats`)."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import and_, delete, func, insert, select, update

from llm4agents.store.schema import idempotency
from llm4agents.store.store import Store


@dataclass(frozen=True, slots=True)
class Kept:
    """`status` None: it is under way, or its server died before it was over."""

    request: bytes
    status: int | None
    answer: bytes | None


def begin(store: Store, project: str, key: str, request: bytes, now: float, *, since: float) -> Kept | None:
    """Note that a request with that key is under way; or, with nothing noted, what there is of it (since `since`)."""
    at = and_(idempotency.c.project == project, idempotency.c.key == key)
    with store.writing() as connection:
        found = connection.execute(select(idempotency).where(at)).mappings().first()
        if found is not None and found["at"] >= since:
            return Kept(found["request"], found["status"], found["answer"])
        connection.execute(delete(idempotency).where(at))
        connection.execute(
            insert(idempotency), {"project": project, "key": key, "request": request, "at": now}
        )
        return None


def end(store: Store, project: str, key: str, status: int, answer: bytes | None) -> None:
    """Keep the answer, or that there was one."""
    at = and_(idempotency.c.project == project, idempotency.c.key == key)
    with store.writing() as connection:
        connection.execute(update(idempotency).where(at).values(status=status, answer=answer))


def forget(store: Store, project: str, key: str) -> None:
    """As if it had never been sent."""
    with store.writing() as connection:
        connection.execute(
            delete(idempotency).where(and_(idempotency.c.project == project, idempotency.c.key == key))
        )


def trim(store: Store, *, before: float, keep: int, bytes_max: int) -> None:
    """Forget what is older than `before` (unix seconds), and of each project all but its newest `keep`, and of these
    what is older than its newest `bytes_max` of answers."""
    with store.writing() as connection:
        connection.execute(delete(idempotency).where(idempotency.c.at < before))
        many = select(idempotency.c.project).group_by(idempotency.c.project).having(func.count() > keep)
        for project in connection.execute(many).scalars().all():
            mine = idempotency.c.project == project
            newest = (
                select(idempotency.c.at).where(mine).order_by(idempotency.c.at.desc()).offset(keep).limit(1)
            )
            connection.execute(
                delete(idempotency).where(and_(mine, idempotency.c.at <= newest.scalar_subquery()))
            )
        size = func.coalesce(func.length(idempotency.c.answer), 0)
        large = (
            select(idempotency.c.project).group_by(idempotency.c.project).having(func.sum(size) > bytes_max)
        )
        for project in connection.execute(large).scalars().all():
            mine = idempotency.c.project == project
            sums = select(
                idempotency.c.at, func.sum(size).over(order_by=idempotency.c.at.desc()).label("bytes")
            ).where(mine)
            found = sums.subquery()
            last = select(func.max(found.c.at)).where(found.c.bytes > bytes_max)
            connection.execute(
                delete(idempotency).where(and_(mine, idempotency.c.at <= last.scalar_subquery()))
            )
