"""What our requests are held against is itself held against the real description, where that is at hand."""

import hashlib
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from llm4agents.errors import CorruptSnapshotError, HostSetupError, VmmError
from llm4agents.vmm import memory, merge, snapshot
from llm4agents.vmm.base import Disk, MachineSpec, Snapshot
from llm4agents.vmm.cloud_hypervisor import api, frozen, versions
from tests.cloud_hypervisor import schema
from tests.vm import guests

OPENAPI = "CLOUD_HYPERVISOR_OPENAPI"


def a_spec(**changes: object) -> MachineSpec:
    disks = (Disk("root", Path("/r"), "raw", True), Disk("upper", Path("/u"), "raw", False))
    return MachineSpec(1, 256, Path("/k"), Path("/i"), disks, "6.1", **changes)  # type: ignore[arg-type]


@pytest.mark.skipif(OPENAPI not in os.environ, reason=f"{OPENAPI} names no cloud-hypervisor.yaml")
def test_the_schema_says_what_the_real_description_says() -> None:
    description = schema.read_yaml(Path(os.environ[OPENAPI]).read_text())
    assert schema.compare(description) == []


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("landlock", [True, False])
def test_every_body_fits_its_schema(nested: bool, landlock: bool) -> None:
    spec = a_spec(nested=nested)
    bodies = {
        "VmConfig": [api.boot(spec, "console=ttyS0", landlock=landlock), api.clone(spec, landlock=landlock)],
        "NetConfig": [api.net()],
        "VmSnapshotConfig": [api.snapshot()],
        "RestoreConfig": [api.restore()],
        "VmResizeDisk": [api.resize_disk("vol0", 4096)],
    }
    for name, each in bodies.items():
        for body in each:
            assert schema.problems(name, body) == []


def test_a_guest_is_meant_to_see_the_devices_that_are_asked_for_and_no_other() -> None:
    devices = {"disks": guests.BLOCK, "rng": guests.ENTROPY, "vsock": guests.VSOCK, "balloon": guests.BALLOON}
    none = {"cpus", "memory", "payload", "serial", "console", "landlock_enable", "landlock_rules"}
    body = api.boot(a_spec(), "console=ttyS0")
    assert set(body) <= {*devices, *none}
    kinds = [
        devices[name]
        for name in body
        if name in devices
        for _ in range(len(body[name]) if name == "disks" else 1)
    ]
    view = guests.VIEWS["cloud-hypervisor"]
    assert view.virtio == tuple(sorted([*kinds, guests.NET]))  # which is added once it is there
    virtio = {int(ident.partition(":")[2], 16) - 0x1040 for ident in view.pci if ident.startswith("0x1af4:")}
    assert virtio == set(view.virtio)


def test_what_does_not_fit_is_found() -> None:
    body = api.boot(a_spec(), "console=ttyS0")
    assert schema.problems("VmConfig", {**body, "nested": True}) == ["VmConfig: there is no field nested"]
    assert schema.problems("VmConfig", {**body, "cpus": {"boot_vcpus": 1}}) == [
        "VmConfig.cpus: max_vcpus is missing"
    ]
    assert schema.problems("NetConfig", {"num_queues": "2"}) == ["NetConfig.num_queues: '2' is no integer"]
    assert schema.problems("DiskConfig", {"image_type": "raw"})[0].startswith(
        "DiskConfig.image_type: 'raw' is"
    )
    assert schema.problems("VsockConfig", {"cid": 2, "socket": "/s"}) == ["VsockConfig.cid: 2 is below 3"]


def test_an_old_version_is_told_what_it_lacks() -> None:
    assert versions.parse("cloud-hypervisor v53.0.0\n") == ((53, 0), "53.0.0")
    assert versions.parse("cloud-hypervisor v54.1-12-gabcdef-dirty") == ((54, 1), "54.1-12-gabcdef-dirty")
    versions.check((53, 0), "53.0")
    versions.check((61, 2), "61.2")
    with pytest.raises(HostSetupError, match=r"52\.0 is too old.*guest clock") as old:
        versions.check((52, 0), "52.0")
    assert "53.0 or newer" in str(old.value.hint)
    with pytest.raises(HostSetupError, match=r"too old.*nested=off.*image_type"):
        versions.check((49, 0), "49.0")
    with pytest.raises(HostSetupError, match="no Cloud Hypervisor"):
        versions.parse("Firecracker v1.16.1")


def test_what_a_snapshot_depends_on_is_in_its_layout() -> None:
    layout = api.layout_digest(a_spec())
    assert layout == api.layout_digest(replace(a_spec(), kernel_args=("quiet",)))
    assert layout != api.layout_digest(a_spec(nested=True))
    assert layout != api.layout_digest(replace(a_spec(), vcpus=2))


def test_nested_virtualisation_is_said_on_and_off() -> None:
    assert [api.boot(a_spec(nested=on), "")["cpus"]["nested"] for on in (False, True)] == [False, True]


def test_a_clone_is_the_same_machine_over_a_private_file() -> None:
    booted, cloned = api.boot(a_spec(), ""), api.clone(a_spec())
    for part in ("cpus", "disks", "rng", "vsock", "serial", "console", "landlock_rules"):
        assert booted[part] == cloned[part]
    assert booted["memory"]["zones"] == [{"id": "ram", "size": 256 << 20, "shared": True}]
    assert cloned["memory"]["zones"] == [
        {"id": "ram", "size": 256 << 20, "shared": False, "file": api.MEMORY}
    ]
    assert "net" not in booted and cloned["net"] == [{**api.net(), "fds": [-1]}]


def test_a_diff_becomes_a_file_of_its_pages_and_holes(tmp_path: Path) -> None:
    page = memory.PAGE
    # As the shim writes it: a header, the data of the runs, and their table; bit 63 of a count: pages of zeros.
    runs = [(2, 2), (7, 1 | 1 << 63)]
    data = b"a" * page + b"b" * page
    head = struct.pack("<4Q", 0x3153_4547_4150_344C, 16, len(runs), 0).ljust(page, b"\0")
    (tmp_path / snapshot.PAGES).write_bytes(head + data + b"".join(struct.pack("<QQ", *run) for run in runs))
    (tmp_path / snapshot.STATE).write_bytes(b"{}")
    parts = {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in (snapshot.PAGES, snapshot.STATE)
    }
    spec = replace(a_spec(), memory_mib=0)
    diff = Snapshot(
        tmp_path,
        spec,
        {},
        0,
        kind="diff",
        pages_bytes=(tmp_path / snapshot.PAGES).stat().st_size,
        state_bytes=2,
        parts=parts,
    )
    fd = frozen.ranges(16 * page)
    try:
        with pytest.raises(CorruptSnapshotError):  # pages for another size of memory
            frozen.read(diff, diff, fd)
        with (tmp_path / snapshot.PAGES).open("rb") as pages:
            merge.spread(pages.fileno(), fd, 16 * page, tmp_path)
        assert list(memory.extents(fd, 16 * page)) == [(2 * page, 4 * page), (7 * page, 8 * page)]
        assert os.pread(fd, 3 * page, 2 * page) == data + bytes(page)
        assert frozen.read(replace(diff, kind="full"), None, fd) == b"{}"
        with pytest.raises(CorruptSnapshotError, match="bytes and not"):
            frozen.read(diff, replace(diff, state_bytes=3), fd)
    finally:
        os.close(fd)


def test_what_the_vmm_wrote_is_read_as_hostile(tmp_path: Path) -> None:
    io = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    state = tmp_path / frozen.STATE
    try:
        with pytest.raises(VmmError, match="did not write"):
            frozen.read_state(io)
        secret = tmp_path / "secret"
        secret.write_text('{"snapshots": "of the host"}')
        state.symlink_to(secret)
        with pytest.raises(VmmError, match="did not write"):
            frozen.read_state(io)
        state.unlink()
        os.mkfifo(state)
        with pytest.raises(VmmError, match="no file"):
            frozen.read_state(io)
        for body, words in (("", "0 bytes"), ("{", "not whole"), ("[]", "something else")):
            state.unlink()
            state.write_text(body)
            with pytest.raises(VmmError, match=words):
                frozen.read_state(io)
        frozen.clear(io)
        frozen.forbid_memory(io)
        frozen.check_forbidden(io)
        (tmp_path / frozen.RANGES).write_text("memory all the same")
        with pytest.raises(VmmError, match="overwrites"):
            frozen.check_forbidden(io)
        frozen.clear(io)
        assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    finally:
        os.close(io)


def test_memory_in_two_pieces_is_laid_out_in_one_file() -> None:
    def state(*pieces: tuple[int, int], ranges: list[tuple[int, int]] | None = None) -> bytes:
        mappings = [{"gpa": gpa, "size": size, "file_offset": 0} for gpa, size in pieces]
        data = [{"gpa": gpa, "length": length} for gpa, length in (ranges or list(pieces))]
        inner = json.dumps({"guest_ram_mappings": mappings, "memory_ranges": {"data": data}, "kept": 1})
        manager = {"snapshot_data": {"state": inner}}
        return json.dumps({"snapshots": {"memory-manager": manager, "other": 2}}).encode()

    one = state((0, 100))
    assert frozen.in_one_file(one, 100) == one
    two = json.loads(frozen.in_one_file(state((0, 30), (40, 12)), 42))
    inner = json.loads(two["snapshots"]["memory-manager"]["snapshot_data"]["state"])
    assert [piece["file_offset"] for piece in inner["guest_ram_mappings"]] == [0, 30]
    assert (inner["kept"], two["snapshots"]["other"]) == (1, 2)
    for wrong in (state((0, 99)), state((0, 30), (40, 70), ranges=[(40, 70), (0, 30)]), b"{}", b"[1]"):
        with pytest.raises(VmmError, match="not understood"):
            frozen.in_one_file(wrong, 100)
