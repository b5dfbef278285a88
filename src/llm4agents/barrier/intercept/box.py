"""A sandbox as the interceptor knows it: its policy, its secrets' values, its connections, its meters."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llm4agents.barrier.gateway.meter import Meter
from llm4agents.barrier.intercept.credentials import Value, Values
from llm4agents.barrier.intercept.placeholders import pattern
from llm4agents.barrier.intercept.striking import Patterns
from llm4agents.barrier.intercept.turns import Turns
from llm4agents.barrier.policy import Policy, Target, Verdict

if TYPE_CHECKING:
    from llm4agents.barrier.intercept.connection import Connection

_PATTERNS_KEPT = 32


class Box:
    def __init__(
        self,
        ident: str,
        policy: Policy,
        secrets: Mapping[str, Value],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.id = ident
        self.connections: dict[str, Connection] = {}
        self.turns = Turns()
        self.waiting = 0
        """Bytes of bodies that wait for a placeholder or a signature."""
        self._write = write
        self._meters: dict[str, Meter] = {}
        self._patterns: OrderedDict[frozenset[bytes], Patterns] = OrderedDict()
        self.values = Values(secrets)
        self.obey(policy)

    def obey(self, policy: Policy) -> int:
        """The new policy, for what is open too; how many connections were cut."""
        self.policy = policy
        self.placeholders = [(b.secret, pattern(b.placeholder)) for b in policy.bindings if b.placeholder]
        cut = 0
        for connection in list(self.connections.values()):
            if (found := connection.denied_now()) is not None:
                rule, reason = found
                connection.cut(f"cut by a new policy: {reason}", rule)
                cut += 1
        return cut

    def know(self, secrets: Mapping[str, Value], *, add: bool) -> None:
        self.values = self.values.with_(secrets) if add else self.values.renewed(secrets)

    def end(self, *, changed: bool = False) -> None:
        """The sandbox has ended, or its policy has `changed` into one that nothing is looked into for."""
        for connection in list(self.connections.values()):
            if changed:
                connection.cut("cut by a new policy: nothing is looked into any more", "policy")
            else:
                connection.cut("the sandbox has ended")

    def meter(self, verdict: Verdict) -> Meter | None:
        """The one of a rule, for as long as the sandbox lives; None when the rule has no limits."""
        if verdict.rate_bytes_per_s is None and verdict.bytes_max is None:
            return None
        found = self._meters.get(verdict.rule)
        if found is None or (found.rate, found.most) != (verdict.rate_bytes_per_s, verdict.bytes_max):
            used = found.used if found is not None else 0
            found = self._meters[verdict.rule] = Meter(verdict.rate_bytes_per_s, verdict.bytes_max, used)
        return found

    def patterns(self, forms: frozenset[bytes]) -> Patterns:
        found = self._patterns.get(forms)
        if found is None:
            found = self._patterns[forms] = Patterns(forms)
            while len(self._patterns) > _PATTERNS_KEPT:
                self._patterns.popitem(last=False)
        return found

    # -- what an exchange asks about its connection -------------------------------------------------------

    def asked_port(self, flow: str, target: Target) -> int:
        connection = self.connections.get(flow)
        return target.port if connection is None else connection.port

    def counted(self, flow: str) -> tuple[int, int]:
        """Bytes from and to the guest since the last time this was asked."""
        connection = self.connections.get(flow)
        return (0, 0) if connection is None else connection.count()

    def address(self, flow: str) -> str | None:
        connection = self.connections.get(flow)
        return None if connection is None else connection.dialled

    def write(self, **record: Any) -> None:
        known = {key: value for key, value in record.items() if value is not None}
        self._write({"at": round(time.time(), 3), "sandbox": self.id, "kind": "request", **known})
