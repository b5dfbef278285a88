"""How each driver's processes are confined, as the kernel tells it, against what SPECIFICATION.md promises."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.errors import ConflictError
from llm4agents.images import disk
from llm4agents.vmm import given
from llm4agents.vmm.base import Disk, MachineRecord
from llm4agents.vmm.jail import cgroups, isolation, promises
from llm4agents.vmm.qemu.machine import QemuMachine
from tests.support import stranger

from .lab import Frozen, Lab, copy_sparse, go_on, in_lab, run, stand_still

pytestmark = pytest.mark.vm
ROOT = os.geteuid() == 0
V1_MEMORY = Path("/sys/fs/cgroup/memory")
_LOCK = "=hhxxxxqqixxxx"


def test_a_lock_on_what_machines_share_holds_up_no_other(frozen: Frozen) -> None:
    """A VMM that its guest has taken over can lock what it was given to read: its template's disks."""
    shared = [next(disk.path for disk in frozen.spec.disks if disk.slot == "root"), frozen.home / "upper.raw"]
    held = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in shared]
    try:
        for fd in held:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 4096, 0))

        async def test(lab: Lab) -> None:
            _, agent = await lab.clone()
            assert await run(agent, "cat /dev/shm/state") == (0, "template")

        in_lab(frozen, test)
    finally:
        for fd in held:
            os.close(fd)


def digest(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def told(report: isolation.Isolation) -> list[str]:
    """What does not hold, but for what this host cannot give."""
    found = isolation.compare(report, isolation.expected(report.driver, report.as_root))
    return [str(difference) for difference in found if not difference.host]


def test_a_vmm_and_its_keeper_are_confined_as_promised(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        report = isolation.report(machine.record)
        assert told(report) == []
        assert report.driver == frozen.driver
        vmm, shim = report.processes
        assert (vmm.role, vmm.pid, shim.role, shim.pid) == (
            "vmm",
            machine.record.vmm_pid,
            "shim",
            machine.record.shim_pid,
        )
        assert vmm.executable_sha256 == digest(f"/proc/{vmm.pid}/exe")
        assert vmm.uids == (machine.record.uid,) * 4
        # What it needs it has: the report looked at the right process, and at all of it.
        assert vmm.threads is not None
        assert len(vmm.threads) == len(list(Path(f"/proc/{vmm.pid}/task").iterdir()))
        assert {"unix", "pipe"} <= {entry.kind for entry in vmm.descriptors or ()}
        assert vmm.root is not None
        assert vmm.root.entries
        # Nothing of that has changed it: it goes on, and its report is the same.
        assert await run(agent, "cat /dev/shm/state") == (0, "template")
        assert isolation.report(machine.record).processes[0].root == vmm.root
        # The next one shares no namespace, uid or root with it.
        other = isolation.report((await lab.clone())[0].record).processes[0]
        for name in promises.ISOLATED:
            assert (vmm.namespaces or {})[name].id != (other.namespaces or {})[name].id
        if ROOT:
            assert vmm.uids != other.uids

    in_lab(frozen, test)


def test_a_paused_and_a_booted_machine_are_confined_too(frozen: Frozen) -> None:
    """Before it has run (a clone that waits), and with memory of its own that is no template's yet."""

    async def test(lab: Lab) -> None:
        assert told(isolation.report((await lab.restore()).record)) == []
        upper = lab.home / "upper.raw"
        copy_sparse(frozen.home / "upper.raw", upper)
        root = next(disk for disk in frozen.spec.disks if disk.slot == "root")
        spec = dataclasses.replace(frozen.spec, disks=(root, Disk("upper", upper, "raw", False)))
        machine = await lab.driver.boot(spec, lab.placement())
        lab.machines.append(machine)
        assert told(isolation.report(machine.record)) == []

    in_lab(frozen, test)


@pytest.mark.skipif(not ROOT, reason="only root can put a process into a VMM's namespaces")
def test_a_process_that_has_no_business_there_is_found(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, _ = await lab.clone()
        with stranger(machine.record.vmm_pid) as pid:
            (words,) = told(isolation.report(machine.record))
            assert words == f"vmm: 1 more process lives in its pid namespace: {pid}"
        assert told(isolation.report(machine.record)) == []
        await machine.stop()
        with pytest.raises(ConflictError, match="has ended"):
            isolation.report(machine.record)

    in_lab(frozen, test)


def test_files_of_its_acts_are_its_own_and_others_are_found(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        old = lab.overlay()
        machine, agent = await lab.clone(overlay=old)
        await stand_still(machine, agent, fs=True)
        made = await machine.checkpoint(lab.home / "pause", base=frozen.snapshot)
        assert told(isolation.report(machine.record)) == []
        if not frozen.raw:
            top = lab.home / "top"
            disk.clone_overlay(frozen.home / "empty.qcow2", top)
            under = (old.rename(lab.home / "layer"), frozen.home / "upper.raw")
            await machine.switch_disk("upper", Disk("upper", top, "qcow2", False, backing=under))
            assert told(isolation.report(machine.record)) == []
        await go_on(machine, agent)
        await made.discard()
        assert await run(agent, "echo well > /root/f; sync; cat /root/f") == (0, "well")
        assert told(isolation.report(machine.record)) == []
        if not isinstance(machine, QemuMachine):
            return  # others open what is in their root, and take no descriptor
        assert "write" not in machine.record.extra["files"].values()
        # What a later server has of it, which knows its disk by name.
        record = MachineRecord.from_json(json.loads(json.dumps(machine.record.to_json())))
        record.extra["files"].pop(given.key(top.stat()))
        assert told(isolation.report(record, (top, *under))) == []
        # Its server's database would be such a file, or another template's memory.
        foreign = lab.home / "state.db"
        foreign.touch()
        for flags in (os.O_RDONLY, os.O_RDWR):
            fd = os.open(foreign, flags | os.O_CLOEXEC)
            try:
                its = int((await machine._command("add-fd", fd=fd))["fd"])
            finally:
                os.close(fd)
            words = f"vmm: descriptor {its} ({foreign}) is a file that was not given to it"
            assert words in told(isolation.report(machine.record))

    in_lab(frozen, test)


@pytest.mark.skipif(not os.access(V1_MEMORY, os.W_OK), reason="no cgroup v1 of memory to measure with")
def test_a_guest_that_takes_all_its_memory_stays_below_its_monitors_bound(
    frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where cgroup v2 has no memory, v1 counts the same pages and ends the same processes: its files have other names.
    The shim joins it as it would."""
    if frozen.driver != "qemu":
        pytest.skip("says nothing of Firecracker, whose laboratory has cgroup v2")
    parent = V1_MEMORY / f"l4a-{os.getpid()}"
    monkeypatch.setattr(cgroups, "shared", lambda wanted: cgroups.Parent(parent, frozenset(cgroups.NEEDED)))
    monkeypatch.setattr(
        cgroups.Bounds, "files", lambda bounds: {"memory.limit_in_bytes": (str(bounds.memory_bytes),)}
    )

    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        own = parent / f"{cgroups.PREFIX}{machine.record.id}"
        assert str(machine.record.vmm_pid) in (own / "cgroup.procs").read_text().split()
        bound = (frozen.spec.memory_mib + limits.VMM_MEMORY_MIB) << 20
        assert int((own / "memory.limit_in_bytes").read_text()) == bound
        # Every page of the guest, and many of its disk, which the host keeps too.
        code, _ = await run(agent, "head -c 200m /dev/zero > /root/big; sync; tail /dev/zero; echo $?")
        assert code == 0
        assert await run(agent, "cat /dev/shm/state") == (0, "template")
        assert "oom_kill 0\n" in (own / "memory.oom_control").read_text()
        stat = dict(line.split() for line in (own / "memory.stat").read_text().splitlines())
        used = int(stat["rss"]) + int(stat["mapped_file"])
        # It was all of it, and what a monitor has besides leaves room.
        assert 0.8 * (frozen.spec.memory_mib << 20) < used < bound - (64 << 20), used >> 20
        await machine.stop()
        assert not own.exists()

    parent.mkdir()
    try:
        in_lab(frozen, test)
    finally:
        parent.rmdir()


def as_a_user(frozen: Frozen, case: str) -> dict[str, Any]:
    root = next(disk.path for disk in frozen.spec.disks if disk.slot == "root")
    # Below no directory that only root may enter.
    with tempfile.TemporaryDirectory(prefix="l4a-lab-", ignore_cleanup_errors=True) as box:
        Path(box).chmod(0o755)
        argv = [sys.executable, "-m", "tests.contract.unprivileged", case, str(frozen.home), str(root), box]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not ROOT, reason="prepares the system for an ordinary user: needs root")
@pytest.mark.parametrize(
    ("case", "lacking"),
    [
        ("works", set()),
        # Where user namespaces may not be made, what is left is said to be that.
        ("chroot", {"ns", "namespaces", "root"}),
    ],
)
def test_of_an_ordinary_users_machine_it_says_what_is_missing(
    frozen: Frozen, case: str, lacking: set[str]
) -> None:
    if frozen.driver != "qemu":
        pytest.skip("says nothing of Firecracker, whose jailer is root's alone")
    body = as_a_user(frozen, case)
    assert (body["as_root"], body["differences"], body["ok"]) == (False, [], True)
    host = body["host"]
    found = {entry["name"] for entry in body["missing"]}
    assert found - {"cgroup"} == {"uid", *lacking} | ({"landlock"} if not host["landlock"] else set())
    vmm = body["processes"][0]
    assert set(vmm["uids"]) == {65_534}
    assert {thread["seccomp"] for thread in vmm["threads"]} == {"filter"}


@pytest.mark.skipif(not ROOT, reason="prepares the system for an ordinary user: needs root")
def test_a_machine_gets_the_namespaces_that_others_got_or_does_not_start(frozen: Frozen) -> None:
    if frozen.driver != "qemu":
        pytest.skip("says nothing of Firecracker, whose jail is its jailer's")
    assert "namespaces of its own" in as_a_user(frozen, "lost")["error"]
