"""Directories in and out as tar streams: what a copy keeps, and what a hostile stream cannot do to this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents import AsyncSandbox, GuestError, Sandbox
from llm4agents.config import Settings
from llm4agents.errors import InvalidRequestError, LLM4AgentsError, ProtocolError
from llm4agents.sdk import _untar
from llm4agents.sdk._runtime import async_fed
from llm4agents.sdk._tar import Packer
from llm4agents.sdk._untar import Unpacked, unpack
from tests.tars import DIRECTORY, FILE, HARD, LINK, archive, reader

ODD = os.fsdecode(b"odd \xff\n")


def packed(top: Path) -> bytes:
    packer = Packer(top)
    data = b"".join(iter(lambda: packer.read(1), b""))
    assert packer.done == packer.total
    return data


def test_a_tree_comes_back(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a/empty").mkdir(parents=True)
    (tree / "a" / ODD).write_bytes(os.urandom(300_000))
    (tree / ("n" * 200)).write_bytes(b"")
    (tree / "up").mkdir()
    (tree / "up/link").symlink_to("../a/" + ODD)
    os.link(tree / "a" / ODD, tree / "hard")
    (tree / "a" / ODD).chmod(0o750)
    os.utime(tree / "a" / ODD, ns=(0, 1_600_000_000_123_456_789))
    os.utime(tree / ("n" * 200), ns=(0, -1_500_000_000))
    os.mkfifo(tree / "fifo")
    to = tmp_path / "to"
    for _ in range(2):
        assert unpack(reader(packed(tree)), to) == Unpacked(7, 0)
    assert (to / "a" / ODD).read_bytes() == (tree / "a" / ODD).read_bytes()
    for name in ("a/" + ODD, "n" * 200):
        old, new = (tree / name).stat(), (to / name).stat()
        assert (old.st_mode, old.st_mtime_ns) == (new.st_mode, new.st_mtime_ns)
    assert (to / "up/link").samefile(to / "hard")
    assert not (to / "fifo").exists()
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "members",
    [
        [("/etc/x", FILE, b"1")],
        [("../x", FILE, b"1")],
        [("a/../../x", FILE, b"1")],
        [("a", LINK, "b"), ("a/x", FILE, b"1")],
        [("a", DIRECTORY, ""), ("a/l", LINK, "../b"), ("a/l/x", FILE, b"1")],
        [("a", HARD, "../secret")],
        [("x" * 5000, FILE, b"1")],
        [("y/" * 1100 + "x", FILE, b"1")],
    ],
)
def test_what_leads_out_is_refused(tmp_path: Path, members: list[Any]) -> None:
    (tmp_path / "secret").write_text("")
    with pytest.raises((ProtocolError, InvalidRequestError)):
        unpack(reader(archive(*members)), tmp_path / "in")
    assert {path.name for path in tmp_path.iterdir()} <= {"secret", "in"}
    assert not [path for path in (tmp_path / "in").rglob("*") if path.is_file() and not path.is_symlink()]


def test_links_that_lead_out_are_left_out_and_those_that_do_not_are_made(tmp_path: Path) -> None:
    members = [("d/e", DIRECTORY, ""), ("ok", LINK, "d/e"), ("d/e/up", LINK, "../../ok")]
    out = [
        ("1", LINK, "/etc"),
        ("2", LINK, ".."),
        ("d/3", LINK, "../../x"),
        ("4", LINK, "ok/../../.."),
        ("5", HARD, "no"),
    ]
    done = unpack(reader(archive(*members, *out, ("dev", tarfile.CHRTYPE, ""))), tmp_path / "in")
    assert done == Unpacked(9, 6)
    assert (tmp_path / "in/d/e/up").resolve() == tmp_path / "in/d/e"
    assert sorted(path.name for path in (tmp_path / "in").rglob("*")) == ["d", "e", "ok", "up"]


def test_links_of_this_machine_are_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/f").write_text("mine")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/d").symlink_to("../mine")
    (tmp_path / "in/g").symlink_to("../mine/f")
    with pytest.raises(InvalidRequestError, match="link"):
        unpack(reader(archive(("d/f", FILE, b"x"))), tmp_path / "in")
    unpack(reader(archive(("g", FILE, b"x"))), tmp_path / "in")
    assert (tmp_path / "mine/f").read_text() == "mine"


def test_a_stream_that_is_cut_or_broken_leaves_no_half_file(tmp_path: Path) -> None:
    whole = archive(("a", FILE, b"x" * 5000), ("n" * 150, FILE, b"y" * 1000))
    chance = random.Random(3)
    for _ in range(300):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        del data[chance.randrange(len(data)) :]
        with contextlib.suppress(LLM4AgentsError):
            unpack(reader(bytes(data)), tmp_path / "in")
    assert not list(tmp_path.rglob("*.part"))
    for cut in (100, 600, 5000, len(whole) - 1024):
        with pytest.raises(ProtocolError, match="broke off"):
            unpack(reader(whole[:cut]), tmp_path / "in")
    endless = tarfile.TarInfo("x")
    endless.type, endless.size = tarfile.XHDTYPE, 7 << 30
    with pytest.raises(ProtocolError, match="without end"):
        unpack(lambda n: endless.tobuf(tarfile.USTAR_FORMAT) if n == 512 else bytes(n), tmp_path / "in")


def test_special_bits_and_writing_by_others_are_not_given(tmp_path: Path) -> None:
    info = tarfile.TarInfo("f")
    info.mode = 0o7777
    unpack(reader(info.tobuf() + bytes(1024)), tmp_path)
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o755


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    trailer = _untar.TRAILER + b'{"skipped": 2, "unreadable": 1, "first_unreadable": "/x"}\n'
    done = unpack(reader(archive() + trailer.ljust(512, b"\0")), tmp_path)
    assert done == Unpacked(0, 2, 1, "/x")
    with pytest.raises(ProtocolError):
        unpack(reader(archive() + _untar.TRAILER + b"[]\n"), tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    packer = Packer(tmp_path / "gone" / "no such")
    with pytest.raises(InvalidRequestError, match="no such"):
        packer.read(1)


def test_through_the_sdk(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "t/d").mkdir(parents=True)
    (tmp_path / "t/d/f").write_bytes(b"x" * 700_000)
    (tmp_path / "t/l").symlink_to("d/f")

    with Sandbox("base") as sandbox:
        sandbox.files.upload(tmp_path / "t", "tree")
        with sandbox.files.tar("tree", exclude=["d"]) as stream:
            assert b"l" in b"".join(stream)
        assert sandbox.files.untar("again", packed(tmp_path / "t")) == 3
        back = sandbox.files.download("again", tmp_path / "back")
        assert (back / "l").read_bytes() == b"x" * 700_000
        sandbox.files.upload(tmp_path / "t", "unreadable")
        with pytest.raises(GuestError, match="2 files"):
            sandbox.files.download("unreadable", tmp_path / "most")
        assert (tmp_path / "most/d/f").exists()

    async def same() -> None:
        async with AsyncSandbox("base") as sandbox:
            await sandbox.files.upload(tmp_path / "t", "tree")
            seen: list[int] = []
            back = await sandbox.files.download(
                "tree", tmp_path / "async", on_progress=lambda got, _: seen.append(got)
            )
            assert (back / "l").read_bytes() == b"x" * 700_000
            assert seen[-1] > 700_000

    asyncio.run(same())


def test_a_cancelled_download_ends_its_thread_and_leaves_no_half_file(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def stream() -> AsyncIterator[bytes]:
        yield archive(("f", FILE, b"x" * 100_000))[:50_000]
        begun.set()
        await asyncio.Event().wait()

    async def test() -> None:
        task = asyncio.create_task(async_fed(lambda read: unpack(read, tmp_path / "in"), stream(), None))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not list((tmp_path / "in").iterdir())

    asyncio.run(asyncio.wait_for(test(), 20))
