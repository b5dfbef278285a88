"""Invites: a code that somebody without a key may have a project for. Not here: how often one may try (its route)."""

from __future__ import annotations

import builtins
import hashlib
import ipaddress
import math
import secrets
from collections.abc import Mapping
from typing import Any

import structlog

from llm4agents import limits
from llm4agents.engine import clock
from llm4agents.engine.keys import Keys
from llm4agents.engine.principal import ORDINARY, Principal
from llm4agents.engine.projects import Projects, random_id
from llm4agents.engine.quotas import Bucket
from llm4agents.errors import ForbiddenError, InvalidRequestError, NotFoundError, QuotaError
from llm4agents.store import Store
from llm4agents.store import invites as rows
from llm4agents.store.invites import InviteRow
from llm4agents.store.keys import KeyRow
from llm4agents.store.projects import ProjectRow

log = structlog.get_logger()
PREFIX = "l4i_"
ORIGINS_MAX = 10_000
"""Addresses whose attempts are remembered."""
FIRST_SCOPES = ORDINARY | {"project"}
"""Of the key that comes with a project: it can make others."""


class Invites:
    """One per engine."""

    def __init__(self, store: Store, projects: Projects, keys: Keys) -> None:
        self._store, self._projects, self._keys = store, projects, keys
        self._attempts: dict[str, Bucket] = {}
        self._together = Bucket(10 * limits.REGISTRATIONS_PER_MINUTE, clock.boottime_s())

    def create(
        self,
        *,
        note: str = "",
        uses: int = 1,
        expires_days: float | None = None,
        quotas: Mapping[str, Any] | None = None,
    ) -> tuple[InviteRow, str]:
        """A new invite, and its code, for the only time. `quotas`: of each project that comes of it.

        Raises InvalidRequestError, CapacityError.
        """
        if not 1 <= uses <= limits.INVITE_USES_MAX:
            raise InvalidRequestError(f"uses={uses} is not possible: 1 to {limits.INVITE_USES_MAX}")
        code, now = PREFIX + secrets.token_hex(20), clock.wall_s()
        row = InviteRow(
            id=f"inv_{random_id(12)}",
            digest=_digest(code),
            note=note,
            quotas=dict(quotas or {}),
            uses_left=uses,
            created_at=now,
            expires_at=None if expires_days is None else now + expires_days * 86_400,
        )
        rows.add(self._store, row, most=limits.INVITES_MAX)
        log.info("invite_created", invite_id=row.id, uses=uses)
        return row, code

    def check_attempt(self, origin: str) -> None:
        """Before a code is looked at: nobody may try many. Raises QuotaError with when to come again."""
        now, most = clock.boottime_s(), limits.REGISTRATIONS_PER_MINUTE
        if len(self._attempts) > ORIGINS_MAX:
            self._attempts.clear()
        mine = self._attempts.setdefault(network_of(origin), Bucket(most, now))
        for bucket, burst in ((mine, most), (self._together, 10 * most)):
            if wait := bucket.take(burst / 60, now, burst=burst):
                raise QuotaError(
                    "too many registrations",
                    hint=f"again in {wait:.0f} s",
                    retry_after_s=max(1, math.ceil(wait)),
                )

    def list(self) -> builtins.list[InviteRow]:
        return rows.rows(self._store)

    def revoke(self, invite: str) -> None:
        """Nobody registers with it any more; who has, stays. Raises NotFoundError."""
        if not rows.remove(self._store, invite):
            # It may be the code itself, mistaken for the id: it is not repeated.
            raise NotFoundError("there is no invite of that id", hint="llm4agents invite ls shows them")
        log.info("invite_revoked", invite_id=invite)

    def register(self, code: str, name: str) -> tuple[ProjectRow, KeyRow, str]:
        """A project of that name, its first key's row, and the key, for the only time.

        Raises ForbiddenError (which never says why a code is no good), InvalidRequestError, ConflictError.
        """
        digest, now = _digest(code), clock.wall_s()
        invite = rows.find(self._store, digest, now)
        if invite is None or not rows.use(self._store, digest, now):
            raise ForbiddenError("the invite is not known, used up, or has expired", hint="ask for another")
        try:
            if len(self._projects.list()) >= limits.PROJECTS_MAX:
                raise ForbiddenError("this server takes no more projects", hint="ask whoever runs it")
            project = self._projects.create(name, invite.quotas)
        except BaseException:
            rows.give_back(self._store, digest)
            raise
        maker = Principal(project.id, invite.id, frozenset(FIRST_SCOPES), "register")
        row, key = self._keys.create(maker, "first", scopes=FIRST_SCOPES)
        log.info("registered", project=project.id, invite_id=invite.id)
        return project, row, key


def describe(row: InviteRow) -> dict[str, Any]:
    """As answers have it: nothing of the code but its id."""
    return {
        "id": row.id,
        "note": row.note,
        "quotas": row.quotas,
        "uses_left": row.uses_left,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
    }


def network_of(origin: str) -> str:
    """Whom an address stands for: of IPv6 everybody has 2^64."""
    try:
        address = ipaddress.ip_address(origin)
    except ValueError:
        return origin
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else origin


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest()
