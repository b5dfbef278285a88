"""Merging a base and a diff: what is forgotten, also where a page tears it."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

from llm4agents.errors import CapacityError, CorruptSnapshotError, HostSetupError
from llm4agents.vmm import merge, snapshot
from llm4agents.vmm.base import MachineSpec, Snapshot

PAGE, PAGES = 4096, 16
SECRET, KNOWN = b"a-secret-of-one's-own", b"en_US.UTF-8"


def _base(tmp_path: Path) -> Snapshot:
    path = tmp_path / "base"
    path.mkdir()
    memory = bytearray(PAGES * PAGE)
    memory[100 : 100 + len(KNOWN)] = KNOWN
    memory[9 * PAGE : 10 * PAGE] = b"\xaa" * PAGE
    (path / "memory").write_bytes(memory)
    spec = MachineSpec(1, 256, Path("k"), Path("i"), ())
    return Snapshot(path, spec, {"a": "b"}, 1)


def _diff(tmp_path: Path, base: Snapshot, runs: list[tuple[int, bytes | int]], *, cut: int = 0) -> Snapshot:
    path = tmp_path / "diff"
    path.mkdir()
    body, table = b"", b""
    for first, what in runs:
        if isinstance(what, int):
            table += struct.pack("<QQ", first, what | 1 << 63)
        else:
            table += struct.pack("<QQ", first, len(what) // PAGE)
            body += what
    header = struct.pack("<4Q", 0x3153_4547_4150_344C, PAGES, len(runs), 0).ljust(PAGE, b"\0")
    whole = header + body + table
    (path / "pages").write_bytes(whole[: len(whole) - cut])
    (path / "state").write_bytes(b"devices")
    return Snapshot(path, base.spec, base.identity, 1, kind="diff")


def test_pages_and_zeros_lie_over_the_base_and_secrets_are_gone(tmp_path: Path) -> None:
    base = _base(tmp_path)
    own = bytearray(3 * PAGE)
    own[10 : 10 + len(SECRET)] = SECRET
    own[500 : 500 + len(KNOWN)] = KNOWN
    own[PAGE - 12 : PAGE] = SECRET[:12]  # torn: its end lies in another page
    own[2 * PAGE : 2 * PAGE + 13] = SECRET[-13:]
    own[2 * PAGE + 100 : 2 * PAGE + 104] = b"kept"
    merged = merge.merge(
        base, _diff(tmp_path, base, [(2, bytes(own)), (9, 1)]), tmp_path / "m", [SECRET, KNOWN, b"k"]
    )
    memory = (tmp_path / "m" / "memory").read_bytes()
    wanted = bytearray((base.path / "memory").read_bytes())
    wanted[9 * PAGE : 10 * PAGE] = bytes(PAGE)
    wanted[2 * PAGE + 500 : 2 * PAGE + 500 + len(KNOWN)] = KNOWN
    wanted[4 * PAGE + 100 : 4 * PAGE + 104] = b"kept"
    assert memory == wanted
    assert merged.bare and (tmp_path / "m" / "state").read_bytes() == b"devices"


@pytest.mark.parametrize("cut", [1, 16, 4096, 8192, 12000])
def test_a_cut_off_file_of_pages_is_refused(tmp_path: Path, cut: int) -> None:
    base = _base(tmp_path)
    diff = _diff(tmp_path, base, [(2, b"\x01" * PAGE * 2)], cut=cut)
    with pytest.raises(CorruptSnapshotError):
        merge.merge(base, diff, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_snapshot_that_cannot_be_written_says_whether_room_would_help(tmp_path: Path) -> None:
    full = snapshot.unwritten("the snapshot", OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(full, CapacityError) and "disk is full" in full.message
    base = _base(tmp_path)
    diff = _diff(tmp_path, base, [(2, b"\x01" * PAGE * 2)])
    (diff.path / "state").unlink()
    with pytest.raises(HostSetupError, match=r"snapshot could not be written.*No such file"):
        merge.merge(base, diff, tmp_path / "m")
    assert not (tmp_path / "m").exists()
