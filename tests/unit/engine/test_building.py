"""Parts of a build without a machine: files sent for copies, disks kept after steps, what a build says."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llm4agents import limits
from llm4agents.engine.building import buildlog
from llm4agents.engine.building import copies as copies_
from llm4agents.engine.building.buildlog import BuildLog
from llm4agents.engine.building.copies import Checker, Copies, owned
from llm4agents.engine.building.stepcache import ABOUT, StepCache
from llm4agents.errors import CapacityError, InvalidRequestError
from llm4agents.images.cache import Cache


def tar(*members: tarfile.TarInfo | tuple[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size, info.mode, info.uid, info.uname = len(member[1]), 0o640, 77, "someone"
                archive.addfile(info, io.BytesIO(member[1]))
            else:
                archive.addfile(member)
    return buffer.getvalue()


def special(name: str, kind: bytes, link: str = "", **pax: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.pax_headers = kind, link, pax
    return info


def check(data: bytes, piece: int = 700) -> Checker:
    checker = Checker()
    for at in range(0, len(data), piece):
        checker.feed(data[at : at + piece])
    return checker


@pytest.mark.parametrize("piece", [1, 511, 512, 700, 100_000])
def test_a_good_tar_is_taken_in_pieces_of_any_size(piece: int) -> None:
    long = "d/" + "n" * 200
    data = tar(
        ("a", b"x" * 3_000),
        (long, b""),
        special("d/l", tarfile.SYMTYPE, "/etc/passwd"),
        special("e", tarfile.DIRTYPE),
    )
    checker = check(data, piece)
    assert checker.ended and checker.entries == 4


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tar(("../a", b"")), "leads out of it"),
        (tar(("/a", b"")), "leads out of it"),
        (tar(("a/./b", b"")), "leads out of it"),
        (tar(special("l", tarfile.LNKTYPE, "../x")), "leads out of it"),
        (tar(special("dev", tarfile.CHRTYPE)), "strange kind"),
        (tar(special("fifo", tarfile.FIFOTYPE)), "strange kind"),
        (tar(special("l", tarfile.SYMTYPE, "/etc"), ("l/passwd", b"x")), "behind a link"),
        (tar(special("a", tarfile.DIRTYPE, uid="5")), "'uid' of a member"),
        (tar(special("a", tarfile.DIRTYPE, **{"GNU.sparse.major": "1"})), "of a member"),
        (tar(special("a", tarfile.DIRTYPE, comment="x" * 70_000)), "header without end"),
        (tar(("a" * 150, b""), form=tarfile.GNU_FORMAT), "strange kind"),
        (b"\1" * 1024, "broken"),
        (tar(("a", b"")) + b"more", "goes on after its end"),
    ],
)
def test_a_tar_that_would_do_harm_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(data)
    assert words in refused.value.message, refused.value.message


def test_a_tar_of_too_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COPY_ENTRIES_MAX", 2)
    with pytest.raises(InvalidRequestError, match="more than 2 entries"):
        check(tar(("a", b""), ("b", b""), ("c", b"")))


def test_a_tar_of_long_names_is_read_off_the_loop_and_little_is_kept_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "/".join("d" * 1_000)
    data = tar(*(special(f"{long}/{at}", tarfile.SYMTYPE, "x") for at in range(50)))
    assert {len(kept) for kept in check(data)._links} == {16}
    threads, feed = set(), Checker.feed

    def watched(self: Checker, piece: bytes) -> None:
        threads.add(threading.current_thread())
        feed(self, piece)

    monkeypatch.setattr(Checker, "feed", watched)
    asyncio.run(Copies(Cache(tmp_path)).receive("default", hashlib.sha256(data).hexdigest(), pieces(data)))
    assert threading.main_thread() not in threads


def test_a_copy_is_not_taken_in_when_the_disk_has_filled_up_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies_, "_LOOK_BYTES", 4_000)
    asked: list[int] = []

    def full(where: Path, least: int) -> None:
        asked.append(least)
        if len(asked) > 1:
            raise CapacityError("full")

    monkeypatch.setattr(copies_, "check_room", full)
    data = tar(("a", b"x" * 20_000))
    with pytest.raises(CapacityError):
        asyncio.run(
            Copies(Cache(tmp_path)).receive("default", hashlib.sha256(data).hexdigest(), pieces(data))
        )
    assert not list((tmp_path / "tmp").iterdir())


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 1_000):
        yield data[at : at + 1_000]


def test_files_are_a_project_s_own_and_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, data = Copies(Cache(tmp_path)), tar(("a", b"x" * 2_000))
    digest = hashlib.sha256(data).hexdigest()

    async def run() -> None:
        assert await copies.receive("default", digest, pieces(data)) == len(data)
        for bad in (data + bytes(512), data[:2_000]):
            with pytest.raises(InvalidRequestError):
                await copies.receive("prj_other0000000", digest, pieces(bad))

    asyncio.run(run())
    assert copies.find("default", digest) is not None and copies.find("prj_other0000000", digest) is None
    assert not list((tmp_path / "tmp").iterdir())
    for project, name in (("default", "../x"), ("..", digest), ("default", digest.upper())):
        with pytest.raises(InvalidRequestError):
            copies.find(project, name)
    monkeypatch.setattr(limits, "COPY_BYTES_MAX", 1_000)
    with pytest.raises(InvalidRequestError, match="at most"):
        asyncio.run(copies.receive("default", "0" * 64, pieces(data)))


def test_the_owner_is_who_builds_and_nothing_else_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(("a", b"x" * 700_000), ("d/" + "n" * 200, b"y"), special("l", tarfile.SYMTYPE, "a")))

    async def run() -> bytes:
        return b"".join([piece async for piece in owned(path, 1234, 55)])

    with tarfile.open(fileobj=io.BytesIO(asyncio.run(run()))) as archive:
        found = {member.name: member for member in archive}
        assert {(one.uid, one.gid, one.uname, one.gname) for one in found.values()} == {(1234, 55, "", "")}
        assert found["a"].mode == 0o640 and archive.extractfile("a").read() == b"x" * 700_000  # type: ignore[union-attr]
        assert found["l"].linkname == "a" and "d/" + "n" * 200 in found
    with pytest.raises(InvalidRequestError):
        asyncio.run(_all(owned(path, 1 << 22, 0)))


async def _all(items: AsyncIterator[bytes]) -> list[bytes]:
    return [item async for item in items]


def test_disks_are_kept_found_and_the_least_used_go_first(tmp_path: Path) -> None:
    steps = StepCache(Cache(tmp_path))
    keys = [digit * 64 for digit in "abc"]

    async def keep(key: str, anew: bool = False, text: bytes = b"x") -> None:
        async def fill(path: Path) -> None:
            path.write_bytes(text * 100_000)

        await steps.keep(key, "f" * 64, "run x", fill, project="default", anew=anew)

    async def run() -> None:
        for key in keys:
            await keep(key)
        await keep(keys[0], anew=True, text=b"y")

    asyncio.run(run())
    found = steps.find(keys[0])
    assert found is not None and found.upper.read_bytes()[:1] == b"y"
    assert steps.last(["d" * 64, keys[1], "e" * 64]) is not None and steps.last(["d" * 64]) is None
    for at, key in enumerate(keys):
        os.utime(tmp_path / "steps" / key / ABOUT, (at, at))
    assert steps.find(keys[0]) is not None  # used now
    assert [Path(gone).name for gone in steps.evict(250_000)] == [keys[1]]
    assert steps.find(keys[1]) is None and steps.find(keys[2]) is not None
    # Nothing half-made is taken for a disk, and the root file systems they lie on are not pruned.
    (tmp_path / "steps" / keys[2] / "upper.raw").unlink()
    assert steps.find(keys[2]) is None
    digest, _ = Cache(tmp_path).ingest_bytes(b"root")
    about = tmp_path / "steps" / keys[0] / ABOUT
    about.write_text(about.read_text().replace("f" * 64, digest))
    asyncio.run(Cache(tmp_path).prune())
    assert Cache(tmp_path).blob(digest) is not None


def test_of_kept_disks_the_project_that_has_most_gives_way(tmp_path: Path) -> None:
    steps = StepCache(Cache(tmp_path))

    async def fill(path: Path) -> None:
        path.write_bytes(b"x" * 100_000)

    def key(project: str, at: int) -> str:
        return f"{project}{at}".ljust(64, "0")

    async def run() -> None:
        for at, project in enumerate(["few"] + ["many"] * 5):  # the oldest of all is the one of `few`
            await steps.keep(key(project, at), "f" * 64, "run x", fill, project=project, anew=False)
            os.utime(tmp_path / "steps" / key(project, at) / ABOUT, (at, at))

    asyncio.run(run())
    gone = steps.evict(350_000, but={key("many", 1)})  # a build goes on from it
    assert [Path(path).name for path in gone] == [key("many", 2), key("many", 3), key("many", 4)]
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {
        key("few", 0),
        key("many", 1),
        key("many", 5),
    }
    # One of an older version says no project; it counts, and goes like any other.
    about = tmp_path / "steps" / key("many", 1) / ABOUT
    about.write_text(
        json.dumps({name: x for name, x in json.loads(about.read_text()).items() if name != "project"})
    )
    assert steps.find(key("many", 1)) is not None and len(steps.evict(0)) == 3


def test_build_logs_of_one_project_push_out_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUILD_LOGS_MAX", 4)

    async def run() -> None:
        log = BuildLog()
        log.add({"type": "build"})
        for at, name in enumerate(["old@prj_a", *(f"t{at}@prj_b" for at in range(5))]):
            log.write(tmp_path / f"{name}.jsonl", lambda name: name.partition("@")[2])
            os.utime(tmp_path / f"{name}.jsonl", (at, at))
        log.write(tmp_path / "t4@prj_b.jsonl", lambda name: name.partition("@")[2])

    asyncio.run(run())
    assert {path.stem for path in tmp_path.iterdir()} == {"old@prj_a", "t2@prj_b", "t3@prj_b", "t4@prj_b"}


def test_what_a_build_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        log, heard = BuildLog(), list[dict[str, object]]()
        log.add({"type": "build"})
        log.listen(heard.append)
        log.output(0, 1, b"one\ntw")
        log.output(0, 2, "ä".encode()[:1])
        log.output(0, 1, b"o\r\n10%\r20%\rdone\n\nlast")
        log.output(0, 2, "ä".encode()[1:])
        log.end_of_output(0)
        said = [(event["stream"], event["text"]) for event in heard if event["type"] == "log"]
        assert said == [
            ("stdout", "one"),
            ("stdout", "two"),
            ("stdout", "done"),
            ("stdout", "last"),
            ("stderr", "ä"),
        ]
        await asyncio.to_thread(log.progress, "pull", "x", None)
        await asyncio.sleep(0)
        assert heard[-1]["step"] == "pull"
        monkeypatch.setattr(limits, "BUILD_LOG_BYTES_MAX", 200)
        log.output(0, 1, b"x" * 20_000 + b"\n")
        assert log.dropped and len(log.events) == 1
        log.write(tmp_path / "logs" / "mine.jsonl")
        assert buildlog.read(tmp_path / "logs" / "mine.jsonl") == [json.loads(json.dumps(log.events[0]))]

    asyncio.run(run())
    assert buildlog.read(tmp_path / "none") is None
