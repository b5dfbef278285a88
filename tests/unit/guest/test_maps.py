"""Maps from a guest: bombs are refused cheaply, fields are checked, names keep their bytes."""

from __future__ import annotations

import contextlib
import math
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.errors import InvalidRequestError, ProtocolError
from llm4agents.guest import maps
from llm4agents.guest.results import EntryReader, ExitStatus

ENTRY: dict[str, Any] = {
    "name": "a", "path": "/a", "kind": "file", "size": 1, "mode": 0o644, "uid": 0, "gid": 0,
    "user": "root", "group": "root", "mtime": 1.5, "target": None,
}  # fmt: skip
BOMBS = {
    "nested arrays": b"\x91" * 65_000,
    "nested maps": b"\x81\xa1a" * 20_000,
    "wide arrays": b"\xdc\xff\xff" * 20_000,
    "an array that claims 4 G": b"\xdd\xff\xff\xff\xff",
    "a map that claims 4 G": b"\xdf\xff\xff\xff\xff",
    "a string that claims 4 G": b"\xdb\xff\xff\xff\xff",
    "bytes that claim 4 G": b"\xc6\xff\xff\xff\xff",
    "nested 256-arrays": b"\xdc\x01\x00" * 20_000,
    "an extension": msgpack.packb({"a": msgpack.Timestamp(1)}),
    "two objects": b"\x80\x80",
    "no map": b"\x01",
    "text that is not UTF-8": b"\x81\xa1a\xa1\xff",
    "a key that is a number": b"\x81\x01\x01",
    "a key that is a map": b"\x81\x80\x01",
    "a key that is bytes": b"\x81\xc4\x01a\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused_and_cost_little(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            maps.unpack(bomb, "REPLY")
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=500))
def test_random_bytes_are_a_map_or_a_protocol_error(data: bytes) -> None:
    for act in (lambda: maps.unpack(data, "REPLY"), lambda: EntryReader().feed(data)):
        with contextlib.suppress(ProtocolError):
            act()


@pytest.mark.parametrize("value", [None, -1, 2**63, True, 1.0, "1", [], {}])
def test_an_integer_is_an_integer_in_range(value: object) -> None:
    with pytest.raises(ProtocolError, match="size"):
        maps.Fields({"size": value}, "REPLY").integer("size")


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", None])
def test_a_number_is_finite(value: object) -> None:
    with pytest.raises(ProtocolError):
        maps.Fields({"mtime": value}, "REPLY").number("mtime")


def test_words_of_a_guest_cannot_move_a_terminal_nor_flood_a_log() -> None:
    fields = maps.Fields({"message": "a\x1b[2Jb\n" + "x" * 5_000}, "ERROR")
    text = fields.text("message")
    assert len(text) == 1_000
    assert text.isprintable()


@given(st.binary(max_size=40).filter(lambda raw: b"\0" not in raw))
def test_a_name_keeps_its_bytes_both_ways(raw: bytes) -> None:
    name = raw.decode("utf-8", "surrogateescape")
    packed = maps.pack({"name": maps.wire_text(name)})
    assert maps.unpack(packed, "REPLY").name("name") == name
    assert maps.wire_text(raw) == maps.wire_text(name)


@pytest.mark.parametrize("path", ["", "a", "../a", "/a\0b", "/" + "x" * 5_000, "/\ud800", b"a"])
def test_paths_we_send_are_checked(path: str) -> None:
    with pytest.raises(InvalidRequestError):
        maps.wire_path(path)


@pytest.mark.parametrize("env", [{"": "x"}, {"A=B": "x"}, {"A": "x\0"}])
def test_environments_we_send_are_checked(env: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError):
        maps.wire_env(env)


@given(st.lists(st.integers(1, 50), max_size=20))
def test_entries_survive_any_split(cuts: list[int]) -> None:
    data = b"".join(msgpack.packb({**ENTRY, "name": f"{n}"}) for n in range(5))
    reader = EntryReader()
    for size in cuts:
        reader.feed(data[:size])
        data = data[size:]
    reader.feed(data)
    reader.finish(5)
    assert [entry.name for entry in reader.entries] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    "change",
    [{"kind": "socket"}, {"size": -1}, {"mtime": math.nan}, {"name": 1}, {"path": "a\0"}, {"target": 7}],
)
def test_an_insane_entry_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        EntryReader().feed(msgpack.packb({**ENTRY, **change}))


def test_an_entry_without_end_is_bounded() -> None:
    reader = EntryReader()
    with pytest.raises(ProtocolError, match=r"without end|broken"):
        for _ in range(100):
            reader.feed(b"\xdc\x01\x00" + b"\x01" * 255 + b"")
            reader.feed(b"\x91" * 10_000)


@pytest.mark.parametrize("end", [{}, {"exit_code": 1, "signal": 9}, {"exit_code": "0"}, {"signal": 1_000}])
def test_an_exit_is_a_code_or_a_signal(end: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        ExitStatus.read(maps.Fields(end, "END"))
