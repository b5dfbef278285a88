"""Why a policy says what it says of a URL or a `host:port`: every rule looked at, in words. Pure; decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llm4agents import limits
from llm4agents.barrier import addresses, rules
from llm4agents.barrier.addresses import Address
from llm4agents.barrier.judging import Request, RuleList, Target, a_kind, protocol_of
from llm4agents.barrier.rules import PROTOCOLS, Protocol
from llm4agents.errors import InvalidRequestError

if TYPE_CHECKING:
    from llm4agents.barrier.policy import Policy


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was looked at on the way to a verdict."""

    rule: str
    matched: Literal["yes", "no", "maybe"]
    why: str


def why(
    policy: Policy, text: str, resolved: Sequence[str] = (), own: Collection[Address] = ()
) -> dict[str, Any]:
    """`{allowed, rule, reason, via, steps: [{rule, matched, why}]}` for a URL or `host:port`; `resolved`:
    what the host resolved its name to, judged too. Raises InvalidRequestError."""
    target, request = parse_question(text)
    steps = [{"rule": s.rule, "matched": s.matched, "why": s.why} for s in _steps(policy, target, request)]
    led = policy.rewrite(target)
    verdict = policy.connect(led, protocol_of(request.scheme) if request is not None else None)
    via = verdict.via if verdict.allowed else None
    if verdict.allowed and request is not None and via == "intercept":
        verdict = policy.request(led, request)
    reachable = 0
    for one in resolved if verdict.allowed else ():
        judged = policy.address(led, one, own)
        reachable += judged.allowed
        steps.append(
            {"rule": judged.rule, "matched": "yes" if judged.allowed else "no", "why": judged.reason}
        )
        if not judged.allowed and one == resolved[-1] and not reachable:
            verdict = judged
    return {
        "allowed": verdict.allowed,
        "rule": verdict.rule,
        "reason": verdict.reason,
        "via": via if verdict.allowed else None,
        "steps": steps,
    }


def explain(policy: Policy, text: str) -> list[Step]:
    """Every rule looked at for a URL or `host:port`, and why it did or did not match; the last says the end.
    Raises InvalidRequestError."""
    return list(_steps(policy, *parse_question(text)))


def _steps(policy: Policy, target: Target, request: Request | None) -> Iterator[Step]:
    led = policy.rewrite(target)
    if led is not target:
        yield Step(f"rewrite {target.name} -> {led}", "yes", f"judged as {led} from here on")
    protocol: Protocol | None = None if request is None else protocol_of(request.scheme)
    for prefix, index in policy.lists():
        about = set(policy.places(index, led))
        for at, rule in enumerate(index.all):
            step = _look(index, at, at in about, led, protocol, request)
            if step[0] == "no" and prefix == "packages: " and at not in about:
                continue
            yield Step(prefix + str(rule), *step)
            if step[0] == "yes" or (step[0] == "maybe" and request is not None and rule.on_requests):
                break
    verdict = policy.connect(led, protocol)
    if verdict.allowed and request is not None and verdict.via == "intercept":
        verdict = policy.request(led, request)
    yield Step(verdict.rule, "yes" if verdict.allowed else "no", verdict.reason)


def _look(
    index: RuleList, at: int, about: bool, target: Target, protocol: Protocol | None, request: Request | None
) -> tuple[Literal["yes", "no", "maybe"], str]:
    rule = index.all[at]
    if not about:
        if target.name is None and rule.host.net is not None and target.address is not None:
            if rule.host.matches_address(target.address):
                kind = addresses.classify(target.address)
                return "no", f"{rule.host} does not open {a_kind(kind)} address; name it"
        elif target.name is not None and rule.host.net is not None:
            return "no", "about addresses: looked at again for what the name resolves to"
        return "no", f"its host is not {target.host}"
    if not rule.has_port(target.port):
        return "no", f"not port {target.port}" + ("" if rule.ports else "; without a port it is 80 and 443")
    spoken = PROTOCOLS if protocol is None else (protocol,)
    if not any(rule.speaks(p, target.port) for p in spoken):
        return "no", "another protocol"
    if rule.on_requests and request is None:
        return "maybe", "depends on the request, which is read"
    if request is not None and rule.methods is not None and request.method not in rule.methods:
        return "no", f"not {request.method}"
    if request is not None and not index.path_matches(at, request):
        ambiguous = len(rules.read_path(request.path)) > 1
        return "no", "another path" + (", or one that can be read in several ways" if ambiguous else "")
    if protocol is None and not all(rule.speaks(p, target.port) for p in spoken):
        return "maybe", "for some protocols"
    return "yes", "the first that matches" if rule.allow else "the first that matches, and it denies"


def parse_question(text: str) -> tuple[Target, Request | None]:
    """A URL, `[METHOD ]URL`, or `host[:port]`, as a target and a request. Raises InvalidRequestError."""
    expected = "a URL such as https://example.com/path, or host:port"
    text = text.strip()
    method, blank, rest = text.partition(" ")
    if blank and method.isupper():
        text = rest.strip()
    else:
        method = "GET"
    if len(text) > limits.PATH_READ_CHARACTERS_MAX or not text.isprintable():
        rules.fail("url", "it is too long or has characters that no URL has", expected)
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        scheme, rest = "", text
    if slashes and scheme.lower() not in ("http", "https", "ws", "wss"):
        rules.fail("url", f"{scheme[:40]!r} is no scheme of HTTP", expected)
    place = rest.partition("/")[0].partition("?")[0].partition("#")[0].rpartition("@")[2]
    try:
        host, ports, _ = rules.target(place)
    except InvalidRequestError as error:
        rules.fail("url", error.message, error.hint or expected)
    if host.kind not in ("name", "net") or (host.net and host.net.prefixlen != host.net.max_prefixlen):
        rules.fail("url", f"{place!r} is no single host", expected)
    secure = scheme.lower() in ("", "https", "wss")
    port = ports[0][0] if ports else 443 if secure else 80
    target = Target(
        host.text if host.net is None else None, None if host.net is None else host.net.network_address, port
    )
    if not slashes:
        return target, None
    path = "/" + rest.partition("#")[0].partition("/")[2] if "/" in rest else "/"
    return target, Request(method, path, "https" if secure else "http")
