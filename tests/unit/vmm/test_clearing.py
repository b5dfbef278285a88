"""What a taken-over VMM leaves in its directory is removed, whatever it is."""

import os
from pathlib import Path

from llm4agents.vmm import clearing


def deep(base: Path, levels: int) -> None:
    base.mkdir()
    at = os.open(base, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=at)
        os.close(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=at))
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_nothing_is_too_deep_and_no_link_is_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    base = tmp_path / "io"
    base.mkdir()
    for name in ("one", "two"):
        deep(base / name, 2_500)
        (base / name / "link").symlink_to(kept)
    os.mkfifo(base / "fifo")
    clearing.remove(base)
    assert not base.exists()
    assert (kept / "file").exists()
    clearing.remove(base)
    (tmp_path / "link").symlink_to(kept)
    clearing.remove(tmp_path / "link")
    assert (kept / "file").exists()
