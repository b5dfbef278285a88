"""The verbs of whole directories against the real agent, serving a socketpair instead of a virtual machine."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llm4agents.errors import (
    GuestError,
    InvalidRequestError,
    PathNotFoundError,
    ProtocolError,
    TimedOutError,
    VersionMismatchError,
)
from llm4agents.guest import trees
from llm4agents.guest.frames import FrameType
from llm4agents.guest.trees import Change, Packed
from llm4agents.guest.verbs import Agent
from tests.unit.guest.agent_process import run
from tests.unit.guest.fake_guest import session

ODD = os.fsdecode(b"odd \xff\n name")


async def packed(agent: Agent, path: Path, exclude: tuple[str, ...] = ()) -> tuple[bytes, Packed]:
    stream = await trees.tar_out(agent, path, exclude=exclude, user=None)
    async with stream:
        data = b"".join([piece async for piece in stream])
    assert stream.packed is not None
    assert stream.packed.bytes == len(data)
    return data, stream.packed


def a_tree(top: Path) -> Path:
    (top / "dir/deep").mkdir(parents=True)
    (top / "empty").mkdir()
    (top / "dir/deep/file").write_bytes(os.urandom(700_001))
    (top / ODD).write_bytes(b"odd")
    (top / ("long" * 60)).write_bytes(b"")
    (top / "link").symlink_to("dir/deep")
    (top / "dangling").symlink_to("/no/where")
    os.link(top / ODD, top / "dir/other")
    (top / "dir/deep/file").chmod(0o640)
    (top / "empty").chmod(0o1777)
    (top / "dir/deep").chmod(0o500)
    os.utime(top / "dir/deep/file", ns=(0, 1_234_567_890_123_456_789))
    return top


def described(top: Path) -> dict[str, tuple[object, ...]]:
    """Everything of a tree that a copy must keep."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(top.rglob("*")):
        seen = path.lstat()
        content = (
            os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else len(list(path.iterdir()))
        )
        found[str(path.relative_to(top))] = (seen.st_mode, seen.st_mtime_ns, seen.st_nlink, content)
    return found


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        tree = a_tree(tmp_path / "from")
        data, info = await packed(agent, tree)
        assert (info.skipped, info.unreadable) == (0, 0)
        done = await trees.tar_in(agent, tmp_path / "new/to", data, user=None)
        assert done.entries == info.entries == len(described(tree))
        assert described(tmp_path / "new/to") == described(tree)

    run(test)


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar here")
def test_others_read_what_we_write_and_we_read_what_they_write(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        tree = a_tree(tmp_path / "from")
        data, _ = await packed(agent, tree)
        (tmp_path / "gnu").mkdir()
        subprocess.run(["tar", "-xpf", "-", "-C", tmp_path / "gnu"], input=data, check=True)
        assert described(tmp_path / "gnu") == described(tree)
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            assert {os.fsencode(name) for name in archive.getnames()} == {
                os.fsencode(name) for name in described(tree)
            }
        for form in ("gnu", "pax", "ustar"):
            left_out = ["--exclude=long*"] if form == "ustar" else []
            made = subprocess.run(
                ["tar", "-c", f"--format={form}", *left_out, "-C", tree, "."], check=True, capture_output=True
            )
            at = tmp_path / f"in-{form}"
            await trees.tar_in(agent, at, made.stdout, user=None)
            wanted = {name: what[0] for name, what in described(tree).items()}
            if form == "ustar":
                del wanted["long" * 60]
            assert {name: what[0] for name, what in described(at).items()} == wanted

    run(test)


def test_sockets_and_what_is_excluded_are_left_out(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        (tmp_path / "node_modules/x").mkdir(parents=True)
        (tmp_path / "keep.py").write_text("")
        server = await asyncio.start_unix_server(lambda r, w: None, tmp_path / "socket")
        os.mkfifo(tmp_path / "fifo")
        async with server:
            data, info = await packed(agent, tmp_path, ("node_modules",))
        assert (info.entries, info.skipped) == (2, 1)
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            assert sorted(archive.getnames()) == ["fifo", "keep.py"]
        with pytest.raises(InvalidRequestError):
            await trees.tar_out(agent, tmp_path / "keep.py", user=None)
        with pytest.raises(PathNotFoundError):
            await trees.tar_out(agent, tmp_path / "none", user=None)

    run(test)


def hostile(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "members",
    [
        [hostile("/etc/x")],
        [hostile("../x")],
        [hostile("a/../../x")],
        [hostile("l", tarfile.SYMTYPE, ".."), hostile("l/x")],
        [hostile("l", tarfile.SYMTYPE, "/tmp"), hostile("l/x")],
        [hostile("l", tarfile.LNKTYPE, "../secret")],
    ],
    ids=["absolute", "parent", "through parent", "link up", "absolute link", "hard link"],
)
def test_a_member_that_leads_out_is_refused_by_name(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    async def test(agent: Agent) -> None:
        (tmp_path / "secret").write_text("x")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for member in members:
                archive.addfile(member)
        with pytest.raises(InvalidRequestError, match=members[-1].name):
            await trees.tar_in(agent, tmp_path / "in", buffer.getvalue(), user=None)
        assert {path.name for path in tmp_path.iterdir()} == {"secret", "in"}

    run(test)


def test_what_is_no_archive_and_one_that_is_cut_are_refused(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        tree = a_tree(tmp_path / "from")
        data, _ = await packed(agent, tree)
        for bad in (b"", b"no archive at all" * 100, data[: len(data) // 2], data[:-1024]):
            with pytest.raises(InvalidRequestError):
                await trees.tar_in(agent, tmp_path / "to", bad, user=None)
        assert not list((tmp_path / "to").rglob(".l4-*"))

    run(test)


def test_a_cancelled_unpacking_leaves_no_half_file_and_no_worker(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        tree = tmp_path / "from"
        tree.mkdir()
        (tree / "big").write_bytes(bytes(5_000_000))
        data, _ = await packed(agent, tree)
        for _ in range(20):  # more than there are workers
            sent = asyncio.Event()

            async def half(sent: asyncio.Event = sent) -> AsyncIterator[bytes]:
                yield data[:2_000_000]
                sent.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(trees.tar_in(agent, tmp_path / "to", half(), user=None))
            await sent.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        while list((tmp_path / "to").iterdir()):
            await agent.ping()
        await trees.tar_in(agent, tmp_path / "to", data, user=None)
        assert (tmp_path / "to/big").stat().st_size == 5_000_000

    run(test)


def test_streams_of_trees_nobody_reads_hold_up_nobody(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        for n in range(8):
            (tmp_path / f"f{n}").write_bytes(bytes(1_000_000))
        streams = [await trees.tar_out(agent, tmp_path, user=None) for _ in range(8)]
        streams += [await trees.tar_out(agent, "/usr", user=None) for _ in range(8)]
        watches = [await trees.watch(agent, tmp_path, user=None) for _ in range(8)]
        assert (await agent.stat(tmp_path / "f1", user=None)).size == 1_000_000
        for stream in [*streams, *watches]:
            stream.cancel()
        data, _ = await packed(agent, tmp_path)
        assert len(data) > 8_000_000

    run(test)


def test_attributes_and_links(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d/f").write_text("x")
        assert await trees.set_attributes(agent, tmp_path / "d/f", mode=0o4711, mtime=5.5, user=None) == 1
        seen = (tmp_path / "d/f").stat()
        assert (seen.st_mode & 0o7777, seen.st_mtime) == (0o4711, 5.5)
        assert await trees.set_attributes(agent, tmp_path, mode=0o750, recursive=True, user=None) == 3
        assert (tmp_path / "d/f").stat().st_mode & 0o7777 == 0o750
        with pytest.raises(InvalidRequestError):
            await trees.set_attributes(agent, tmp_path, owner="nobody-here", user=None)
        with pytest.raises(PathNotFoundError):
            await trees.set_attributes(agent, tmp_path / "none", mode=0, user=None)
        await trees.link(agent, tmp_path / "l", "any where", user=None)
        with pytest.raises(GuestError) as caught:
            await trees.link(agent, tmp_path / "l", ODD, user=None)
        assert caught.value.details["code"] == "exists"
        await trees.link(agent, tmp_path / "l", ODD, overwrite=True, user=None)
        assert (tmp_path / "l").readlink().name == ODD
        assert (await agent.stat(tmp_path / "l", follow=False, user=None)).target == ODD
        await trees.link(agent, tmp_path / "hard", tmp_path / "d/f", symbolic=False, user=None)
        assert (tmp_path / "hard").stat().st_nlink == 2

    run(test)


def test_search_by_name_and_by_content(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        (tmp_path / "a/.hidden").mkdir(parents=True)
        (tmp_path / "a/x.py").write_text("import os\nprint('Needle')\n")
        (tmp_path / "a/.hidden/y.py").write_bytes(b"\xe4 needle\n")
        (tmp_path / ODD).write_bytes(b"needle\0")
        found = await trees.search(agent, tmp_path, name="*.py", user=None)
        assert sorted(Path(match.path).name for match in found.matches) == ["x.py", "y.py"]
        assert {match.size for match in found.matches} == {26, 9}
        found = await trees.search(agent, tmp_path, name="*odd*", user=None)
        assert [match.path for match in found.matches] == [str(tmp_path / ODD)]
        found = await trees.search(agent, tmp_path, content="needle", ignore_case=True, user=None)
        assert found.files == 3
        assert sorted((m.line, m.column, m.text) for m in found.matches) == [
            (1, 3, b"\xe4 needle"),
            (2, 8, b"print('Needle')"),
        ]
        found = await trees.search(
            agent, tmp_path, content=r"^import \w+$", regex=True, hidden=False, user=None
        )
        assert [(m.line, m.text) for m in found.matches] == [(1, b"import os")]
        found = await trees.search(agent, tmp_path, max=1, user=None)
        assert (len(found.matches), found.truncated) == (1, True)
        with pytest.raises(InvalidRequestError, match="regular expression"):
            await trees.search(agent, tmp_path, content="(", regex=True, user=None)

    run(test)


def test_a_search_of_everything_is_cut_off_in_time_and_gives_its_worker_back(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        (tmp_path / "endless").mkdir()
        with (tmp_path / "endless/file").open("wb") as file:
            file.write(b"x" * 9_000)
            file.truncate(200 << 30)  # a hole: no NUL at its beginning, and hours to read
        for _ in range(6):
            with pytest.raises(TimedOutError):
                await trees.search(agent, tmp_path, content="needle", user=None, timeout=0.2)
            assert (await agent.stat(tmp_path, user=None)).kind == "directory"

    run(test)


async def changes(watch: trees.Watch, until: str) -> list[Change]:
    """What is seen up to the first change whose path ends in `until`."""
    seen = []
    async for change in aiter(watch):
        seen.append(change)
        if change.path.endswith(until):
            return seen
    raise AssertionError(f"the watch ended: {seen}")


def test_watch_sees_what_happens_also_in_new_directories(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        seen: asyncio.Queue[Change | None] = asyncio.Queue()

        async def collect() -> None:
            async for change in watch:
                seen.put_nowait(change)
            seen.put_nowait(None)

        async def next_() -> tuple[str, ...]:
            change = await seen.get()
            assert change is not None
            to = () if change.to is None else (str(Path(change.to).relative_to(tmp_path)),)
            return (change.event, str(Path(change.path).relative_to(tmp_path)), *to)

        watch = await trees.watch(agent, tmp_path, user=None)
        collecting = asyncio.create_task(collect())
        (tmp_path / "sub").mkdir()
        assert await next_() == ("created", "sub")
        (tmp_path / "sub" / ODD).write_bytes(b"1")
        assert await next_() == ("created", f"sub/{ODD}")
        assert await next_() == ("modified", f"sub/{ODD}")
        (tmp_path / "sub" / ODD).rename(tmp_path / "moved")
        assert await next_() == ("moved", f"sub/{ODD}", "moved")
        (tmp_path / "moved").unlink()
        assert await next_() == ("removed", "moved")
        for n in range(2_000):  # more than any buffer between us
            (tmp_path / "sub" / f"{'x' * 200}{n}").write_bytes(b"1")
        created = set()
        while len(created) < 2_000:
            event = await next_()
            if event[0] == "created":
                created.add(event[1])
        shutil.rmtree(tmp_path)
        while (change := await seen.get()) is not None:
            last = change
        assert (last.event, last.path) == ("removed", str(tmp_path))
        await collecting

    run(test)


def test_a_watch_nobody_reads_overflows_and_says_so(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
        watch = await trees.watch(agent, tmp_path, user=None)

        def flood() -> None:
            for n in range(limit):
                (tmp_path / f"{n % 40}").touch()
                (tmp_path / f"{n % 40}").unlink()

        await asyncio.to_thread(flood)
        async for change in watch:
            if change.event == "overflow":
                break
        watch.cancel()
        await agent.ping()

    run(test)


def test_a_guest_that_lies_of_its_trees_loses_its_session(tmp_path: Path) -> None:
    async def lies(verb: str, payloads: list[bytes], end: object) -> None:
        async with session() as (opened, guest):
            opened.hello = type(opened.hello)(1, "x", "", ("files2",), 1024)
            agent = Agent(opened)

            async def ask() -> None:
                if verb == "search":
                    await trees.search(agent, "/", max=2)
                elif verb == "watch":
                    async for _ in await trees.watch(agent, "/"):
                        pass
                else:
                    async for _ in await trees.tar_out(agent, "/"):
                        pass

            asking = asyncio.create_task(ask())
            stream, _ = await guest.opened(verb)
            await guest.send(stream, FrameType.REPLY, {})
            for payload in payloads:
                await guest.send(stream, FrameType.DATA, payload)
            if end is not None:
                await guest.send(stream, FrameType.EOF)
                await guest.send(stream, FrameType.END, end)
            with pytest.raises(ProtocolError):
                await asking
            assert isinstance(opened.closed.result(), ProtocolError)

    async def all_of_them() -> None:
        entry = b"\x84\xa4path\xa2/x\xa4kind\xa4file\xa4size\x01\xa5mtime\xca\0\0\0\0"
        await lies("search", [entry] * 3, None)
        await lies("search", [entry], {"matches": 2, "files": 1})
        await lies("search", [b"\x81\xa4path\x01"], None)
        await lies("search", [b"\xdd\xff\xff\xff\xff"], None)
        await lies("watch", [b"\x81\xa5event\xa3odd"], None)
        await lies("watch", [b"\x82\xa5event\xa7created\xa4path\xda\xff\xff" + b"x" * 60_000] * 2, None)
        await lies("tar_out", [b"x"], {"entries": 1, "skipped": 0, "bytes": 7})

    asyncio.run(asyncio.wait_for(all_of_them(), 30))


def test_an_old_agent_is_told_from_a_new_one() -> None:
    async def test() -> None:
        async with session() as (opened, _):
            with pytest.raises(VersionMismatchError, match="too old"):
                await trees.tar_out(Agent(opened), "/")
            assert not opened.closed.done()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_file_that_changes_while_it_is_packed_breaks_nothing(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        path = tmp_path / "f"
        path.write_bytes(b"x" * 3_000_000)
        stop = threading.Event()

        def change() -> None:
            while not stop.is_set():
                for size in (10, 5_000_000, 3_000_000):
                    os.truncate(path, size)

        changing = asyncio.create_task(asyncio.to_thread(change))
        try:
            for _ in range(20):
                data, _ = await packed(agent, tmp_path)
                with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                    assert archive.getnames() == ["f"]
        finally:
            stop.set()
            await changing

    run(test)
