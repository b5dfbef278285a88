"""API keys: made, listed, revoked, known again. Not here: which header has one (`api.access`).

A key is `l4a_`, the 8 characters of its id, `_` and 40 hex digits: 160 random bits, so a plain SHA-256 of it is as hard
to go back from as a slow one. The whole key is in the answer to its making and nowhere else: no log line, error, audit
row or store has it. All of them are held in memory, since every call asks for one; of those that are good no more, a
project's last KEYS_GONE_KEPT.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import structlog

from llm4agents import limits
from llm4agents.engine import clock
from llm4agents.engine.principal import ORDINARY, SCOPES, Principal
from llm4agents.engine.projects import Projects, random_id
from llm4agents.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
)
from llm4agents.store import Store
from llm4agents.store import keys as rows
from llm4agents.store.keys import KeyRow

T = TypeVar("T")
log = structlog.get_logger()
PREFIX = "l4a_"
_KEY = re.compile(r"l4a_([a-z0-9]{8})_([0-9a-f]{40})")
_NO_DIGEST = hashlib.sha256(b"no key has this").digest()
USED_S = 60.0
"""How exact `used_at` is: no call writes the store for it more often."""


class Held:
    """A call under way with a key, which may be revoked before the call is over."""

    def __init__(self) -> None:
        self.ended = False
        self._waiting: set[asyncio.Timeout] = set()

    def end(self) -> None:
        if self.ended:
            return
        self.ended, now = True, asyncio.get_running_loop().time()
        for waiting in self._waiting:
            waiting.reschedule(now)

    async def unless_ended(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """What `work` comes to; None, and it is cancelled, when the key is good no more."""
        if self.ended:
            return None
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting.add(waiting)
                try:
                    return await work()
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            if not self.ended:
                raise
            return None


class Keys:
    """One per engine."""

    def __init__(self, store: Store, projects: Projects) -> None:
        self._store, self._projects = store, projects
        self._held: dict[str, set[Held]] = {}
        projects.on_disabled.append(self._project_disabled)

    @cached_property
    def _all(self) -> dict[str, KeyRow]:
        return {row.id: row for row in rows.rows(self._store)}

    @cached_property
    def _of(self) -> dict[str, dict[str, KeyRow]]:
        """The same, by project."""
        found: dict[str, dict[str, KeyRow]] = {}
        for row in self._all.values():
            found.setdefault(row.project, {})[row.id] = row
        return found

    # -- for callers

    def create(
        self,
        maker: Principal,
        name: str,
        *,
        project: str | None = None,
        scopes: Iterable[str] | None = None,
        expires_days: float | None = None,
    ) -> tuple[KeyRow, str]:
        """A new key of a project (of the maker's, unless he sees all): its row, and the key, for the only time.

        Raises InvalidRequestError, ForbiddenError for a scope that the maker has not, or another's project.
        """
        owner = maker.project
        if project is not None and maker.sees_all:
            owner = self._projects.get(project).id
        elif project is not None and project not in self._called(owner):
            # One word for what is another's and for what never was.
            raise NotFoundError(
                f"there is no project {project[:80]!r}", hint="leave it out: keys are of your own"
            )
        wanted = frozenset(scopes) if scopes is not None else ORDINARY & (maker.scopes | _implied(maker))
        if unknown := sorted(wanted - set(SCOPES)):
            raise InvalidRequestError(f"{unknown[0][:40]!r} is no scope", hint=f"any of {', '.join(SCOPES)}")
        if not wanted:
            raise InvalidRequestError("a key needs a scope", hint=f"any of {', '.join(SCOPES)}")
        if beyond := sorted(one for one in wanted if not maker.may(one)):
            raise ForbiddenError(
                f"a key cannot make one with more scopes than its own: {', '.join(beyond)}",
                hint="ask whoever runs the server",
            )
        if not 1 <= len(name) <= 128 or not name.isprintable():
            raise InvalidRequestError("a key's name is 1 to 128 printable characters")
        self._trim(owner)
        theirs, now = self._of.setdefault(owner, {}), clock.wall_s()
        if sum(_gone_at(row, now) is None for row in theirs.values()) >= limits.KEYS_PER_PROJECT_MAX:
            raise InvalidRequestError(
                f"the project has {limits.KEYS_PER_PROJECT_MAX} keys", hint="llm4agents key revoke"
            )
        ident = next(one for one in iter(lambda: random_id(8), "") if f"key_{one}" not in self._all)
        text = f"{PREFIX}{ident}_{secrets.token_hex(20)}"
        row = KeyRow(
            id=f"key_{ident}",
            project=owner,
            name=name,
            digest=_digest(text),
            scopes=sorted(wanted, key=SCOPES.index),
            created_at=now,
            created_by=maker.actor if maker.actor.startswith("key_") else None,
            expires_at=None if expires_days is None else now + expires_days * 86_400,
        )
        rows.add(self._store, row)
        self._all[row.id] = theirs[row.id] = row
        log.info("key_created", key_id=row.id, project=owner, scopes=row.scopes)
        return row, text

    def _called(self, owner: str) -> tuple[str, ...]:
        row = self._projects.of(owner)
        return (owner,) if row is None else (owner, row.name)

    def list(self, project: str | None) -> builtins.list[KeyRow]:
        """Those of a project, or (None) all, oldest first; also what was revoked or has expired lately."""
        return builtins.list((self._all if project is None else self._of.get(project, {})).values())

    def get(self, ident: str, project: str | None) -> KeyRow:
        """One of a project's, or (None) of any. Raises NotFoundError, also for another's."""
        row = self._all.get(ident)
        if row is None or (project is not None and row.project != project):
            # It may be the key itself, mistaken for its id: it is not repeated.
            raise NotFoundError("there is no key of that id", hint="llm4agents key ls shows them")
        return row

    def revoke(self, ident: str, project: str | None) -> KeyRow:
        """From now on it is no key any more, and what is under way with it ends. Raises NotFoundError, also for
        another's."""
        row = self.get(ident, project)
        if row.revoked_at is None:
            rows.change(self._store, row, revoked_at=clock.wall_s())
            log.info("key_revoked", key_id=row.id, project=row.project)
            self._end(row.id)
            self._trim(row.project)
        return row

    def _trim(self, project: str) -> None:
        """Whoever makes keys and revokes them, or lets them expire, fills neither the store nor the memory."""
        theirs, now = self._of.get(project, {}), clock.wall_s()
        gone = [(at, row.id) for row in theirs.values() if (at := _gone_at(row, now)) is not None]
        if len(gone) > limits.KEYS_GONE_KEPT:
            forgotten = [ident for _, ident in sorted(gone)[: -limits.KEYS_GONE_KEPT]]
            rows.remove(self._store, forgotten)
            for ident in forgotten:
                del self._all[ident], theirs[ident]

    @contextlib.contextmanager
    def holding(self, ident: str) -> Iterator[Held]:
        """While a call is under way with the key of that id; it ends when the key expires, too."""
        held, timer = Held(), None
        self._held.setdefault(ident, set()).add(held)
        row = self._all.get(ident)
        if row is not None and row.expires_at is not None:
            left = max(0.0, row.expires_at - clock.wall_s())
            timer = asyncio.get_running_loop().call_later(left, held.end)
        try:
            yield held
        finally:
            if timer is not None:
                timer.cancel()
            mine = self._held[ident]
            mine.discard(held)
            if not mine:
                del self._held[ident]

    def _end(self, ident: str) -> None:
        for held in tuple(self._held.get(ident, ())):
            held.end()

    def _project_disabled(self, project: str) -> None:
        for row in self.list(project):
            self._end(row.id)

    # -- for whoever lets callers in

    def known(self, text: str) -> KeyRow:
        """The row of a key that is good now. Raises AuthenticationError, which never says what it was given."""
        found = _KEY.fullmatch(text)
        row = self._all.get(f"key_{found[1]}") if found is not None else None
        # The same digest and compare for a key that nobody has: how long it takes tells nothing of what there is.
        same = hmac.compare_digest(_digest(text), _NO_DIGEST if row is None else row.digest)
        if row is None or not same:
            raise AuthenticationError("the API key is not one of this server", hint=_HINT)
        now = clock.wall_s()
        if row.revoked_at is not None:
            raise AuthenticationError(f"the API key {row.id} is revoked", hint=_HINT)
        if row.expires_at is not None and now >= row.expires_at:
            raise AuthenticationError(f"the API key {row.id} has expired", hint=_HINT)
        project = self._projects.of(row.project)
        if project is None or project.disabled_at is not None:
            raise AuthenticationError(
                f"the project of the API key {row.id} is disabled",
                hint=f"llm4agents project enable {row.project} on the server's host enables it again",
            )
        if row.used_at is None or now - row.used_at >= USED_S:
            self._used(row, now)
        return row

    def _used(self, row: KeyRow, now: float) -> None:
        row.used_at = now
        try:
            rows.change(self._store, row, used_at=now)
        except LLM4AgentsError as error:  # a full disk refuses nobody that needs no disk
            log.warning("key_use_not_written", key_id=row.id, error=error.message)


_HINT = "llm4agents key create on the server's host makes one"


def principal_of(row: KeyRow, origin: str) -> Principal:
    return Principal(row.project, row.id, frozenset(row.scopes), origin)


def describe(row: KeyRow) -> dict[str, Any]:
    """As answers have it: nothing of the key but its id."""
    return {
        "id": row.id,
        "project": row.project,
        "name": row.name,
        "scopes": row.scopes,
        "created_at": row.created_at,
        "created_by": row.created_by,
        "expires_at": row.expires_at,
        "revoked_at": row.revoked_at,
        "used_at": row.used_at,
    }


def _gone_at(row: KeyRow, now: float) -> float | None:
    """Since when it is good no more; None: it is good."""
    if row.revoked_at is not None:  # whatever the clock says now
        return row.revoked_at
    return row.expires_at if row.expires_at is not None and row.expires_at <= now else None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _implied(maker: Principal) -> frozenset[str]:
    return frozenset(SCOPES) if maker.sees_all else frozenset()
