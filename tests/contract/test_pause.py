"""What every driver's checkpoints do: a machine goes on from its own pages, its devices and its layers of disk."""

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llm4agents import limits
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    CorruptSnapshotError,
    NotFoundError,
    VersionMismatchError,
)
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk, layers
from llm4agents.vmm import pages, snapshot
from llm4agents.vmm.base import Disk, Machine, Snapshot
from llm4agents.vmm.shim import write_deadline

from .lab import (
    DRIVERS,
    Frozen,
    Lab,
    alive,
    copy_sparse,
    freeze,
    go_on,
    in_lab,
    other_identity,
    run,
    stand_still,
    talk,
    wake,
)
from .test_machine import ROOT, orphan, small_disk

pytestmark = pytest.mark.vm
__all__ = ["small_disk"]
FILL = "head -c {bytes} /dev/urandom > /dev/shm/big; sha256sum < /dev/shm/big"


async def checkpoint(lab: Lab, machine: Machine, agent: Agent, name: str = "pause") -> Snapshot:
    await stand_still(machine, agent, drop_caches=True)
    made = await machine.checkpoint(lab.home / name, base=lab.frozen.snapshot)
    return await made.durable()


async def resumed(lab: Lab, diff: Snapshot, overlay: Path, **options: object) -> tuple[Machine, Agent]:
    machine = await lab.restore(diff=diff, overlay=overlay, **options)  # type: ignore[arg-type]
    await machine.resume()
    return machine, await wake(machine)


def test_own_pages_survive_rounds_and_do_not_grow(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        overlay = lab.overlay()
        machine, agent = await lab.clone(overlay=overlay)
        code, digest = await run(agent, FILL.format(bytes=16 << 20))
        assert code == 0
        # A process that was there before every one of the pauses.
        assert await run(
            agent, "(i=0; while sleep 0.1; do i=$((i+1)); echo $i > /dev/shm/count; done) &"
        ) == (
            0,
            "",
        )
        sizes, counts = [], []
        for number in range(5):
            diff = await checkpoint(lab, machine, agent, f"pause{number}")
            assert snapshot.load_diff(diff.path) == diff
            assert (diff.path / "pages").stat().st_size == diff.pages_bytes
            assert sorted(path.name for path in diff.path.iterdir()) == ["manifest.json", "pages", "state"]
            await machine.stop()
            sizes.append(diff.pages_bytes)
            machine, agent = await resumed(lab, snapshot.load(diff.path), overlay)
            assert await run(agent, "sha256sum < /dev/shm/big; echo $? > /root/disk") == (0, digest)
            # Empty while it is being written.
            count = "until c=$(cat /dev/shm/count); [ $c ]; do :; done; echo $c"
            counts.append(int((await run(agent, count))[1]))
        assert 16 << 20 < sizes[0] < 64 << 20
        assert max(sizes[1:]) - min(sizes[1:]) < 8 << 20, sizes
        assert counts == sorted(counts)

    in_lab(frozen, test)


def test_the_machine_goes_on_after_a_checkpoint_and_needs_nothing_of_it(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        await stand_still(machine, agent)
        made = await machine.checkpoint(lab.home / "pause", base=frozen.snapshot)
        await go_on(machine, agent)
        writing = asyncio.create_task(made.durable())
        assert await run(agent, "echo on; echo on > /dev/shm/state") == (0, "on")
        diff = await writing
        _, other = await resumed(lab, diff, lab.overlay())
        assert await run(other, "cat /dev/shm/state") == (0, "template")
        again = await machine_checkpoint_dropped(lab, machine, agent)
        assert not again.exists()

    in_lab(frozen, test)


async def machine_checkpoint_dropped(lab: Lab, machine: Machine, agent: Agent) -> Path:
    await stand_still(machine, agent)
    made = await machine.checkpoint(lab.home / "dropped", base=lab.frozen.snapshot)
    with pytest.raises(ConflictError, match="exists already"):
        await machine.checkpoint(made.path, base=lab.frozen.snapshot)
    await made.discard()
    await made.discard()
    await go_on(machine, agent)
    assert (await run(agent, "echo still"))[1] == "still"
    return made.path


def test_clones_of_one_checkpoint_are_private_to_each_other(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        overlay = lab.overlay()
        machine, agent = await lab.clone(overlay=overlay)
        code, digest = await run(agent, FILL.format(bytes=4 << 20))
        assert code == 0
        diff = await checkpoint(lab, machine, agent)
        await machine.stop()
        before = {path: path.read_bytes() for path in diff.path.iterdir()}
        copies = [copy_sparse(overlay, lab.home / f"copy{number}") for number in range(3)]
        clones = await asyncio.gather(*(resumed(lab, diff, copy) for copy in copies))
        for number, (_, clone) in enumerate(clones):
            assert await run(clone, f"echo {number} > /dev/shm/state; echo {number} >> /dev/shm/big") == (
                0,
                "",
            )
        for number, (_, clone) in enumerate(clones):
            script = "cat /dev/shm/state; head -c -2 /dev/shm/big | sha256sum; tail -c 2 /dev/shm/big"
            assert await run(clone, script) == (0, f"{number}\n{digest}\n{number}")
        assert {path: path.read_bytes() for path in before} == before
        # One of them is a base for the next checkpoint as any clone is.
        again = await checkpoint(lab, *clones[1], "again")
        _, last = await resumed(lab, again, copy_sparse(copies[1], lab.home / "last"))
        assert (await run(last, "cat /dev/shm/state"))[1] == "1"

    in_lab(frozen, test)


def test_a_damaged_checkpoint_is_refused_by_its_digest(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        diff = await checkpoint(lab, machine, agent)
        await machine.stop()

        def flip(path: Path, at: int) -> None:
            with path.open("r+b") as file:
                file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))

        damages: dict[str, Callable[[Path], object]] = {
            "a bit of the pages": lambda path: flip(path / "pages", 4096 + 77),
            "a bit of their header": lambda path: flip(path / "pages", 8),
            "a bit of their table": lambda path: flip(path / "pages", -3),
            "a bit of the state": lambda path: flip(path / "state", 1000),
            "short pages": lambda path: os.truncate(path / "pages", diff.pages_bytes - 1),
            "no pages": lambda path: (path / "pages").unlink(),
            "empty pages": lambda path: os.truncate(path / "pages", 0),
            "short state": lambda path: os.truncate(path / "state", 100),
            "no state": lambda path: (path / "state").unlink(),
        }
        for name, damage in damages.items():
            bad = lab.home / "bad"
            shutil.copytree(diff.path, bad)
            damage(bad)
            with pytest.raises(CorruptSnapshotError):
                snapshot.load_diff(bad)
            placement, overlay = lab.placement(), lab.overlay()
            with pytest.raises(CorruptSnapshotError):
                await lab.driver.restore(
                    frozen.snapshot, placement, frozen.disks(overlay), diff=snapshot.load(bad)
                )
            assert {path.name for path in placement.run_dir.iterdir()} <= {"exit"}, name
            shutil.rmtree(bad)
        (diff.path / "manifest.json").unlink()
        with pytest.raises(NotFoundError):
            snapshot.load_diff(diff.path)

    in_lab(frozen, test)


def test_a_checkpoint_of_another_machine_is_refused(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        diff = await checkpoint(lab, machine, agent)
        await machine.stop()

        async def refused(bad: Snapshot, words: str) -> None:
            with pytest.raises(VersionMismatchError, match=words):
                await lab.driver.restore(
                    frozen.snapshot, lab.placement(), frozen.disks(lab.overlay()), diff=bad
                )

        for name in diff.identity:
            await refused(other_identity(diff, **{name: "another"}), f"{name}: made with another")
        await refused(dataclasses.replace(diff, base="0" * 64), "another build of its template")
        await refused(frozen.snapshot, "full snapshot")

    in_lab(frozen, test)


def test_a_machine_that_runs_or_lies_over_something_else_is_not_copied(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        with pytest.raises(ConflictError, match="runs"):
            await machine.checkpoint(lab.home / "pause", base=frozen.snapshot)
        other = lab.home / "other"
        shutil.copytree(frozen.snapshot.path, other)
        with (other / "state").open("ab") as file:
            file.write(b"built again")
        await stand_still(machine, agent)
        with pytest.raises(ConflictError, match="no clone of"):
            await machine.checkpoint(
                lab.home / "pause", base=dataclasses.replace(frozen.snapshot, path=other)
            )
        assert not (lab.home / "pause").exists()
        await go_on(machine, agent)
        assert await run(agent, "echo well") == (0, "well")

    in_lab(frozen, test)


@pytest.mark.parametrize(
    ("driver", "memory_mib"),
    [
        (driver, size)
        for driver in sorted(DRIVERS)
        # Firecracker has one mapping below the devices' addresses and one above them.
        for size in ([512, 3584] if driver == "firecracker" else [256, 1024, 2048])
    ],
)
def test_memory_of_every_size_comes_back(driver: str, memory_mib: int) -> None:
    home = Path(tempfile.mkdtemp(prefix="l4a-contract-size-"))

    async def test(lab: Lab) -> None:
        overlay = lab.overlay()
        machine, agent = await lab.clone(overlay=overlay)
        code, digest = await run(agent, FILL.format(bytes=8 << 20))
        assert code == 0
        diff = await checkpoint(lab, machine, agent)
        assert diff.pages_bytes < 48 << 20
        await machine.stop()
        _, agent = await resumed(lab, diff, overlay)
        script = "sha256sum < /dev/shm/big; grep -c MemTotal /proc/meminfo; echo ok > /root/x; cat /root/x"
        assert await run(agent, script) == (0, f"{digest}\n1\nok")

    try:
        in_lab(asyncio.run(freeze(driver, home, memory_mib)), test)
    finally:
        shutil.rmtree(home)


def test_a_booted_machine_is_copied_as_a_clone_is(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        overlay, placement = lab.overlay(), lab.placement(time.time() + 300)
        cold = dataclasses.replace(frozen.spec, disks=frozen.disks(overlay))
        machine = await lab.driver.boot(cold, placement)
        lab.machines.append(machine)
        agent = await talk(machine)
        assert (await run(agent, "echo cold > /dev/shm/state"))[0] == 0
        diff = await checkpoint(lab, machine, agent)
        await machine.stop()
        _, agent = await resumed(lab, diff, overlay)
        assert await run(agent, "cat /dev/shm/state") == (0, "cold")

    in_lab(frozen, test)


# -- disks ------------------------------------------------------------------------------------------------


def test_the_layers_of_a_disk_after_switches(frozen: Frozen) -> None:
    if frozen.raw:
        pytest.skip("says nothing of Firecracker, whose disks have no layers: the test after the next")

    async def test(lab: Lab) -> None:
        tops = [lab.overlay()]
        machine, agent = await lab.clone(overlay=tops[0])
        digests = []
        for number in range(3):
            assert await run(agent, f"echo {number} > /root/f{number}; sync") == (0, "")
            await stand_still(machine, agent, fs=True)
            await machine.flush_disks()
            # The name may change before: the layer is what is open, and not a path.
            old, top = tops[-1].rename(lab.home / f"layer{number}"), lab.home / f"top{number}"
            tops[-1] = old
            disk.clone_overlay(frozen.home / "empty.qcow2", top)
            under = (*reversed(tops), frozen.home / "upper.raw")
            await machine.switch_disk("upper", Disk("upper", top, "qcow2", False, backing=under))
            digests.append(hashlib.sha256(old.read_bytes()).digest())
            tops.append(top)
            await go_on(machine, agent)
            # QEMU has let go of the right to write to it.
            await until(lambda path=old: modes(machine, path) == {os.O_RDONLY})  # type: ignore[misc]
            assert os.O_RDWR in modes(machine, top)
        assert await run(agent, "echo top > /root/top; head -c 9000000 /dev/urandom > /root/big; sync") == (
            0,
            "",
        )
        assert [hashlib.sha256(path.read_bytes()).digest() for path in tops[:-1]] == digests
        diff = await checkpoint(lab, machine, agent)
        await machine.stop()
        *below, top = tops
        _, agent = await resumed(lab, diff, top, layers=tuple(reversed(below)))
        assert await run(agent, "cd /root; cat f0 f1 f2 top; wc -c < big") == (0, "0\n1\n2\ntop\n9000000")
        # The second layer as it was at its end: what lies under a fork made then.
        flat, raw = lab.home / "flat.qcow2", lab.home / "flat.raw"
        await layers.flatten((below[1], below[0]), frozen.home / "upper.raw", flat)
        await layers.to_raw((below[1], below[0]), frozen.home / "upper.raw", raw)
        for path, format_, under in ((flat, "qcow2", (frozen.home / "upper.raw",)), (raw, "raw", ())):
            # Frozen file systems are whole without their memory: nothing is to be repaired.
            assert clean(lab, path, format_)
            cold = (frozen.spec.disks[0], Disk("upper", path, format_, False, backing=under))  # type: ignore[arg-type]
            machine = await lab.driver.boot(
                dataclasses.replace(frozen.spec, disks=cold), lab.placement(time.time() + 300)
            )
            lab.machines.append(machine)
            assert await run(await talk(machine), "cd /root; cat f0 f1; ls f2 top 2>&1 | wc -l") == (
                0,
                "0\n1\n2",
            )
            await machine.stop()

    in_lab(frozen, test)


def modes(machine: Machine, path: Path) -> set[int]:
    """The ways in which the VMM has `path` open."""
    found = set()
    for entry in Path(f"/proc/{machine.record.vmm_pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(entry.readlink()) == str(path):
                info = (entry.parent.parent / "fdinfo" / entry.name).read_text()
                found.add(int(info.partition("flags:")[2].split()[0], 8) & os.O_ACCMODE)
    return found


def clean(lab: Lab, path: Path, format_: str) -> bool:
    raw = path
    if format_ != "raw":
        raw = lab.home / "check.raw"
        subprocess.run(["qemu-img", "convert", "-f", format_, "-O", "raw", path, raw], check=True)
    return subprocess.run(["e2fsck", "-fn", raw], capture_output=True).returncode == 0


def test_a_disk_that_is_a_file_is_copied_while_its_machine_stands_still(frozen: Frozen) -> None:
    """What a fork of a sandbox with such a disk does."""
    if not frozen.raw:
        pytest.skip("its disks have layers: the test before")

    async def test(lab: Lab) -> None:
        top, copy = lab.overlay(), lab.home / "copy.top"
        machine, agent = await lab.clone(overlay=top)
        assert await machine.disk_inode("upper") == top.stat().st_ino
        assert await run(agent, "echo before > /root/f; sync") == (0, "")
        with pytest.raises(ConflictError, match="raw"):
            await machine.switch_disk("upper", frozen.top(copy))
        await stand_still(machine, agent, fs=True, drop_caches=True)
        await machine.flush_disks()
        made = await machine.checkpoint(lab.home / "pause", base=frozen.snapshot)
        copy_sparse(top, copy)
        whole = copy_sparse(top, lab.home / "whole")
        await go_on(machine, agent)
        assert await run(agent, "echo after > /root/f; sync; cat /root/f") == (0, "after")
        _, fork = await resumed(lab, await made.durable(), copy)
        assert await run(fork, "cat /root/f; echo mine > /root/g; sync") == (0, "before")
        assert (await run(agent, "cat /root/f /root/g 2>&1"))[1].startswith("after\ncat: ")
        # Frozen, the file system was whole without its memory.
        assert clean(lab, whole, "raw")

    in_lab(frozen, test)


def test_a_disk_that_cannot_be_switched_stays(frozen: Frozen) -> None:
    if frozen.raw:
        pytest.skip("says nothing of Firecracker, none of whose disks can be")

    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        nonsense = lab.home / "nonsense"
        nonsense.write_bytes(b"not an image" * 1000)
        top = Disk("upper", nonsense, "qcow2", False)
        with pytest.raises(ConflictError, match="runs"):
            await machine.switch_disk("upper", top)
        await stand_still(machine, agent)
        for bad in (
            top,
            dataclasses.replace(top, path=lab.home / "none"),
            dataclasses.replace(top, format="raw"),
        ):
            with pytest.raises(Exception, match=r"upper|qcow2|opened"):
                await machine.switch_disk("upper", bad)
        good = lab.home / "good"
        disk.clone_overlay(frozen.home / "empty.qcow2", good)
        await machine.switch_disk("upper", dataclasses.replace(top, path=good))
        await go_on(machine, agent)
        assert await run(agent, "echo well > /root/f; sync; cat /root/f") == (0, "well")

    in_lab(frozen, test)


# -- a host without room, a server that is gone -----------------------------------------------------------


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="mounts a small file system")
def test_a_full_host_disk_fails_the_checkpoint_and_the_machine_goes_on(
    frozen: Frozen, small_disk: Path
) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        code, digest = await run(agent, FILL.format(bytes=48 << 20))
        assert code == 0
        await stand_still(machine, agent)
        for _ in range(2):
            with pytest.raises(CapacityError):
                await machine.checkpoint(small_disk / "pause", base=frozen.snapshot)
            assert not list(small_disk.iterdir())
        await go_on(machine, agent)
        assert await run(agent, "sha256sum < /dev/shm/big") == (0, digest)

    in_lab(frozen, test)


def test_an_adopted_machine_is_copied_too(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        record = await asyncio.to_thread(orphan, lab, time.time() + 300)
        machine = await lab.driver.adopt(record)
        assert machine is not None
        lab.machines.append(machine)
        agent = await talk(machine, dirty=True, timeout=15)
        code, digest = await run(agent, FILL.format(bytes=4 << 20))
        assert code == 0
        diff = await checkpoint(lab, machine, agent)
        await machine.stop()
        overlay = next(lab.home.glob("upper*.top"))
        _, agent = await resumed(lab, diff, overlay)
        assert await run(agent, "sha256sum < /dev/shm/big") == (0, digest)

    in_lab(frozen, test)


def state_of(pid: int) -> str:
    found = re.search(r"^State:\s+(\S)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.01)


def test_a_deadline_that_stops_loses_nothing_and_ends_with_adoption(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        record = await asyncio.to_thread(orphan, lab, time.time() + 300)
        write_deadline(record.run_dir, time.time() - limits.KEEPER_GRACE_S + 0.2, "stop")
        await until(lambda: state_of(record.vmm_pid) == "T")
        machine = await lab.driver.adopt(record)
        assert machine is not None
        lab.machines.append(machine)
        assert state_of(record.vmm_pid) != "T"
        agent = await talk(machine, dirty=True, timeout=15)
        assert await run(agent, "cat /dev/shm/state") == (0, "template")
        # Stopped again under a server that lives: it ends as any other.
        await machine.set_deadline(time.time() - limits.KEEPER_GRACE_S, act="stop")
        await until(lambda: state_of(record.vmm_pid) == "T")
        assert (await machine.stop()).reason == "stopped"
        assert not alive(record)

    in_lab(frozen, test)


def test_the_capability_is_what_the_host_allows(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        can = await lab.driver.capabilities()
        assert can.differential_pause == await asyncio.to_thread(
            pages.readable_children, 0x7000_0000 if ROOT else None
        )

    in_lab(frozen, test)


@pytest.mark.skipif(not ROOT, reason="only root can lose the right")
def test_without_the_right_to_trace_nothing_is_promised() -> None:
    script = "from llm4agents.vmm import pages; print(pages.readable_children(0x7000_0000))"
    argv = ["setpriv", "--bounding-set", "-sys_ptrace", sys.executable, "-c", script]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
