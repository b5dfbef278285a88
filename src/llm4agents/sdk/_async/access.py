"""Who may call a server: keys, projects, invites, the audit. Not here: a key of one's own (`LLM4AGENTS_API_KEY`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llm4agents.sdk import _wire
from llm4agents.sdk._async.transport import AsyncTransport


class AsyncAccess:
    """The part of `AsyncClient` that is about callers. Times in unix seconds."""

    _transport: AsyncTransport

    async def whoami(self) -> dict[str, Any]:
        """`project`, `actor`, `scopes`, `quotas`, `used`: the caller, as the server sees him."""
        return await self._transport.json("GET", "/v1/whoami")

    async def create_key(
        self,
        name: str,
        *,
        project: str | None = None,
        scopes: Sequence[str] | None = None,
        expires_days: float | None = None,
    ) -> dict[str, Any]:
        """A new API key: `key` is in this answer alone. Of the caller's project, unless he may see all.

        Without `scopes` it may do everything but make keys (`project`) and run the server (`node`). Raises
        ForbiddenError for a scope that the caller has not.
        """
        body: dict[str, Any] = {"name": name, "project": project, "expires_days": expires_days}
        body["scopes"] = None if scopes is None else list(scopes)
        return await self._transport.json("POST", "/v1/keys", _wire.without_none(body))

    async def keys(self) -> list[dict[str, Any]]:
        """Every key of the project, also those that are revoked; no key itself."""
        answer = await self._transport.json("GET", "/v1/keys")
        return list(answer.get("data") or ())

    async def revoke_key(self, key: str) -> dict[str, Any]:
        """By its id (`key_…`): it is no key from now on. Raises NotFoundError."""
        return await self._transport.json("DELETE", f"/v1/keys/{_wire.segment(key)}")

    async def create_project(self, name: str, quotas: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Raises ConflictError when there is one of that name, InvalidRequestError."""
        return await self._transport.json(
            "POST", "/v1/projects", {"name": name, "quotas": dict(quotas or {})}
        )

    async def projects(self) -> list[dict[str, Any]]:
        """Every project, with its `quotas` and what is `used` of them."""
        answer = await self._transport.json("GET", "/v1/projects")
        return list(answer.get("data") or ())

    async def project(self, project: str) -> dict[str, Any]:
        """By id or name. Raises NotFoundError."""
        return await self._transport.json("GET", f"/v1/projects/{_wire.segment(project)}")

    async def change_project(
        self,
        project: str,
        *,
        quotas: Mapping[str, float | None] | None = None,
        disabled: bool | None = None,
    ) -> dict[str, Any]:
        """Other quotas (None: no bound; those not named stay), or whether its keys work. Raises NotFoundError."""
        body: dict[str, Any] = {"quotas": None if quotas is None else dict(quotas), "disabled": disabled}
        path = f"/v1/projects/{_wire.segment(project)}"
        return await self._transport.json("PATCH", path, _wire.without_none(body))

    async def create_invite(
        self,
        *,
        note: str = "",
        uses: int = 1,
        expires_days: float | None = None,
        quotas: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """An invite: its code is `invite` in this answer alone. `quotas`: of each project that comes of it."""
        body = {"note": note, "uses": uses, "expires_days": expires_days, "quotas": dict(quotas or {})}
        return await self._transport.json("POST", "/v1/invites", _wire.without_none(body))

    async def invites(self) -> list[dict[str, Any]]:
        answer = await self._transport.json("GET", "/v1/invites")
        return list(answer.get("data") or ())

    async def revoke_invite(self, invite: str) -> dict[str, Any]:
        """By its id (`inv_…`). Raises NotFoundError."""
        return await self._transport.json("DELETE", f"/v1/invites/{_wire.segment(invite)}")

    async def register(self, invite: str, name: str) -> dict[str, Any]:
        """A project of one's own for an invite's code, without a key: `project`, and `key`, in this answer alone.

        Raises ForbiddenError (no such invite, or the server takes none), ConflictError (the name), QuotaError.
        """
        return await self._transport.public("POST", "/v1/register", {"invite": invite, "name": name})

    async def audit(
        self,
        *,
        limit: int = 100,
        before: int | None = None,
        actor: str | None = None,
        since: float | None = None,
    ) -> list[dict[str, Any]]:
        """What was changed and what was refused, the newest first; `before`: older than the row of that id."""
        params = {"limit": limit, "before": before, "actor": actor, "since": since}
        answer = await self._transport.json("GET", "/v1/audit", params=params)
        return list(answer.get("data") or ())
