"""What a policy says: deny by default, the first match, the floor that nothing widens, addresses, paths, rewrites."""

from __future__ import annotations

import json
import time
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm4agents import limits
from llm4agents.barrier import resolvers, rules
from llm4agents.barrier.addresses import Kind, classify
from llm4agents.barrier.network import Network, PackageHost, Packages, Rewrite
from llm4agents.barrier.policy import CANARY, Floor, Policy, Request, Target, Verdict
from llm4agents.errors import InvalidRequestError
from tests.unit.barrier.rule_lines import lines


def policy(network: Any = None, floor: str = "", packages: Packages | None = None) -> Policy:
    """Through JSON, as the gateway gets it."""
    made = Policy.compile(Network.from_json(network), floor=Floor.load(floor), packages=packages)
    return Policy.from_json(json.loads(json.dumps(made.to_json())))


def to(place: str) -> Target:
    host, _, port = place.rpartition(":")
    try:
        return Target(None, ip_address(host), int(port))
    except ValueError:
        return Target(host, None, int(port))


def connect(made: Policy, place: str, protocol: Any = None) -> Verdict:
    return made.connect(made.rewrite(to(place)), protocol)


def ask(made: Policy, place: str, method: str, path: str, scheme: Any = "https") -> Verdict:
    target = made.rewrite(to(place))
    return made.request(target, Request(method, path, scheme, target.seen_as))


# -- connections -------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["a.example", "localhost", "8.8.8.8", "10.0.0.1", "::1"]), st.integers(1, 65535))
def test_without_rules_nothing_is_allowed(host: str, port: int) -> None:
    made = policy()
    verdict = connect(made, f"{host}:{port}")
    assert not verdict.allowed and verdict.rule == "default" and "`none`" in verdict.reason
    assert "Way out" in verdict.reason and "allow " in verdict.reason
    assert not made.resolve("a.example").allowed


@pytest.mark.parametrize(
    ("port", "method", "path", "advice"),
    [
        (443, "POST", "/repos/x?y=1", "allow POST a.example/repos/x"),
        (8443, "GET", "/v1", "allow GET a.example:8443/v1"),
        (443, "GET", "/a%2fb", "allow a.example"),
        (443, "GET", "/a*", "allow a.example"),
    ],
)
def test_the_advice_for_a_request_opens_no_more_than_it(
    port: int, method: str, path: str, advice: str
) -> None:
    made = policy([f"allow HEAD a.example:{port}/other"])
    verdict = ask(made, f"a.example:{port}", method, path)
    assert not verdict.allowed and f"`{advice}" in verdict.reason
    followed = policy([f"allow HEAD a.example:{port}/other", advice])
    if "/" in advice:
        assert ask(followed, f"a.example:{port}", method, path).allowed
        assert not ask(followed, f"a.example:{port}", method, "/elsewhere").allowed


CONNECTIONS = [
    # rules, where, protocol, allowed, via
    (["allow a.example"], "a.example:443", None, True, "splice"),
    (["allow a.example"], "a.example:80", "http", True, "splice"),
    (["allow a.example"], "a.example:443", "tcp", False, None),
    (["allow a.example"], "a.example:8080", None, False, None),
    (["allow a.example"], "b.a.example:443", None, False, None),
    (["allow *.a.example"], "b.a.example:443", None, True, "splice"),
    (["allow *.a.example"], "c.b.a.example:443", None, True, "splice"),
    (["allow *.a.example"], "a.example:443", None, False, None),
    (["allow *.a.example"], "xa.example:443", None, False, None),
    (["allow a.example"], "A.Example.:443", None, True, "splice"),
    (["allow a.example:8080"], "a.example:8080", None, True, "raw"),
    (["allow a.example:8080"], "a.example:443", None, False, None),
    (["allow a.example:*"], "a.example:443", None, True, "splice"),
    (["allow a.example:*"], "a.example:443", "tcp", False, None),
    (["allow a.example:*"], "a.example:22", None, True, "raw"),
    (["allow tcp a.example:443"], "a.example:443", None, True, "raw"),
    (["allow tcp a.example:22"], "a.example:443", None, False, None),
    (["allow http a.example"], "a.example:443", None, False, None),
    (["allow http a.example:8080"], "a.example:8080", "http", True, "splice"),
    (["allow http a.example:8080"], "a.example:8080", "tls", False, None),
    (["allow https a.example:8443"], "a.example:8443", "http", False, None),
    (["allow https a.example:8443"], "a.example:8443", None, True, "splice"),
    (["allow GET a.example"], "a.example:443", None, True, "intercept"),
    (["allow GET a.example:8080"], "a.example:8080", "tcp", False, None),
    (["allow a.example/x"], "a.example:80", None, True, "intercept"),
    (["deny a.example/x", "allow a.example"], "a.example:443", None, True, "intercept"),
    (["deny a.example/x", "allow a.example:9000"], "a.example:9000", None, True, "intercept"),
    (["deny a.example/x", "allow a.example:9000"], "a.example:9000", "tcp", False, None),
    (["allow a.example", "deny a.example/x"], "a.example:443", None, True, "splice"),
    (["deny a.example", "allow a.example"], "a.example:443", None, False, None),
    (["deny a.example", "allow *.example:*"], "a.example:9000", None, False, None),
    (["deny *.example", "allow a.example"], "a.example:443", None, False, None),
    (["allow a.example", "deny *"], "a.example:443", None, True, "splice"),
    (["allow GET a.example", "deny a.example"], "a.example:443", None, True, "intercept"),
    (["deny http a.example", "allow a.example:9000"], "a.example:9000", "tls", True, "splice"),
    (["deny http a.example", "allow a.example:9000"], "a.example:9000", "tcp", False, None),
    (["deny tcp a.example", "allow a.example:9000"], "a.example:9000", "http", True, "splice"),
    (["deny tcp a.example", "allow a.example:9000"], "a.example:9000", "tcp", False, None),
    (["allow *"], "8.8.4.4:443", None, False, None),  # a known resolver
    (["allow *"], "192.0.2.1:443", None, True, "splice"),
    (["allow *:*"], "10.0.0.1:443", None, False, None),
    (["allow *"], "169.254.169.254:80", None, False, None),
    (["allow 0.0.0.0/0"], "192.0.2.1:443", None, True, "splice"),
    (["allow 0.0.0.0/0"], "10.0.0.1:443", None, False, None),
    (["allow 10.0.0.0/8"], "10.0.0.1:443", None, True, "splice"),
    (["allow 10.0.0.0/8"], "10.0.0.1:5432", None, False, None),
    (["allow 10.0.0.0/8:5432"], "10.0.0.1:5432", None, True, "raw"),
    (["deny 10.0.0.0/24", "allow 10.0.0.0/8"], "10.0.0.1:443", None, False, None),
    (["allow 127.0.0.0/8:*"], "127.0.0.1:8000", None, True, "raw"),
    (["allow a.example"], "192.0.2.1:443", None, False, None),
    (["allow 192.0.2.1"], "a.example:443", None, False, None),
    (["allow 169.254.0.0/16"], "169.254.169.254:80", None, False, None),
    (["allow 169.254.169.254"], "169.254.169.254:80", None, True, "splice"),
    (["allow 192.0.2.1"], "::ffff:192.0.2.1:443", None, True, "splice"),
]


@pytest.mark.parametrize("network, place, protocol, allowed, via", CONNECTIONS)
def test_connections(network: list[str], place: str, protocol: Any, allowed: bool, via: str | None) -> None:
    verdict = connect(policy(network), place, protocol)
    assert verdict.allowed is allowed, verdict
    if allowed:
        assert verdict.via == via, verdict
        assert verdict.rule in network
    else:
        assert verdict.reason


def test_what_may_be_spoken_is_said_before_the_first_byte() -> None:
    made = policy(["allow https a.example:8443", "allow b.example:9000"])
    assert connect(made, "a.example:8443").protocols == ("tls",)
    assert not connect(made, "a.example:8443").raw
    assert connect(made, "b.example:9000").protocols == ("tls", "http", "tcp")
    assert connect(made, "b.example:9000").raw


def test_a_protocol_that_is_refused_is_named() -> None:
    assert (
        "plain HTTP to a.example:8443"
        in connect(policy(["allow https a.example:8443"]), "a.example:8443", "http").reason
    )


def test_limits_are_told_and_the_floors_count_too() -> None:
    verdict = connect(
        policy(["allow a.example rate=1MiB/s bytes=1GiB"], "allow * rate=3MiB/s bytes=1MiB"), "a.example:443"
    )
    assert (verdict.rate_bytes_per_s, verdict.bytes_max) == (1 << 20, 1 << 20)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "network, name, allowed",
    [
        (["allow a.example"], "a.example", True),
        (["allow a.example"], "A.EXAMPLE.", True),
        (["allow a.example:8080"], "a.example", True),
        (["allow tcp a.example:1-5"], "a.example", True),
        (["allow GET a.example/x"], "a.example", True),
        (["allow *.a.example"], "a.example", False),
        (["deny a.example", "allow *"], "a.example", False),
        (["deny a.example:443", "allow a.example"], "a.example", True),  # 80 is left
        (["deny a.example:1-8079", "deny a.example:8081-65535", "allow a.example:*"], "a.example", True),
        (["deny a.example:1-8080", "deny a.example:8081-65535", "allow a.example:*"], "a.example", False),
        (["deny https a.example", "allow a.example:443"], "a.example", True),  # plain HTTP on 443
        (["allow 0.0.0.0/0"], "a.example", False),
        (["allow *"], CANARY, False),
        (["allow " + CANARY], CANARY, True),
        (["allow *:*"], "127.0.0.1", False),
        (["allow *:*"], "0x7f.1", False),
        (["allow *:*"], "2130706433.", False),
        (["allow *:*"], "", False),
    ],
)
def test_names_are_answered_for_when_something_could_be_connected(
    network: list[str], name: str, allowed: bool
) -> None:
    assert policy(network).resolve(name).allowed is allowed


def test_names_that_are_denied_cost_little_however_many_rules_there_are() -> None:
    """The gateway answers all sandboxes: with these rules each query took it 0.1 s."""
    made = policy([f"deny *:{port}" for port in range(1_000, 1_000 + limits.NETWORK_RULES_MAX)])
    began = time.thread_time()
    reasons = {made.resolve(f"n{number}.example").reason for number in range(200)}
    assert time.thread_time() - began < 2
    assert len(reasons) == 200 and not any(made.resolve(f"n{number}.example").allowed for number in range(3))


def test_only_what_is_named_may_be_short_for_another_name() -> None:
    """By the host's search domains, of which rules know nothing."""
    assert policy(["allow wiki"]).names(to("wiki:443"))
    for made in (
        policy("public"),
        policy(["allow *"]),
        policy(["allow *.corp"]),
        policy(["allow wiki"], "deny *.corp"),
    ):
        assert not made.names(to("wiki:443")) and not made.names(to("wiki.corp:443"))
    index = Packages((PackageHost("nexus", 443, "https", "pip", ()),), {}, {})
    assert policy("packages", "deny *.corp", packages=index).names(to("nexus:443"))


def test_public_leaves_out_resolvers_unless_named() -> None:
    names, found = resolvers.known()
    assert len(names) > 50 and len(found) > 30
    for network in ("public", ["allow *:*"], ["allow *.com:*", "allow *.google:*", "allow *:*"]):
        made = policy(network)
        for name in names:
            assert not made.resolve(name).allowed, name
            assert not made.resolve("x1y2." + name).allowed
        for address in found:
            assert not made.connect(Target(None, address, 443)).allowed, address
            assert not made.address(Target("innocent.example", None, 443), address).allowed
        assert not made.resolve(CANARY).allowed
        assert made.resolve("example.com").allowed
    name = sorted(names)[0]
    made = policy({"profile": "public", "rules": [f"allow {name}", "allow 8.8.8.8"]})
    assert made.resolve(name).allowed and connect(made, "8.8.8.8:443").allowed
    assert made.address(Target(name, None, 443), "8.8.4.4").allowed


def test_public_is_everything_ordinary() -> None:
    made = policy("public")
    assert connect(made, "a.example:443").via == "splice"
    assert connect(made, "a.example:22").via == "raw"
    assert connect(made, "192.0.2.1:5432").via == "raw"
    assert not connect(made, "a.example:443", "tcp").allowed
    assert not connect(made, "a.example:853").allowed
    for place in (
        "10.0.0.1:80",
        "127.0.0.1:80",
        "169.254.169.254:80",
        "100.64.0.1:80",
        "198.18.0.1:80",
        "::1:80",
    ):
        verdict = connect(made, place)
        assert not verdict.allowed and "public" in verdict.reason
    verdict = policy({"profile": "public", "rules": ["deny *.bad.example"]}).resolve("x.bad.example")
    assert not verdict.allowed and verdict.rule == "deny *.bad.example"


# -- addresses ---------------------------------------------------------------------------------------------------------

OWN = {ip_address("192.0.2.7"), ip_address("10.9.9.9"), ip_address("127.0.0.1")}
ADDRESSES = [
    # rules, target, address, allowed
    (["allow a.example"], "a.example:443", "192.0.2.1", True),
    (["allow a.example"], "a.example:443", "2001:db8::1", True),
    (["allow a.example"], "a.example:443", "10.0.0.1", False),
    (["allow a.example"], "a.example:443", "127.0.0.1", False),
    (["allow a.example"], "a.example:443", "::ffff:127.0.0.1", False),
    (["allow a.example"], "a.example:443", "64:ff9b::a00:1", False),
    (["allow a.example"], "a.example:443", "169.254.169.254", False),
    (["allow a.example"], "a.example:443", "192.0.2.7", False),  # the host's own
    (["allow a.example"], "a.example:443", "0.0.0.0", False),
    (["allow *:*"], "a.example:443", "10.0.0.1", False),
    (["allow a.example", "allow 10.0.0.0/8"], "a.example:443", "10.0.0.1", True),
    (["allow 10.0.0.0/8", "allow a.example"], "a.example:443", "10.0.0.1", True),
    (["allow a.example:5432", "allow 10.0.0.0/8"], "a.example:5432", "10.0.0.1", False),  # 80 and 443 only
    (["allow a.example:5432", "allow 10.0.0.0/8:5432"], "a.example:5432", "10.0.0.1", True),
    (
        ["allow a.example", "allow 10.0.0.0/8"],
        "a.example:443",
        "10.9.9.9",
        False,
    ),  # the host's own, not named alone
    (["allow a.example", "allow 10.9.9.9"], "a.example:443", "10.9.9.9", True),
    (["deny 10.0.0.0/24", "allow a.example", "allow 10.0.0.0/8"], "a.example:443", "10.0.0.1", False),
    (["deny 10.0.0.0/24", "allow a.example", "allow 10.0.0.0/8"], "a.example:443", "10.0.1.1", True),
    (["deny 192.0.2.0/24", "allow a.example"], "a.example:443", "192.0.2.1", False),
    (["allow a.example", "deny 192.0.2.0/24"], "a.example:443", "192.0.2.1", True),  # the first match
    (["allow a.example", "deny 10.0.0.0/24", "allow 10.0.0.0/8"], "a.example:443", "10.0.0.1", False),
    (["allow 10.0.0.1", "deny 10.0.0.0/8", "allow a.example"], "a.example:443", "10.0.0.1", True),
    (["allow 127.0.0.1:8000"], "127.0.0.1:8000", "127.0.0.1", True),
    (["allow 10.0.0.0/8"], "10.9.9.9:443", "10.9.9.9", False),
    (["allow 10.9.9.9"], "10.9.9.9:443", "10.9.9.9", True),
    (["allow *", "deny 192.0.2.0/24"], "192.0.2.1:443", "192.0.2.1", True),
]


@pytest.mark.parametrize("network, place, address, allowed", ADDRESSES)
def test_addresses(network: list[str], place: str, address: str, allowed: bool) -> None:
    made = policy(network)
    assert connect(made, place).allowed
    verdict = made.address(to(place), address, OWN)
    assert verdict.allowed is allowed, verdict


def test_a_private_address_is_refused_with_the_rule_that_opens_it() -> None:
    network = ["allow db.example:5432"]
    verdict = policy(network).address(to("db.example:5432"), "10.1.2.3")
    way_out = verdict.reason.rpartition("`allow ")[2].rstrip("`")
    assert verdict.reason.startswith("db.example resolves to 10.1.2.3, a private address")
    assert "`allow " in verdict.reason
    rule = "allow " + verdict.reason.split("`allow ")[1].split("`")[0]
    assert (
        way_out
        and policy([*network, rule.replace("db.example", "10.1.2.3")])
        .address(to("db.example:5432"), "10.1.2.3")
        .allowed
    )


@given(st.ip_addresses(), st.lists(lines(), max_size=6))
def test_a_name_never_opens_what_no_rule_names(address: Any, extra: list[str]) -> None:
    """Whatever rules about names there are: special addresses need one about addresses."""
    named = [line for line in extra if rules.parse(line).host.net is None]
    made = policy(["allow a.example:*", *named])
    if classify(address) is not Kind.PUBLIC:
        assert not made.address(to("a.example:443"), address).allowed


# -- requests ----------------------------------------------------------------------------------------------------------

REQUESTS = [
    # rules, method, path, allowed
    (["allow GET a.example"], "GET", "/x", True),
    (["allow GET a.example"], "HEAD", "/x", False),
    (["allow GET a.example"], "POST", "/x", False),
    (["allow a.example/v1/*"], "POST", "/v1/x/y", True),
    (["allow a.example/v1/*"], "GET", "/v1", False),
    (["allow a.example/v1/*"], "GET", "/v1/", True),
    (["allow a.example/v1/*"], "GET", "/v1/?a=/../../v2", True),
    (["allow a.example/v1/*"], "GET", "/v1/../v2", False),
    (["allow a.example/v1/*"], "GET", "/v1/%2e%2e/v2", False),
    (["allow a.example/v1/*"], "GET", "/v1/..%2fv2", False),
    (["allow a.example/v1/*"], "GET", "/v1/%252e%252e/v2", False),
    (["allow a.example/v1/*"], "GET", "/v1/..\\v2", False),
    (["allow a.example/v1/*"], "GET", "/v1/..;x=y/v2", False),
    (["allow a.example/v1/*"], "GET", "/v1/a%2Fb", True),  # it stays below, however it is read
    (["allow a.example/v1/*"], "GET", "/v1/a%20b", True),
    (["allow a.example/v1/*"], "GET", "/v1/100%25", True),
    (["allow a.example/v1/*"], "GET", "/v1//b", True),
    (["allow a.example/v1/*"], "GET", "//v1/b", False),
    (["allow a.example/v1/*"], "GET", "/v1/a%00b", False),
    (["allow a.example/v1/*"], "GET", "/v1/a%c0%afb", False),
    (["allow a.example/v1/*"], "GET", "/v1/%u002e", False),
    (["allow a.example/v1/*"], "GET", "/v1/a#b", False),
    (["allow a.example/v1/*"], "GET", "*", False),
    (["allow a.example/v1/*"], "GET", "/v1/" + "a" * 9000, True),
    (["allow a.example/v1/*"], "GET", "/v1/%41" + "a" * 9000, False),
    (["allow a.example/b%C3%BCcher"], "GET", "/b%C3%BCcher", True),
    (["allow a.example/x"], "GET", "/x", True),
    (["allow a.example/x"], "GET", "/x/", False),
    (["allow a.example/x"], "GET", "/%78", True),
    (["allow a.example/*.git/info/refs"], "GET", "/a/b.git/info/refs", True),
    (["deny a.example/admin*", "allow a.example"], "GET", "/x", True),
    (["deny a.example/admin*", "allow a.example"], "GET", "/admin", False),
    (["deny a.example/admin*", "allow a.example"], "GET", "/admin/x", False),
    (["deny a.example/admin*", "allow a.example"], "GET", "/%61dmin", False),
    (["deny a.example/admin*", "allow a.example"], "GET", "/%2561dmin", False),
    (["deny a.example/admin*", "allow a.example"], "GET", "/x/../admin", False),
    (["deny a.example/admin*", "allow a.example"], "GET", "//admin", False),
    (["deny a.example/admin*", "allow a.example"], "GET", "/./admin", False),
    (["deny a.example/admin*", "allow a.example"], "GET", "/x/..%2fadmin", False),
    (["deny a.example/admin*", "allow a.example"], "GET", "/;x/admin", False),
    (["deny a.example/admin*", "allow a.example"], "GET", "\\admin", False),
    (
        ["deny a.example/admin*", "allow a.example"],
        "GET",
        "/a%c0%afb",
        False,
    ),  # cannot be told: the deny bites
    (["deny a.example/admin*", "allow a.example"], "GET", "/admi", True),
    (["deny POST a.example", "allow a.example"], "POST", "/x", False),
    (["deny POST a.example", "allow a.example"], "post", "/x", False),
    (["deny POST a.example", "allow a.example"], "GET", "/x", True),
    (["allow GET a.example/a", "allow POST a.example/b"], "POST", "/a", False),
    (["allow GET a.example/a", "allow POST a.example/b"], "POST", "/b", True),
    (["deny DELETE *", "allow GET,DELETE a.example"], "DELETE", "/a", False),
]


@pytest.mark.parametrize("network, method, path, allowed", REQUESTS)
def test_requests(network: list[str], method: str, path: str, allowed: bool) -> None:
    made = policy(network)
    assert made.intercepts(to("a.example:443"))
    verdict = ask(made, "a.example:443", method, path)
    assert verdict.allowed is allowed, verdict
    assert allowed or verdict.reason


PATHS = st.lists(
    st.sampled_from(["/", "a", "b", "..", ".", "%2e", "%2E", "%2f", "%5c", "\\", ";", "%25", "2f", "admin", "%61"]),
    max_size=9,
).map(lambda parts: "/" + "".join(parts))  # fmt: skip


@given(PATHS)
@example("/%252fadmin%25")
@example("/%2561dmin%25ff")
@example("/%2561dmin%25zz")
def test_no_reading_of_a_path_gets_past_a_rule(path: str) -> None:
    """Servers that decode once, decode twice, resolve dots or take backslashes: none of them sees what is denied."""
    from posixpath import normpath
    from urllib.parse import unquote

    denying = ask(policy(["deny a.example/admin*", "allow a.example"]), "a.example:443", "GET", path)
    allowing = ask(policy(["allow a.example/a/*"]), "a.example:443", "GET", path)
    for decode in (lambda p: p, unquote, lambda p: unquote(unquote(p))):
        for slashes in (lambda p: p, lambda p: p.replace("\\", "/")):
            seen = slashes(decode(path))
            normal = "/" + normpath(seen).lstrip("/")
            if denying.allowed:
                assert not normal.startswith("/admin") and not seen.startswith("/admin")
            if allowing.allowed and (
                decode("%61") == "a" or "%61" not in path
            ):  # (all servers decode letters)
                assert normal.startswith("/a/") or normal == "/a"


@pytest.mark.parametrize(
    "host", ["b.example", "a.example.b.example", "a.example@b.example", "", " a.example", "a.example:x"]
)
def test_a_host_that_is_not_the_name_is_refused(host: str) -> None:
    made = policy(["allow GET a.example", "allow GET b.example"])
    verdict = made.request(to("a.example:443"), Request("GET", "/", "https", host))
    assert verdict.allowed is (host in ("", " a.example")), verdict
    for fine in ("a.example", "A.example.", "a.example:443"):
        assert made.request(to("a.example:443"), Request("GET", "/", "https", fine)).allowed


def test_globs_are_linear() -> None:
    matches = rules.globs("/" + "*a" * 100 + "b")
    began = time.process_time()
    assert not matches("/" + "a" * 8_000)
    assert time.process_time() - began < 1


# -- the floor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "floor, network, place, allowed, rule",
    [
        ("deny a.example", ["allow a.example"], "a.example:443", False, "floor: deny a.example"),
        ("deny a.example", "public", "a.example:443", False, "floor: deny a.example"),
        ("deny a.example", ["allow b.example"], "b.example:443", True, "allow b.example"),
        ("deny a.example", ["allow b.example"], "c.example:443", False, "default"),
        ("allow *.corp.example", ["allow a.example"], "a.example:443", False, "floor: default"),
        ("allow *.corp.example", ["allow *"], "x.corp.example:443", True, "allow *"),
        ("allow *.corp.example", [], "x.corp.example:443", False, "default"),
        ("allow *.corp.example", "public", "a.example:443", False, "floor: default"),
        ("allow a.example", ["allow 10.0.0.1"], "10.0.0.1:443", False, "floor: default"),
        (
            "deny *:1-79\ndeny *:81-442\nallow *:*",
            ["allow a.example:*"],
            "a.example:22",
            False,
            "floor: deny *:1-79",
        ),
    ],
)
def test_the_floor(floor: str, network: Any, place: str, allowed: bool, rule: str) -> None:
    verdict = connect(policy(network, floor), place)
    assert (verdict.allowed, verdict.rule) == (allowed, rule), verdict


def test_the_floor_bites_resolved_addresses_and_paths() -> None:
    made = policy(["allow a.example", "allow 10.0.0.0/8"], "deny 10.1.0.0/16")
    assert made.address(to("a.example:443"), "10.2.0.1").allowed
    assert not made.address(to("a.example:443"), "10.1.0.1").allowed
    made = policy(["allow a.example", "allow 10.0.0.0/8"], "allow a.example")
    assert not made.address(to("a.example:443"), "10.2.0.1").allowed
    made = policy(["allow a.example"], "deny POST *")
    assert made.intercepts(to("a.example:443"))
    assert (
        not ask(made, "a.example:443", "POST", "/").allowed and ask(made, "a.example:443", "GET", "/").allowed
    )


def test_a_floor_with_a_mistake_names_its_line() -> None:
    with pytest.raises(InvalidRequestError, match="network floor, line 3 'alow x'"):
        Floor.load("# ours\n\nalow x\n")
    floor = Floor.load("allow a.example # why\n\n  deny *\n")
    assert Floor.load(str(floor)) == floor
    with pytest.raises(InvalidRequestError, match="bytes"):
        Floor.load("#" * (limits.FLOOR_BYTES_MAX + 1))


PLACES = st.tuples(
    st.sampled_from(
        ["a.example", "ab", "x.ab", "192.0.2.1", "10.0.0.1", "8.8.8.8", "2001:db8::1", "fd00::1"]
    ),
    st.sampled_from([80, 443, 22, 8080]),
).map(lambda t: f"{t[0]}:{t[1]}")
RULES = st.lists(
    lines() | st.sampled_from(["allow *", "allow *:*", "allow a.example", "allow 10.0.0.0/8:*", "deny ab"]),
    max_size=5,
)


@settings(max_examples=150)
@given(RULES, RULES, st.sampled_from(["none", "public"]), PLACES, st.sampled_from(["GET", "POST"]))
def test_no_rules_widen_the_floor(
    floor: list[str], network: list[str], profile: str, place: str, method: str
) -> None:
    """What a sandbox with everything may do under a floor, and not one thing more, is open to any other."""
    floor_text = "\n".join(floor)
    made = policy({"profile": profile, "rules": network}, floor_text)
    only = Policy(Network(), Floor.load(floor_text), None)
    target = to(place)
    for protocol in ("tls", "http", "tcp"):  # (without one: of the first that may be spoken)
        verdict = made.connect(target, protocol)
        outer = only.connect(target, protocol)  # type: ignore[arg-type]
        if outer.rule.startswith("floor"):
            assert not verdict.allowed and verdict.rule.startswith("floor")
    request = Request(method, "/a/b", "https", target.seen_as)
    if only.request(target, request).rule.startswith("floor"):
        assert not made.request(target, request).allowed


def reference(found: list[rules.Rule], target: Target, protocol: str, request: Request) -> rules.Rule | None:
    """The first rule that matches, said in the plainest way."""
    for rule in found:
        if target.name is not None:
            about = rule.host.matches_name(target.name)
        else:
            assert target.address is not None
            kind = classify(target.address)
            about = rule.host.matches_address(target.address) or rule.host.kind == "any"
            if rule.allow and rule.host.net is None:
                about = about and kind is Kind.PUBLIC
            elif rule.allow and about and kind is not Kind.PUBLIC and rule.host.net is not None:
                about = rule.host.net.prefixlen >= {"10.0.0.1": 8, "fd00::1": 7}[str(target.address)]
        if not about or not rule.has_port(target.port) or not rule.speaks(protocol, target.port):  # type: ignore[arg-type]
            continue
        if rule.methods is not None and request.method not in rule.methods:
            continue
        if rule.path is not None and not rules.globs(rule.path)(request.path):
            continue
        return rule
    return None


@settings(max_examples=250)
@given(
    RULES,
    PLACES.filter(lambda place: "8.8.8.8" not in place),
    st.sampled_from(["GET", "POST"]),
    st.sampled_from(["/", "/a", "/a/b"]),
    st.sampled_from(["https", "http"]),
)
def test_the_first_match_decides(network: list[str], place: str, method: str, path: str, scheme: Any) -> None:
    made, target = policy(network), to(place)
    request = Request(method, path, scheme, target.seen_as)
    protocol: Any = "tls" if scheme == "https" else "http"
    rule = reference([rules.parse(line) for line in network], target, protocol, request)
    verdict = made.request(target, request)
    assert verdict.allowed is (rule is not None and rule.allow)
    assert verdict.rule == (str(rule) if rule is not None else "default")
    # A connection is let in where a request could be, and read where not all could be.
    connection = made.connect(target, protocol)
    if verdict.allowed:
        assert connection.allowed
    elif connection.allowed:
        assert connection.via == "intercept"
    if connection.allowed and target.name is not None:
        assert made.resolve(target.name).allowed


# -- rewrites ----------------------------------------------------------------------------------------------------------


def test_a_rewrite_is_judged_as_what_it_has_become() -> None:
    rewrite = [
        "prod.example -> staging.example:8443",
        "mirror.example -> 10.0.0.9",
        "staging.example -> prod.example",
    ]
    made = policy({"rules": ["allow prod.example"], "rewrite": rewrite})
    assert not made.resolve("prod.example").allowed and not connect(made, "prod.example:443").allowed
    assert made.resolve("staging.example").allowed  # led to prod, which is allowed
    made = policy(
        {
            "rules": ["deny prod.example", "allow https staging.example:8443", "allow 10.0.0.9"],
            "rewrite": rewrite,
        }
    )
    target = made.rewrite(to("PROD.example.:443"))
    assert target == Target("staging.example", None, 8443, asked="prod.example")
    assert (target.seen_as, target.host) == ("prod.example", "staging.example")
    assert made.rewrite(target) is target
    assert made.resolve("prod.example").allowed
    assert made.connect(target).via == "intercept"  # SNI, certificate and Host change
    assert made.request(target, Request("GET", "/", "https", "prod.example")).allowed
    assert not made.request(target, Request("GET", "/", "https", "other.example")).allowed
    mirror = made.rewrite(to("mirror.example:443"))
    assert (mirror.seen_as, mirror.host, str(mirror.address)) == (
        "mirror.example",
        "mirror.example",
        "10.0.0.9",
    )
    assert made.connect(mirror).via == "splice" and made.address(mirror, "10.0.0.9").allowed
    assert made.resolve("mirror.example").allowed
    assert (
        not policy({"rules": ["allow mirror.example"], "rewrite": rewrite}).resolve("mirror.example").allowed
    )


def test_the_floor_sees_where_a_rewrite_leads() -> None:
    asked = {"rules": ["allow *"], "rewrite": ["good.example -> bad.example"]}
    assert not connect(policy(asked, "deny bad.example"), "good.example:443").allowed
    assert not policy(asked, "allow good.example").resolve("good.example").allowed


# -- credentials -------------------------------------------------------------------------------------------------------


def test_credentials_make_a_host_intercepted_and_go_nowhere_else() -> None:
    made = policy({
        "rules": ["allow *.example", "allow c.example:8443"],
        "credentials": ["A=bearer@a.example/v1/*", "B=basic:u@*.b.example", "C=header:X-C@c.example:8443",
                        {"secret": "D", "as": "bearer", "host": "a.example", "methods": ["POST"]},
                        {"secret": "E", "as": "bearer", "host": "e.example", "scheme": "http"}],
    })  # fmt: skip
    assert made.secrets == ("A", "B", "C", "D", "E")

    def names(place: str, path: str = "/v1/x", method: str = "GET", scheme: Any = "https") -> list[str]:
        return [b.secret for b in made.credentials(to(place), Request(method, path, scheme, ""))]

    assert names("a.example:443") == ["A"] and names("a.example:443", method="POST") == ["A", "D"]
    assert (
        names("a.example:443", "/v2")
        == names("a.example:443", "/v1/../v2")
        == names("a.example:443", "/v1/%2e%2e/v2")
        == []
    )
    assert names("a.example:80", scheme="http") == names("a.example:443", scheme="http") == []
    assert names("x.b.example:443") == ["B"] and names("b.example:443") == []
    assert names("c.example:8443") == ["C"] and names("c.example:443") == []
    assert names("e.example:80", scheme="http") == ["E"] and names("e.example:443") == []
    assert names("192.0.2.1:443") == []
    # What was put there by one of a host's two ways must not be read by the other where nobody strikes it.
    assert made.intercepts(to("a.example:443")) and connect(made, "a.example:80", "http").via == "intercept"
    assert {one.secret for one in made.bound(to("a.example:80"))} == {"A", "D"}
    assert not made.bound(to("d.example:443")) and not made.bound(to("b.example:443"))
    assert connect(made, "c.example:8443", "tls").via == connect(made, "c.example:443").via == "intercept"
    assert connect(made, "e.example:80").via == connect(made, "e.example:80", "tls").via == "intercept"
    assert connect(made, "d.example:443").via == "splice"


@pytest.mark.parametrize(
    "network, credential, fine",
    [
        (["allow a.example"], "T=bearer@a.example", True),
        (["allow b.example"], "T=bearer@a.example", False),
        (["allow a.example"], "T=bearer@a.example:8443", False),
        (["allow http a.example"], "T=bearer@a.example", False),
        (["deny a.example", "allow *"], "T=bearer@a.example", False),
        (["allow x.a.example"], "T=bearer@*.a.example", True),
        (["allow x.b.example"], "T=bearer@*.a.example", False),
        (["allow *"], "T=bearer@*.a.example", True),
        ("public", "T=bearer@a.example", True),
        ("none", "T=bearer@a.example", False),
        (["allow 10.0.0.9:8443"], "T=bearer@10.0.0.9:8443", True),
    ],
)
def test_a_credential_allows_nothing(network: Any, credential: str, fine: bool) -> None:
    asked = {"profile": network} if isinstance(network, str) else {"rules": network}
    asked["credentials"] = [credential]
    if fine:
        policy(asked)
    else:
        with pytest.raises(
            InvalidRequestError, match=r"no rule allows .*allows nothing by itself.*add the rule"
        ):
            policy(asked)


def test_credentials_follow_a_rewrite() -> None:
    made = policy({
        "rules": ["allow s.example", "allow 10.0.0.9"],
        "rewrite": ["p.example -> s.example", "m.example -> 10.0.0.9"],
        "credentials": ["P=bearer@p.example", "S=bearer@s.example", "M=bearer@m.example"],
    })  # fmt: skip

    def names(place: str, scheme: Any = "https") -> list[str]:
        return [b.secret for b in made.credentials(made.rewrite(to(place)), Request("GET", "/", scheme, ""))]

    assert names("p.example:443") == ["S"]  # what staging gets is staging's
    assert names("m.example:443") == ["M"]  # proves by its certificate to be m.example


# -- packages ----------------------------------------------------------------------------------------------------------

PACKAGES = Packages(
    hosts=(
        PackageHost("index.example", 443, "https", "pip", ("/simple/*",)),
        PackageHost("files.example", 443, "https", "pip"),
        PackageHost(
            "npm.corp.example", 8443, "https", "npm", ("/npm/*",), ("/npm/-/npm/v1/security/audits",)
        ),
        PackageHost("deb.example", 80, "http", "apt", ("/debian/*",)),
        PackageHost("127.0.0.1", 3141, "http", "pip"),
    ),
    rewrites=(Rewrite.parse("this-host.internal -> 127.0.0.1"),),
)


@pytest.mark.parametrize(
    "place, method, path, scheme, allowed",
    [
        ("index.example:443", "GET", "/simple/six/", "https", True),
        ("index.example:443", "GET", "/other", "https", False),
        ("index.example:443", "POST", "/simple/six/", "https", False),
        ("files.example:443", "HEAD", "/any/thing", "https", True),
        ("files.example:443", "PUT", "/any/thing", "https", False),
        ("files.example:80", "GET", "/any/thing", "http", False),
        ("npm.corp.example:8443", "GET", "/npm/@types%2fnode", "https", True),
        ("npm.corp.example:8443", "POST", "/npm/-/npm/v1/security/audits", "https", True),
        ("npm.corp.example:8443", "PUT", "/npm/left-pad", "https", False),
        ("npm.corp.example:8443", "DELETE", "/npm/-/npm/v1/security/audits", "https", False),
        ("deb.example:80", "GET", "/debian/dists/x/InRelease", "http", True),
        ("deb.example:80", "GET", "/private/", "http", False),
        ("this-host.internal:3141", "GET", "/root/pypi", "http", True),
        ("this-host.internal:22", "GET", "/", "http", False),
        ("example.com:443", "GET", "/", "https", False),
    ],
)
def test_packages_may_be_read(place: str, method: str, path: str, scheme: Any, allowed: bool) -> None:
    made = policy("packages", packages=PACKAGES)
    assert ask(made, place, method, path, scheme).allowed is allowed
    target = made.rewrite(to(place))
    if allowed:
        assert made.connect(target).via == "intercept"
        assert made.resolve(place.rpartition(":")[0]).allowed
        assert not made.connect(target, "tcp").allowed


def test_a_mirror_in_the_company_may_be_private_and_no_metadata_service() -> None:
    made = policy("packages", packages=PACKAGES)
    assert made.address(to("npm.corp.example:8443"), "10.0.0.9").allowed
    assert not made.address(to("npm.corp.example:8443"), "169.254.169.254").allowed
    assert not made.address(to("other.example:443"), "10.0.0.9").allowed
    led = made.rewrite(to("this-host.internal:3141"))
    assert made.address(led, "127.0.0.1", OWN).allowed
    assert not policy("packages", "deny 127.0.0.0/8", PACKAGES).connect(led).allowed


def test_rules_come_before_the_profile() -> None:
    made = policy(
        {"profile": "packages", "rules": ["deny index.example", "allow POST files.example/up"]},
        packages=PACKAGES,
    )
    assert not made.resolve("index.example").allowed
    assert (
        ask(made, "files.example:443", "POST", "/up").allowed
        and ask(made, "files.example:443", "GET", "/x").allowed
    )
    assert not ask(made, "files.example:443", "POST", "/other").allowed


def test_packages_must_have_been_found_out() -> None:
    with pytest.raises(InvalidRequestError, match="not found out"):
        Policy.compile(Network.from_json("packages"))


# -- why ---------------------------------------------------------------------------------------------------------------


def test_why_says_every_rule_looked_at() -> None:
    made = policy(
        ["deny b.example", "allow GET a.example/v1/*", "allow a.example:8080", "allow 10.0.0.0/8"],
        "deny c.example",
    )
    told = made.why("https://a.example/v1/x?y=z", ["192.0.2.1"])
    assert (told["allowed"], told["rule"], told["via"]) == (True, "allow GET a.example/v1/*", "intercept")
    assert [(s["rule"], s["matched"]) for s in told["steps"][:3]] == [
        ("floor: deny c.example", "no"), ("deny b.example", "no"), ("allow GET a.example/v1/*", "yes")]  # fmt: skip
    told = made.why("POST https://a.example/v1/x")
    assert not told["allowed"] and any("not POST" in s["why"] for s in told["steps"]) and told["via"] is None
    told = made.why("a.example:443")
    assert told["allowed"] and any(s["matched"] == "maybe" for s in told["steps"])
    told = made.why("https://a.example/v1/x", ["10.255.0.1"])
    assert not policy(["allow a.example"]).why("https://a.example/", ["10.0.0.1"])["allowed"]
    assert told["allowed"] and told["steps"][-1]["why"].endswith("a private address")
    assert made.why("http://10.0.0.1/")["allowed"] and not made.why("[::1]:80")["allowed"]
    assert not made.why("https://c.example")["allowed"]
    assert made.explain("https://a.example/v1/x")[-1].rule == "allow GET a.example/v1/*"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://a.example/",
        "https://",
        "https://*.a.example",
        "a b c",
        "https://a.example:0",
        "http://0x7f000001/",
    ],
)
def test_questions_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        policy().why(text)


@settings(max_examples=200)
@given(RULES, st.one_of(st.text(max_size=30), PLACES, PLACES.map(lambda p: f"POST https://{p}/a/../b")))
def test_why_agrees_with_the_verdict(network: list[str], text: str) -> None:
    made = policy(network)
    try:
        told = made.why(text)
    except InvalidRequestError:
        return
    assert told["steps"][-1]["why"] == told["reason"]
    json.dumps(told)


# -- size and speed ----------------------------------------------------------------------------------------------------


def test_five_hundred_rules_fit_one_message_and_cost_no_time() -> None:
    network = [f"allow h{n}.some-domain.example" for n in range(250)]
    network += [f"deny 100.{n % 60 + 64}.{n}.0/24" for n in range(248)] + [
        "deny *.bad.example",
        "allow *:443",
    ]
    began = time.process_time()
    made = policy(network)
    assert time.process_time() - began < 1
    assert len(json.dumps(made.to_json())) < limits.CONTROL_MESSAGE_BYTES_MAX
    target, rounds = to("h249.some-domain.example:443"), 1_000
    began = time.process_time()
    for _ in range(rounds):
        made.connect(target)
    assert (time.process_time() - began) / rounds < 0.002  # 25 µs when nothing else runs


def test_a_policy_that_is_none() -> None:
    for value in (
        {},
        3,
        {"network": 1, "floor": "", "packages": None},
        {"network": "none", "floor": "x", "packages": None},
        {"network": "packages", "floor": "", "packages": {"hosts": [{}]}},
    ):
        with pytest.raises(InvalidRequestError):
            Policy.from_json(value)  # type: ignore[arg-type]
