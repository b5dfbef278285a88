"""What an address is: its class, and what it reaches behind IPv4-in-IPv6 wrappings. Pure; dials and resolves nothing.

Tables of our own and not `ipaddress.is_private`: that one differs between Python versions, and counts documentation
ranges (ordinary addresses here) as private. Names live here too as far as they must not be mistaken for addresses.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from llm4agents import limits

Address = IPv4Address | IPv6Address
Net = IPv4Network | IPv6Network


class Kind(StrEnum):
    """Classes of addresses. All but PUBLIC are dialled only when a rule names the address (`opens`)."""

    PUBLIC = "public"
    PRIVATE = "private"
    LOOPBACK = "loopback"
    LINK_LOCAL = "link-local"
    METADATA = "metadata"
    CGNAT = "carrier-grade NAT"
    HOST = "the host's own"
    RESERVED = "reserved"
    MULTICAST = "multicast"
    BROADCAST = "broadcast"
    UNSPECIFIED = "unspecified"
    SYNTHETIC = "synthetic"


NEVER = frozenset({Kind.MULTICAST, Kind.BROADCAST, Kind.UNSPECIFIED, Kind.SYNTHETIC})
"""No rule opens these: a TCP connection to them means nothing, or the host itself."""

# Where clouds and their agents answer with credentials; some lie outside the link-local range.
_METADATA = frozenset(
    map(
        ip_address,
        (
            "169.254.169.254",  # most clouds
            "169.254.169.253",
            "169.254.169.250",
            "169.254.169.123",
            "169.254.170.2",  # container credentials
            "169.254.170.23",
            "169.254.42.42",
            "169.254.0.23",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd00:ec2::253",
            "fd00:ec2::250",
            "fd00:ec2::123",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:42::42",
            "fe80::a9fe:a9fe",
        ),
    )
)
_RANGES_4: tuple[tuple[IPv4Network, Kind], ...] = tuple(
    (IPv4Network(net), kind)
    for net, kind in (
        ("0.0.0.0/8", Kind.UNSPECIFIED),  # Linux connects 0.0.0.0 to itself
        ("10.0.0.0/8", Kind.PRIVATE),
        ("100.64.0.0/10", Kind.CGNAT),
        ("127.0.0.0/8", Kind.LOOPBACK),
        ("169.254.0.0/16", Kind.LINK_LOCAL),
        ("172.16.0.0/12", Kind.PRIVATE),
        ("192.0.0.0/24", Kind.RESERVED),
        ("192.88.99.0/24", Kind.RESERVED),  # 6to4 relays
        ("192.168.0.0/16", Kind.PRIVATE),
        ("198.18.0.0/15", Kind.SYNTHETIC),  # ours, and the link's
        ("224.0.0.0/4", Kind.MULTICAST),
        ("255.255.255.255/32", Kind.BROADCAST),
        ("240.0.0.0/4", Kind.RESERVED),
    )
)
assert IPv4Network(limits.SYNTHETIC_NET).subnet_of(IPv4Network("198.18.0.0/15"))
_RANGES_6: tuple[tuple[IPv6Network, Kind], ...] = tuple(
    (IPv6Network(net), kind)
    for net, kind in (
        ("::/128", Kind.UNSPECIFIED),
        ("::1/128", Kind.LOOPBACK),
        ("64:ff9b:1::/48", Kind.PRIVATE),  # a site's own NAT64: where it leads cannot be told
        ("fc00::/7", Kind.PRIVATE),
        ("fe80::/10", Kind.LINK_LOCAL),
        ("fec0::/10", Kind.PRIVATE),
        ("ff00::/8", Kind.MULTICAST),
        ("3ffe::/16", Kind.RESERVED),
        ("2001:10::/28", Kind.RESERVED),
        ("2001:20::/28", Kind.RESERVED),
        ("2000::/3", Kind.PUBLIC),
        ("::/0", Kind.RESERVED),
    )
)
_MAPPED = IPv6Network("::ffff:0:0/96")
_TRANSLATED = IPv6Network("::ffff:0:0:0/96")
_COMPATIBLE = IPv6Network("::/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_6TO4 = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")


def parse(text: str) -> Address | None:
    """An address in its usual spelling, `[…]` around IPv6 or not; None for everything else (also zones, `%eth0`)."""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
        if ":" not in text:
            return None
    if "%" in text:
        return None
    try:
        return ip_address(text)
    except ValueError:
        return None


def is_numeric(text: str) -> bool:
    """Whether a resolver or a browser would read it as an IPv4 address: its last label is a number.

    The rule of the URL standard, after the compatibility forms of digits and dots are unified. No top-level domain
    is a number, so nothing that is a name is lost.
    """
    last = _unified(text).removesuffix(".").rpartition(".")[2]
    return bool(re.fullmatch(r"[0-9]+|0[xX][0-9a-fA-F]*", last))


def spelled(text: str) -> IPv4Address | None:
    """The address that `inet_aton` and browsers read in a numeric spelling (decimal, octal, hexadecimal, one to four
    parts); None when they would find none. Only for telling people what they wrote: such spellings are refused."""
    parts = _unified(text).removesuffix(".").split(".")
    if len(parts) > 4:
        return None
    numbers = []
    for part in parts:
        if re.fullmatch(r"0[xX][0-9a-fA-F]*", part):
            numbers.append(int(part[2:] or "0", 16))
        elif re.fullmatch(r"0[0-7]*", part):
            numbers.append(int(part, 8))
        elif re.fullmatch(r"[1-9][0-9]{0,12}", part):
            numbers.append(int(part))
        else:
            return None
    *heads, tail = numbers
    if any(head > 255 for head in heads) or tail >= 256 ** (4 - len(heads)):
        return None
    value = tail
    for place, head in enumerate(heads):
        value |= head << (8 * (3 - place))
    return IPv4Address(value)


def _unified(text: str) -> str:
    return (
        text if text.isascii() else unicodedata.normalize("NFKC", text).replace("。", ".").replace("｡", ".")
    )


def reached(address: Address) -> Address:
    """What a packet to it ends at: the IPv4 address inside mapped, translated, compatible, NAT64, 6to4, Teredo and
    ISATAP forms, else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    value = int(address)
    if address in _MAPPED or address in _TRANSLATED or address in _NAT64:
        return IPv4Address(value & 0xFFFFFFFF)
    if address in _COMPATIBLE and value > 0xFFFF:  # ::1 and its like are no wrappings
        return IPv4Address(value & 0xFFFFFFFF)
    if address in _6TO4:
        return IPv4Address(value >> 80 & 0xFFFFFFFF)
    if address in _TEREDO:
        return IPv4Address(~value & 0xFFFFFFFF)
    if (value >> 32 & 0xFFFFFFFF) in (0x00005EFE, 0x02005EFE):
        return IPv4Address(value & 0xFFFFFFFF)
    return address


def _range_of(address: Address) -> tuple[Net, Kind] | None:
    ranges: Iterable[tuple[Net, Kind]] = _RANGES_4 if isinstance(address, IPv4Address) else _RANGES_6
    for net, kind in ranges:
        if address in net:
            return net, kind
    return None


@lru_cache(maxsize=4096)
def _kind(address: Address) -> Kind:
    if address in _METADATA:
        return Kind.METADATA
    found = _range_of(address)
    kind = Kind.PUBLIC if found is None else found[1]
    inner = reached(address)
    if inner == address:
        return kind
    if kind in (Kind.PUBLIC, Kind.RESERVED):
        # The wrapping says nothing of its own (mapped forms lie in reserved space): what is inside counts. A Teredo
        # address also names its server.
        within = _kind(inner)
        if within is Kind.PUBLIC and address in _TEREDO:
            return _kind(IPv4Address(int(address) >> 64 & 0xFFFFFFFF))
        return within
    return kind


def classify(address: Address, own: Collection[Address] = ()) -> Kind:
    """The class of what the address reaches. `own`: addresses of this host."""
    if own and (address in own or reached(address) in own):
        kind = _kind(address)
        return kind if kind in NEVER or kind is Kind.LOOPBACK else Kind.HOST
    return _kind(address)


def opens(net: Net, address: Address, kind: Kind) -> bool:
    """Whether a rule that names `net` names `address` closely enough to open its class.

    A network opens a class only from within it (10.0.0.0/8 opens private addresses, 0.0.0.0/0 none); metadata
    services and the host itself must be named as the one address that they are.
    """
    inner = reached(address)
    if not (_holds(net, address) or _holds(net, inner)):
        return False
    if kind is Kind.PUBLIC:
        return True
    if kind in NEVER:
        return False
    if kind in (Kind.METADATA, Kind.HOST):
        return net.prefixlen == net.max_prefixlen
    if net.prefixlen == net.max_prefixlen:
        return True
    here = inner if inner.version == net.version else address
    found = _range_of(here)
    return found is not None and found[1] is not Kind.PUBLIC and net.prefixlen >= found[0].prefixlen > 0


def beyond(net: Net, own: Collection[Address] = ()) -> Kind | None:
    """The class of addresses, ordinary ones aside, that a rule which names `net` opens (`opens`); None: no such."""
    if net.prefixlen == net.max_prefixlen:
        kind = classify(net.network_address, own)
        return None if kind is Kind.PUBLIC or kind in NEVER else kind
    found = _range_of(net.network_address)
    if found is None or found[1] is Kind.PUBLIC or found[1] in NEVER:
        return None
    return found[1] if net.prefixlen >= found[0].prefixlen > 0 else None


def within(net: Net, nets: Iterable[Net]) -> bool:
    """Whether one of `nets` has all of it."""
    return any(
        net.version == other.version and net.prefixlen >= other.prefixlen and net.network_address in other
        for other in nets
    )


def _holds(net: Net, address: Address) -> bool:
    return net.version == address.version and address in net


def holds(net: Net, address: Address) -> bool:
    """Whether the network has the address, or what the address reaches."""
    return _holds(net, address) or _holds(net, reached(address))


def own_addresses(fib_trie: str, if_inet6: str) -> frozenset[Address]:
    """This host's addresses, from the text of /proc/net/fib_trie and /proc/net/if_inet6."""
    found: set[Address] = set()
    last = ""
    for line in fib_trie.splitlines():
        match = re.search(r"(?:\|--|\+--) (\d+\.\d+\.\d+\.\d+)", line)
        if match:
            last = match[1]
        elif "host LOCAL" in line and last:
            found.add(IPv4Address(last))
    for line in if_inet6.splitlines():
        words = line.split()
        if words and re.fullmatch(r"[0-9a-f]{32}", words[0]):
            found.add(IPv6Address(int(words[0], 16)))
    return frozenset(found)


_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")


def name(text: str) -> str:
    """A host name as lower-case A-labels without its trailing dot.

    Raises ValueError with a sentence for what is none: addresses in any spelling, empty or overlong labels, letters
    whose spelling in ASCII depends on whom one asks.
    """
    plain = text
    if not text.isascii():
        odd = next((c for c in text if c in "ßς\u200c\u200d"), None)
        if odd is not None:
            raise ValueError(f"{odd!r} is encoded in two ways; write the name in its xn-- form")
        if any(unicodedata.category(c)[0] in "CZ" for c in text):
            raise ValueError("it has a blank or an invisible character")
        try:
            plain = ".".join(
                label.encode("idna").decode() if label else "" for label in re.split("[.。．｡]", text)
            )
        except UnicodeError as error:
            raise ValueError(f"it is no internationalised name ({error})") from None
    plain = plain.lower().removesuffix(".")
    if not plain:
        raise ValueError("it is empty")
    if parse(plain) is not None:
        raise ValueError("it is an address")
    if is_numeric(plain):
        other = spelled(plain)
        raise ValueError(
            f"it is another spelling of {other}; write that"
            if other
            else "it ends in a number, as no name does"
        )
    if len(plain) > 253:
        raise ValueError(f"it has {len(plain)} characters; 253 is the most")
    for label in plain.split("."):
        if not _LABEL.fullmatch(label):
            if len(label) > 63:
                raise ValueError(f"its label {label[:20]!r}… has {len(label)} characters; 63 is the most")
            raise ValueError(f"{label!r} is no label of a name" if label else "it has an empty label")
    return plain
