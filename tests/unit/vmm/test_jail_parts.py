"""What a jail is made of, without one: which files a program needs, which cgroup is ours, what a bound looks like."""

import asyncio
import contextlib
import os
import struct
import subprocess
from pathlib import Path

import pytest

from llm4agents import config
from llm4agents.engine import doctor
from llm4agents.errors import HostSetupError
from llm4agents.vmm.jail import cell, cgroups, closure
from llm4agents.vmm.qemu import parts

LISTING = """\
\tlinux-vdso.so.1 (0x00007ffd3e5f2000)
\tlibpixman-1.so.0 => /lib/x86_64-linux-gnu/libpixman-1.so.0 (0x00007f3a0c000000)
\tlibodd.so => /nix/store/abc-odd (1)/lib/libodd.so (0x00007f3a0c000000)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f3a0d000000)
"""


def test_the_files_a_loader_lists() -> None:
    plain = LISTING.replace("/nix/store/abc-odd (1)", "/nix/store/abc-odd")
    assert closure.needed(plain) == [
        "/lib/x86_64-linux-gnu/libpixman-1.so.0",
        "/nix/store/abc-odd/lib/libodd.so",
        "/lib64/ld-linux-x86-64.so.2",
    ]
    with pytest.raises(ValueError, match="libgone"):
        closure.needed("\tlibgone.so.1 => not found\n")


def test_the_loader_a_program_names() -> None:
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1)
    header = struct.pack("<IIQQQQQQ", 3, 4, 130, 0, 0, 8, 8, 1)
    image = head.ljust(64, b"\0") + header + bytes(10) + b"/lib/ld\0"
    assert closure.interpreter(image) == "/lib/ld"
    assert closure.interpreter(image[:54] + struct.pack("<HH", 56, 0) + image[58:]) is None
    for bad in (b"#!/bin/sh\n", image[:80], b""):
        with pytest.raises(ValueError, match=r"ELF|headers"):
            closure.interpreter(bad)


def test_a_closure_is_another_when_a_file_or_a_place_is() -> None:
    identity = {"/a": (1, 2, 3)}
    keys = {
        closure.key(identity, []),
        closure.key({"/a": (1, 3, 3)}, []),
        closure.key({"/b": (1, 2, 3)}, []),
        closure.key(identity, ["/dev/kvm"]),
    }
    assert len(keys) == 4
    assert closure.key(identity, ["/x", "/y"]) == closure.key(identity, ["/y", "/x"])


def test_a_script_is_no_program_for_a_jail(tmp_path: Path) -> None:
    script = tmp_path / "qemu"
    script.write_text("#!/bin/sh\nexec qemu\n")
    with pytest.raises(HostSetupError, match="no 64-bit ELF"):
        asyncio.run(closure.closure(str(script), tmp_path))
    with pytest.raises(HostSetupError, match="No such file"):
        asyncio.run(closure.closure("/no/such", tmp_path))


def test_a_root_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    shell = os.path.realpath("/bin/sh")
    made = asyncio.run(closure.closure(shell, tmp_path))
    made.path.chmod(0o777)
    with pytest.raises(HostSetupError, match="not ours alone"):
        asyncio.run(closure.closure(shell, tmp_path))
    for directory, _, _ in os.walk(tmp_path):
        Path(directory).chmod(0o700)


def test_roots_that_nobody_uses_any_more_go_when_another_is_made(tmp_path: Path) -> None:
    shell = os.path.realpath("/bin/sh")
    old, used = (asyncio.run(closure.closure(shell, tmp_path, places=[f"/dev/{name}"])) for name in "ab")
    left = tmp_path / "jail/.killed.x"
    (left / "usr").mkdir(parents=True)
    (left / "usr").chmod(0o555)
    for path in (old.path, used.path, left):
        os.utime(path, (1, 1))
    assert asyncio.run(closure.closure(shell, tmp_path, places=["/dev/b"])) == used
    made = asyncio.run(closure.closure(shell, tmp_path))
    assert {entry.name for entry in (tmp_path / "jail").iterdir()} == {used.digest, made.digest}
    for directory, _, _ in os.walk(tmp_path):
        Path(directory).chmod(0o700)


def test_firmware_is_the_first_of_its_name(tmp_path: Path) -> None:
    for name in ("one/pvh.bin", "two/pvh.bin", "two/kvmvapic.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    places = [tmp_path / "none", tmp_path / "one", tmp_path / "two"]
    found = parts.first_of_each(["pvh.bin", "kvmvapic.bin", "absent.bin"], places)
    assert found == [tmp_path / "one/pvh.bin", tmp_path / "two/kvmvapic.bin"]


def test_what_a_host_does_not_give_in_words() -> None:
    assert cell.missing({"ns": "mnt+pid", "root": "pivot", "proc": "subset", "seccomp": "1"}) == []
    said = {"no-ns": "Operation_not_permitted", "proc": "shared", "no-cgroup": "no_cgroup_v2"}
    assert cell.missing(said) == [
        "namespaces (Operation not permitted)",
        "a cgroup (no cgroup v2)",
        "a /proc of its own processes alone",
    ]


def test_bounds_as_the_kernel_reads_them() -> None:
    files = cgroups.Bounds(768 << 20, 128, 1.5, ("8:0 wbps=1048576",)).files()
    assert files["memory.max"] == ("805306368",)
    assert files["memory.swap.max"] == ("0",)
    assert (files["pids.max"], files["cpu.max"]) == (("128",), ("150000 100000",))
    assert files["io.max"] == ("8:0 wbps=1048576",)


def test_the_hierarchy_and_our_place_in_it() -> None:
    mounts = (
        "24 1 0:22 / /sys rw - sysfs sysfs rw\n"
        "30 24 0:26 / /sys/fs/cgroup\\040two rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    )
    assert cgroups.hierarchy(mounts) == Path("/sys/fs/cgroup two")
    over = mounts + "40 24 0:30 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n"
    assert cgroups.hierarchy(over) == Path("/sys/fs/cgroup")  # the one below is out of reach
    assert cgroups.hierarchy("24 1 0:22 / /sys rw - sysfs sysfs rw\n") is None
    assert cgroups.own("12:pids:/x\n0::/user.slice/a\n") == "/user.slice/a"
    assert cgroups.own("12:pids:/x\n") is None


class Host:
    """A directory that looks like a host's files, as far as files can."""

    def __init__(self, home: Path, controllers: str = "cpu io memory pids") -> None:
        self.top = home / "cgroup"
        self.proc = home / "proc"
        (self.proc / "self").mkdir(parents=True)
        self.top.mkdir()
        (self.top / "cgroup.controllers").write_text(controllers)
        (self.proc / "self/mountinfo").write_text(f"30 24 0:26 / {self.top} rw - cgroup2 cgroup2 rw\n")
        (self.proc / "self/cgroup").write_text("0::/mine\n")
        self.group("mine", procs="1 2")

    def group(self, name: str, *, procs: str = "", on: str = "memory pids cpu io") -> Path:
        path = self.top / name
        path.mkdir(exist_ok=True)
        (path / "cgroup.type").touch()
        (path / "cgroup.procs").write_text(procs)
        (path / "cgroup.controllers").write_text("cpu io memory pids")
        (path / "cgroup.subtree_control").write_text(on)
        return path


def test_a_named_cgroup_is_used_or_refused_with_a_reason(tmp_path: Path) -> None:
    host = Host(tmp_path)
    (host.top / "cgroup.type").touch()  # a container's
    path = host.group("given")
    for wanted in ("given", "/given", str(path)):
        assert cgroups.foreseen(wanted, proc=host.proc) == cgroups.parent(wanted, proc=host.proc)
        found = cgroups.parent(wanted, proc=host.proc)
        assert (found.path, found.missing) == (path, None)
    host.group("busy", procs="1 1 1")
    assert "LLM4AGENTS_CGROUP=busy is of no use: 3 processes" in str(
        cgroups.foreseen("busy", proc=host.proc).missing
    )
    with pytest.raises(HostSetupError, match="3 processes that are not ours are in"):
        cgroups.parent("busy", proc=host.proc)
    host.group("bare", on="cpu")
    with pytest.raises(HostSetupError, match="no controller memory, pids"):
        cgroups.parent("bare", proc=host.proc)
    part = host.group("part", on="memory pids")
    (part / "cgroup.controllers").write_text("memory pids")
    assert "no controller cpu, io" in str(cgroups.parent("part", proc=host.proc).missing)


def test_what_doctor_says_of_cgroups_is_what_a_server_would_find_and_it_changes_nothing(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path)
    (host.top / "cgroup.type").touch()  # a container's, so that root has no other place

    def told(wanted: str | None = None) -> str:
        return "; ".join(doctor.without_cgroups(cgroups.foreseen(wanted, proc=host.proc)))

    # cgroup v2 is there with all controllers, and is not ours to divide: VMMs have none.
    words = f"our cgroup {host.top}/mine is not delegated to us, and other processes are in it"
    assert told() == f"cgroups ({words})"
    mine = host.group("mine", procs=f"{os.getpid()}", on="")
    before = sorted(path.relative_to(host.top) for path in host.top.rglob("*"))
    assert told() == ""
    (mine / "cgroup.controllers").write_text("memory pids")
    assert told() == f"a whole cgroup (the cgroup {mine} has no controller cpu, io)"
    (mine / "cgroup.controllers").write_text("cpu io")
    assert "has no controller memory, pids for its children" in told()
    # One that is not there yet gets what the one above it gives.
    (host.top / "cgroup.subtree_control").write_text("memory pids")
    assert told("/new") == f"a whole cgroup (the cgroup {host.top}/new has no controller cpu, io)"
    (host.top / "cgroup.subtree_control").write_text("")
    assert told("/new").startswith("cgroups (LLM4AGENTS_CGROUP=/new is of no use: ")
    found = sorted(path.relative_to(host.top) for path in host.top.rglob("*"))
    assert found == sorted([*before, Path("cgroup.subtree_control")])
    assert (mine / "cgroup.procs").read_text() == f"{os.getpid()}"
    assert (mine / "cgroup.subtree_control").read_text() == ""


def test_where_no_parent_is_whole_the_log_says_so_and_vmms_run_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`cell.joined`, as every driver asks it, on a host that gives none."""
    settings = config.load({"HOME": "/nowhere"})
    none = cgroups.Parent(None, why_not="our cgroup /x is not delegated, to us")
    monkeypatch.setattr(cgroups, "parent", lambda wanted: none)
    cgroups.shared.cache_clear()
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                cgroup, notes = cell.joined(settings, stack, "m", cgroups.Bounds(1 << 30, 128, 1))
        assert (cgroup, notes) == (None, {"no-cgroup": "our_cgroup_/x_is_not_delegated_to_us"})
        assert cell.missing(notes) == ["a cgroup (our cgroup /x is not delegated to us)"]
        (said,) = [entry for entry in caplog.records if entry.name == cgroups.__name__]
        assert said.levelname == "WARNING"
        assert "not bounded by cgroups" in said.getMessage()
        assert "not delegated, to us" in said.getMessage()
    finally:
        cgroups.shared.cache_clear()


def test_a_cgroup_that_we_are_alone_in_is_divided_and_we_go_into_a_leaf(tmp_path: Path) -> None:
    host = Host(tmp_path)
    (host.top / "cgroup.type").touch()
    with subprocess.Popen(["/bin/sleep", "60"]) as worker:
        mine = host.group("mine", procs=f"{os.getpid()} {worker.pid}")
        leaf = host.group("mine/server")
        assert cgroups.parent(None, proc=host.proc).path == mine
        assert (leaf / "cgroup.procs").read_text() == str(
            worker.pid
        )  # the last one written: no kernel keeps a list
        # From the leaf the next one finds it again.
        (host.proc / "self/cgroup").write_text("0::/mine/server\n")
        (mine / "cgroup.procs").write_text("")
        assert cgroups.parent(None, proc=host.proc).path == mine
        worker.kill()


def test_without_a_cgroup_it_says_why(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    none = Host(tmp_path / "a", controllers="")
    found = cgroups.parent(None, proc=none.proc)
    assert found.path is None
    assert "no controller memory, pids" in str(found.missing)
    with pytest.raises(HostSetupError, match="LLM4AGENTS_CGROUP=x is of no use"):
        cgroups.parent("x", proc=none.proc)
    (tmp_path / "b").mkdir()
    shared = Host(tmp_path / "b")
    (shared.top / "cgroup.type").touch()
    assert "other processes are in it" in str(cgroups.parent(None, proc=shared.proc).missing)
    (none.proc / "self/mountinfo").write_text("")
    assert "no cgroup v2 mounted" in str(cgroups.parent(None, proc=none.proc).missing)


def test_leftovers_are_removed_and_what_is_being_made_is_not(tmp_path: Path) -> None:
    """On plain directories: the kernel's refuse to go while a process is in them."""
    parent = cgroups.Parent(tmp_path, frozenset(cgroups.NEEDED))
    made = cgroups.make(parent, "one", cgroups.Bounds(1 << 30, 128, 1))
    assert set(made.lacking) >= {"memory.max", "pids.max"}  # no kernel made these files
    (tmp_path / "vm-left/below").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    assert cgroups.sweep(parent) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "vm-one"]
    cgroups.let_go(made)
    assert not made.path.exists()
