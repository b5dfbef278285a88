"""What the gateway keeps: names, the audit's lines, meters; and what it reads of logged packets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents import limits
from llm4agents.barrier.gateway import packets
from llm4agents.barrier.gateway.audit import Audit
from llm4agents.barrier.gateway.meter import Meter
from llm4agents.barrier.gateway.names import Names, NamesFull, is_synthetic

# -- names


def test_an_address_is_for_ever_and_for_one_name(tmp_path: Path) -> None:
    names = Names(tmp_path / "a")
    first, second = names.address("one.example"), names.address("two.example")
    assert first != second
    assert names.address("one.example") == first
    assert is_synthetic(first)
    assert names.name(second) == "two.example"
    assert names.name("198.18.77.77") is None
    assert names.name("93.184.216.34") is None
    names.close()
    again = Names(tmp_path / "a")
    assert (again.name(first), again.name(second)) == ("one.example", "two.example")
    third = again.address("three.example")
    assert third not in (first, second)
    again.close()


def test_a_line_cut_short_was_told_to_nobody(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one.example\ntwo.exam")
    names = Names(tmp_path / "a")
    assert len(names) == 1
    address = names.address("three.example")
    names.close()
    assert Names(tmp_path / "a").name(address) == "three.example"


def test_a_fork_knows_its_parents_names_and_neither_learns_from_the_other(tmp_path: Path) -> None:
    parent = Names(tmp_path / "parent")
    address = parent.address("one.example")
    fork = Names(tmp_path / "fork", tmp_path / "parent")
    assert fork.name(address) == "one.example"
    mine = fork.address("fork.example")
    assert parent.address("parent.example") == mine
    for names in (parent, fork):
        names.close()
    assert Names(tmp_path / "fork", tmp_path / "parent").name(mine) == "fork.example"  # not copied twice
    assert len(Names(tmp_path / "x", tmp_path / "nobody")) == 0


def test_names_are_bounded(tmp_path: Path) -> None:
    count = limits.SYNTHETIC_NAMES_MAX
    (tmp_path / "a").write_text("".join(f"n{number}.example\n" for number in range(count)))
    names = Names(tmp_path / "a")
    assert names.address(f"n{count - 1}.example") == "198.18.64.0"
    with pytest.raises(NamesFull):
        names.address("one-more.example")
    assert names.address("n0.example") == "198.18.0.1"


# -- audit


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_lines_without_what_is_unknown(tmp_path: Path) -> None:
    async def write() -> None:
        audit = Audit(tmp_path, "sb")
        audit.write({"kind": "dns", "verdict": "deny", "name": "x" * 2_000, "port": None})
        audit.close()

    asyncio.run(write())
    (record,) = lines(tmp_path / "sb.jsonl")
    assert record.keys() == {"at", "sandbox", "kind", "verdict", "name"}
    assert record["sandbox"] == "sb"
    assert len(record["name"]) == 512


def test_a_flood_is_summed_up_and_every_record_counted(tmp_path: Path) -> None:
    count = limits.AUDIT_BURST + 30_000

    async def write() -> None:
        audit = Audit(tmp_path, "sb")
        for number in range(count):
            verdict = {
                "kind": "connection",
                "verdict": "deny",
                "reason": "no",
                "bytes_in": 2,
                "name": f"{number}.example",
            }
            audit.write(verdict)
        audit.close()

    asyncio.run(write())
    found = lines(tmp_path / "sb.jsonl")
    assert len(found) < limits.AUDIT_BURST + 1_000
    assert sum(record.get("repeated", 1) for record in found) == count
    assert sum(record["bytes_in"] for record in found) == 2 * count


def test_a_flood_of_many_kinds_is_bounded_too(tmp_path: Path) -> None:
    async def write() -> None:
        audit = Audit(tmp_path, "sb")
        for number in range(limits.AUDIT_BURST + 30_000):
            audit.write({"kind": "connection", "verdict": "deny", "reason": f"no {number}"})
        audit.close()

    asyncio.run(write())
    found = lines(tmp_path / "sb.jsonl")
    assert len(found) < limits.AUDIT_BURST + 1_000
    assert sum(record.get("repeated", 1) for record in found) == limits.AUDIT_BURST + 30_000


def test_two_files_take_turns_and_say_what_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AUDIT_BURST", 1_000_000)

    async def write() -> None:
        audit = Audit(tmp_path, "sb", bytes_max=20_000)
        for number in range(1_000):
            audit.write({"kind": "dns", "verdict": "allow", "name": f"{number}.example"})
            audit.flush()
        audit.close()

    asyncio.run(write())
    new, old = tmp_path / "sb.jsonl", tmp_path / "sb.1.jsonl"
    assert new.stat().st_size + old.stat().st_size < 21_000
    found = [*lines(old), *lines(new)]
    told = [record for record in found if record["kind"] == "gateway"]
    assert told
    assert all(record["repeated"] for record in told)
    names = [record["name"] for record in found if record["kind"] == "dns"]
    assert names == [f"{number}.example" for number in range(1_000 - len(names), 1_000)]


def test_a_disk_that_refuses_is_told_of_later(tmp_path: Path) -> None:
    async def write() -> None:
        home = tmp_path / "later"
        audit = Audit(home, "sb")
        audit.write({"kind": "dns", "verdict": "deny"})
        audit.flush()
        home.mkdir()
        audit.write({"kind": "dns", "verdict": "allow"})
        audit.close()

    asyncio.run(write())
    first, second = lines(tmp_path / "later" / "sb.jsonl")
    assert (first["kind"], first["repeated"]) == ("gateway", 1)
    assert second["verdict"] == "allow"


def test_a_dead_writers_last_line_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "sb.jsonl").write_text('{"kind":"dns"}\n{"kind":"d')

    async def write() -> None:
        audit = Audit(tmp_path, "sb")
        audit.write({"kind": "policy"})
        audit.close()

    asyncio.run(write())
    assert json.loads((tmp_path / "sb.jsonl").read_text().splitlines()[-1])["kind"] == "policy"


# -- meter


def test_bytes_a_second() -> None:
    meter = Meter(1_000_000, None)
    assert meter.room(100.0) == 1_000_000
    meter.take(1_000_000)
    assert meter.room(100.0) == 0
    assert 0 < meter.wait() <= 1
    assert meter.room(100.5) == pytest.approx(500_000, abs=1)
    assert meter.room(200.0) == 1_000_000  # no more in hand than a second's worth


def test_bytes_in_all() -> None:
    meter = Meter(None, 10)
    assert meter.room(0) == 10
    meter.take(9)
    assert (meter.room(0), meter.spent) == (1, False)
    meter.take(1)
    assert (meter.room(0), meter.spent) == (0, True)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 300_000)), max_size=60), st.integers(1_024, 10_000_000)
)
def test_no_pattern_gets_more_than_the_rate(steps: list[tuple[float, int]], rate: int) -> None:
    meter, now, moved = Meter(rate, None), 50.0, 0
    for wait, wanted in steps:
        now += wait
        count = min(wanted, meter.room(now))
        meter.take(count)
        moved += count
    assert moved <= rate * (now - 50.0) + max(rate, 65_536) + 1


# -- logged packets


def netlink(payload: bytes, prefix: str, family: int = socket.AF_INET) -> bytes:
    def attribute(kind: int, value: bytes) -> bytes:
        raw = struct.pack("=HH", 4 + len(value), kind) + value
        return raw + bytes(-len(raw) % 4)

    body = struct.pack("=BBH", family, 0, 0) + attribute(10, prefix.encode() + b"\0") + attribute(9, payload)
    return struct.pack("=IHHII", 16 + len(body), 4 << 8, 0, 0, 0) + body


def ipv4(protocol: int, rest: bytes, source: str = limits.GUEST_ADDRESS, to: str = "8.8.8.8") -> bytes:
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(rest), 0, 0, 64, protocol, 0)
    return head + socket.inet_aton(source) + socket.inet_aton(to) + rest


def test_a_packet_is_told_with_what_it_was_refused_for() -> None:
    two = netlink(ipv4(17, struct.pack("!HHHH", 5, 443, 8, 0)), "denied") + netlink(
        ipv4(1, b"\x08\x00", source="10.9.9.9"), "source*100"
    )
    first, second = packets.records(two)
    assert (first["rule"], first["protocol"], first["address"], first["port"]) == (
        "link: denied",
        "udp",
        "8.8.8.8",
        443,
    )
    assert "UDP other than DNS" in first["reason"]
    assert "source" not in first
    assert (second["protocol"], second["source"], second["repeated"]) == ("icmp", "10.9.9.9", 100)


def test_a_packet_of_ipv6_behind_extension_headers() -> None:
    rest = b"\x11\x00" + bytes(6) + struct.pack("!HHHH", 5, 53, 8, 0)
    packet = (
        b"\x60"
        + bytes(3)
        + struct.pack("!HBB", len(rest), 0, 64)
        + bytes(15)
        + b"\1"
        + bytes(15)
        + b"\2"
        + rest
    )
    (found,) = packets.records(netlink(packet, "ipv6", 10))
    assert (found["protocol"], found["address"], found["port"]) == ("udp", "::2", 53)


@given(st.binary(max_size=200), st.integers(0, 12))
def test_no_packet_is_too_odd(payload: bytes, family: int) -> None:
    (found,) = packets.records(netlink(payload, "denied", family))
    assert json.dumps(found)


@given(st.binary(max_size=200))
def test_no_datagram_is_too_odd(raw: bytes) -> None:
    list(packets.records(raw))
