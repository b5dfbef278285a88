"""Upper disks are whole, small on the host, and clones of their overlay work from anywhere."""

from __future__ import annotations

import asyncio
import errno
import filecmp
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from llm4agents.errors import CapacityError, ConflictError
from llm4agents.images import disk
from llm4agents.images.process import PATH

pytestmark = pytest.mark.skipif(
    shutil.which("mke2fs", path=PATH) is None or shutil.which("qemu-img", path=PATH) is None,
    reason="e2fsprogs or qemu-utils is not installed",
)


def test_an_upper_is_a_clean_sparse_ext4(tmp_path: Path) -> None:
    path = tmp_path / "upper.raw"
    asyncio.run(disk.make_upper(path, 5 << 30))
    assert path.stat().st_size == 5 << 30
    assert path.stat().st_blocks * 512 < 8 << 20
    env = {"PATH": PATH}
    assert subprocess.run(["e2fsck", "-fn", str(path)], env=env, capture_output=True).returncode == 0
    listed = subprocess.run(
        ["debugfs", "-R", "ls /", str(path)], env=env, capture_output=True, text=True
    ).stdout
    assert "upper" in listed and "work" in listed
    assert [p.name for p in tmp_path.iterdir()] == ["upper.raw"]
    with pytest.raises(ConflictError):
        asyncio.run(disk.make_upper(path, 1 << 30))


def test_equal_uppers_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1735689600")
    for name in ("a", "b"):
        asyncio.run(disk.make_upper(tmp_path / name, 64 << 20))
    features = [
        subprocess.run(
            ["dumpe2fs", str(tmp_path / n)], env={"PATH": PATH}, capture_output=True, text=True
        ).stdout
        for n in ("a", "b")
    ]
    uuids = [line for text in features for line in text.splitlines() if "UUID" in line or "Hash Seed" in line]
    assert len(set(uuids)) == len(uuids) // 2


def test_a_copied_overlay_finds_its_disk(tmp_path: Path) -> None:
    (tmp_path / "upper.raw").write_bytes(bytes(1 << 20))
    asyncio.run(disk.make_overlay(tmp_path / "upper.raw", tmp_path / "empty"))
    other = tmp_path / "other"
    other.mkdir()
    disk.clone_overlay(tmp_path / "empty", other / "upper.qcow2")
    command = ["qemu-img", "info", "--output=json", str(other / "upper.qcow2")]
    info = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert info["backing-filename"] == str(tmp_path / "upper.raw")
    assert info["backing-filename-format"] == "raw"
    assert info["virtual-size"] == 1 << 20
    with pytest.raises(ConflictError):
        disk.clone_overlay(tmp_path / "empty", other / "upper.qcow2")
    with pytest.raises(ConflictError):
        asyncio.run(disk.make_overlay(tmp_path / "none", tmp_path / "x"))


def _holes(path: Path, size: int, pieces: dict[int, bytes]) -> Path:
    with path.open("xb") as file:
        file.truncate(size)
        for at, data in pieces.items():
            file.seek(at)
            file.write(data)
    return path


@pytest.mark.parametrize("able", ["all", "no reference", "no copy in the kernel", "nothing"])
def test_a_file_of_holes_is_copied_in_milliseconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, able: str
) -> None:
    size = 5 << 30
    pieces = {0: b"head", 1 << 20: os.urandom(3 << 20), (4 << 30) + 12_345: b"far", size - 4: b"tail"}
    source = _holes(tmp_path / "upper.raw", size, pieces)

    def refused(*_: object) -> int:
        raise OSError(errno.EXDEV, "no")

    if able != "all":
        monkeypatch.setattr(disk.fcntl, "ioctl", refused)
    if able in ("no copy in the kernel", "nothing"):
        monkeypatch.setattr(disk.os, "copy_file_range", refused)
    began = time.perf_counter()
    disk.copy_sparse(source, tmp_path / "top.raw", durable=able == "nothing")
    took_s = time.perf_counter() - began
    copy = tmp_path / "top.raw"
    assert copy.stat().st_size == size and copy.stat().st_mode & 0o777 == 0o600
    assert copy.stat().st_blocks <= source.stat().st_blocks + 64
    with copy.open("rb") as file:
        for at, data in pieces.items():
            file.seek(at)
            assert file.read(len(data)) == data
        file.seek(3 << 30)
        assert file.read(4096) == bytes(4096)
    assert took_s < 1, f"{took_s:.3f} s for a few MiB"
    # It is another file, and a name is never taken over.
    with copy.open("r+b") as file:
        file.write(b"ours")
    assert source.open("rb").read(4) == b"head"
    with pytest.raises(ConflictError):
        disk.copy_sparse(source, copy)
    assert copy.open("rb").read(4) == b"ours"


def test_where_holes_are_not_known_zeroes_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _holes(tmp_path / "upper.raw", 64 << 20, {20 << 20: b"data"})

    def refused(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(disk.fcntl, "ioctl", refused)
    monkeypatch.setattr(disk.os, "copy_file_range", refused)
    monkeypatch.setattr(disk.os, "lseek", lambda _, at, how: at if how == os.SEEK_DATA else 64 << 20)
    disk.copy_sparse(source, tmp_path / "top.raw")
    assert (tmp_path / "top.raw").stat().st_blocks * 512 <= 8 << 20
    assert filecmp.cmp(source, tmp_path / "top.raw", shallow=False)


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _holes(tmp_path / "upper.raw", 1 << 20, {0: b"data"})

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(disk.fcntl, "ioctl", full)
    monkeypatch.setattr(disk.os, "copy_file_range", full)
    with pytest.raises(CapacityError):
        disk.copy_sparse(source, tmp_path / "top.raw")
    assert [path.name for path in tmp_path.iterdir()] == ["upper.raw"]
