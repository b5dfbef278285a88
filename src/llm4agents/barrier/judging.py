"""One list of rules asked about one target: found by host, judged in order, with "it depends on the request" as a third
answer. Pure. What lists there are and what follows from their answers is policy.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from llm4agents import limits
from llm4agents.barrier import addresses, resolvers, rules
from llm4agents.barrier.addresses import Address, Kind
from llm4agents.barrier.rules import Protocol, Rule

CANARY = "use-application-dns.net"
"""Browsers turn DNS over HTTPS off where this name does not resolve."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a connection goes: a name (then `address`, if any, is only the synthetic one), or a literal address.

    `asked`: the name the guest used, where a rewrite led it elsewhere.
    """

    name: str | None
    address: Address | None
    port: int
    asked: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.address, str):
            parsed = addresses.parse(self.address)
            if parsed is None:
                raise ValueError(f"{self.address!r} is no address")
            object.__setattr__(self, "address", parsed)
        if self.name is not None:
            object.__setattr__(self, "name", self.name.lower().removesuffix("."))

    @property
    def seen_as(self) -> str:
        """What Host and SNI of the guest must say."""
        return self.asked or self.name or str(self.address)

    @property
    def host(self) -> str:
        """What is contacted: whom an upstream certificate must name, and what an interceptor's Host says. A rewrite
        to another name is another host; one to an address is the same host elsewhere."""
        return self.name or self.asked or str(self.address)

    def __str__(self) -> str:
        bare = self.name or str(self.address)
        return f"[{bare}]:{self.port}" if ":" in bare else f"{bare}:{self.port}"


@dataclass(frozen=True, slots=True)
class Request:
    """`path`: as in the request line, with or without its query. `host`: Host or :authority, "" for none."""

    method: str
    path: str
    scheme: Literal["http", "https"] = "https"
    host: str = ""


@dataclass(frozen=True, slots=True)
class Floor:
    """The operator's rules. A deny there holds; where there is any allow, nothing else is allowed at all."""

    rules: tuple[Rule, ...] = ()

    @classmethod
    def load(cls, text: str) -> Floor:
        """Rule lines; blank lines and what follows a `#` are left out. Raises InvalidRequestError with the line."""
        if len(text.encode()) > limits.FLOOR_BYTES_MAX:
            rules.fail("network floor", f"{len(text.encode())} bytes", f"at most {limits.FLOOR_BYTES_MAX}")
        found = []
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            if line:
                found.append(rules.parse(line, f"network floor, line {number}", line=number))
        return cls(tuple(found))

    @property
    def is_list(self) -> bool:
        return any(rule.allow for rule in self.rules)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rules))


class RuleList:
    """Rules, found by host: what is asked of a policy must not cost as much as it has rules."""

    def __init__(self, found: Sequence[Rule]) -> None:
        self.all = tuple(found)
        self._paths: dict[int, Callable[[str], bool]] = {
            at: rules.globs(rule.path) for at, rule in enumerate(found) if rule.path is not None
        }
        self._named: dict[str, list[int]] = {}
        self._below: dict[str, list[int]] = {}
        self._any: list[int] = []
        self._nets: dict[tuple[int, int], dict[int, list[int]]] = {}
        for at, rule in enumerate(found):
            host = rule.host
            if host.kind == "name":
                self._named.setdefault(host.text, []).append(at)
            elif host.kind == "wildcard":
                self._below.setdefault(host.text, []).append(at)
            elif host.net is None:
                self._any.append(at)
            else:
                shift = host.net.max_prefixlen - host.net.prefixlen
                nets = self._nets.setdefault((host.net.version, shift), {})
                nets.setdefault(int(host.net.network_address) >> shift, []).append(at)

    def names(self, name: str) -> bool:
        """Whether a rule is about that name alone."""
        return name in self._named

    def of_name(self, name: str) -> list[int]:
        """Places of the rules that are about it, in their order."""
        found = [*self._any, *self._named.get(name, ())]
        rest = name.partition(".")[2]
        while rest:
            found += self._below.get(rest, ())
            rest = rest.partition(".")[2]
        if resolvers.is_resolver(name) or name == CANARY:
            # A `*` allows no resolver that would look up past ours: whoever wants one names it.
            found = [at for at in found if not self.all[at].allow or "." in self.all[at].host.text]
        return sorted(found)

    def of_net(self, address: Address) -> list[int]:
        found: set[int] = set()
        for one in {address, addresses.reached(address)}:
            value = int(one)
            for (version, shift), nets in self._nets.items():
                if version == one.version:
                    found.update(nets.get(value >> shift, ()))
        return sorted(found)

    def of_address(self, address: Address, kind: Kind) -> list[int]:
        """Of a literal address: rules that name it, or `*` if it is an ordinary one."""
        resolver = resolvers.is_resolver_address(address)
        found = []
        for at in [*self.of_net(address), *self._any]:
            rule = self.all[at]
            net = rule.host.net
            if rule.allow:
                if net is None and (kind is not Kind.PUBLIC or resolver):
                    continue
                if net is not None and not addresses.opens(net, address, kind):
                    continue
                if net is not None and resolver and net.prefixlen < (24 if net.version == 4 else 64):
                    continue
            found.append(at)
        return sorted(found)

    def path_matches(self, at: int, request: Request) -> bool:
        """An allow must match every way to read the path; a deny bites with any."""
        matches = self._paths.get(at)
        if matches is None:
            return True
        readings = rules.read_path(request.path)
        if self.all[at].allow:
            return all(reading is not None and matches(reading) for reading in readings)
        return any(reading is None or matches(reading) for reading in readings)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one list: the rule that decides (None: none does), whether it is decided only by requests."""

    rule: Rule | None
    allowed: bool
    on_requests: bool


def judge(
    index: RuleList, found: Sequence[int], port: int, protocol: Protocol, request: Request | None
) -> Outcome:
    conditional = False
    maybe: Rule | None = None
    for at in found:
        rule = index.all[at]
        if not rule.has_port(port) or not rule.speaks(protocol, port):
            continue
        if rule.on_requests:
            if request is not None:
                if rule.methods is not None and request.method.upper() not in rule.methods:
                    continue
                if not index.path_matches(at, request):
                    continue
            elif protocol != "tcp":  # (what is raw has no requests: a deny of some of them is a deny of it)
                conditional = True
                if rule.allow and maybe is None:
                    maybe = rule
                continue
        if not rule.allow and maybe is not None:
            break
        return Outcome(rule, rule.allow, conditional)
    return Outcome(maybe, maybe is not None, conditional)


def protocol_of(scheme: str) -> Protocol:
    return "tls" if scheme == "https" else "http"


@lru_cache(maxsize=32)
def a_kind(kind: Kind) -> str:
    if kind is Kind.HOST:
        return "this host's own"
    return f"an {kind.value}" if kind.value[0] in "aeiou" else f"a {kind.value}"
