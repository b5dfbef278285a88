"""Where a request comes from and whom it is for, as far as its head can be believed. Pure.

A head says `Host`, `X-Forwarded-…`, `Forwarded`; anybody can write anything there. What a proxy says counts if the
connection is a trusted proxy's, and then only what the last untrusted hop cannot have written: chains are read from
their end. From everyone else these fields are taken off, so that nothing behind can be misled by them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from llm4agents.errors import InvalidRequestError

Headers = Sequence[tuple[bytes, bytes]]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_HOST: Final = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9_.-]{1,253}))(?::\d{1,5})?")
_FORWARDING: Final = frozenset(
    {
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-forwarded-port",
        b"x-forwarded-prefix",
        b"x-real-ip",
    }
)
_PAIR: Final = re.compile(r"""\s*([A-Za-z]+)=(?:"([^"\\]*)"|([^\s;,"]*))\s*""")


def name_of(host: str) -> str | None:
    """The host of a `Host` field in lower case, without port, brackets and last dot; None when it is none."""
    found = _HOST.fullmatch(host)
    if found is None:
        return None
    return (found[1] or found[2]).lower().removesuffix(".") or None


@dataclass(frozen=True, slots=True)
class Hosts:
    """What this server is called: everything else is somebody else's, or a page's trick to make a browser call us."""

    names: frozenset[str]
    suffixes: tuple[str, ...]
    """Each begins with a dot: ports of sandboxes are hosts below these."""

    @classmethod
    def of(cls, listen: str, domain: str | None, public_url: str | None, extra: Iterable[str] = ()) -> Hosts:
        """`listen` is the host of the listening address."""
        names = {"localhost", listen.lower(), *extra}
        suffixes = {".localhost"}  # which no resolver may send anywhere but to the same machine
        if domain:
            names.add(domain.lower())
            suffixes.add(f".{domain.lower()}")
        if public_url and (host := urlsplit(public_url).hostname):
            names.add(host.lower())
        return cls(frozenset(names), tuple(sorted(suffixes)))

    def are(self, name: str, address: str | None) -> bool:
        """Whether `name` is ours; `address` is where the connection came in, which is ours too."""
        return name in self.names or name == address or name.endswith(self.suffixes)


@dataclass(frozen=True, slots=True)
class Proxies:
    """Those whose word on others is taken."""

    networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[str]) -> Proxies:
        """Raises InvalidRequestError naming what is no address and no network."""
        found = []
        for entry in entries:
            try:
                found.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                raise InvalidRequestError(
                    f"LLM4AGENTS_TRUSTED_PROXIES: {entry!r} is neither an address nor a network",
                    hint="for example 127.0.0.1,10.0.0.0/8",
                ) from None
        return cls(tuple(found))

    def trust(self, address: str | None) -> bool:
        try:
            parsed = ipaddress.ip_address((address or "").partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(parsed, "ipv4_mapped", None)
        return any((mapped or parsed) in network for network in self.networks)


@dataclass(frozen=True, slots=True)
class Origin:
    """A request's client (an address), scheme and host, and its headers without those that only say so."""

    client: str | None
    scheme: str
    host: str | None
    headers: list[tuple[bytes, bytes]]


def read(headers: Headers, peer: str | None, scheme: str, proxies: Proxies) -> Origin:
    """What of a head is to be believed. `host` is as it was said, not yet judged; None: it said none, or several."""
    kept = [(name, value) for name, value in headers if name not in _FORWARDING]
    hosts = [value.decode("latin-1") for name, value in kept if name == b"host"]
    host = hosts[0] if len(hosts) == 1 else None
    if len(kept) == len(headers) or not proxies.trust(peer):
        return Origin(peer, scheme, host, kept)
    chain, proto, named = _said(headers)
    client = peer
    for hop in reversed(chain):
        client = hop
        if not proxies.trust(hop):
            break
    if named is not None:
        kept = [(name, value) for name, value in kept if name != b"host"]
        kept.insert(0, (b"host", named.encode("latin-1")))
        host = named
    if proto in ("http", "https", "ws", "wss"):
        kind = "ws" if scheme in ("ws", "wss") else "http"  # which no proxy changes
        scheme = f"{kind}s" if proto in ("https", "wss") else kind
    return Origin(client, scheme, host, kept)


def _said(headers: Headers) -> tuple[list[str], str | None, str | None]:
    """(the hops' addresses, protocol, host) as proxies put them; the last of each list is the nearest proxy's."""

    def fields(name: bytes) -> list[str]:
        values = [value.decode("latin-1") for key, value in headers if key == name]
        return [part.strip() for value in values for part in value.split(",") if part.strip()]

    chain: list[str] = []
    proto = host = None
    for element in fields(b"forwarded"):
        pairs = {found[1].lower(): found[2] or found[3] for found in _PAIR.finditer(element)}
        if (address := _address(pairs.get("for"))) is not None:
            chain.append(address)
        proto, host = pairs.get("proto", proto), pairs.get("host", host)
    if not chain:
        chain = [address for part in fields(b"x-forwarded-for") if (address := _address(part)) is not None]
    if proto is None and (protos := fields(b"x-forwarded-proto")):
        proto = protos[-1]
    if host is None and (hosts := fields(b"x-forwarded-host")):
        host = hosts[-1]
    return chain, (proto or "").lower() or None, host


def _address(text: str | None) -> str | None:
    """The address of a hop, without its port; None for `unknown` and what is none."""
    text = (text or "").strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
