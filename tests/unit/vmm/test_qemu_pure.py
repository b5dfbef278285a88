"""The decisions of the QEMU driver that touch nothing: command line, known pairs, manifest, uids."""

import dataclasses
import hashlib
import json
import os
import struct
from pathlib import Path

import pytest

from llm4agents import limits
from llm4agents.errors import (
    CorruptSnapshotError,
    HostSetupError,
    InvalidRequestError,
    NotFoundError,
    VersionMismatchError,
)
from llm4agents.vmm import host, pages, process, shim, snapshot, uids
from llm4agents.vmm.base import Disk, Exit, MachineRecord, MachineSpec, Snapshot
from llm4agents.vmm.qemu import command, table

ROOT = Disk("root", Path("/c/root.erofs"), "raw", True)
UPPER = Disk("upper", Path("/s/upper.qcow2"), "qcow2", False, backing=(Path("/c/upper.raw"),))
SPEC = MachineSpec(
    1, 512, Path("/c/vmlinux"), Path("/c/initrd"), (ROOT, UPPER), "6.1.0-1-cloud-amd64", ("l4.x=1",)
)


def build(
    *,
    spec: MachineSpec = SPEC,
    disks: tuple[Disk, ...] = (ROOT, UPPER),
    kvm: bool = False,
    clone: bool,
    bare: bool = False,
) -> command.Command:
    accelerator = "kvm" if kvm else "tcg"
    return command.build(
        spec,
        disks,
        qemu="/q",
        accelerator=accelerator,  # type: ignore[arg-type]
        tsc_khz=2_596_136,
        clone=clone,
        bare=bare,
    )


def after(argv: tuple[str, ...], option: str) -> list[str]:
    return [argv[place + 1] for place, word in enumerate(argv) if word == option]


def nodes(argv: tuple[str, ...]) -> dict[str, dict[str, object]]:
    return {node["node-name"]: node for node in map(json.loads, after(argv, "-blockdev"))}


@pytest.mark.parametrize("clone", [False, True])
def test_qemu_is_given_no_path_but_its_own_descriptors(clone: bool) -> None:
    built = build(clone=clone)
    text = " ".join(built.argv[1:])
    for place in ("/c/", "/s/"):
        assert place not in text
    assert after(built.argv, "-sandbox") == [command.SANDBOX]
    for number, name in enumerate(built.fds, start=command.FIRST_FD):
        assert f"/{number}" in text or f"fd={number}" in text, name


def test_a_boot_shares_its_memory_and_a_clone_does_not() -> None:
    boot, clone = build(clone=False), build(clone=True)
    assert after(boot.argv, "-object")[0].endswith("share=on")
    assert after(clone.argv, "-object")[0].endswith("share=off")
    assert set(boot.fds) - set(clone.fds) == {"kernel", "initrd"}
    assert after(clone.argv, "-incoming") == ["defer"]
    assert "-S" in clone.argv
    (line,) = after(boot.argv, "-append")
    assert {
        "tsc_early_khz=2596136",
        "tsc=reliable",
        "no_timer_check",
        "reboot=t",
        "panic=-1",
        "l4.x=1",
    } <= set(line.split())


def test_machine_is_the_one_that_boots_every_time() -> None:
    argv = build(clone=False).argv
    assert {"acpi=on", "pic=off", "pit=off", "rtc=on", "isa-serial=on"} <= set(
        after(argv, "-M")[0].split(",")
    )
    assert after(argv, "-accel") == ["tcg,thread=single,tb-size=128"]
    assert after(argv, "-cpu") == ["max,erms=off,svm=off,vmx=off"]
    assert after(build(clone=False, kvm=True).argv, "-cpu") == ["host,svm=off,vmx=off"]
    nested = build(spec=dataclasses.replace(SPEC, nested=True), clone=False)
    assert after(nested.argv, "-cpu") == ["max,erms=off"]
    two = build(spec=dataclasses.replace(SPEC, vcpus=2), clone=False)
    assert after(two.argv, "-accel") == ["tcg,thread=multi,tb-size=128"]


def test_every_machine_has_the_same_slots_whatever_is_in_them() -> None:
    volume = Disk("vol2", Path("/v"), "raw", False)
    boot, clone = build(clone=False), build(clone=True, disks=(UPPER, volume, ROOT))
    assert after(boot.argv, "-device") == after(clone.argv, "-device")
    assert after(boot.argv, "-netdev") == ["hubport,id=nic0,hubid=0"]
    assert "-netdev" in clone.argv and "tap" not in clone.fds
    assert any(limits.GUEST_MAC in device for device in after(boot.argv, "-device"))
    empty, filled = nodes(boot.argv)["vol2"], nodes(clone.argv)["vol2"]
    assert (empty["driver"], empty["read-zeroes"], empty["size"]) == ("null-co", True, 1 << 20)
    assert filled["driver"] == "file"
    buses = [device.partition("bus=")[2].partition(",")[0] for device in after(boot.argv, "-device")]
    assert len(set(buses)) == len(buses)


def test_overlay_lies_over_its_backing_by_reference_only() -> None:
    found = nodes(build(clone=True).argv)
    assert found["upper"]["backing"] == "upper-backing"
    assert found["upper-backing"]["read-only"] is True
    assert found["root"]["read-only"] is True


def test_layers_are_linked_from_the_bottom_up_and_each_is_a_descriptor_of_its_own() -> None:
    layered = dataclasses.replace(UPPER, backing=tuple(Path(f"/l/{depth}") for depth in range(3)))
    built = build(clone=True, disks=(ROOT, layered))
    assert built.fds[-4:] == ("upper", "upper.backing", "upper.backing1", "upper.backing2")
    found = nodes(built.argv)
    assert [found[name]["backing"] for name in ("upper", "upper-backing", "upper-backing1")] == [
        "upper-backing",
        "upper-backing1",
        "upper-backing2",
    ]
    assert found["upper-backing2"]["driver"] == "file"
    assert (
        found["upper-backing1"]["file"]["filename"] == f"/dev/fdset/{3 + built.fds.index('upper.backing1')}"
    )
    assert all(found[name]["read-only"] for name in found if name.startswith("upper-backing"))
    on_qcow2 = nodes(build(clone=True, disks=(ROOT, dataclasses.replace(layered, base_format="qcow2"))).argv)
    assert (on_qcow2["upper-backing2"]["driver"], on_qcow2["upper-backing2"]["backing"]) == ("qcow2", None)


def test_a_state_of_devices_alone_changes_no_device() -> None:
    whole, bare = build(clone=True), build(clone=True, bare=True)
    assert set(bare.argv) - set(whole.argv) == {
        "suppress-vmdesc=on",
        "-global",
        "migration.send-configuration=off",
    }


@pytest.mark.parametrize(
    "disks",
    [
        (ROOT, dataclasses.replace(UPPER, format="raw")),
        (ROOT,),
        (ROOT, UPPER, UPPER),
        (ROOT, UPPER, Disk("vol9", Path("/v"), "raw", False)),
        (ROOT, UPPER, Disk("vol0", Path("/v"), "raw", True)),
        (dataclasses.replace(ROOT, read_only=False), UPPER),
    ],
)
def test_disks_that_do_not_fit_the_slots(disks: tuple[Disk, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        build(clone=True, disks=disks)


def test_layout_is_part_of_what_a_snapshot_needs() -> None:
    digest = command.layout_digest(SPEC, "tcg")
    assert digest == command.layout_digest(dataclasses.replace(SPEC, kernel_args=()), "tcg")
    for other in ({"vcpus": 2}, {"memory_mib": 640}, {"nested": True}):
        assert command.layout_digest(dataclasses.replace(SPEC, **other), "tcg") != digest  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("qemu", "kernel", "verdict"),
    [
        ("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)", "6.1.0-57-cloud-amd64", "good"),
        ("10.0.8 (Debian 1:10.0.8)", "6.12.1-cloud-amd64", "good"),
        ("10.2.0", "6.1.0-57-cloud-amd64", "good"),
        ("7.2.22", "6.12.48+deb13-cloud-amd64", "bad"),
        ("8.2.0", "6.8.0", "untried"),
        ("7.2.22", "", "untried"),
    ],
)
def test_known_pairs(qemu: str, kernel: str, verdict: str) -> None:
    assert table.verdict(qemu, kernel, "tcg") == verdict
    if verdict == "bad":
        with pytest.raises(HostSetupError, match="corrupts"):
            table.check(qemu, kernel, "tcg")
    else:
        assert (table.check(qemu, kernel, "tcg") is None) == (verdict == "good")


def test_bad_pair_is_about_emulation_only() -> None:
    assert table.verdict("7.2.22", "6.12.1", "kvm") == "untried"


def test_manifest_is_read_back_as_written(tmp_path: Path) -> None:
    made = Snapshot(tmp_path, SPEC, {"vmm": "7.2", "layout": "x"}, 12_345)
    snapshot.write_manifest(made)
    assert snapshot.load(tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_the_manifest_of_a_diff_is_read_back_and_its_parts_are_checked(tmp_path: Path) -> None:
    parts = {"pages": b"some pages", "state": b"devices"}
    for name, content in parts.items():
        (tmp_path / name).write_bytes(content)
    layered = dataclasses.replace(UPPER, backing=(Path("/l/1"), Path("/c/upper.raw")))
    made = Snapshot(
        tmp_path,
        dataclasses.replace(SPEC, disks=(ROOT, layered)),
        {"vmm": "7.2"},
        4096,
        kind="diff",
        base="f" * 64,
        pages_bytes=10,
        state_bytes=7,
        parts={name: hashlib.sha256(content).hexdigest() for name, content in parts.items()},
    )
    snapshot.write_manifest(made)
    assert snapshot.load_diff(tmp_path) == made
    snapshot.check_diff(made, Snapshot(Path("/b"), SPEC, {"vmm": "7.2"}, 1), "f" * 64)
    with pytest.raises(VersionMismatchError, match="another build"):
        snapshot.check_diff(made, Snapshot(Path("/b"), SPEC, {"vmm": "7.2"}, 1), "e" * 64)
    (tmp_path / "state").write_bytes(b"Devices")
    with pytest.raises(CorruptSnapshotError, match="digest"):
        snapshot.load_diff(tmp_path)
    (tmp_path / "state").write_bytes(b"device")
    with pytest.raises(CorruptSnapshotError, match="cut off"):
        snapshot.load_diff(tmp_path)


def test_a_template_built_again_is_another_base(tmp_path: Path) -> None:
    snapshot.write_manifest(Snapshot(tmp_path, SPEC, {}, 1))
    with pytest.raises(NotFoundError):
        snapshot.digest(tmp_path)
    digests = set()
    for state in (b"a state", b"another"):
        (tmp_path / "state").write_bytes(state)
        digests.add(snapshot.digest(tmp_path))
    assert len(digests) == 2
    with pytest.raises(VersionMismatchError, match="full snapshot"):
        snapshot.load_diff(tmp_path)


def test_a_manifest_from_before_there_were_layers_is_read() -> None:
    body = snapshot.to_json(Snapshot(Path("/t"), SPEC, {}, 1))
    for disk in body["spec"]["disks"]:
        del disk["base_format"]
        disk["backing"] = disk["backing"][0] if disk["backing"] else None
    assert snapshot.from_json(Path("/t"), body).spec == SPEC


def test_a_machines_memory_is_found_by_name_and_size() -> None:
    maps = (
        "1000-2000 r-xp 00000000 00:01 5    /usr/bin/qemu\n"
        "7f0000000000-7f0020000000 rw-p 00000000 00:01 77    /memfd:llm4agents-ram (deleted)\n"
        "7f1000000000-7f1040000000 rw-s 00000000 00:01 78    /memfd:llm4agents-ram (deleted)\n"
        "7f2000000000-7f2080000000 rw-p 00000000 00:01 79    /memfd:llm4agents-rambo (deleted)\n"
    )
    assert pages.mapping(maps, 512 << 20) == pages.Mapping(0x7F00_0000_0000, True, 77)
    assert pages.mapping(maps, 1 << 30) == pages.Mapping(0x7F10_0000_0000, False, 78)
    assert pages.mapping(maps, 2 << 30) is None


def test_a_manifest_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        snapshot.load(tmp_path)
    good = snapshot.to_json(Snapshot(tmp_path, SPEC, {}, 1))
    for body in (
        "{",
        "[]",
        "{}",
        json.dumps({**good, "format": 99}),
        json.dumps({**good, "spec": {"vcpus": 1}}),
    ):
        (tmp_path / "manifest.json").write_text(body)
        with pytest.raises(VersionMismatchError):
            snapshot.load(tmp_path)


def test_every_difference_of_identity_is_named() -> None:
    made = Snapshot(Path("/t"), SPEC, {"vmm": "7.2", "tsc": "2596 MHz", "old": "x"}, 1)
    snapshot.check_identity(made, dict(made.identity))
    with pytest.raises(VersionMismatchError) as caught:
        snapshot.check_identity(made, {"vmm": "10.0", "tsc": "2596 MHz", "new": "y"})
    assert caught.value.details["different"] == ["new", "old", "vmm"]
    assert "vmm: made with 7.2, here 10.0" in str(caught.value)


def test_uids_come_from_what_is_mapped() -> None:
    assert uids.uid_range("         0          0 4294967295\n") == range(
        uids.UID_BASE, uids.UID_BASE + uids.UID_COUNT
    )
    assert uids.uid_range("0 100000 65536\n") == range(32768, 65536)
    for too_few in ("0 1000 1\n", ""):
        with pytest.raises(HostSetupError):
            uids.uid_range(too_few)


def test_two_leases_are_never_the_same(tmp_path: Path) -> None:
    leases = [uids.lease("one machine", tmp_path / "leases") for _ in range(3)]
    assert len({lease.uid for lease in leases}) == 3

    for lease in leases:
        os.close(lease.fd)
    again = uids.lease("one machine", tmp_path / "leases")
    os.close(again.fd)
    assert again.uid == leases[0].uid


def test_the_probe_kernel_is_an_elf_with_a_pvh_entry() -> None:
    image = host.stub_kernel()
    assert image[:6] == b"\x7fELF\x02\x01"
    entry, phoff = struct.unpack_from("<QQ", image, 24)
    count = struct.unpack_from("<H", image, 56)[0]
    headers = [struct.unpack_from("<IIQQQQQQ", image, phoff + 56 * number) for number in range(count)]
    load = next(header for header in headers if header[0] == 1)
    note = next(header for header in headers if header[0] == 4)
    assert load[3] == entry
    assert image[load[2] : load[2] + load[5]].endswith(b"\xee\xf4\xeb\xfd")
    assert struct.unpack_from("<Q", image, note[2] + 16)[0] == entry


def test_shim_configuration_is_records_ended_by_nul() -> None:
    launch = shim.Launch(
        argv=["/q", "-x=\n"],
        env={"A": "b"},
        fds=[9],
        run_dir=Path("/r"),
        rlimits={"core": 0},
        hold=[8],
        serve={"tcp": 7, "udp": 7},
        serve_socket=6,
        uid=70,
        gid=71,
        jail=shim.Jail(5, binds=[shim.Bind(4, "/dev/kvm", read_only=False), shim.Bind(3, "/a:b")], cgroup=2),
    )
    assert shim.descriptors(launch) == [9, 8, 7, 7, 6, 5, 4, 3, 2]
    records = shim.encode(launch, range(40, 49), 49).decode().split("\0")
    assert records[-1] == ""
    assert {
        "arg=-x=\n",
        "env=A=b",
        "fd=40",
        "hold=41",
        "serve=tcp:42",
        "serve=udp:43",
        "serve_socket=44",
        "jail=45",
        "userns=0",
        "memfd=0",
        "bind=46:rw:/dev/kvm",
        "bind=47:ro:/a:b",
        "cgroup=48",
        "status=49",
        "uid=70",
        "gid=71",
        "rlimit=core:0",
    } <= set(records)
    launcher = shim.Launcher(binds=[shim.Bind(5, "/x")], cgroup=6)
    other = shim.Launch(["/j"], {}, [9], Path("/r"), {}, launcher=launcher)
    assert shim.descriptors(other) == [9, 5, 6]
    told = shim.encode(other, [50, 51, 52], 53).decode().split("\0")
    assert {"launcher=1", "bind=51:ro:/x", "cgroup=52"} <= set(told)


def test_how_it_ended_in_words() -> None:
    assert "signal 9" in process.describe(Exit(None, 9, "exited", ""))
    assert "Kernel panic" in process.describe(Exit(0, None, "exited", "x\nKernel panic\x1b[0m\n\n"))
    assert process.printable("a\x1b[2Jb\r\n") == "a[2Jb\n"


def test_a_record_travels_as_json() -> None:
    record = MachineRecord("qemu", "x", Path("/r"), 1, 2, 3, 4, 5, {"host_boot_id": "b"})
    assert MachineRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
