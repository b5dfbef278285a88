"""Invite codes in the store: digests alone. Not here: what they are for (`engine.invites`)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import and_, delete, func, insert, or_, select, update

from llm4agents.errors import CapacityError
from llm4agents.store.schema import invites
from llm4agents.store.store import Store


@dataclass(slots=True)
class InviteRow:
    """One invite; times in unix seconds."""

    id: str
    digest: bytes = field(repr=False)
    note: str
    quotas: dict[str, Any]
    uses_left: int
    created_at: float
    expires_at: float | None = None


def add(store: Store, row: InviteRow, *, most: int) -> None:
    """Raises CapacityError when there are `most` already."""
    with store.writing() as connection:
        if connection.execute(select(func.count()).select_from(invites)).scalar_one() >= most:
            raise CapacityError(f"there are {most} invites already", hint="llm4agents invite revoke")
        connection.execute(insert(invites), {one.name: getattr(row, one.name) for one in fields(row)})


def rows(store: Store) -> list[InviteRow]:
    """Every one, oldest first."""
    with store.reading() as connection:
        found = connection.execute(select(invites).order_by(invites.c.created_at, invites.c.id)).mappings()
        return [InviteRow(**row) for row in found]


def remove(store: Store, invite: str) -> bool:
    """Whether there was one."""
    with store.writing() as connection:
        return connection.execute(delete(invites).where(invites.c.id == invite)).rowcount == 1


def find(store: Store, digest: bytes, now: float) -> InviteRow | None:
    """The invite of that code, if it can be used now."""
    with store.reading() as connection:
        found = connection.execute(select(invites).where(_usable(digest, now))).mappings().first()
        return None if found is None else InviteRow(**found)


def use(store: Store, digest: bytes, now: float) -> bool:
    """Take one use of it. Whether there was one left."""
    with store.writing() as connection:
        taken = update(invites).where(_usable(digest, now)).values(uses_left=invites.c.uses_left - 1)
        return connection.execute(taken).rowcount == 1


def give_back(store: Store, digest: bytes) -> None:
    """What it was used for did not come to be."""
    with store.writing() as connection:
        connection.execute(
            update(invites).where(invites.c.digest == digest).values(uses_left=invites.c.uses_left + 1)
        )


def _usable(digest: bytes, now: float) -> Any:
    lasts = or_(invites.c.expires_at.is_(None), invites.c.expires_at > now)
    return and_(invites.c.digest == digest, invites.c.uses_left > 0, lasts)
