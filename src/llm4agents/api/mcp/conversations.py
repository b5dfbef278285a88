"""Whose sandboxes a call over HTTP acts on: of its session, or (protocols without one) of its key.

A conversation is a name for a default sandbox and costs little: many are known for long, and when one is forgotten its
sandbox is left to its own timeouts. Not here: the protocol's sessions, which `mcp` keeps.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llm4agents import limits
from llm4agents.engine.principal import Principal
from llm4agents.errors import InvalidRequestError
from llm4agents.tools.boxes import Boxes
from llm4agents.tools.inside import InsideTransport

IDLE_S: Final = 900.0
_KNOWN: Final = ("template", "sandbox", "timeout", "memory_mib", "vcpus", "net", "session")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the URL says of the default sandbox. It is the user's, in his client's configuration; no tool has it."""

    template: str = limits.DEFAULT_TEMPLATE
    sandbox: str | None = None
    timeout: float = IDLE_S
    memory_mib: int | None = None
    vcpus: int | None = None
    net: tuple[str, ...] = ()
    session: str = ""
    """Tells conversations of one key apart, for clients whose protocol does not."""

    @classmethod
    def of(cls, query: Sequence[tuple[str, str]]) -> Wanted:
        """Raises InvalidRequestError for what is not known, or no number."""
        said: dict[str, Any] = {}
        for name, value in query:
            if name not in _KNOWN:
                raise InvalidRequestError(
                    f"/mcp takes no {name[:40]!r}", hint=f"it takes {', '.join(_KNOWN)}"
                )
            if name == "net":
                said["net"] = (*said.get("net", ()), value)
            elif name in said:
                raise InvalidRequestError(f"/mcp takes one {name}")
            elif name in ("timeout", "memory_mib", "vcpus"):
                said[name] = _number(name, value)
            elif not 1 <= len(value) <= 128:
                raise InvalidRequestError(f"/mcp: {name} has 1 to 128 characters")
            else:
                said[name] = value
        return cls(**said)

    def network(self) -> Mapping[str, Any] | None:
        """As `--net` has it: a word is a profile, several are a rule."""
        if not self.net:
            return None
        profiles = [word.strip() for word in self.net if len(word.split()) == 1]
        if len(profiles) > 1:
            raise InvalidRequestError(f"/mcp: net is {' and '.join(profiles)}", hint="only one profile")
        rules = [word for word in self.net if len(word.split()) != 1]
        found = {"profile": profiles[0] if profiles else "none", "rules": rules}
        return {name: value for name, value in found.items() if value}


def _number(name: str, value: str) -> float | int:
    if not value.isdecimal() or not 1 <= len(value) <= 7:
        raise InvalidRequestError(f"/mcp: {name}={value[:40]!r} is no number")
    return float(value) if name == "timeout" else int(value)


@dataclass(slots=True)
class _Known:
    boxes: Boxes
    used_s: float


Key = tuple[str, str, str, Wanted | None]


class Conversations:
    """One per server."""

    def __init__(self, way: Callable[[Principal], InsideTransport]) -> None:
        self._way = way
        self._known: OrderedDict[Key, _Known] = OrderedDict()

    def boxes(self, who: Principal, session: str | None, wanted: Wanted) -> Boxes:
        """Those of a session of `who`'s; without one, of his key and of what his URL says."""
        key = self._key(who, session, wanted)
        now = time.monotonic()
        known = self._known.get(key)
        if known is None:
            boxes = Boxes(
                template=wanted.template,
                given=wanted.sandbox,
                keep=False,
                timeout=wanted.timeout,
                memory_mib=wanted.memory_mib,
                vcpus=wanted.vcpus,
                network=wanted.network(),
                way=self._way(who),
            )
            known = self._known[key] = _Known(boxes, now)
            self._forget(now)
        known.used_s = now
        self._known.move_to_end(key)
        return known.boxes

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return any(known.boxes.busy for known in self._known.values())

    async def end(self, who: Principal, session: str) -> None:
        """The client has said goodbye: the session's default sandbox ends."""
        known = self._known.pop((who.project, who.actor, session, None), None)
        if known is not None:
            await known.boxes.close()

    def _forget(self, now: float) -> None:
        """The longest unused ones that are too old or too many; first those of a project that has too many."""
        newest = next(reversed(self._known))
        mine = [key for key in self._known if key[0] == newest[0] and not self._known[key].boxes.busy]
        for key in mine[: max(0, len(mine) - limits.MCP_CONVERSATIONS_PER_PROJECT_MAX)]:
            del self._known[key]
        for key, known in list(self._known.items()):
            old = now - known.used_s > limits.MCP_CONVERSATION_S
            if not old and len(self._known) <= limits.MCP_CONVERSATIONS_MAX:
                return
            if not known.boxes.busy:
                del self._known[key]

    @staticmethod
    def _key(who: Principal, session: str | None, wanted: Wanted) -> Key:
        return (who.project, who.actor, session or "", None if session else wanted)
