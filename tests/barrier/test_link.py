"""A link's promises, on real namespaces and frames: what comes through, what is refused, what is told of it."""

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm4agents import limits
from llm4agents.barrier.link import nft
from llm4agents.barrier.link.links import Link
from tests.support import eventually

from . import guestside
from .guestside import (
    GATEWAY_MAC,
    GUEST_MAC,
    Guest,
    Log,
    Pool,
    arp,
    checksum,
    frame,
    frames,
    ip,
    original,
    ping,
    tcp,
    udp,
)

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root; ordinary users: test_link_unprivileged"
)
ELSEWHERE = "203.0.113.9"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with guestside.pool() as pool:
        yield pool


@pytest.fixture
def link(pool: Pool) -> Iterator[Link]:
    link = pool.take()
    try:
        yield link
    finally:
        link.close()


@pytest.fixture
def guest(link: Link) -> Iterator[Guest]:
    guest = Guest(link)
    try:
        yield guest
    finally:
        guest.close()


@pytest.fixture
def log(link: Link) -> Iterator[Log]:
    log = Log(link.planted.packets)
    try:
        yield log
    finally:
        log.close()


def accept(link: Link) -> socket.socket:
    listening = socket.socket(fileno=os.dup(link.planted.tcp))
    listening.settimeout(5)
    with listening:
        connection, _ = listening.accept()
    connection.settimeout(5)
    return connection


def nobody_connects(link: Link) -> bool:
    with socket.socket(fileno=os.dup(link.planted.tcp)) as listening:
        listening.setblocking(False)
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return True
        return False


def answers(link: Link, sent: bytes) -> list[bytes]:
    """What of IP comes back to the guest for one frame."""
    os.write(link.tap, sent)
    return [got[14:] for got in frames(link.tap, 0.3) if got[12:14] == b"\x08\x00"]


@pytest.mark.parametrize(
    "address", [ELSEWHERE, "169.254.169.254", "10.0.0.1", "127.0.0.1", limits.GATEWAY_ADDRESS]
)
@pytest.mark.parametrize("port", [80, 443, 53, 853, 5432, 9000])
def test_tcp_to_anywhere_ends_at_the_planted_socket(
    guest: Guest, link: Link, address: str, port: int
) -> None:
    if address == "127.0.0.1":
        # The guest's own stack would keep it to itself: a frame by hand.
        os.write(link.tap, frame(ip(tcp(address, port), 6, address)))
        assert guest and nobody_connects(link)
        return
    with guest.connect(address, port) as client, accept(link) as server:
        assert original(server) == (address, port)
        assert server.getpeername()[0] == limits.GUEST_ADDRESS
        client.sendall(b"up" * 50_000)
        client.shutdown(socket.SHUT_WR)
        got = b"".join(iter(lambda: server.recv(65536), b""))
        assert got == b"up" * 50_000
        server.sendall(b"down")
        assert client.recv(9) == b"down"


@pytest.mark.parametrize("address", [ELSEWHERE, limits.GATEWAY_ADDRESS, "8.8.4.4"])
def test_dns_to_anywhere_is_answered_from_there(guest: Guest, link: Link, address: str) -> None:
    with guest.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((address, 53))  # so that an answer from elsewhere would not be taken
        with socket.socket(fileno=os.dup(link.planted.udp)) as server:
            server.setblocking(True)
            for number in range(3):
                client.send(b"query %d" % number)
                query, peer = server.recvfrom(999)
                server.sendto(b"answer to " + query, peer)
                assert client.recv(999) == b"answer to query %d" % number


def test_other_udp_is_refused_with_an_answer_and_told(guest: Guest, log: Log) -> None:
    with guest.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((ELSEWHERE, 443))
        client.send(b"quic")
        with pytest.raises(OSError) as refused:
            client.recv(1)
        assert refused.value.errno == errno.EHOSTUNREACH
    logged = log.wait("denied")
    assert (logged.destination, logged.payload[9], logged.payload[20:24]) == (
        ELSEWHERE,
        17,
        logged.payload[20:22] + struct.pack("!H", 443),
    )
    assert logged.payload.endswith(b"quic")


@pytest.mark.parametrize("address", [ELSEWHERE, limits.GATEWAY_ADDRESS])
def test_ping_is_refused_with_an_answer_and_told(link: Link, log: Log, address: str) -> None:
    back = answers(link, frame(ip(ping(), 1, address)))
    assert [(got[9], got[20], got[21]) for got in back] == [(1, 3, 13)]  # administratively prohibited
    assert log.wait("denied").destination == address


@pytest.mark.parametrize("protocol", [2, 4, 41, 47, 50, 89, 132, 253])
def test_other_protocols_are_refused_with_an_answer_and_told(link: Link, log: Log, protocol: int) -> None:
    # The kernel answers nothing whose payload does not add up, where it knows no better for the protocol.
    data = b"tunnel" * 10
    back = answers(link, frame(ip(data + struct.pack("!H", checksum(data)), protocol, ELSEWHERE)))
    assert [(got[9], got[20], got[21]) for got in back] == [(1, 3, 13)]
    assert log.wait("denied").payload[9] == protocol


def test_tcp_of_no_connection_is_reset_and_told(link: Link, log: Log) -> None:
    (back,) = answers(link, frame(ip(tcp(ELSEWHERE, 443, flags=0x18, data=b"secret"), 6, ELSEWHERE)))
    assert back[9] == 6 and back[33] & 0x04
    assert socket.inet_ntoa(back[12:16]) == ELSEWHERE
    assert b"secret" in log.wait("stray").payload


@pytest.mark.parametrize(
    ("prefix", "sent"),
    [
        ("source", frame(ip(udp(b"x", 53), 17, ELSEWHERE, source="198.19.255.1"))),
        ("source", frame(ip(tcp(ELSEWHERE, 80, source="10.1.1.1"), 6, ELSEWHERE, source="10.1.1.1"))),
        ("source", frame(ip(udp(b"x", 53), 17, ELSEWHERE, source="127.0.0.1"))),
        ("mac", frame(ip(udp(b"x", 53), 17, ELSEWHERE), source=b"\x02\x4c\x34\x00\x00\x03")),
        ("mac", frame(ip(tcp(ELSEWHERE, 80), 6, ELSEWHERE), source=GATEWAY_MAC)),
        (
            "ipv6",
            frame(b"\x60" + bytes(3) + b"\x00\x08\x3a\x40" + bytes(32) + b"\x80" + bytes(7), kind=0x86DD),
        ),
        ("ipv6", frame(b"\x60" + bytes(39), kind=0x86DD, target=b"\x33\x33\x00\x00\x00\x01")),
        ("ethernet", frame(bytes(46), kind=0x88CC)),
        ("ethernet", frame(bytes(46), kind=0x8847)),
        ("ethernet", frame(struct.pack("!HH", 5, 0x0800) + ip(udp(b"x", 53), 17, ELSEWHERE), kind=0x8100)),
        ("multicast", frame(ip(udp(b"x", 5353), 17, "224.0.0.251"), target=b"\x01\x00\x5e\x00\x00\xfb")),
        ("multicast", frame(ip(udp(b"x", 67), 17, "255.255.255.255"), target=b"\xff" * 6)),
        ("multicast", frame(ip(tcp(ELSEWHERE, 80), 6, ELSEWHERE), target=b"\x02\x00\x00\x00\x00\x09")),
        ("arp", arp(ELSEWHERE)),
        ("arp", arp(limits.GATEWAY_ADDRESS, mac=b"\x02\x00\x00\x00\x00\x09")),
        ("arp", arp(limits.GATEWAY_ADDRESS, source=limits.GATEWAY_ADDRESS)),
        ("arp", arp(limits.GUEST_ADDRESS, operation=2, source=limits.GATEWAY_ADDRESS)),
    ],
)
def test_what_the_guest_cannot_be_is_dropped_and_told(link: Link, log: Log, prefix: str, sent: bytes) -> None:
    os.write(link.tap, sent)
    logged = log.wait(prefix)
    assert prefix in nft.PREFIXES
    assert logged.payload[:8] == (
        sent[14:22] if prefix != "ethernet" or sent[12:14] != b"\x81\x00" else logged.payload[:8]
    )
    assert not [got for got in frames(link.tap, 0.2) if got[12:14] == b"\x08\x00"]
    assert nobody_connects(link)
    with socket.socket(fileno=os.dup(link.planted.udp)) as planted, pytest.raises(BlockingIOError):
        planted.recv(1)


def test_the_same_packets_come_through_when_they_are_the_guests(link: Link, log: Log) -> None:
    """The control of what is dropped above."""
    os.write(link.tap, frame(ip(udp(b"x", 53), 17, ELSEWHERE)))
    with socket.socket(fileno=os.dup(link.planted.udp)) as planted:
        planted.setblocking(True)
        planted.settimeout(5)
        assert planted.recv(9) == b"x"
    (back,) = answers(link, frame(ip(tcp(ELSEWHERE, 80), 6, ELSEWHERE)))
    assert (back[9], back[33], socket.inet_ntoa(back[12:16])) == (6, 0x12, ELSEWHERE)  # SYN+ACK
    os.write(link.tap, arp(limits.GATEWAY_ADDRESS))
    replies = [got for got in frames(link.tap, 0.3) if got[12:14] == b"\x08\x06"]
    assert [got[22:32] for got in replies] == [GATEWAY_MAC + socket.inet_aton(limits.GATEWAY_ADDRESS)]
    assert not log.read()


def test_arp_changes_nothing(link: Link) -> None:
    """Whatever the guest says, answers go to its own hardware address."""
    for sent in (
        arp(limits.GUEST_ADDRESS, operation=2, mac=b"\x02\x00\x00\x00\x00\x09"),
        arp(limits.GATEWAY_ADDRESS, operation=2),
        arp(limits.GUEST_ADDRESS),
    ):
        os.write(link.tap, sent)
    os.write(link.tap, frame(ip(tcp(ELSEWHERE, 80), 6, ELSEWHERE)))
    got = next(got for got in frames(link.tap) if got[12:14] == b"\x08\x00")
    assert (got[:6], got[6:12]) == (GUEST_MAC, GATEWAY_MAC)


def test_fragments_are_judged_whole(link: Link, log: Log) -> None:
    datagram = udp(b"quic" * 10, 443)
    os.write(link.tap, frame(ip(datagram[:24], 17, ELSEWHERE, fragment=0x2000)))
    os.write(link.tap, frame(ip(datagram[24:], 17, ELSEWHERE, fragment=3)))
    assert log.wait("denied").payload[20:] == datagram
    assert nobody_connects(link)


def test_connections_at_once_are_bounded_and_the_rest_refused(guest: Guest, link: Link, log: Log) -> None:
    opened: list[socket.socket] = []
    refused = 0
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [sock.close() for sock in opened])
        for number in range(limits.LINK_CONNECTIONS_MAX + 200):
            try:
                opened.append(guest.connect(ELSEWHERE, 1000 + number % 50_000))
            except ConnectionRefusedError:
                refused += 1
        assert 0 < len(opened) <= limits.LINK_CONNECTIONS_MAX + 1
        assert refused >= 199
        assert log.wait("connections").destination == ELSEWHERE
    # What was closed makes room again.
    with socket.socket(fileno=os.dup(link.planted.tcp)) as listening:
        listening.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                listening.accept()[0].close()

    def again() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            guest.connect(ELSEWHERE, 80).close()
            return True
        return False

    eventually(again, 10)


def test_a_flood_of_half_open_connections_is_bounded(link: Link, log: Log) -> None:
    """10,000 SYNs from ports nobody answers for."""
    before = time.monotonic()
    half_open = 0
    for number in range(10_000):
        os.write(link.tap, frame(ip(tcp(ELSEWHERE, 80, source_port=1 + number % 60_000), 6, ELSEWHERE)))
        if number % 100 == 0:
            half_open += sum(
                got[47] == 0x12 for got in frames(link.tap, 0) if got[12:14] == b"\x08\x00" and got[23] == 6
            )
    for got in frames(link.tap, 0.5):
        if got[12:14] == b"\x08\x00" and got[23] == 6 and got[47] == 0x12:
            half_open += 1
    assert half_open > 0
    prefixes = {logged.prefix for logged in (log.wait("connections"), *log.read())}
    assert prefixes & {"connections", f"connections{nft.MANY}", "rate"}
    assert nobody_connects(link)
    assert time.monotonic() - before < 30
    # Other sandboxes notice nothing: another link is made and works.


def test_a_flood_of_refused_packets_is_summed_up(link: Link, log: Log) -> None:
    sent = 5_000
    data = frame(ip(udp(b"x" * 600, 9999), 17, ELSEWHERE))
    for _ in range(sent):
        os.write(link.tap, data)
    log.wait(f"denied{nft.MANY}")
    assert len(log.read()) < sent / 10
    many = [logged for logged in log.seen if logged.prefix == f"denied{nft.MANY}"]
    assert limits.PACKET_LOG_MANY * len(many) + len(log.seen) >= sent - 2 * limits.PACKET_LOG_MANY
    assert max(len(logged.payload) for logged in log.seen) == limits.PACKET_LOG_BYTES
    for _ in frames(link.tap, 0):
        pass


def test_the_namespace_has_no_way_out(link: Link) -> None:
    def enter() -> tuple[list[str], str, str]:
        assert guestside._libc.setns(link.planted.netns, 0x4000_0000) == 0
        devices = [
            line.split(":")[0].strip()
            for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
        ]
        routes = Path("/proc/thread-self/net/route").read_text()
        return sorted(devices), routes, Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").read_text().strip()

    found: list[tuple[list[str], str, str]] = []
    thread = threading.Thread(target=lambda: found.append(enter()))
    thread.start()
    thread.join()
    devices, routes, ipv6 = found[0]
    assert devices == ["lo", "tap0"]
    assert len(routes.splitlines()) == 2 and routes.splitlines()[1].split()[1] == "00FF13C6"  # 198.19.255.0
    assert ipv6 == "1"


def test_a_packet_socket_sees_both_directions(pool: Pool, link: Link, guest: Guest) -> None:
    fd = pool.packet_socket(link.planted.netns)
    with socket.socket(fileno=fd) as capture, guest.connect(ELSEWHERE, 80), accept(link):
        capture.settimeout(5)
        seen = set()
        while len(seen) < 2:
            data = capture.recv(65536)
            if data[12:14] == b"\x08\x00" and data[23] == 6:
                seen.add(data[6:12])
        assert seen == {GUEST_MAC, GATEWAY_MAC}
