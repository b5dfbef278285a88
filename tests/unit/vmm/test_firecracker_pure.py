"""What Firecracker and its jailer are told, what each version lacks, and where a process has its guest's memory."""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import pytest

from llm4agents import limits
from llm4agents.config import load, rate_of
from llm4agents.errors import HostSetupError, InvalidRequestError, VmmError
from llm4agents.vmm import pages
from llm4agents.vmm.base import TAP_NAME, Disk, MachineSpec
from llm4agents.vmm.firecracker import api, jail, jailer, versions
from llm4agents.vmm.firecracker.jailer import Layout
from llm4agents.vmm.pages import Place

ROOT, UPPER = Disk("root", Path("/r"), "raw", True), Disk("upper", Path("/u"), "raw", False)
SPEC = MachineSpec(2, 256, Path("/k"), Path("/i"), (ROOT, UPPER), kernel_args=("x=y",))


# -- versions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", ["1.11.0", "1.9.1", "0.25.2"])
def test_an_old_version_is_refused_with_what_to_install(old: str) -> None:
    with pytest.raises(HostSetupError, match=f"{old} is too old") as caught:
        versions.traits(versions.parse(f"Firecracker v{old}\n"))
    assert versions.ADVISED in str(caught.value.hint)


def test_every_version_from_1_12_on_can_be_used_but_one() -> None:
    for version in [
        (1, 12, 0),
        (1, 12, 1),
        (1, 13, 2),
        (1, 14, 4),
        (1, 15, 1),
        (1, 16, 1),
        (1, 17, 0),
        (2, 0, 0),
    ]:
        found = versions.traits(version)
        assert found.text == ".".join(map(str, version))
        assert found.named_exec == (version < (1, 13, 0))
        assert found.low_memory_mib == (3328 if version < (1, 13, 0) else 3072)
        assert found.waits_for_reset == found.resume_needs_snapshot == (version >= (1, 16, 0))
    with pytest.raises(HostSetupError, match=r"1\.16\.0"):
        versions.traits((1, 16, 0))


def test_what_a_version_lacks_goes_by_its_branch() -> None:
    assert len(versions.lacks((1, 12, 1))) == 6
    copy = "its jailer follows links when it copies the program into the jail"
    for version, has in [((1, 13, 1), False), ((1, 13, 2), True), ((1, 14, 0), False), ((1, 14, 1), True)]:
        assert (copy not in versions.lacks(version)) == has
    for good in [(1, 16, 1), (1, 17, 3)]:
        assert versions.lacks(good) == ()
    assert len(versions.lacks((1, 15, 0))) == 4 and len(versions.lacks((1, 15, 1))) == 1
    assert versions.advice((1, 16, 1)) is None
    assert "newer" in str(versions.advice((1, 17, 0)))
    assert f"{versions.ADVISED} or later is better" in str(versions.advice((1, 12, 1)))


def test_what_says_no_version_is_none() -> None:
    with pytest.raises(HostSetupError, match="does not say its version: nonsense"):
        versions.parse("nonsense")


# -- requests ---------------------------------------------------------------------------------------------


def test_a_machine_is_configured_whole_and_in_one_order() -> None:
    requests = api.configure(SPEC)
    by_path = {path: body for _, path, body in requests}
    assert [path for _, path, _ in requests] == [
        "/machine-config",
        "/boot-source",
        "/cpu-config",
        *(f"/drives/{slot}" for slot in ("root", "upper", "vol0", "vol1", "vol2", "vol3")),
        "/vsock",
        "/entropy",
        "/balloon",
        "/network-interfaces/nic0",
    ]
    assert by_path["/machine-config"] == {"vcpu_count": 2, "mem_size_mib": 256, "smt": False}
    line = by_path["/boot-source"]["boot_args"]
    assert line.startswith(api.LINE_BEGINS) and line.endswith(" x=y")
    assert {"console=ttyS0", "reboot=k", "panic=-1"} <= set(line.split())
    assert "nomodule" not in line and "pci=off" not in line
    assert by_path["/drives/root"]["is_read_only"] and not by_path["/drives/upper"]["is_read_only"]
    assert by_path["/network-interfaces/nic0"] == {
        "iface_id": "nic0",
        "guest_mac": limits.GUEST_MAC,
        "host_dev_name": TAP_NAME,
    }
    masks = {
        leaf["leaf"]: [(one["register"], one["bitmap"]) for one in leaf["modifiers"]]
        for leaf in by_path["/cpu-config"]["cpuid_modifiers"]
    }
    # No VMX, no SVM; every other bit as KVM has it.
    assert masks == {
        "0x1": [("ecx", "0b" + "x" * 26 + "0" + "x" * 5)],
        "0x80000001": [("ecx", "0b" + "x" * 29 + "0" + "x" * 2)],
    }
    bucket = {"size": limits.ENTROPY_BYTES_PER_S, "refill_time": 1000}
    assert by_path["/entropy"] == {"rate_limiter": {"bandwidth": bucket}}
    # Names are relative, and so the same in every jail.
    names = [body["path_on_host"] for path, body in by_path.items() if path.startswith("/drives/")]
    names += [by_path["/boot-source"][key] for key in ("kernel_image_path", "initrd_path")]
    names += [by_path["/vsock"]["uds_path"]]
    assert not any("/" in name for name in names)


def test_bounds_are_in_a_boot_and_in_a_load() -> None:
    rates = api.Rates(disk=api.Rate(bytes=1000, operations=7), network=api.Rate(operations=3))
    by_path = {path: body for _, path, body in api.configure(SPEC, rates)}
    buckets = {"bandwidth": {"size": 1000, "refill_time": 1000}, "ops": {"size": 7, "refill_time": 1000}}
    assert by_path["/drives/upper"]["rate_limiter"] == by_path["/drives/vol3"]["rate_limiter"] == buckets
    assert "rate_limiter" not in by_path["/drives/root"]
    nic = by_path["/network-interfaces/nic0"]
    assert nic["tx_rate_limiter"] == nic["rx_rate_limiter"] == {"ops": {"size": 3, "refill_time": 1000}}
    limited = api.limit(rates)
    assert [path for _, path, _ in limited] == [
        *(f"/drives/{slot}" for slot in api.SLOTS[1:]),
        "/network-interfaces/nic0",
    ]
    assert api.limit(api.NO_RATES) == []
    # A snapshot can be loaded under other bounds.
    assert api.layout_digest(SPEC) == api.layout_digest(dataclasses.replace(SPEC, kernel_args=()))


def test_rates_are_read_from_the_environment() -> None:
    assert rate_of("") == (None, None)
    assert rate_of("5") == (5, None)
    assert rate_of("5/6") == (5, 6)
    assert rate_of("/6") == (None, 6)
    for bad in ("0", "-1", "x", "1/2/3", "1.5", "1/0", str(1 << 63)):
        with pytest.raises(ValueError):
            rate_of(bad)
        with pytest.raises(InvalidRequestError, match="LLM4AGENTS_DISK_RATE"):
            load({"LLM4AGENTS_DISK_RATE": bad, "HOME": "/h"})
    found = load({"LLM4AGENTS_NETWORK_RATE": "10/20", "LLM4AGENTS_FIRECRACKER": "/fc", "HOME": "/h"})
    assert (found.network_rate, found.disk_rate) == ((10, 20), (None, None))
    assert (found.firecracker, found.jailer) == ("/fc", "jailer")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vcpus": 33}, "vCPUs"),
        ({"nested": True}, "no virtualisation"),
        ({"disks": (ROOT,)}, "`root` and `upper`"),
        ({"disks": (ROOT, UPPER, UPPER)}, "at most once"),
        ({"disks": (ROOT, UPPER, Disk("vol9", Path("/v"), "raw", False))}, "vol9"),
        ({"disks": (ROOT, dataclasses.replace(UPPER, format="qcow2"))}, "raw disks"),
        ({"disks": (ROOT, dataclasses.replace(UPPER, backing=(Path("/b"),)))}, "no layers"),
        ({"disks": (ROOT, dataclasses.replace(UPPER, read_only=True))}, "read-only"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    api.check(SPEC, SPEC.disks)
    spec = dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=words):
        api.check(spec, spec.disks)


def test_the_layout_is_what_a_snapshot_depends_on() -> None:
    same = dataclasses.replace(SPEC, kernel=Path("/other"), kernel_args=("z",))
    assert api.layout_digest(same) == api.layout_digest(SPEC)
    assert api.layout_digest(dataclasses.replace(SPEC, memory_mib=512)) != api.layout_digest(SPEC)


# -- the jail ---------------------------------------------------------------------------------------------


def test_the_jailer_is_told_ids_places_and_bounds_and_firecracker_where_to_listen() -> None:
    layout = Layout(Path("/run/x/jail"), "firecracker")
    assert layout.root == Path("/run/x/jail/firecracker/vm/root")
    words = jailer.argv("/j", "/bin/firecracker", layout, uid=7, netns="/proc/1/fd/3", file_bytes_max=99)
    cut = words.index("--")
    jailers, vmms = words[:cut], words[cut + 1 :]
    pairs = dict(zip(jailers[1::2], jailers[2::2], strict=True))
    assert jailers[0] == "/j"
    assert (pairs["--uid"], pairs["--gid"], pairs["--netns"]) == ("7", "7", "/proc/1/fd/3")
    assert pairs["--chroot-base-dir"] == "/run/x/jail" and pairs["--exec-file"] == "/bin/firecracker"
    assert [value for name, value in itertools.pairwise(jailers) if name == "--resource-limit"] == [
        "fsize=99",
        "no-file=1024",
    ]
    assert vmms[:2] == ("--api-sock", "api.sock")
    assert not {"--daemonize", "--new-pid-ns", "--no-seccomp"} & set(words)


def test_a_jail_is_made_and_removed_and_a_later_server_finds_those_left(tmp_path: Path) -> None:
    run_dir, state = tmp_path / "run", tmp_path / "state"
    run_dir.mkdir()
    apart, inside = (
        Layout(jail.base_of(run_dir, state), "firecracker"),
        Layout(run_dir / "jail", "firecracker"),
    )
    assert apart.base.parent == state / "jails" and apart.base == jail.base_of(run_dir, state)
    assert apart.base != jail.base_of(tmp_path, state)
    for layout in (inside, apart):
        for _ in range(2):
            jail.make(layout, run_dir, ["root", "upper"], ["vol0"], os.getuid())
        assert sorted(path.name for path in layout.root.iterdir()) == ["root", "upper", "vol0"]
        assert layout.inside("vol0").stat().st_size == limits.VOLUME_SLOT_BYTES
        jail.put(layout, "state", b"devices", os.getuid())
        assert jail.take(layout, "state", 7) == b"devices"
        assert not layout.inside("state").exists()
    jail.sweep(state)
    assert apart.base.exists()
    jail.remove(inside.base)
    assert not list(run_dir.iterdir())
    run_dir.rmdir()
    jail.sweep(state)
    assert not list((state / "jails").iterdir())


def test_nothing_is_taken_from_a_jail_but_a_file_that_is_its_own(tmp_path: Path) -> None:
    layout = Layout(tmp_path, "firecracker")
    layout.root.mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    with pytest.raises(VmmError, match="wrote no"):
        jail.take(layout, "state.out", 100)
    layout.inside("state.out").symlink_to(secret)
    with pytest.raises(VmmError):
        jail.take(layout, "state.out", 100)
    layout.inside("state.out").unlink()
    os.mkfifo(layout.inside("state.out"))
    with pytest.raises(VmmError, match="is no file"):
        jail.take(layout, "state.out", 100)
    assert not layout.inside("state.out").exists()
    for body in (b"", b"x" * 101):
        layout.inside("state.out").write_bytes(body)
        with pytest.raises(VmmError, match="at most 100 bytes"):
            jail.take(layout, "state.out", 100)
    assert secret.read_text() == "of the host"


# -- where the memory is ----------------------------------------------------------------------------------

MIB = 1 << 20


def line(start: int, size: int, offset: int = 0, inode: int = 0, flags: str = "rw-p", name: str = "") -> str:
    return f"{start:x}-{start + size:x} {flags} {offset:08x} fe:01 {inode}    {name}"


def test_a_clones_memory_is_the_file_that_is_mapped_whole() -> None:
    base = 0x7F00_0000_0000
    maps = "\n".join(
        [
            line(0x1000, 4096, 0x244000, 12, name="/firecracker"),
            line(base, 8 * MIB),
            line(base + 9 * MIB, 256 * MIB, 0, 77, flags="rw-s", name="/other"),
            line(base + 512 * MIB, 172 * MIB, 3328 * MIB, 644, name="/memory"),
            line(base + 800 * MIB, 3328 * MIB, 0, 644, name="/memory"),
        ]
    )
    low, high = Place(base + 800 * MIB, 3328 * MIB), Place(base + 512 * MIB, 172 * MIB)
    assert pages.of_file(maps, 3500 * MIB) == [low, high]
    assert pages.of_file(maps, 3328 * MIB) is None
    assert pages.of_file(maps, 256 * MIB) is None
    one = line(base, 256 * MIB, 0, 5, name="/memory")
    assert pages.of_file(one, 256 * MIB) == [Place(base, 256 * MIB)]
    assert pages.of_file("", 1) is None
    assert pages.anonymous(maps, 8 * MIB) == [base]
    assert pages.anonymous(maps, 256 * MIB) == []


def test_what_is_sent_is_json() -> None:
    for request in (api.load(), api.save_state(), api.replace_drive("vol1"), *api.configure(SPEC)):
        json.dumps(request)
