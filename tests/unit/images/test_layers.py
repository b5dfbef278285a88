"""Layers of a disk: merged, they read as the chain did."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from llm4agents.errors import ConflictError
from llm4agents.images import disk, layers

SIZE = 8 << 20

pytestmark = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")


def _io(image: str, *commands: str) -> None:
    argv = ["qemu-io", image, *(word for command in commands for word in ("-c", command))]
    subprocess.run(argv, check=True, capture_output=True)


def _chain_of(tmp_path: Path, count: int) -> tuple[list[Path], Path, bytearray]:
    """`count` layers of random writes and zeros over a base, and what the disk should read as."""
    draw = random.Random(7)
    base = tmp_path / "base.raw"
    whole = bytearray(draw.randbytes(1 << 20) + bytes(SIZE - (1 << 20)))
    base.write_bytes(whole)
    empty = tmp_path / "empty.qcow2"
    asyncio.run(disk.make_overlay(base, empty))
    made: list[Path] = []
    for index in range(count):
        top = tmp_path / f"layer-{index}.qcow2"
        layers.new_overlay(empty, top)
        made.insert(0, top)
        commands = []
        for _ in range(12):
            at, length = draw.randrange(SIZE // 4096) * 4096, 4096 * draw.randrange(1, 20)
            length = min(length, SIZE - at)
            pattern = draw.randrange(256)
            commands.append(
                f"write -P {pattern} {at} {length}" if draw.random() < 0.7 else f"write -z {at} {length}"
            )
            value = pattern if commands[-1].startswith("write -P") else 0
            whole[at : at + length] = bytes([value]) * length
        _io(layers.chain(made, base), *commands)
    return made, base, whole


@pytest.mark.parametrize("count", [1, 2, 9])
def test_merged_layers_read_as_the_chain_did(tmp_path: Path, count: int) -> None:
    made, base, whole = _chain_of(tmp_path, count)
    before = [path.read_bytes() for path in made]
    asyncio.run(layers.to_raw(made, base, tmp_path / "raw"))
    assert (tmp_path / "raw").read_bytes() == whole
    asyncio.run(layers.flatten(made, base, tmp_path / "flat"))
    asyncio.run(layers.to_raw([tmp_path / "flat"], base, tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == whole
    assert [path.read_bytes() for path in made] == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_what_exists_is_not_written_over(tmp_path: Path) -> None:
    made, base, _ = _chain_of(tmp_path, 1)
    (tmp_path / "there").write_bytes(b"x")
    for act in (layers.flatten, layers.to_raw):
        with pytest.raises(ConflictError):
            asyncio.run(act(made, base, tmp_path / "there"))
    assert (tmp_path / "there").read_bytes() == b"x"
