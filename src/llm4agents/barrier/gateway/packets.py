"""Packets that the link's rules logged (NFLOG), as audit records. Pure.

    for record in records(datagram): ...     # netlink messages of one datagram; what is none is passed over

The reason is the prefix the rule gave: what it was dropped for. The packets are a guest's, so hostile; the netlink
messages around them are the kernel's.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from typing import Any

from llm4agents import limits
from llm4agents.barrier.link.nft import PREFIXES

_GUEST = limits.GUEST_ADDRESS
_MESSAGE = struct.Struct("=IHHII")
_NFNL_ULOG, _PACKET = 4, 0
_PAYLOAD, _PREFIX = 9, 10
_PROTOCOLS = {1: "icmp", 2: "igmp", 6: "tcp", 17: "udp", 47: "gre", 50: "esp", 58: "icmpv6", 132: "sctp"}
_WITH_PORTS = {6, 17, 132, 136}
_INET, _INET6 = 2, 10
_IPV6_EXTENSIONS = {0, 43, 44, 60}


def records(datagram: bytes) -> Iterator[dict[str, Any]]:
    at = 0
    while at + _MESSAGE.size + 4 <= len(datagram):
        length, kind, *_ = _MESSAGE.unpack_from(datagram, at)
        if length < _MESSAGE.size or at + length > len(datagram):
            return
        if kind == (_NFNL_ULOG << 8 | _PACKET):
            family = datagram[at + _MESSAGE.size]
            attributes = _attributes(datagram[at + _MESSAGE.size + 4 : at + length])
            yield record(family, attributes.get(_PAYLOAD, b""), _text(attributes.get(_PREFIX, b"")))
        at += (length + 3) & ~3


def record(family: int, packet: bytes, prefix: str) -> dict[str, Any]:
    """`family` as in nfgenmsg: AF_INET, AF_INET6, NFPROTO_ARP (3), NFPROTO_NETDEV (5), NFPROTO_BRIDGE (7)."""
    prefix, many, count = prefix.partition("*")
    found: dict[str, Any] = {
        "kind": "packet",
        "verdict": "deny",
        "rule": f"link: {prefix}",
        "reason": PREFIXES.get(prefix, "not redirected"),
    }
    if many and count.isdecimal():
        found["repeated"] = int(count)  # this one stands for so many that were not logged
    version = packet[0] >> 4 if packet else 0
    if family == 3 or (family in (5, 7) and version not in (4, 6)):
        found["protocol"] = "arp" if family == 3 else "ethernet"
    elif version == 4:
        found.update(_ipv4(packet))
    elif version == 6:
        found.update(_ipv6(packet))
    else:
        found["protocol"] = "ip" if family == _INET else "ipv6" if family == _INET6 else "other"
    return found


def _ipv4(packet: bytes) -> dict[str, Any]:
    if len(packet) < 20:
        return {"protocol": "ip"}
    protocol = packet[9]
    found: dict[str, Any] = {
        "protocol": _PROTOCOLS.get(protocol, f"ip/{protocol}"),
        "address": str(ipaddress.IPv4Address(packet[16:20])),
    }
    if str(ipaddress.IPv4Address(packet[12:16])) != _GUEST:
        found["source"] = str(ipaddress.IPv4Address(packet[12:16]))
    first = not struct.unpack_from("!H", packet, 6)[0] & 0x1FFF
    return {**found, **(_ports(protocol, packet[(packet[0] & 0xF) * 4 :]) if first else {})}


def _ipv6(packet: bytes) -> dict[str, Any]:
    if len(packet) < 40:
        return {"protocol": "ipv6"}
    protocol, at = packet[6], 40
    for _ in range(8):
        if protocol not in _IPV6_EXTENSIONS or at + 8 > len(packet):
            break
        protocol, at = packet[at], at + (8 if protocol == 44 else (packet[at + 1] + 1) * 8)
    return {
        "protocol": _PROTOCOLS.get(protocol, f"ipv6/{protocol}"),
        "address": str(ipaddress.IPv6Address(packet[24:40])),
        "source": str(ipaddress.IPv6Address(packet[8:24])),
        **_ports(protocol, packet[at:]),
    }


def _ports(protocol: int, rest: bytes) -> dict[str, int]:
    return (
        {"port": struct.unpack_from("!H", rest, 2)[0]} if protocol in _WITH_PORTS and len(rest) >= 4 else {}
    )


def _attributes(raw: bytes) -> dict[int, bytes]:
    found, at = {}, 0
    while at + 4 <= len(raw):
        length, kind = struct.unpack_from("=HH", raw, at)
        if length < 4 or at + length > len(raw):
            break
        found[kind & 0x3FFF] = raw[at + 4 : at + length]
        at += (length + 3) & ~3
    return found


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii", "replace").strip().rstrip(":")
