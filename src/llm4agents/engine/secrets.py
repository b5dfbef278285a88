"""Secrets of projects: set, listed, removed; and their values for the interceptor, which nothing else is given.

Write-only: no answer, event, log line or error has a value in it, and no function here but `resolve` returns one. What
else lies sealed in the store has the same key (`seal`). Not here: sealing (`barrier.vault`), bindings and where a value
is put in (`barrier.policy`, the interceptor).
"""

from __future__ import annotations

import asyncio
import builtins
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import structlog

from llm4agents import limits
from llm4agents.barrier.vault import CannotOpen, Value, Vault, check_name, value_of
from llm4agents.engine import clock
from llm4agents.engine.principal import DEFAULT
from llm4agents.errors import HostSetupError, InvalidRequestError, NotFoundError
from llm4agents.store import SandboxRow, Store
from llm4agents.store import secrets as rows

log = structlog.get_logger()

OnChange: TypeAlias = "Callable[[str, str], Awaitable[None]]"
"""Called with project and name of a secret that has a new value, or none; awaited before the call is answered."""


class Secrets:
    """One per engine. `on_change` is appended to by whoever holds values for somebody (`engine.network`)."""

    def __init__(self, store: Store, vault: Vault) -> None:
        self._store, self._vault = store, vault
        self.on_change: builtins.list[OnChange] = []

    # -- for callers

    def list(self, project: str = DEFAULT) -> builtins.list[dict[str, Any]]:
        """`{name, version, created_at, updated_at}` of each of a project, by name."""
        return [_described(row) for row in rows.rows(self._store, project)]

    async def set(self, name: str, given: object, project: str = DEFAULT) -> dict[str, Any]:
        """Make a secret, or give it a new value; whoever uses it has the new one when this returns.

        Raises InvalidRequestError, CapacityError, and HostSetupError when the vault's key is lost or not in order.
        """
        check_name(name)
        value = value_of(given)
        self._have_key(project)
        row = rows.put(
            self._store,
            name,
            lambda version: self._vault.seal(_sealed_as(project, name), version, value),
            clock.wall_s(),
            most=limits.SECRETS_MAX,
            project=project,
        )
        log.info("secret_set", secret=name, project=project, version=row.version)
        await self._changed(project, name)
        return _described(row)

    async def remove(self, name: str, project: str = DEFAULT) -> dict[str, Any]:
        """Forget a secret: `{name, removed: true, used_by: [sandbox…]}`. Raises NotFoundError.

        One that is in use goes too: what a sandbox then sends where it would have been put in is refused, and audited.
        """
        if not rows.remove(self._store, check_name(name), project):
            raise NotFoundError(f"there is no secret {name}", hint="llm4agents secret ls shows them")
        log.info("secret_removed", secret=name, project=project)
        await self._changed(project, name)
        return {"name": name, "removed": True, "used_by": self.used_by(name, project)}

    def used_by(self, name: str, project: str = DEFAULT) -> builtins.list[str]:
        """The project's sandboxes that have not ended and have a binding of that secret."""
        return [row.id for row in self._store.alive(project) if name in names_of(row)]

    # -- for the engine

    def check(self, names: Iterable[str], project: str = DEFAULT) -> None:
        """Before a project's sandbox is given bindings of `names`: each must be there, and together they must fit.

        Raises InvalidRequestError that names those that are missing, HostSetupError as `resolve`.
        """
        wanted = sorted(set(names))
        found = self.resolve(wanted, project)
        if missing := [name for name in wanted if name not in found]:
            # Shown only if it can be a name: who mixes up name and value must not find the value in an answer.
            said = ", ".join(_shown(name) for name in missing)
            raise InvalidRequestError(
                f"there is no secret {said}", hint="llm4agents secret set NAME reads its value from stdin"
            )
        size = len(json.dumps(found))
        if size > limits.SANDBOX_SECRETS_BYTES_MAX:
            raise InvalidRequestError(
                f"the secrets that one sandbox's credentials name may have {limits.SANDBOX_SECRETS_BYTES_MAX} bytes "
                f"together; these have {size}"
            )

    def resolve(self, names: Iterable[str], project: str = DEFAULT) -> dict[str, Value]:
        """The values of a project's `names`, for the interceptor's memory; those that are not there are left out.

        Raises HostSetupError when one cannot be opened: the key is lost, or another; it says what must be set again.
        """
        found: dict[str, Value] = {}
        for name in sorted(set(names)):
            row = rows.get(self._store, name, project)
            if row is None:
                continue
            try:
                found[name] = self._open(row)
            except CannotOpen as error:
                raise self._lost(error.reason, project) from None
        return found

    # -- what else lies sealed in the store

    def seal(self, what: str, body: bytes) -> bytes:
        """`body` under the key of the secrets, as nothing but `what`. Raises HostSetupError when the key is lost."""
        if self._vault.lost:
            if rows.rows(self._store):
                raise HostSetupError("the key that the server seals with is lost", hint="put it back")
            self._vault.make()
        return self._vault.seal_bytes(what, body)

    def unseal(self, what: str, sealed: bytes) -> bytes:
        """It again. Raises HostSetupError: the key is lost, or another."""
        try:
            return self._vault.open_bytes(what, sealed)
        except CannotOpen:
            raise HostSetupError(
                "it lies sealed in the store, and the server's key does not open it",
                hint="put the right key back",
            ) from None

    # -- inside

    def _have_key(self, project: str) -> None:
        """A key is made for the first secret only: with others sealed, one that is not there is lost."""
        if self._vault.lost:
            if rows.rows(self._store):
                raise self._lost(f"{self._vault.path} is gone", project)
            self._vault.make()

    def _open(self, row: rows.SecretRow) -> Value:
        return self._vault.open(_sealed_as(row.project, row.name), row.version, row.sealed)

    def _lost(self, reason: str, project: str) -> HostSetupError:
        unreadable = []
        for row in rows.rows(self._store, project):
            try:
                self._open(row)
            except CannotOpen:
                unreadable.append(row.name)
        names = " ".join(unreadable)
        return HostSetupError(
            f"these secrets cannot be read: {', '.join(unreadable)}: {reason}",
            hint=f"put the right key back; or `llm4agents secret rm {names}`, and set them again",
            secrets=unreadable,
        )

    async def _changed(self, project: str, name: str) -> None:
        told = await asyncio.gather(*(act(project, name) for act in self.on_change), return_exceptions=True)
        for error in told:
            if isinstance(error, BaseException):
                # Its type alone: what it says is somebody else's text, and may have been made with a value.
                log.error("secret_not_passed_on", secret=name, error=type(error).__name__)


def _sealed_as(project: str, name: str) -> str:
    """What a sealed value is bound to: no other secret's can be put in its place. No name has a `/`."""
    return name if project == DEFAULT else f"{project}/{name}"


def names_of(row: SandboxRow) -> set[str]:
    """The secrets that the bindings of a sandbox's network name."""
    network = row.network
    bindings = network.get("credentials") if isinstance(network, dict) else None
    return {
        str(one["secret"])
        for one in (bindings if isinstance(bindings, list) else ())
        if isinstance(one, dict) and "secret" in one
    }


def _shown(name: str) -> str:
    try:
        return check_name(name) if len(name) <= 40 else "of that name"
    except InvalidRequestError:
        return "of that name"


def _described(row: rows.SecretRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "version": row.version,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    }
