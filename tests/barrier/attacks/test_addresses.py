"""Addresses in every spelling, and those nobody may reach unless a rule names them."""

from __future__ import annotations

import pytest

from tests.barrier.attacks.guest import Case, Guest
from tests.barrier.attacks.kit import (
    GATEWAY,
    GUEST,
    Any,
    contextlib,
    fetch,
    raw_http,
    resolve,
    socket,
    tcp,
    threading,
    udp,
    why,
)
from tests.barrier.origins import HOST_PORT
from tests.barrier.world import HOST, HOST6

pytestmark = [pytest.mark.vm, pytest.mark.root]

PUBLIC = "93.184.216.66"
"""Of evil.example.net."""
SPELLINGS = {
    "dotted": "93.184.216.66",
    "decimal": "1572395074",
    "hex": "0x5db8d842",
    "hex parts": "0x5d.0xb8.0xd8.0x42",
    "octal": "0135.0270.0330.0102",
    "octal number": "013556154102",
    "two parts": "93.12113986",
    "three parts": "93.184.55362",
    "mixed": "0x5d.184.0330.66",
    "leading zeros": "0x000000005db8d842",
}
METADATA = "169.254.169.254"
METADATA_SPELLINGS = {
    "dotted": METADATA,
    "decimal": "2852039166",
    "hex": "0xa9fea9fe",
    "hex parts": "0xa9.0xfe.0xa9.0xfe",
    "octal": "0251.0376.0251.0376",
    "two parts": "169.16689662",
    "three parts": "169.254.43518",
    "padded": "169.254.169.254.",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_literals_in_every_spelling(case: Case, spelling: str) -> None:
    """What a guest's own resolver makes of them is one address, which no rule names."""
    literal = SPELLINGS[spelling]
    case.guest.network(["allow api.example.com"])
    for scheme in ("http", "https"):
        answer = case.guest.run(fetch, f"{scheme}://{literal}/", verify=False)
        assert answer["status"] in (0, 403), answer
    answer = case.guest.run(fetch, f"http://{literal}/", headers={"Host": "api.example.com"})
    assert answer["status"] in (0, 403)
    case.nothing_arrived()
    case.denied(address=PUBLIC)
    case.guest.network([f"allow {PUBLIC}"])
    raw = f"GET / HTTP/1.1\r\nHost: {PUBLIC}\r\n\r\n".encode()
    assert case.guest.run(raw_http, raw, host=literal, until=b"hello")["statuses"] == [200]


@pytest.mark.parametrize("spelling", METADATA_SPELLINGS)
def test_names_that_are_addresses(case: Case, spelling: str) -> None:
    """Asked of our resolver by hand, as a name: the host's own resolver would read it as an address."""
    literal = METADATA_SPELLINGS[spelling]
    for network in ("public", ["allow *"]):
        case.guest.network(network)
        found = case.guest.run(resolve, literal)
        for address in found["addresses"]:
            raw = f"GET / HTTP/1.1\r\nHost: {literal}\r\n\r\n".encode()
            answer = case.guest.run(raw_http, raw, host=address)
            assert answer["statuses"] in ([], [403], [502]), answer
        assert case.guest.run(resolve, "api.example.com")["addresses"], "a name that is one has an address"
    case.nothing_arrived(resolving=(literal, literal.rstrip(".")))
    case.denied(name=lambda name: name in (literal, literal.rstrip(".")))
    case.guest.network([f"allow {METADATA}"])
    assert case.guest.run(fetch, f"http://{METADATA}/")["status"] == 200


@pytest.mark.parametrize(
    "name", ["localhost", "localhost.localdomain", "ip6-localhost", "metadata.google.internal"]
)
def test_local_names(case: Case, name: str) -> None:
    for network in ("public", ["allow *"], [f"allow {name}:{HOST_PORT}", f"allow {name}"]):
        case.guest.network(network)
        addresses = case.guest.run(resolve, name)["addresses"]
        assert addresses, (
            "a name that is allowed has an address, and where it leads is found out when it is dialled"
        )
        for address in addresses:
            raw = f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()
            assert case.guest.run(raw_http, raw, host=address)["statuses"] in ([], [403], [502])
            assert case.guest.run(tcp, address, HOST_PORT, b"\0", limit=10)["outcome"] != "answered"
        # As denied where it has an address, else as what does not resolve.
        told = case.guest.audit(case.at, kind="connection", name=name, port=80)
        assert told["verdict"] == "deny" or "knows no address" in told["reason"], told
    case.nothing_arrived(resolving=(name,))
    case.guest.network(["allow api.example.com"])
    assert case.guest.run(fetch, "http://api.example.com/")["status"] == 200


@pytest.mark.parametrize(
    "address",
    [METADATA, "169.254.170.2", "169.254.0.1", "100.100.100.200", "192.0.0.192", "168.63.129.16"],
)
def test_metadata(case: Case, address: str) -> None:
    """Of clouds. (168.63.129.16 is Azure's, an ordinary address but for what answers there.)"""
    for network in ("none", ["allow api.example.com"], "public"):
        case.guest.network(network)
        answer = case.guest.run(fetch, f"http://{address}/latest/meta-data/", headers={"Metadata": "true"})
        assert answer["status"] in (0, 403), (network, answer)
        assert case.guest.run(tcp, address, 22, limit=9)["outcome"] != "answered"
    case.nothing_arrived()
    case.denied(address=address)
    case.guest.network([f"allow {address}"])
    assert case.guest.run(fetch, f"http://{address}/latest/")["body"] == f"hello from {address}:80\n".encode()


@pytest.mark.parametrize(
    "address",
    ["10.0.0.5", "10.255.255.254", "172.16.0.9", "172.31.255.1", "192.168.1.10", "100.64.0.1", "198.19.0.9",
     "192.0.0.8", "192.88.99.1", "240.0.0.1", "0.1.2.3"],
)  # fmt: skip
def test_private_and_special_addresses(case: Case, address: str) -> None:
    for network in (["allow *"], "public"):
        case.guest.network(network)
        for port in (80, 443, 22, 5432):
            answer = case.guest.run(tcp, address, port, b"GET / HTTP/1.0\r\n\r\n", limit=12, timeout=2)
            assert not answer["data"].startswith((b"HTTP/1.1 200", b"lab ready")), (network, port, answer)
    case.nothing_arrived()
    if address.startswith(("10.", "172.", "192.168.", "100.64.")):
        case.denied(address=address)
        case.guest.network([f"allow tcp {address}:22"])
        assert case.guest.run(tcp, address, 22, limit=9)["data"].startswith(b"lab ready")


def test_a_rule_for_a_wider_net_names_the_class(case: Case) -> None:
    """`0.0.0.0/0` is no way to private addresses; a network within the class is."""
    case.guest.network(["allow 0.0.0.0/0", "allow tcp 0.0.0.0/0:22"])
    assert case.guest.run(tcp, "10.0.0.5", 22, limit=9)["outcome"] != "answered"
    assert case.guest.run(tcp, METADATA, 22, limit=9)["outcome"] != "answered"
    case.nothing_arrived()
    case.denied(kind="connection", address="10.0.0.5", port=22)
    case.denied(kind="connection", address=METADATA, port=22)
    assert case.guest.run(tcp, PUBLIC, 22, limit=9)["outcome"] == "answered"
    case.guest.network(["allow tcp 10.0.0.0/24:22"])
    assert case.guest.run(tcp, "10.0.0.5", 22, limit=9)["outcome"] == "answered"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3"])
def test_loopback_is_the_guests_own(case: Case, address: str) -> None:
    case.guest.network([f"allow tcp {address}:{HOST_PORT}", "allow *"])
    assert case.guest.run(tcp, address, HOST_PORT, limit=9)["outcome"] == "refused"
    case.nothing_arrived()


def test_the_host(case: Case) -> None:
    """Its own addresses, whatever port, under everything but a rule that names them."""
    for network in ("none", ["allow *"], "public", ["allow 0.0.0.0/0"], ["allow 198.51.100.0/24"]):
        case.guest.network(network)
        for port in (22, 80, 443, HOST_PORT):
            answer = case.guest.run(tcp, HOST, port, b"GET / HTTP/1.0\r\n\r\n", limit=12, timeout=2)
            assert not answer["data"].startswith((b"HTTP/1.1 200", b"lab ready")), (network, port, answer)
    case.nothing_arrived()
    case.denied(address=HOST, port=HOST_PORT)
    case.guest.network([f"allow tcp {HOST}:{HOST_PORT}"])
    assert case.guest.run(tcp, HOST, HOST_PORT, limit=9)["data"].startswith(b"lab ready")


def scan(address: str, ports: list[int]) -> dict[int, str]:
    """What is open there, or silent."""
    found: dict[int, str] = {}
    for port in ports:
        try:
            with socket.create_connection((address, port), 3) as sock:
                sock.sendall(b"\0")  # who says nothing waits for his denial
                sock.settimeout(1.0)
                with contextlib.suppress(TimeoutError):
                    if got := sock.recv(100):
                        found[port] = got.decode("latin-1")
        except OSError as error:
            if isinstance(error, TimeoutError):
                found[port] = "timeout"
    return found


def test_the_gateways_own_ports(case: Case) -> None:
    """The planted sockets themselves, and what else might listen at the guest's gateway."""
    case.guest.network("public")
    found = case.guest.run(scan, GATEWAY, [22, 53, 80, 443, 853, 5353, 8099, 9000, 9001, 10_000])
    assert {port for port, what in found.items() if "ready" in what or what == "timeout"} == set(), found
    for port in (9000, 5353, 80):
        raw = b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
        answer = case.guest.run(raw_http, raw, host=GATEWAY, port=port)
        assert answer["statuses"] in ([], [403]), answer
    for port in (9000, 5353, 67, 69, 123, 161):
        answer = case.guest.run(udp, GATEWAY, port, b"\0" * 12, timeout=0.4)
        assert answer["outcome"] != "answered", (port, answer)
    case.nothing_arrived()
    case.denied(address=GATEWAY, port=9000)
    assert case.guest.run(resolve, "api.example.com")["addresses"]


def test_connections_to_the_gateways_port_do_not_loop(case: Case) -> None:
    """No rule may name the very address; and what comes to the planted port by its own address is not led back in."""
    where = f"/v1/sandboxes/{case.guest.id}/network"
    for rule in (f"allow tcp {GATEWAY}:9000", f"allow tcp {GATEWAY}:*", f"allow tcp {GUEST}:22"):
        answer = case.guest.node.http.put(where, json={"network": [rule]})
        assert answer.status_code == 400 and "synthetic" in answer.text, answer.text
    case.guest.network({"profile": "public", "rules": ["allow tcp 198.0.0.0/8:9000", "allow tcp *:9000"]})
    for _ in range(10):
        answer = case.guest.run(tcp, GATEWAY, 9000, b"x", limit=20, timeout=5)
        assert answer["outcome"] in ("refused", "reset", "closed"), answer
    case.nothing_arrived()
    case.denied(kind="connection", address=GATEWAY, port=9000)


def listen(port: int) -> None:
    listener = socket.create_server(("0.0.0.0", port))

    def serve() -> None:
        while True:
            sock, _ = listener.accept()
            sock.sendall(b"the other sandbox\n")
            sock.close()

    threading.Thread(target=serve, daemon=True).start()


def test_another_sandbox(case: Case) -> None:
    """Same addresses, other namespace: names and ports of one lead nowhere in another."""
    other = Guest(case.guest.node, case.lab, ["allow other.example.com", "allow tcp 93.184.216.35:22"])
    try:
        theirs = other.run(resolve, "other.example.com")["addresses"][0]
        other.run(listen, 8_000)
        assert other.run(tcp, GUEST, 8_000, limit=5)["data"].startswith(b"the o")
        case.guest.network(["allow api.example.com"])
        ours = case.guest.run(resolve, "api.example.com")["addresses"][0]
        raw = b"GET / HTTP/1.1\r\nHost: other.example.com\r\n\r\n"
        for host in {theirs, ours}:
            assert case.guest.run(raw_http, raw, host=host)["statuses"] in ([], [403])
        for address in (GUEST, GATEWAY, "198.19.255.3", "198.19.255.0"):
            assert case.guest.run(tcp, address, 8_000, b"\0", limit=5, timeout=2)["outcome"] not in (
                "answered",
                "closed",
            )
        case.nothing_arrived()
        case.denied(kind="connection", address=GATEWAY, port=8_000)
        case.denied(kind="packet", rule="link: arp")
        case.denied(kind="connection", name="api.example.com", protocol="http")
        # Each has its own record and its own policy.
        assert not [one for one in case.guest.records(case.at) if one["sandbox"] == other.id]
        assert other.run(fetch, "http://other.example.com/")["status"] == 200
        assert case.guest.run(fetch, "http://api.example.com/")["status"] == 200
    finally:
        other.kill()


def six(address: str, port: int) -> dict[str, Any]:
    """A connection by IPv6, whether or not the kernel has an address for it."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.settimeout(2)
            sock.connect((address, port))
            return {"outcome": "connected", "data": sock.recv(100)}
    except OSError as error:
        return {"outcome": why(error), "data": b""}


@pytest.mark.parametrize(
    "address",
    [f"::ffff:{PUBLIC}", f"::ffff:{METADATA}", "64:ff9b::a9fe:a9fe", "::a9fe:a9fe", "2002:a9fe:a9fe::1",
     "2001:db8:77::1", HOST6, "fd00:ec2::254", "fe80::1"],
)  # fmt: skip
def test_addresses_of_six(case: Case, address: str) -> None:
    """v4-mapped, NAT64, v4-compatible, 6to4, the host's own, metadata's, link-local."""
    networks: tuple[Any, ...] = (["allow api.example.com"],) if PUBLIC in address else (["allow *"], "public")
    for network in networks:
        case.guest.network(network)
        for port in (22, 80):
            assert case.guest.run(six, address, port)["data"] == b"", network
    case.nothing_arrived()
    if "." in address:
        case.denied(kind="connection", address=address.removeprefix("::ffff:"), port=80)
        case.guest.network([f"allow tcp {address.removeprefix('::ffff:')}:22"])
        assert case.guest.run(six, address, 22)["data"].startswith(b"lab ready")
    elif not address.startswith("fe80"):
        where = address if address != HOST6 else "2001:db8:1::1"
        assert case.lab.dial(where, 22).startswith(b"lab ready")


def test_every_port_of_a_denied_host_is_answered_at_once(case: Case) -> None:
    """No timeouts to tell ports apart by, and none to wait for."""
    case.guest.network(["allow api.example.com"])
    found: dict[str, Any] = case.guest.run(tcp, PUBLIC, 22)
    assert found["outcome"] in ("refused", "reset") and found["seconds"] < 2, found
    case.nothing_arrived()
    case.denied(kind="connection", address=PUBLIC, port=22)
