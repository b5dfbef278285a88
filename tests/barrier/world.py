"""What the lab's world is, as data: addresses and names, and the records of what arrived. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

HOST = "198.51.100.2"
"""Of the machine the server runs on, as the world sees it."""
HOST6 = "2001:db8:1::2"
WORLD = "198.51.100.1"
"""The world's router, and the host's resolver."""
WORLD6 = "2001:db8:1::1"

NAMES: dict[str, list[str]] = {
    "api.example.com": ["93.184.216.34"],
    "other.example.com": ["93.184.216.35"],
    "files.example.com": ["93.184.216.36"],
    "te.example.com": ["93.184.216.37"],
    "cl.example.com": ["93.184.216.38"],
    "h2.example.com": ["93.184.216.39"],
    "untrusted.example.com": ["93.184.216.40"],
    "evil.example.net": ["93.184.216.66"],
    "tunnel.evil.example.net": ["93.184.216.67"],
    "dns.google": ["8.8.8.8"],
    "cloudflare-dns.com": ["1.1.1.1"],
    "metadata.google.internal": ["169.254.169.254"],
    "private.example.com": ["10.0.0.5"],
    "nas.example.com": ["192.168.1.10"],
    "loopback.example.com": ["127.0.0.1"],
    "host.example.com": [HOST],
    "mapped.example.com": ["::ffff:10.0.0.5"],
    "nat64.example.com": ["64:ff9b::a00:5"],
    "six.example.com": ["2001:db8:77::1"],
    "host6.example.com": [HOST6],
    "loopback6.example.com": ["::1"],
    "local6.example.com": ["fe80::1"],
    "unique6.example.com": ["fd00:ec2::254"],
    "6to4.example.com": ["2002:a9fe:a9fe::1"],
    "compatible.example.com": ["::a9fe:a9fe"],
    "teredo.example.com": ["2001:0:a9fe:a9fe:0:0:5601:5601"],
    "isatap.example.com": ["2001:db8:77::5efe:a9fe:a9fe"],
    "reserved.example.com": ["240.0.0.1"],
    "synthetic.example.com": ["198.18.0.1"],
    "link.example.com": ["198.19.255.1"],
    "cgnat.example.com": ["100.64.0.1"],
    "mixed.example.com": ["10.0.0.5", "93.184.216.34"],
    "multicast.example.com": ["224.0.0.251"],
    "zero.example.com": ["0.0.0.0"],
}
"""What the world's resolver answers, unless a test changes it (`Lab.names`)."""


@dataclass(frozen=True, slots=True)
class Packet:
    """That left the host: addresses are text, `protocol` is IP's number (or "arp", or the EtherType)."""

    protocol: int | str
    source: str
    destination: str
    port: int | None
    payload: bytes
    raw: bytes

    def __str__(self) -> str:
        return f"{self.protocol} {self.source} -> {self.destination}:{self.port} {self.payload[:60]!r}"


@dataclass(frozen=True, slots=True)
class Query:
    name: str
    type: str
    over: str
    to: str


@dataclass(slots=True)
class Arrival:
    """What reached a listener: a connection (`kind` "tcp" or "tls") or a request ("http", "https")."""

    kind: str
    address: str
    port: int
    sni: str | None = None
    method: str = ""
    target: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    body_bytes: int = 0
    body: bytes = b""
    """The first of it."""
    raw: bytes = b""

    def header(self, name: str) -> str | None:
        """The first of that name."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in what the lab has recorded."""

    arrivals: int
    packets: int
    queries: int


def dissect(raw: bytes) -> Packet:
    kind = int.from_bytes(raw[12:14], "big")
    if kind == 0x0806:
        return Packet("arp", _four(raw[28:32]), _four(raw[38:42]), None, raw[14:], raw)
    if kind == 0x0800:
        start = 14 + 4 * (raw[14] & 15)
        protocol, source, destination = raw[23], _four(raw[26:30]), _four(raw[30:34])
        first = not int.from_bytes(raw[20:22], "big") & 0x1FFF
    elif kind == 0x86DD:
        start, protocol, first = 54, raw[20], True
        source, destination = (str(ipaddress.ip_address(raw[at : at + 16].ljust(16))) for at in (22, 38))
    else:
        return Packet(f"{kind:#06x}", raw[6:12].hex(":"), raw[:6].hex(":"), None, raw[14:], raw)
    body = raw[start:]
    if protocol in (6, 17) and first:
        skip = 8 if protocol == 17 else 4 * (body[12] >> 4)
        return Packet(protocol, source, destination, int.from_bytes(body[2:4], "big"), body[skip:], raw)
    return Packet(protocol, source, destination, None, body, raw)


def _four(raw: bytes) -> str:
    return ".".join(str(byte) for byte in raw)
