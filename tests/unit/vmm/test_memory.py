"""Guest memory in files: only what is not zero is written, and what is sealed stays as it is."""

import mmap
import os
from pathlib import Path

import pytest

from llm4agents.errors import VersionMismatchError
from llm4agents.vmm import memory

SIZE = 16 << 20


def written(*pages: tuple[int, bytes]) -> int:
    fd = memory.create(SIZE)
    for place, data in pages:
        os.pwrite(fd, data, place)
    return fd


def test_only_pages_that_are_not_zero_are_written_and_come_back(tmp_path: Path) -> None:
    last = SIZE - memory.PAGE
    fd = written(
        (0, b"first"), (5 << 20, bytes(2 << 20)), ((7 << 20) + memory.PAGE, b"x" * 9000), (last, b"last")
    )
    size = memory.save(fd, tmp_path / "memory")
    assert size == memory.PAGE * (1 + 3 + 1)
    assert (tmp_path / "memory").stat().st_size == SIZE
    assert (tmp_path / "memory").stat().st_blocks * 512 < 1 << 20
    loaded = memory.load_sealed(tmp_path / "memory", SIZE)
    assert os.pread(loaded, SIZE, 0) == os.pread(fd, SIZE, 0)
    assert os.fstat(loaded).st_blocks * 512 <= 1 << 20
    os.close(fd)
    os.close(loaded)


def test_sealed_memory_can_be_opened_for_writing_and_not_written(tmp_path: Path) -> None:
    fd = written((0, b"template"))
    memory.save(fd, tmp_path / "memory")
    os.close(fd)
    sealed = memory.load_sealed(tmp_path / "memory", SIZE)
    again = os.open(f"/proc/self/fd/{sealed}", os.O_RDWR)
    for act in (
        lambda: os.pwrite(again, b"x", 0),
        lambda: os.ftruncate(again, 0),
        lambda: os.ftruncate(again, 2 * SIZE),
        lambda: mmap.mmap(again, SIZE, mmap.MAP_SHARED),
    ):
        with pytest.raises(PermissionError):
            act()
    with mmap.mmap(again, SIZE, mmap.MAP_PRIVATE) as private:
        private[0:8] = b"a clone "
    assert os.pread(sealed, 8, 0) == b"template"
    os.close(again)
    os.close(sealed)


def test_memory_of_another_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "memory").write_bytes(b"x" * 100)
    with pytest.raises(VersionMismatchError, match="100 bytes"):
        memory.load_sealed(tmp_path / "memory", SIZE)


def test_a_file_as_memory(tmp_path: Path) -> None:
    (tmp_path / "kernel").write_bytes(os.urandom(3 << 20))
    fd = memory.of_file(tmp_path / "kernel")
    assert os.pread(fd, 4 << 20, 0) == (tmp_path / "kernel").read_bytes()
    os.close(fd)
