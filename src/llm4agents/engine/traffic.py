"""Who may reach a sandbox's ports: what is stored of it, and the key that tokens and signed URLs are made with.

Not here: tokens, signatures and what a request offers (`api.proxy.admission`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm4agents.barrier import keyfiles
from llm4agents.errors import HostSetupError

KEY_NAME: Final = "access.key"
_KEY_BYTES: Final = 32
_WHAT: Final = "the key of the ports' tokens"


@dataclass(frozen=True, slots=True)
class Traffic:
    """`public`: anybody may. Tokens and signed URLs hold for the `generation` they were made in alone."""

    public: bool = False
    generation: int = 0

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> Traffic:
        """As the store has it."""
        if stored is None:
            return cls()
        return cls(bool(stored.get("public")), int(stored.get("generation", 0)))

    def stored(self) -> dict[str, Any] | None:
        if self == Traffic():
            return None
        return {"public": self.public, "generation": self.generation}

    def changed(self, *, public: bool | None, rotate: bool) -> Traffic:
        return Traffic(
            self.public if public is None else public, self.generation + 1 if rotate else self.generation
        )


def key(state: Path) -> bytes:
    """The node's, made when there is none. Raises HostSetupError when the file is not as it should be."""
    path = state / KEY_NAME
    found = keyfiles.read(path, _WHAT)
    if found is None:
        keyfiles.make(path, secrets.token_bytes(_KEY_BYTES), _WHAT)
        found = keyfiles.read(path, _WHAT)
    if found is None or len(found) != _KEY_BYTES:
        raise HostSetupError(
            f"{_WHAT} {path} is damaged",
            hint="remove it: another is made, and tokens and signed URLs that were given out hold no more",
        )
    return found
