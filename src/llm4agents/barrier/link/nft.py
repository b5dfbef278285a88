"""The ruleset of a sandbox's namespace, as text. Pure.

Two gates. `door` sees every frame as it comes off the tap and lets through what the guest's own address can have sent;
`link` has TCP and DNS end at the planted sockets and refuses everything else, with an answer, so that nothing hangs.
What is refused is also told to who reads the planted packet socket, with one of PREFIXES.
"""

from __future__ import annotations

from typing import Final

from llm4agents import limits

TAP: Final = "tap0"
PREFIXES: Final = {
    "mac": "a frame with another sender's hardware address",
    "arp": "ARP for or about another address than the gateway's",
    "ipv6": "IPv6",
    "ethernet": "a frame that is neither IPv4 nor ARP",
    "source": "another source address than the sandbox's",
    "multicast": "a broadcast or multicast packet",
    "denied": "UDP other than DNS, ICMP, or another IP protocol",
    "stray": "TCP of a connection there is none of",
    "connections": "a new connection beyond those one sandbox may have at once",
    "rate": "a new connection or DNS query beyond those a second",
}
"""What a logged packet was refused for. With MANY after it, one record stands for so many packets beyond those
logged one by one."""
MANY: Final = f"*{limits.PACKET_LOG_MANY}"


def ruleset() -> str:
    """For `nft -f -` in a namespace that has the tap and no rules yet."""
    guest, gateway = limits.GUEST_MAC, limits.GATEWAY_MAC
    address, router = limits.GUEST_ADDRESS, limits.GATEWAY_ADDRESS
    reject = "reject with icmp type admin-prohibited"
    reset = "reject with tcp reset"
    dropped = "\n".join(
        _refusal(prefix, "drop") for prefix in ("mac", "arp", "ipv6", "ethernet", "source", "multicast")
    )
    answered = "\n".join(
        [
            _refusal("denied", reject),
            _refusal("stray", reset),
            _refusal("connections", reset),
            _refusal("rate", reset, "no_rate_tcp"),
            _refusal("rate", reject, "no_rate_udp"),
        ]
    )
    new, asked = limits.LINK_CONNECTIONS_PER_S, limits.LINK_QUERIES_PER_S
    # Queries are counted also where one socket asks them all, whose second is of a connection by then.
    # 0x8035 is RARP, by which the VMM says where its guest is.
    return f"""
table netdev door {{
{dropped}
  chain arp_in {{
    arp operation request arp saddr ether {guest} arp saddr ip {address} arp daddr ip {router} accept
    arp saddr ether {guest} arp saddr ip {address} arp daddr ip {address} drop
    goto no_arp
  }}
  chain arrival {{
    type filter hook ingress device "{TAP}" priority 0; policy drop;
    ether saddr != {guest} goto no_mac
    ether type 0x8035 drop
    ether type arp goto arp_in
    ether type ip6 goto no_ipv6
    ether type != ip goto no_ethernet
    ip saddr != {address} goto no_source
    ether daddr != {gateway} goto no_multicast
    accept
  }}
}}
table ip link {{
{answered}
  chain judge {{
    type filter hook prerouting priority mangle; policy drop;
    iifname != "{TAP}" drop
    udp dport 53 limit rate over {asked}/second burst {asked} packets goto no_rate_udp
    ct state established accept
    ip protocol tcp tcp flags & (fin|syn|rst|ack) != syn goto no_stray
    ip protocol tcp limit rate over {new}/second burst {new} packets goto no_rate_tcp
    ip protocol tcp ct count over {limits.LINK_CONNECTIONS_MAX} goto no_connections
    ip protocol tcp accept
    udp dport 53 accept
    ct state related drop
    goto no_denied
  }}
  chain redirect_to_planted {{
    type nat hook prerouting priority dstnat; policy accept;
    ip protocol tcp redirect to :{limits.TCP_REDIRECT_PORT}
    udp dport 53 redirect to :{limits.DNS_REDIRECT_PORT}
  }}
  chain enter {{
    type filter hook input priority filter; policy drop;
    iifname "{TAP}" tcp dport {limits.TCP_REDIRECT_PORT} accept
    iifname "{TAP}" udp dport {limits.DNS_REDIRECT_PORT} accept
  }}
  chain pass {{
    type filter hook forward priority filter; policy drop;
  }}
  chain leave {{
    type filter hook output priority filter; policy drop;
    oifname "{TAP}" ip daddr {address} accept
  }}
}}
"""


def _refusal(prefix: str, act: str, chain: str | None = None) -> str:
    """A chain that refuses: the first ones each second are logged, of a flood one in PACKET_LOG_MANY for them all.

    Its name has a prefix: many a word is nft's own.
    """
    to = f"group {limits.PACKET_LOG_GROUP} snaplen {limits.PACKET_LOG_BYTES}"
    rate = f"{limits.PACKET_LOG_PER_S}/second burst {limits.PACKET_LOG_PER_S} packets"
    return f"""\
  chain {chain or f"no_{prefix}"} {{
    limit rate {rate} log prefix "{prefix}" {to} {act}
    numgen inc mod {limits.PACKET_LOG_MANY} 0 log prefix "{prefix}{MANY}" {to}
    {act}
  }}"""
