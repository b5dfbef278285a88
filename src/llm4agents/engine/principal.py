"""Who calls and what he may. Pure.

Not here: how he is known (`keys`, `api.access.gate`), what a route needs (`api.access.table`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT: Final = "default"
"""The project of the unix socket, and of what was there before there were projects."""

SCOPES: Final = ("read", "sandboxes", "templates", "volumes", "secrets", "project", "node")
"""`node` sees and may everything, of every project."""
ORDINARY: Final = frozenset({"read", "sandboxes", "templates", "volumes", "secrets"})
"""Of a key that is made without saying which."""

SOCKET, NOBODY = "socket", "nobody"


@dataclass(frozen=True, slots=True)
class Principal:
    """`actor`: a key's id, `socket`, or `nobody`, who has no scope at all. `origin`: the peer's address, or `unix`."""

    project: str
    actor: str
    scopes: frozenset[str]
    origin: str

    @classmethod
    def operator(cls) -> Principal:
        """Whoever can connect to the server's unix socket, which only its own user can."""
        return cls(DEFAULT, SOCKET, frozenset(SCOPES), "unix")

    @classmethod
    def nobody(cls, origin: str) -> Principal:
        """A caller without a key: nothing is his."""
        return cls("", NOBODY, frozenset(), origin)

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "node" in self.scopes

    @property
    def sees_all(self) -> bool:
        return "node" in self.scopes

    @property
    def visible(self) -> str | None:
        """The project whose things he sees; None: every one's. What lists are filtered by."""
        return None if self.sees_all else self.project

    def sees(self, project: str) -> bool:
        return self.sees_all or (self.project == project and self.actor != NOBODY)
