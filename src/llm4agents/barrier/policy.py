"""One pure function in several steps: what a sandbox may reach, and why. No I/O, no clock, no state.

A connection is judged when it arrives (`connect`), again when its first bytes tell its protocol (`connect` with one),
each resolved address before it is dialled (`address`), and each request where an interceptor reads them (`request`).
The first rule that matches decides, then the profile, then deny. The operator's floor is a second list that must
agree at every step: so nothing in a sandbox's own rules can widen it.

A rewrite comes before all of it: the target that a name is led to is what rules, floor and credentials are about. The
name that the guest asked for (`Target.asked`) is only what Host and SNI must say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llm4agents import limits
from llm4agents.barrier import addresses, resolvers, rules, why
from llm4agents.barrier.addresses import NEVER, Address, Kind
from llm4agents.barrier.judging import CANARY, Floor, Request, RuleList, Target, a_kind, judge, protocol_of
from llm4agents.barrier.network import Binding, Network, Packages, Rewrite
from llm4agents.barrier.rules import PROTOCOLS, Protocol, Rule
from llm4agents.barrier.why import Step

__all__ = ["CANARY", "Floor", "Policy", "Request", "Step", "Target", "Verdict", "Via"]

Via = Literal["splice", "raw", "intercept"]
_DNS_OVER_TLS = 853
_PLAIN = re.compile(r"[A-Z]{1,10} /[A-Za-z0-9._/~-]{0,120}")
"""Methods and paths that are a rule's as they are."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rule`: its text, "profile NAME", "floor: RULE", "address" or "default". `reason`: a sentence for whoever was
    refused, with the way out. `via`, `raw` and `protocols` count only when allowed: how to carry the connection,
    whether bytes that are neither HTTP nor TLS may pass, and what may be spoken."""

    allowed: bool
    rule: str
    reason: str
    via: Via = "splice"
    raw: bool = False
    rate_bytes_per_s: int | None = None
    bytes_max: int | None = None
    protocols: tuple[Protocol, ...] = ()


class Policy:
    """Compiled: a network, the floor over it, and what profile `packages` came to on this host."""

    def __init__(self, network: Network, floor: Floor, packages: Packages | None) -> None:
        self.network = network
        self.floor = floor
        self.packages = packages if network.profile == "packages" else None
        self._floor = RuleList(floor.rules)
        self._own = RuleList(network.rules)
        hosts = self.packages.hosts if self.packages is not None else ()
        self._profile = RuleList([rule for host in hosts for rule in host.rules()])
        self._rewrites: Mapping[str, Rewrite] = {
            rewrite.name: rewrite
            for rewrite in (*(self.packages.rewrites if self.packages else ()), *network.rewrites)
        }
        own_bindings = self.packages.credentials if self.packages is not None else ()
        self.bindings: tuple[Binding, ...] = (*network.credentials, *own_bindings)
        self._binding_paths = [
            None if binding.path is None else rules.globs(binding.path) for binding in self.bindings
        ]
        self._resolved: dict[tuple[object, ...], Verdict] = {}

    @classmethod
    def compile(
        cls, network: Network, *, floor: Floor | None = None, packages: Packages | None = None
    ) -> Policy:
        """Raises InvalidRequestError: profile `packages` without `packages`, a credential for a host that nothing
        allows, or too much of everything."""
        if network.profile == "packages" and packages is None:
            rules.fail("network", "profile packages", "what the host's tools use was not found out")
        policy = cls(network, floor or Floor(), packages)
        for binding in network.credentials:
            if not policy._may_reach(binding):
                rules.fail(
                    f"credential {binding.secret}",
                    f"no rule allows {binding.host}:{binding.port}, and a credential allows nothing by itself",
                    f"add the rule `allow {binding.host}"
                    + ("`" if binding.port in (80, 443) else f":{binding.port}`"),
                )
        size = len(json.dumps(policy.to_json()))
        if size > limits.CONTROL_MESSAGE_BYTES_MAX - 4_096:
            rules.fail("network", f"{size} bytes with floor and profile", "fewer rules")
        return policy

    def _may_reach(self, binding: Binding) -> bool:
        host, protocol = binding.host, protocol_of(binding.scheme)
        if host.net is not None:
            return self.connect(Target(None, host.net.network_address, binding.port), protocol).allowed
        if host.kind == "name":
            return self.connect(self.rewrite(Target(host.text, None, binding.port)), protocol).allowed
        if self.network.profile == "public":
            return True
        return any(
            rule.allow and rule.host.overlaps(host) and rule.has_port(binding.port)
            for rule in (*self._own.all, *self._profile.all)
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Policy:
        """What `to_json` made. Raises InvalidRequestError."""
        if not isinstance(value, Mapping) or not {"network", "floor", "packages"} <= set(value):
            rules.fail("policy", "it is none", "what Policy.to_json makes")
        packages = value["packages"]
        return cls(
            Network.from_json(value["network"]),
            Floor.load(str(value["floor"])),
            None if packages is None else Packages.from_json(packages),
        )

    def to_json(self) -> dict[str, Any]:
        packages = self.packages
        return {
            "network": self.network.to_json(),
            "floor": str(self.floor),
            "packages": None if packages is None else replace(packages, environment={}, files={}).to_json(),
        }

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the secrets that its credentials put in."""
        return tuple(dict.fromkeys(binding.secret for binding in self.bindings))

    # The steps

    def rewrite(self, target: Target) -> Target:
        """Where it is led to (once; a rewrite's target is not rewritten again); the target itself if nowhere."""
        rewrite = None if target.name is None or target.asked else self._rewrites.get(target.name)
        if rewrite is None:
            return target
        return Target(rewrite.to_name, rewrite.to_address, rewrite.port or target.port, asked=target.name)

    def resolve(self, name: str) -> Verdict:
        """Whether the resolver may answer for the name: whether any connection to it could be allowed."""
        name = name.lower().removesuffix(".")
        if addresses.is_numeric(name) or not name or ":" in name:
            return Verdict(False, "default", f"{name[:100]!r} is no name")
        rewrite = self._rewrites.get(name)
        probe = self.rewrite(Target(name, None, 443))
        found = (
            self.places(self._floor, probe),
            self.places(self._own, probe),
            self.places(self._profile, probe),
        )
        special = resolvers.is_resolver(probe.name or "") or probe.name == CANARY
        key = (*map(tuple, found), special, probe if rewrite else None)
        known = self._resolved.get(key)
        if known is not None and known.allowed:
            return known
        if rewrite is not None and rewrite.port is not None:
            ports: Collection[int] = (rewrite.port,)
        elif known is not None:
            ports = (443,)  # no port is open: another name was asked for that the same rules are about
        else:
            edges = {443, 80, 1024}
            for index, places in zip((self._floor, self._own, self._profile), found, strict=True):
                for at in places:
                    for low, high in index.all[at].spans():
                        edges |= {low, min(high + 1, 65535)}
            ports = sorted(edges, key=lambda port: (port not in (443, 80), port))
        verdict = first = None
        for port in ports:
            verdict = self._connect(replace(probe, port=port), found, None)
            first = verdict if port == 443 or first is None else first
            if verdict.allowed:
                break
        assert verdict is not None and first is not None
        verdict = verdict if verdict.allowed else first
        if len(self._resolved) < 4_096:
            self._resolved[key] = verdict
        return verdict

    def connect(self, target: Target, protocol: Protocol | None = None) -> Verdict:
        """Before the first byte is read; with `protocol`, once the first bytes told it ("tls", "http" or, for
        everything else, "tcp"). `target`: after `rewrite`."""
        found = (
            self.places(self._floor, target),
            self.places(self._own, target),
            self.places(self._profile, target),
        )
        return self._connect(target, found, protocol)

    def request(self, target: Target, request: Request) -> Verdict:
        """One request of an intercepted connection. `target`: after `rewrite`."""
        if request.host and not _same_host(request.host, target):
            return Verdict(
                False,
                "host",
                f"the request's Host {request.host[:100]!r} is not {target.seen_as}, where its connection goes",
            )
        found = (
            self.places(self._floor, target),
            self.places(self._own, target),
            self.places(self._profile, target),
        )
        return self._decide(target, found, protocol_of(request.scheme), request)[0]

    def address(self, target: Target, address: Address | str, own: Collection[Address] = ()) -> Verdict:
        """The address that is about to be dialled for a target that `connect` allowed. `own`: this host's addresses.

        A name alone opens ordinary addresses only; every other needs a rule that names the address (for profile
        `packages`: the host's own configuration naming the host). A deny of addresses before the name's allow bites.
        """
        if isinstance(address, str):
            parsed = addresses.parse(address)
            if parsed is None:
                return Verdict(False, "address", f"{address[:60]!r} is no address")
            address = parsed
        kind = addresses.classify(address, own)
        what = f"{target.seen_as} resolves to {address}" if target.name is not None else str(address)
        if kind in NEVER:
            return Verdict(
                False, "address", f"{what}, {a_kind(kind)} address; nothing can be connected to there"
            )
        for index in (self._floor, self._own):
            opened, deny = self._opened(index, target, address, kind)
            text = "floor: " if index is self._floor else ""
            if deny is not None:
                return Verdict(
                    False, f"{text}{deny}", f"{what}, which {text and 'the operator’s '}{text}`{deny}` denies"
                )
            if kind is Kind.PUBLIC or opened:
                continue
            if index is self._floor:
                if self.floor.is_list:
                    return Verdict(
                        False,
                        "floor: default",
                        f"{what}, {a_kind(kind)} address, and the operator's floor does not list it",
                    )
                continue
            if kind is not Kind.METADATA and self._packages_name(target):
                continue
            return Verdict(
                False,
                "address",
                f"{what}, {a_kind(kind)} address, which a name alone never opens. Way out: a rule that names it, "
                f"`allow {Target(None, address, target.port)}`",
            )
        if target.name is not None and resolvers.is_resolver_address(address):
            named = any(rule.host.kind == "name" and rule.host.text == target.name for rule in self._own.all)
            if not named and not resolvers.is_resolver(target.name):
                opened, _ = self._opened(self._own, target, address, kind)
                if not opened:
                    return Verdict(
                        False, "address", f"{what}, a public resolver's address. {_resolver_way_out}"
                    )
        return Verdict(True, "address", f"{what}, {a_kind(kind)} address")

    def credentials(self, target: Target, request: Request) -> tuple[Binding, ...]:
        """What is put into a request that was allowed. `target`: after `rewrite`."""
        found = []
        for binding, path in zip(self.bindings, self._binding_paths, strict=True):
            if binding.scheme != request.scheme or not _bound(binding, target):
                continue
            if binding.methods is not None and request.method.upper() not in binding.methods:
                continue
            if path is not None and not all(
                reading is not None and path(reading) for reading in rules.read_path(request.path)
            ):
                continue
            found.append(binding)
        return tuple(found)

    def bound(self, target: Target) -> tuple[Binding, ...]:
        """Those of the target's host, whatever the port, method and path: what any request may have given it."""
        return tuple(binding for binding in self.bindings if _bound_host(binding, target))

    def names(self, target: Target) -> bool:
        """Whether the target's name may be short for another (by the host's search domains): where a rule or the host's
        own configuration names just it. Else a name would be judged that is not the one that is contacted; so too where
        the operator's floor is about names that its short form does not match."""
        name = target.name or ""
        return self._profile.names(name) or (self._own.names(name) and not self._floor.all)

    def intercepts(self, target: Target) -> bool:
        verdict = self.connect(target)
        return verdict.allowed and verdict.via == "intercept"

    def why(self, text: str, resolved: Sequence[str] = (), own: Collection[Address] = ()) -> dict[str, Any]:
        """`{allowed, rule, reason, via, steps: [{rule, matched, why}]}` for a URL or `host:port`; `resolved`: the
        addresses its name has, judged too. Raises InvalidRequestError."""
        return why.why(self, text, resolved, own)

    def explain(self, text: str) -> list[Step]:
        """Every rule looked at for a URL or `host:port`, and why it did or did not match; the last says the end.
        Raises InvalidRequestError."""
        return why.explain(self, text)

    # How

    def lists(self) -> list[tuple[str, RuleList]]:
        """Its lists in the order in which they are asked, each with what is put before its rules in words."""
        found = [("floor: ", self._floor), ("", self._own)]
        return [*found, ("packages: ", self._profile)] if self.packages is not None else found

    def places(self, index: RuleList, target: Target) -> list[int]:
        """Places of the list's rules that are about the target's host."""
        if not index.all:
            return []
        if target.name is not None:
            return index.of_name(target.name)
        assert target.address is not None
        return index.of_address(target.address, addresses.classify(target.address))

    def _connect(
        self, target: Target, found: tuple[list[int], list[int], list[int]], protocol: Protocol | None
    ) -> Verdict:
        judged = {p: self._decide(target, found, p, None) for p in PROTOCOLS}
        allowed = tuple(p for p in PROTOCOLS if judged[p][0].allowed)
        asked = allowed if protocol is None else tuple(p for p in allowed if p == protocol)
        if not asked:
            verdict = judged[protocol or "tls"][0]
            if protocol is not None and allowed:
                spoken = {"tls": "TLS", "http": "plain HTTP", "tcp": "what is neither HTTP nor TLS"}[protocol]
                return replace(verdict, reason=f"{spoken} to {target}: {verdict.reason}")
            return verdict
        intercepted = [p for p in asked if p != "tcp" and (judged[p][1] or self._reads(target, p))]
        verdict = judged[(intercepted or asked)[0]][0]
        raw = "tcp" in allowed
        via: Via = "intercept" if intercepted else "raw" if raw else "splice"
        return replace(verdict, via=via, raw=raw, protocols=allowed)

    def _reads(self, target: Target, protocol: Protocol) -> bool:
        """Whether requests are read for another reason than rules."""
        if target.asked is not None and target.name is not None:
            return True  # another host: SNI, certificate and Host must become its own
        return any(
            # Also the other of the two ways to a host's pages: what was put there by the one is not read by the other.
            (target.port in (80, 443) and _bound_host(b, target))
            or (protocol_of(b.scheme) == protocol and _bound(b, target))
            for b in self.bindings
        )

    def _decide(
        self,
        target: Target,
        found: tuple[list[int], list[int], list[int]],
        protocol: Protocol,
        request: Request | None,
    ) -> tuple[Verdict, bool]:
        """Of one protocol: the verdict, and whether it holds only for some requests."""
        floor = judge(self._floor, found[0], target.port, protocol, request)
        if floor.rule is None and self.floor.is_list:
            return Verdict(False, "floor: default", _floor_default(target)), False
        if floor.rule is not None and not floor.allowed:
            return Verdict(False, f"floor: {floor.rule}", _floor_deny(target, floor.rule)), False
        own = judge(self._own, found[1], target.port, protocol, request)
        conditional = floor.on_requests or own.on_requests
        if own.rule is not None:
            if not own.allowed:
                where = f" {request.method} {request.path.partition('?')[0][:200]}" if request else ""
                return (
                    Verdict(
                        False, str(own.rule), f"{target}{where}: denied by the sandbox's rule `{own.rule}`"
                    ),
                    conditional,
                )
            return self._allow(str(own.rule), target, own.rule, floor.rule), conditional
        profile = self.network.profile
        if profile == "public":
            refused = self._not_public(target, protocol)
            if refused is not None:
                return Verdict(False, "profile public", refused), conditional
            return self._allow("profile public", target, None, floor.rule), conditional
        if profile == "packages":
            inner = judge(self._profile, found[2], target.port, protocol, request)
            if inner.rule is not None and inner.allowed:
                verdict = self._allow("profile packages", target, inner.rule, floor.rule)
                return verdict, conditional or inner.on_requests
        return Verdict(False, "default", self._default(target, request, bool(found[2]))), conditional

    def _allow(self, rule: str, target: Target, own: Rule | None, floor: Rule | None) -> Verdict:
        rates = [r.rate_bytes_per_s for r in (own, floor) if r is not None and r.rate_bytes_per_s is not None]
        sizes = [r.bytes_max for r in (own, floor) if r is not None and r.bytes_max is not None]
        return Verdict(
            True,
            rule,
            f"{target}: allowed by {rule if rule.startswith('profile ') else f'the rule `{rule}`'}",
            rate_bytes_per_s=min(rates, default=None),
            bytes_max=min(sizes, default=None),
        )

    def _not_public(self, target: Target, protocol: Protocol) -> str | None:
        if target.name is not None and (target.name == CANARY or resolvers.is_resolver(target.name)):
            return f"{target.name} is a public resolver. {_resolver_way_out}"
        if target.name is None:
            assert target.address is not None
            kind = addresses.classify(target.address)
            if kind is not Kind.PUBLIC:
                return (
                    f"{target.address} is {a_kind(kind)} address, which profile `public` leaves out. Way out: a rule "
                    f"that names it, `allow {target}`"
                )
            if resolvers.is_resolver_address(target.address):
                return f"{target.address} is a public resolver's. {_resolver_way_out}"
        if target.port == _DNS_OVER_TLS:
            return f"{target}: DNS over TLS. {_resolver_way_out}"
        if protocol == "tcp" and target.port in (80, 443):
            return f"{target}: port {target.port} is for HTTP and TLS. Way out: the rule `allow tcp {target}`"
        return None

    def _default(self, target: Target, request: Request | None, known: bool) -> str:
        profile = self.network.profile
        rule = f"allow {target.host}" if target.port in (80, 443) and target.name else f"allow {target}"
        if request is not None and _PLAIN.fullmatch(f"{request.method} {request.path.partition('?')[0]}"):
            # No wider than what was asked for: whoever follows the advice opens one door, not the house.
            rule = f"allow {request.method} {rule.removeprefix('allow ')}{request.path.partition('?')[0]}"
        if profile == "packages" and known and request is not None:
            return (
                f"{request.method} {request.path.partition('?')[0][:200]}: profile `packages` only reads what package "
                f"tools need from {target.host}. Way out: whoever made this sandbox adds the rule `{rule}`"
            )
        what = str(target)
        kind = Kind.PUBLIC if target.address is None or target.name else addresses.classify(target.address)
        if kind in NEVER:
            return f"{target} is {a_kind(kind)} address; nothing can be connected to there"
        if request is not None:
            what = f"{request.method} {request.path.partition('?')[0][:200]} of {target}"
        wide = ' (or sets network="public")' if profile != "public" and kind is Kind.PUBLIC else ""
        return (
            f"no rule allows {what}; this sandbox's network profile is `{profile}`. Way out: whoever made this sandbox "
            f"adds the rule `{rule}`{wide}, also while it runs"
        )

    def _opened(
        self, index: RuleList, target: Target, address: Address, kind: Kind
    ) -> tuple[bool, Rule | None]:
        """Whether the list names the address closely enough, and the rule that denies it before its name is allowed."""
        nets = index.of_net(address)
        if not nets:
            return False, None
        if target.name is None:  # (`connect` has judged it in its order; only the class is open)
            there = (index.all[at] for at in nets)
            return any(
                rule.allow
                and rule.host.net is not None
                and rule.has_port(target.port)
                and addresses.opens(rule.host.net, address, kind)
                for rule in there
            ), None
        decided = False
        for at in sorted({*nets, *index.of_name(target.name)}):
            rule = index.all[at]
            if not rule.has_port(target.port):
                continue
            if rule.host.net is None:
                decided = decided or rule.allow
            elif not rule.allow:
                return False, None if decided else rule
            elif addresses.opens(rule.host.net, address, kind):
                return True, None
        return False, None

    def _packages_name(self, target: Target) -> bool:
        if self.packages is None:
            return False
        return any(
            rule.has_port(target.port)
            and (
                rule.host.matches_name(target.name)
                if target.name is not None
                else target.address is not None and rule.host.matches_address(target.address)
            )
            for rule in self._profile.all
        )


_resolver_way_out = "Names are looked up by the sandbox's own resolver; way out: a rule that names this one"


def _bound(binding: Binding, target: Target) -> bool:
    if binding.port != target.port:
        return False
    if target.name is not None:
        return binding.host.matches_name(target.name)
    if target.address is not None and binding.host.matches_address(target.address):
        return True
    # Led to an address: still the host that was asked for, if it can prove it.
    return target.asked is not None and binding.scheme == "https" and binding.host.matches_name(target.asked)


def _bound_host(binding: Binding, target: Target) -> bool:
    return (
        (target.name is not None and binding.host.matches_name(target.name))
        or (
            target.name is None
            and target.address is not None
            and binding.host.matches_address(target.address)
        )
        or (target.asked is not None and binding.host.matches_name(target.asked))
    )


def _same_host(text: str, target: Target) -> bool:
    host = text.strip().lower()
    if host == target.seen_as:
        return True
    if host.startswith("["):
        bare, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    else:
        bare, _, port = host.partition(":")
    if port and not port.isdecimal():
        return False
    bare = bare.removesuffix(".")
    return (
        bare in (target.seen_as, target.name) if target.name or target.asked else _same_address(bare, target)
    )


def _same_address(text: str, target: Target) -> bool:
    return addresses.parse(text) == target.address


def _floor_default(target: Target) -> str:
    return f"{target} is not in the operator's floor (LLM4AGENTS_NETWORK_FLOOR), which no sandbox can widen"


def _floor_deny(target: Target, rule: Rule) -> str:
    return f"{target} is denied by the operator's floor, `{rule}`, which no sandbox can widen"
