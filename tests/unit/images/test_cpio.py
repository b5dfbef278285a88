"""The archive we write is one that cpio, and so the kernel, reads."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from llm4agents.images import cpio
from llm4agents.images.initramfs import assemble


def test_equal_entries_give_equal_bytes_on_whole_sectors() -> None:
    one = cpio.archive([cpio.directory("dev"), cpio.file("init", b"x" * 5, 0o755)])
    two = cpio.archive([cpio.directory("dev"), cpio.file("init", b"x" * 5, 0o755)])
    assert one == two
    assert len(one) % 512 == 0
    assert one.startswith(b"070701")
    assert b"TRAILER!!!" in one


@pytest.mark.parametrize("size", range(9))
def test_every_length_keeps_the_next_header_aligned(size: int) -> None:
    data = cpio.archive([cpio.file("a" * (size + 1), b"y" * size), cpio.file("b", b"z")])
    second = data.index(b"070701", 6)
    assert second % 4 == 0


@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio is not installed")
def test_cpio_lists_and_unpacks_it(tmp_path) -> None:
    archive = assemble(b"\x7fELF agent", [("virtio", b"module"), ("ext4", b"")])
    listed = subprocess.run(["cpio", "-tv"], input=archive, capture_output=True, check=True).stdout.decode()
    assert "crw-------" in listed and "5,   1" in listed and "dev/console" in listed
    wanted = ["init", "modules.order", "modules/*"]
    subprocess.run(["cpio", "-id", "--quiet", *wanted], input=archive, cwd=tmp_path, check=True)
    assert (tmp_path / "init").read_bytes() == b"\x7fELF agent"
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "modules.order").read_text() == "/modules/virtio.ko\n/modules/ext4.ko\n"
    assert (tmp_path / "modules/virtio.ko").read_bytes() == b"module"
    assert (tmp_path / "modules/ext4.ko").read_bytes() == b""


def test_only_a_nested_machines_archive_has_the_list_of_modules_for_it(tmp_path) -> None:
    every = [("virtio", b"module")]
    assert assemble(b"\x7fELF agent", every, []) == assemble(b"\x7fELF agent", every)
    assert b"modules.nested" not in assemble(b"\x7fELF agent", every)
    nested = assemble(b"\x7fELF agent", every, [("kvm", b"m"), ("tun", b"m")])
    assert b"modules.nested" in nested and b"/modules/kvm.ko\n/modules/tun.ko\n" in nested
    assert b"/modules/virtio.ko\n" in nested
