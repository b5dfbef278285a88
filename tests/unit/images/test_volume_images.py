"""The files that volumes are: sizes that hold, whole or not at all, and locks that are asked."""

from __future__ import annotations

import asyncio
import fcntl
import re
import subprocess
from pathlib import Path

import pytest

from llm4agents.errors import ConflictError
from llm4agents.images.process import tool
from llm4agents.images.volumes import MIB, OWNER, Files, file_bytes


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "volumes")


def asked(path: Path, what: str) -> int:
    out = subprocess.run([tool("dumpe2fs"), "-h", path], capture_output=True, text=True, check=True).stdout
    found = re.search(rf"^{what}:\s+(\d+)", out, re.MULTILINE)
    assert found
    return int(found[1])


def test_sizes_only_grow_and_are_whole() -> None:
    sizes = [file_bytes(mib * MIB) for mib in [*range(8, 3_000, 7), 20_000, 131_072, 1_048_576]]
    assert sizes == sorted(sizes)
    assert all(size % MIB == 0 for size in sizes)


@pytest.mark.parametrize("mib", [8, 129, 1_024, 131_072])
def test_what_was_asked_for_fits(files: Files, mib: int) -> None:
    asyncio.run(files.make("vol_a", mib * MIB))
    path = files.path("vol_a")
    blocks = asked(path, "Block count")
    # What ext4 keeps back for itself when it is mounted: 2%, or 4096 blocks.
    free = asked(path, "Free blocks") - min(blocks // 50, 4_096)
    assert mib * MIB <= free * 4_096
    assert blocks * 4_096 == path.stat().st_size == file_bytes(mib * MIB) == files.bytes("vol_a")
    assert asked(path, "Reserved block count") == 0
    assert files.allocated_bytes("vol_a") < 16 * MIB
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_root_is_the_users(files: Files) -> None:
    asyncio.run(files.make("vol_a", 8 * MIB))
    command = [tool("debugfs"), "-R", "stat <2>", files.path("vol_a")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"User:\s+{OWNER}\s+Group:\s+{OWNER}", said)


def test_a_copy_is_the_same_and_as_long_as_is_asked(files: Files) -> None:
    asyncio.run(files.make("vol_a", 8 * MIB))
    for name, mib in (("vol_b", 8), ("vol_c", 16), ("vol_d", 8)):
        copied = files.copy("vol_a", name, mib * MIB)
        assert not files.path(name).exists()
        if name != "vol_d":
            files.appear(copied, name)
    files.remove("vol_d")
    whole = files.path("vol_a").read_bytes()
    assert files.path("vol_b").read_bytes() == whole
    assert files.path("vol_c").read_bytes() == whole.ljust(file_bytes(16 * MIB), b"\0")
    with pytest.raises(ConflictError):
        files.copy("vol_a", "vol_b", 8 * MIB)
    assert sorted(path.name for path in files.root.iterdir()) == ["vol_a.raw", "vol_b.raw", "vol_c.raw"]


def test_one_that_is_in_use_does_not_grow(files: Files) -> None:
    asyncio.run(files.make("vol_a", 8 * MIB))
    with files.path("vol_a").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(ConflictError, match="in use"):
            files.grow("vol_a", 16 * MIB)
    assert files.bytes("vol_a") == file_bytes(8 * MIB)
    files.grow("vol_a", 16 * MIB)
    files.grow("vol_a", 8 * MIB)
    assert files.bytes("vol_a") == file_bytes(16 * MIB)


def test_what_no_row_has_is_swept(files: Files) -> None:
    assert files.sweep(set()) == []
    files.remove("vol_a")
    asyncio.run(files.make("vol_a", 8 * MIB))
    for name in ("vol_b.raw", ".vol_a.0123.tmp", "other"):
        (files.root / name).touch()
    assert sorted(files.sweep({"vol_a"})) == [".vol_a.0123.tmp", "other", "vol_b.raw"]
    assert [path.name for path in files.root.iterdir()] == ["vol_a.raw"]
    files.remove("vol_a")
    assert files.allocated_bytes("vol_a") == 0


def test_what_a_monitor_wrote_past_the_end_is_cut_off_when_nobody_has_it(files: Files) -> None:
    asyncio.run(files.make("vol_a", 8 * MIB))
    whole = files.path("vol_a").read_bytes()
    with files.path("vol_a").open("ab") as monitor:
        monitor.write(b"x" * MIB)
        monitor.flush()
        fcntl.flock(monitor, fcntl.LOCK_EX)
        files.cut("vol_a", 8 * MIB)
        assert files.bytes("vol_a") == len(whole) + MIB
    files.cut("vol_a", 16 * MIB)
    assert files.bytes("vol_a") == len(whole) + MIB, "not longer than one of that size"
    files.cut("vol_a", 8 * MIB)
    assert files.path("vol_a").read_bytes() == whole
    files.cut("vol_b", 8 * MIB)
