"""Nothing appears before it is whole, one build at a time, and what died is swept: with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from llm4agents.errors import CapacityError, InvalidRequestError
from llm4agents.images.cache import Cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


BUILD = """
    import asyncio, sys
    from pathlib import Path
    from llm4agents.images.cache import Cache
    cache, log = Cache(Path(sys.argv[1])), Path(sys.argv[2])
    async def main():
        async with cache.lock("thing", lambda step, detail, fraction: print(step, detail, flush=True)):
            if cache.recall("thing", "k") is None:
                print("building", flush=True)
                sys.stdin.readline()
                with log.open("a") as file:
                    file.write("built\\n")
                digest, _ = cache.ingest_bytes(b"thing")
                cache.remember("thing", "k", {"digest": digest})
        print("done", flush=True)
    asyncio.run(main())
"""


def test_two_processes_build_a_thing_once(cache: Cache, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with python(BUILD, str(cache.root), str(log)) as first:
        assert first.stdout and first.stdin
        assert first.stdout.readline() == "building\n"
        with python(BUILD, str(cache.root), str(log)) as second:
            assert second.stdout and second.stdin
            assert second.stdout.readline() == f"wait waiting for another build (pid {first.pid})\n"
            first.stdin.write("\n")
            first.stdin.flush()
            assert second.stdout.readline() == "done\n"
        assert first.stdout.readline() == "done\n"
    assert log.read_text() == "built\n"


def test_a_killed_builder_frees_the_lock_and_leaves_nothing_finished(cache: Cache, tmp_path: Path) -> None:
    code = """
        import asyncio, sys
        from pathlib import Path
        from llm4agents.images.cache import Cache
        cache = Cache(Path(sys.argv[1]))
        async def main():
            async with cache.lock("thing"):
                with cache.tmpdir() as tmp:
                    (tmp / "half").mkdir()
                    (tmp / "half" / "file").write_text("half")
                    (tmp / "half").chmod(0o500)
                    print("building", flush=True)
                    sys.stdin.readline()
        asyncio.run(main())
    """
    with python(code, str(cache.root)) as builder:
        assert builder.stdout and builder.stdout.readline() == "building\n"
        assert len(list(cache.tmp.iterdir())) == 1
        assert cache.sweep() == []  # it lives
        builder.send_signal(signal.SIGKILL)
        builder.wait()

    async def take() -> None:
        async with cache.lock("thing"):
            pass

    asyncio.run(asyncio.wait_for(take(), 10))
    assert len(cache.sweep()) == 1
    assert list(cache.tmp.iterdir()) == []
    assert not cache.templates.exists() and not cache.blobs.exists()


def test_a_live_build_of_another_container_is_no_leftover(cache: Cache) -> None:
    """Which shares the cache, and in which our pids are nobody's."""
    code = "import sys; from llm4agents.images.cache import *; print(Cache(Path(sys.argv[1])).sweep())"
    within = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    argv = [*within, sys.executable, "-c", code, str(cache.root)]
    with cache.tmpdir() as mine:
        other = cache.tmp / mine.name.replace(str(os.getpid()), "1")
        other.mkdir()
        swept = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
        assert mine.is_dir() and not other.exists()
        assert other.name in swept and mine.name not in swept


def test_a_reused_pid_does_not_protect_anothers_leftovers(cache: Cache) -> None:
    with cache.tmpdir() as mine:
        stale = cache.tmp / f"{os.getpid()}-0123456789abcdef"
        for path in (stale, cache.tmp / "strange"):
            path.mkdir()
        (cache.tmp / "a-file").touch()
        assert {path.name for path in cache.sweep()} == {stale.name, "strange"}
        assert mine.is_dir()


def test_a_directory_that_a_sweeper_reaches_first_is_made_anew(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, swept = Path.mkdir, list[Path]()

    def made(path: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(path, *args, **kwargs)
        if path.parent == cache.tmp and not swept:
            swept.extend(cache.sweep())

    monkeypatch.setattr(Path, "mkdir", made)
    with cache.tmpdir() as path:
        assert path.is_dir() and swept and path not in swept


def test_a_waiting_build_can_be_cancelled(cache: Cache) -> None:
    async def main() -> None:
        waiting = asyncio.Event()

        async def second() -> None:
            async with cache.lock("thing", lambda *_: waiting.set()):
                raise AssertionError("both hold it")

        async with cache.lock("thing"):
            task = asyncio.create_task(second())
            await asyncio.wait_for(waiting.wait(), 10)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()

    asyncio.run(main())


def test_a_blob_is_read_only_and_there_once(cache: Cache) -> None:
    digest, path = cache.ingest_bytes(b"data")
    assert digest == hashlib.sha256(b"data").hexdigest()
    assert path.read_bytes() == b"data" and path.stat().st_mode & 0o777 == 0o444
    with cache.tmpdir() as tmp:
        (tmp / "again").write_bytes(b"data")
        assert cache.ingest(tmp / "again") == (digest, path)
    assert cache.blob(digest) == path
    assert cache.blob("0" * 64) is None
    assert list(cache.tmp.iterdir()) == []


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63])
def test_what_is_no_digest_is_no_path(cache: Cache, digest: str) -> None:
    with pytest.raises(InvalidRequestError):
        cache.blob(digest)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".x"])
def test_what_is_no_name_is_no_path(cache: Cache, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        cache.remember("kind", name, {})


def test_an_entry_that_cannot_be_read_is_none(cache: Cache) -> None:
    cache.remember("kind", "key", {"a": 1})
    assert cache.recall("kind", "key") == {"a": 1}
    (cache.index / "kind" / "key.json").write_text("{half")
    assert cache.recall("kind", "key") is None


def test_publish_is_whole_and_the_first_wins(cache: Cache) -> None:
    dest = cache.templates / "t" / "keys" / "k"
    with cache.tmpdir() as tmp:
        for name in ("one", "two"):
            (tmp / name).mkdir()
            (tmp / name / "file").write_text(name)
        assert cache.publish(tmp / "one", dest)
        assert not cache.publish(tmp / "two", dest)
    assert (dest / "file").read_text() == "one"


def test_prune_keeps_what_a_template_or_the_caller_names(cache: Cache) -> None:
    kept, _ = cache.ingest_bytes(b"of a template")
    asked, _ = cache.ingest_bytes(b"asked for")
    gone, path = cache.ingest_bytes(b"nobody's")
    cache.remember("rootfs", "kept", {"digest": kept})
    cache.remember("rootfs", "gone", {"digest": gone})
    variant = cache.templates / "t" / "keys" / "k"
    variant.mkdir(parents=True)
    (variant / "template.json").write_text(f'{{"blobs": ["{kept}"]}}')
    (cache.tmp / "1-1-dead").mkdir()
    pruned = asyncio.run(cache.prune(frozenset({asked})))
    assert cache.blob(kept) and cache.blob(asked) and not cache.blob(gone)
    assert cache.recall("rootfs", "kept") and cache.recall("rootfs", "gone") is None
    assert str(path) in pruned.removed and pruned.bytes > 0
    assert list(cache.tmp.iterdir()) == []


def test_prune_waits_for_builds(cache: Cache) -> None:
    async def main() -> None:
        waiting = asyncio.Event()
        async with cache.building(), cache.building():  # builds share
            pruning = asyncio.create_task(cache.prune(progress=lambda *_: waiting.set()))
            await asyncio.wait_for(waiting.wait(), 10)
            digest, _ = cache.ingest_bytes(b"just made")
            assert not pruning.done()
            variant = cache.templates / "t" / "keys" / "k"
            variant.mkdir(parents=True)
            (variant / "template.json").write_text(digest)
        await asyncio.wait_for(pruning, 10)
        assert cache.blob(digest)

    asyncio.run(main())


def test_du_counts_what_is_allocated(cache: Cache) -> None:
    cache.ingest_bytes(b"x" * 10_000)
    variant = cache.templates / "t" / "keys" / "k"
    variant.mkdir(parents=True)
    with (variant / "memory").open("wb") as file:
        file.truncate(1 << 30)
    usage = {item.name: item.bytes for item in cache.du()}
    assert 8_192 <= usage["blobs"] < 100_000
    assert usage["template t"] < 100_000


@pytest.fixture
def tiny_disk(tmp_path: Path):
    """A file system with room for 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    where = tmp_path / "tiny"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.root
def test_a_full_disk_is_a_capacity_error_and_leaves_nothing(tiny_disk: Path) -> None:
    from llm4agents.images import process

    cache = Cache(tiny_disk)
    with pytest.raises(CapacityError, match="free") as raised:
        cache.ingest_bytes(bytes(4_000_000))
    assert raised.value.details["needed_bytes"] == 4_000_000
    assert list(cache.tmp.iterdir()) == []
    with pytest.raises(CapacityError, match="5000 MB needed"):
        process.check_room(tiny_disk, 5_000_000_000)

    async def tool() -> None:
        with cache.tmpdir() as tmp:
            await process.run(
                ["dd", "if=/dev/zero", "of=big", "bs=1M", "count=9"], cwd=tmp, needed_bytes=9_437_184
            )

    with pytest.raises(CapacityError, match="9 MB needed"):
        asyncio.run(tool())
    assert list(cache.tmp.iterdir()) == []
