"""Projects of this server, held in memory: every call asks for one.

Not here: keys (`keys`), what quotas mean (`quotas`).
"""

from __future__ import annotations

import builtins
import re
import secrets
from collections.abc import Callable
from functools import cached_property
from typing import Any

from llm4agents.engine import clock
from llm4agents.engine.principal import DEFAULT
from llm4agents.errors import ConflictError, InvalidRequestError, NotFoundError
from llm4agents.store import Store
from llm4agents.store import projects as rows
from llm4agents.store.projects import ProjectRow

__all__ = ["ProjectRow", "Projects", "random_id"]

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._-]{0,62}[A-Za-z0-9])?")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


def random_id(characters: int) -> str:
    """Of a-z0-9: the part of an id that is drawn."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(characters))


class Projects:
    """One per engine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.on_disabled: list[Callable[[str], None]] = []

    @cached_property
    def _all(self) -> dict[str, ProjectRow]:
        return {row.id: row for row in rows.rows(self._store)}

    def list(self) -> builtins.list[ProjectRow]:
        return builtins.list(self._all.values())

    def of(self, project: str) -> ProjectRow | None:
        """By its id."""
        return self._all.get(project)

    def owner_of_volume(self, volume: str) -> str | None:
        """The project of the volume of that id."""
        return rows.owner_of_volume(self._store, volume)

    def get(self, project: str) -> ProjectRow:
        """By id or name. Raises NotFoundError."""
        found = self._all.get(project) or next((row for row in self.list() if row.name == project), None)
        if found is None:
            raise NotFoundError(
                f"there is no project {project[:80]!r}", hint="llm4agents project ls shows them"
            )
        return found

    def create(self, name: str, quotas: dict[str, Any] | None = None) -> ProjectRow:
        """Raises InvalidRequestError, ConflictError when one has that name."""
        if not _NAME.fullmatch(name) or name.startswith("prj_"):
            raise InvalidRequestError(
                f"{name[:80]!r} cannot be a project's name",
                hint="1 to 64 of letters, digits, space, '.', '-' and '_', with a letter or digit at both ends",
            )
        if any(row.name == name for row in self.list()):
            raise ConflictError(f"there is a project {name}", hint="llm4agents project ls shows them")
        row = ProjectRow(f"prj_{random_id(12)}", name, clock.wall_s(), quotas=dict(quotas or {}))
        rows.add(self._store, row)
        self._all[row.id] = row
        return row

    def set_quotas(self, project: str, quotas: dict[str, Any]) -> ProjectRow:
        """Replace what it may have. Raises NotFoundError."""
        row = self.get(project)
        rows.change(self._store, row, quotas=dict(quotas))
        return row

    def disable(self, project: str, *, disabled: bool = True) -> ProjectRow:
        """Its keys work no more (or again); what it has stays and runs on. Raises NotFoundError, ConflictError."""
        row = self.get(project)
        if row.id == DEFAULT:
            raise ConflictError("the default project cannot be disabled", hint="revoke its keys")
        rows.change(self._store, row, disabled_at=clock.wall_s() if disabled else None)
        if disabled:
            for tell in self.on_disabled:
                tell(row.id)
        return row
