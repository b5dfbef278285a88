"""Layers of a disk: merged, they read as the chain did."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from llm4agents.errors import ConflictError, CorruptSnapshotError, InvalidRequestError
from llm4agents.images import disk, layers
from llm4agents.vmm.base import Disk
from llm4agents.vmm.qemu.driver import virtual_size

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
        disk.clone_overlay(empty, top)
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


def _poisoned(path: Path, secret: Path, size: int = SIZE) -> None:
    """What a monitor that was taken over can make of the disk it has open: an image whose data is another file."""
    option = f"data_file={secret},data_file_raw=on"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-o", option, str(path), str(size)], check=True
    )
    secret.write_bytes(b"the host's own".ljust(SIZE, b"!"))


def test_a_layer_whose_header_names_a_file_of_the_host_is_not_read(tmp_path: Path) -> None:
    made, base, _ = _chain_of(tmp_path, 2)
    for place in (0, 1):
        chain = list(made)
        chain[place] = tmp_path / f"poisoned-{place}.qcow2"
        _poisoned(chain[place], tmp_path / "secret")
        for act in (layers.to_raw, layers.flatten):
            with pytest.raises(CorruptSnapshotError, match="header"):
                asyncio.run(act(chain, base, tmp_path / "out"))
    with chain[1].open("rb") as file, pytest.raises(InvalidRequestError, match="header"):
        virtual_size(file.fileno(), Disk("upper", chain[1], "qcow2", read_only=False))
    assert not [name for name in os.listdir(tmp_path) if name.startswith((".", "out"))]


def test_a_layer_of_another_size_than_its_template_is_refused(tmp_path: Path) -> None:
    made, base, _ = _chain_of(tmp_path, 1)
    with made[0].open("r+b") as file:  # what bounds the files of the next monitor
        file.seek(24)
        file.write((1 << 50).to_bytes(8, "big"))
    with pytest.raises(CorruptSnapshotError):
        asyncio.run(layers.to_raw(made, base, tmp_path / "out"))
    with made[0].open("rb") as file, base.open("rb") as under, pytest.raises(InvalidRequestError):
        virtual_size(file.fileno(), Disk("upper", made[0], "qcow2", False, backing=(base,)), under.fileno())


def test_a_layer_that_someone_may_still_write_to_is_read_from_a_copy(tmp_path: Path) -> None:
    made, base, whole = _chain_of(tmp_path, 2)
    with layers.readable(made, base, tmp_path) as files:
        assert files == tuple(made)
    with made[1].open("r+b"), layers.readable(made, base, tmp_path) as files:
        assert files[0] == made[0]
        assert files[1] != made[1]
        _poisoned(made[1], tmp_path / "secret")  # too late
        asyncio.run(layers.to_raw(files, base, tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == whole
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
