"""Upper disks are whole, small on the host, and clones of their overlay work from anywhere."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from llm4agents.errors import ConflictError
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
