"""What an address is, in every spelling that a resolver, a browser or a tunnel would take."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.barrier import addresses
from llm4agents.barrier.addresses import Kind, classify, opens, reached

CLASSES = {
    Kind.PUBLIC: [
        "8.8.8.8",
        "192.0.2.1",
        "198.51.100.9",
        "203.0.113.80",
        "2001:db8::1",
        "2606:4700::1",
        "3fff::1",
    ],
    Kind.PRIVATE: [
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "fc00::1",
        "fd12::1",
        "fec0::1",
    ],
    Kind.LOOPBACK: ["127.0.0.1", "127.255.255.255", "::1"],
    Kind.LINK_LOCAL: ["169.254.1.1", "fe80::1"],
    Kind.METADATA: ["169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "fd00:ec2::254"],
    Kind.CGNAT: ["100.64.0.1", "100.127.255.255"],
    Kind.RESERVED: ["240.0.0.1", "192.0.0.8", "192.88.99.1", "100::1", "5f00::1"],
    Kind.MULTICAST: ["224.0.0.251", "239.1.1.1", "ff02::fb"],
    Kind.BROADCAST: ["255.255.255.255"],
    Kind.UNSPECIFIED: ["0.0.0.0", "0.1.2.3", "::"],
    Kind.SYNTHETIC: ["198.18.0.1", "198.19.255.1", "198.19.255.2"],
}
OUTSIDE = [
    "9.255.255.255",
    "11.0.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "100.63.0.0",
    "100.128.0.0",
    "198.17.0.1",
]


@pytest.mark.parametrize("text, kind", [(text, kind) for kind, texts in CLASSES.items() for text in texts])
def test_a_class_for_each_address(text: str, kind: Kind) -> None:
    assert classify(ip_address(text)) is kind


@pytest.mark.parametrize("text", OUTSIDE)
def test_neighbours_of_special_ranges_are_ordinary(text: str) -> None:
    assert classify(ip_address(text)) is Kind.PUBLIC


def wrappings(inner: IPv4Address) -> dict[str, IPv6Address]:
    value = int(inner)
    return {
        "mapped": IPv6Address(0xFFFF << 32 | value),
        "translated": IPv6Address(0xFFFF << 48 | value),
        "nat64": IPv6Address(int(IPv6Address("64:ff9b::")) | value),
        "6to4": IPv6Address(0x2002 << 112 | value << 80 | 1),
        "teredo": IPv6Address(0x20010000 << 96 | 0x08080808 << 64 | (~value & 0xFFFFFFFF)),
        "isatap": IPv6Address(int(IPv6Address("2606:4700::")) | 0x5EFE << 32 | value),
    }


@given(st.ip_addresses(v=4))
def test_wrapped_addresses_are_what_they_reach(inner: IPv4Address) -> None:
    for how, outer in wrappings(inner).items():
        assert reached(outer) == inner, how
        assert classify(outer) is classify(inner), how


@given(st.ip_addresses())
def test_every_address_has_a_class_and_unwrapping_ends(address: IPv4Address | IPv6Address) -> None:
    classify(address)
    assert isinstance(reached(address), IPv4Address) or reached(address) == address


def test_a_teredo_address_is_also_its_server() -> None:
    address = IPv6Address(0x20010000 << 96 | int(IPv4Address("10.0.0.1")) << 64 | (~0x08080808 & 0xFFFFFFFF))
    assert classify(address) is Kind.PRIVATE


def test_this_hosts_own_addresses() -> None:
    own = {ip_address("192.0.2.7"), ip_address("10.0.0.5")}
    assert classify(ip_address("192.0.2.7"), own) is Kind.HOST
    assert classify(ip_address("::ffff:10.0.0.5"), own) is Kind.HOST
    assert classify(ip_address("10.0.0.6"), own) is Kind.PRIVATE
    assert classify(ip_address("127.0.0.1"), {ip_address("127.0.0.1")}) is Kind.LOOPBACK


@pytest.mark.parametrize(
    "net, address, opened",
    [
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/7", "10.1.2.3", False),  # reaches out of the class
        ("0.0.0.0/0", "10.1.2.3", False),
        ("0.0.0.0/0", "8.8.8.8", True),
        ("10.1.2.3/32", "10.1.2.3", True),
        ("10.1.2.3/32", "::ffff:10.1.2.3", True),
        ("10.1.2.3/32", "10.1.2.4", False),
        ("169.254.0.0/16", "169.254.1.1", True),
        ("169.254.0.0/16", "169.254.169.254", False),
        ("169.254.169.254/32", "169.254.169.254", True),
        ("169.254.169.254/32", "64:ff9b::a9fe:a9fe", True),
        ("127.0.0.1/32", "127.0.0.1", True),
        ("fc00::/7", "fd00::1", True),
        ("::/0", "fd00::1", False),
        ("::/0", "::ffff:10.0.0.1", False),
        ("224.0.0.0/4", "224.0.0.1", False),
        ("198.18.0.0/15", "198.18.0.1", False),
        ("0.0.0.0/32", "0.0.0.0", False),
    ],
)
def test_what_opens_a_class(net: str, address: str, opened: bool) -> None:
    parsed = ip_address(address)
    assert opens(ip_network(net), parsed, classify(parsed)) is opened


def test_the_host_itself_must_be_named_alone() -> None:
    own = ip_address("10.0.0.5")
    assert not opens(ip_network("10.0.0.0/8"), own, classify(own, {own}))
    assert opens(ip_network("10.0.0.5/32"), own, classify(own, {own}))


SPELLINGS = {
    "2130706433": "127.0.0.1",
    "0x7f000001": "127.0.0.1",
    "0x7F.1": "127.0.0.1",
    "017700000001": "127.0.0.1",
    "127.1": "127.0.0.1",
    "127.0.1": "127.0.0.1",
    "0177.0.0.1": "127.0.0.1",
    "0": "0.0.0.0",
    "0xa9fea9fe": "169.254.169.254",
    "169.254.43518": "169.254.169.254",
    "１２７.0.0.1": "127.0.0.1",  # full-width digits
    "127。0。0。1": "127.0.0.1",
    "①②⑦.0.0.1": "127.0.0.1",
}


@pytest.mark.parametrize("text, meant", SPELLINGS.items())
def test_odd_spellings_are_neither_names_nor_addresses(text: str, meant: str) -> None:
    assert addresses.parse(text) is None
    assert addresses.is_numeric(text)
    assert str(addresses.spelled(text)) == meant
    with pytest.raises(ValueError, match=f"another spelling of {meant}|it is an address"):
        addresses.name(text)


@pytest.mark.parametrize(
    "text", ["256.1.1.1", "1.2.3.4.5", "0x100000000", "08.0.0.1", "a.b.1", "1..2", "fe80::1%eth0"]
)
def test_what_looks_like_a_number_and_is_none_is_no_name(text: str) -> None:
    with pytest.raises(ValueError):
        addresses.name(text)


@given(st.text(max_size=40))
def test_a_text_is_never_a_name_and_an_address(text: str) -> None:
    try:
        name = addresses.name(text)
    except ValueError:
        return
    assert addresses.parse(name) is None and addresses.spelled(name) is None
    assert addresses.name(name) == name and name == name.lower() and name.isascii()


@pytest.mark.parametrize(
    "text, name",
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("bücher。example", "xn--bcher-kva.example"),
        ("_dmarc.example", "_dmarc.example"),
        ("localhost", "localhost"),
        ("1password.example", "1password.example"),
        ("127.0.0.1.example", "127.0.0.1.example"),
    ],
)
def test_names_have_one_spelling(text: str, name: str) -> None:
    assert addresses.name(text) == name


@pytest.mark.parametrize(
    "text",
    ["", ".", "a..b", "-a.example", "a-.example", "a b", "a/b", "a_b:1", "a" * 64 + ".example",
     "a." * 127 + "a.example",     "faß.example", "a\u200d.example", "a\u0000.example", "[::1]", "::1", "*.example"],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ValueError):
        addresses.name(text)


def test_own_addresses_are_read_from_the_kernels_tables() -> None:
    trie = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
     |-- 192.0.2.7
        /32 host LOCAL
     |-- 192.0.2.255
        /32 link BROADCAST
"""
    inet6 = "fe80000000000000fc5400fffe000001 02 40 20 80     eth0\n"
    found = addresses.own_addresses(trie, inet6)
    assert found == {ip_address("127.0.0.1"), ip_address("192.0.2.7"), ip_address("fe80::fc54:ff:fe00:1")}
