"""Capture files: what tcpdump makes of them, how they take turns, and what a killed writer leaves."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.barrier.capture import pcap


def frame(number: int, size: int = 60) -> bytes:
    """A UDP packet to port `number`."""
    payload = bytes(max(0, size - 42))
    udp = struct.pack("!HHHH", 9, number, 8 + len(payload), 0)
    ip = struct.pack(
        "!BBHHHBBH4s4s",
        0x45,
        0,
        28 + len(payload),
        0,
        0,
        64,
        17,
        0,
        bytes([198, 19, 255, 2]),
        bytes([192, 0, 2, 1]),
    )
    return b"\2" * 6 + b"\4" * 6 + b"\x08\0" + ip + udp + payload


def whole(directory: Path) -> bytes:
    return b"".join(pcap.whole(directory))


def ports(data: bytes) -> list[int]:
    found = pcap.records(io.BytesIO(data))
    return [struct.unpack_from("!H", record, pcap.RECORD.size + 36)[0] for record in found]


@pytest.mark.skipif(shutil.which("tcpdump") is None, reason="tcpdump is not installed")
def test_tcpdump_reads_it(tmp_path: Path) -> None:
    writer = pcap.Writer(tmp_path, 1 << 20)
    for number in range(1, 4):
        writer.add(1_700_000_000_123_456_789 + number, frame(number), 60)
    writer.flush()
    (tmp_path / "it").write_bytes(whole(tmp_path))
    command = ["tcpdump", "-nn", "-tt", "-r", str(tmp_path / "it")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and lines[0].startswith("1700000000.123456 IP 198.19.255.2.9 > 192.0.2.1.1: UDP")


def test_the_newest_are_kept_in_order_within_the_bound(tmp_path: Path) -> None:
    most = 20_000
    writer = pcap.Writer(tmp_path, most)
    for number in range(1_000):
        writer.add(0, frame(number, 100), 100)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= most
    writer.flush()
    found = ports(whole(tmp_path))
    assert found == list(range(1_000 - len(found), 1_000)) and len(found) > most // 2 // 116
    assert len(list(tmp_path.iterdir())) == 2


@given(cut=st.integers(1, 2_000))
def test_a_writer_that_was_killed_leaves_whole_packets(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    directory = tmp_path_factory.mktemp("p")
    writer = pcap.Writer(directory, 1 << 20)
    for number in range(20):
        writer.add(0, frame(number, 84), 84)
    writer.flush()
    path = directory / pcap.CURRENT
    path.write_bytes(path.read_bytes()[:-cut])
    left = max(0, 20 - -(-cut // 100))
    assert ports(whole(directory) or pcap.HEADER) == list(range(left))
    again = pcap.Writer(directory, 1 << 20)
    again.add(0, frame(99), 60)
    again.flush()
    assert ports(whole(directory)) == [*range(left), 99]


def test_nothing_is_no_file(tmp_path: Path) -> None:
    assert whole(tmp_path) == b""
    (tmp_path / pcap.CURRENT).write_bytes(b"nonsense" * 10)
    assert whole(tmp_path) == pcap.HEADER
