"""What questions are answered, with real policies: whatever is asked, nothing but an answer comes of it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm4agents import limits
from llm4agents.barrier.gateway import dns
from llm4agents.barrier.gateway.audit import Audit
from llm4agents.barrier.gateway.names import Names
from llm4agents.barrier.gateway.resolver import Resolver
from llm4agents.barrier.network import Network
from llm4agents.barrier.policy import Policy


class Silent(Audit):
    """Keeps what would be written."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: Any) -> None:
        self.records.append(dict(record))


@pytest.fixture(scope="module")
def resolvers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Resolver]]:
    home = tmp_path_factory.mktemp("names")
    made = {}
    for name, network in {
        "none": "none",
        "public": "public",
        "rules": ["allow *.example.com", "deny GET example.net/x", "allow tcp db.example.org:5432"],
    }.items():
        policy = Policy.compile(Network.from_json(network))
        made[name] = Resolver(Names(home / name), Silent(), policy.resolve)
    yield made


def ask(name: bytes, kind: int = 1, *, edns: bool = False) -> bytes:
    labels = b"".join(bytes([len(part)]) + part for part in name.split(b".") if part) + b"\0"
    opt = b"\0" + struct.pack("!HHIH", 41, 1232, 0, 0) if edns else b""
    return (
        struct.pack("!6H", 9, 0x0100, 1, 0, 0, 1 if edns else 0) + labels + struct.pack("!2H", kind, 1) + opt
    )


def code(raw: bytes | None) -> int:
    assert raw is not None
    return raw[3] & 0xF


def test_by_policy(resolvers: dict[str, Resolver]) -> None:
    rules = resolvers["rules"]
    for name in (b"a.example.com", b"DB.example.ORG", b"b.a.example.com"):
        assert code(rules.answer(ask(name), stream=False)) == dns.NOERROR
    for name in (b"example.com", b"example.net", b"other.example.org", b"com", b""):
        assert code(rules.answer(ask(name), stream=False)) == dns.NXDOMAIN
    assert code(resolvers["none"].answer(ask(b"example.com"), stream=False)) == dns.NXDOMAIN
    assert code(resolvers["public"].answer(ask(b"example.com"), stream=False)) == dns.NOERROR


def test_browsers_are_told_to_leave_dns_to_us(resolvers: dict[str, Resolver]) -> None:
    for name in (b"use-application-dns.net", b"dns.google"):
        assert code(resolvers["public"].answer(ask(name), stream=False)) == dns.NXDOMAIN


def test_the_denial_says_profile_and_way_out(resolvers: dict[str, Resolver]) -> None:
    raw = resolvers["none"].answer(ask(b"example.com", edns=True), stream=False)
    assert raw is not None
    assert b"`none`" in raw
    assert b"Way out" in raw
    assert len(raw) <= dns.UDP_BYTES_MAX


def test_the_reverse_of_a_synthetic_address_and_of_the_gateway(resolvers: dict[str, Resolver]) -> None:
    rules = resolvers["rules"]
    raw = rules.answer(ask(b"ptr.example.com"), stream=False)
    assert raw is not None
    address = socket.inet_ntoa(raw[-4:])
    backwards = ".".join(reversed(address.split("."))) + ".in-addr.arpa"
    assert b"\x03ptr\x07example\x03com\x00" in (
        rules.answer(ask(backwards.encode(), 12), stream=False) or b""
    )
    gateway = ".".join(reversed(limits.GATEWAY_ADDRESS.split("."))) + ".in-addr.arpa"
    assert b"\x07gateway\x00" in (rules.answer(ask(gateway.encode(), 12), stream=False) or b"")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from(["none", "public", "rules"]),
    st.lists(
        st.one_of(st.binary(min_size=1, max_size=63), st.from_regex(rb"[a-z0-9_-]{1,20}", fullmatch=True)),
        max_size=5,
    ),
    st.integers(0, 65_535),
    st.booleans(),
)
def test_any_question(
    resolvers: dict[str, Resolver], which: str, labels: list[bytes], kind: int, stream: bool
) -> None:
    raw = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    packet = struct.pack("!6H", 9, 0x0100, 1, 0, 0, 0) + raw + struct.pack("!2H", kind, 1)
    reply = resolvers[which].answer(packet, stream=stream)
    assert reply is None or (len(reply) <= (65_535 if stream else 512) and code(reply) in (0, 1, 3))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(resolvers: dict[str, Resolver], raw: bytes) -> None:
    for resolver in resolvers.values():
        resolver.answer(raw, stream=False)


def test_over_tcp_one_after_the_other_until_nonsense(resolvers: dict[str, Resolver]) -> None:
    async def go() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for sock in (ours, theirs):
                sock.setblocking(False)
            task = asyncio.create_task(resolvers["rules"].stream(theirs))
            loop = asyncio.get_running_loop()
            question = ask(b"a.example.com")
            raw = struct.pack("!H", len(question)) + question
            await loop.sock_sendall(ours, raw + raw[:5])
            await loop.sock_sendall(ours, raw[5:] + b"\xff\xff")
            await task
            return await loop.sock_recv(ours, 4_096)

    found = asyncio.run(go())
    (size,) = struct.unpack_from("!H", found)
    assert len(found) == 2 * (size + 2)


def test_a_full_disk_is_an_error_and_no_address(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    policy = Policy.compile(Network.from_json("public"))
    names = Names(tmp_path / "gone" / "names")
    (tmp_path / "gone").rmdir()
    resolver = Resolver(names, Silent(), policy.resolve)
    assert code(resolver.answer(ask(b"example.com"), stream=False)) == dns.SERVFAIL
