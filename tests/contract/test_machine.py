"""What every driver's machines do. One suite, real virtual machines; see `vmm/base.py` for the promises."""

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm4agents import limits
from llm4agents.config import settings
from llm4agents.errors import BootError, ConflictError, LLM4AgentsError, VersionMismatchError
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk
from llm4agents.images.volumes import Files
from llm4agents.vmm import memory
from llm4agents.vmm.base import Disk, MachineEvent, MachineRecord
from llm4agents.vmm.shim import write_deadline
from tests.support import eventually, traces

from .lab import Frozen, Lab, alive, copy_sparse, in_lab, other_identity, record_of, run, talk, wake

pytestmark = pytest.mark.vm
ROOT = os.geteuid() == 0


def digest(path: Path) -> str:
    """Of all that is not a hole."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        for start, end in memory.extents(file.fileno(), path.stat().st_size):
            found.update(f"{start} {end}".encode())
            file.seek(start)
            while start < end:
                found.update(part := file.read(min(1 << 20, end - start)))
                start += len(part)
    return found.hexdigest()


def test_a_clone_is_paused_until_resumed_and_both_are_idempotent(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine = await lab.restore()
        await machine.pause()
        await machine.resume()
        await machine.resume()
        agent = await wake(machine)
        await agent.session.quiesce()
        await machine.pause()
        await machine.pause()
        idle = (await machine.stats()).cpu_ns
        await machine.resume()
        await agent.session.unquiesce()
        assert await run(agent, "cat /dev/shm/state") == (0, "template")
        assert (await machine.stats()).cpu_ns > idle

    in_lab(frozen, test)


def test_clones_share_nothing_they_write(frozen: Frozen) -> None:
    before = {path: digest(path) for path in (frozen.home / "snapshot").iterdir()}
    before[frozen.home / "upper.raw"] = digest(frozen.home / "upper.raw")

    async def test(lab: Lab) -> None:
        clones = await asyncio.gather(*(lab.clone() for _ in range(3)))
        for number, (_, agent) in enumerate(clones):
            script = f"echo {number} > /dev/shm/state; echo {number} > /root/disk; sync"
            assert await run(agent, script) == (0, "")
        for number, (_, agent) in enumerate(clones):
            assert await run(agent, "cat /dev/shm/state /root/disk") == (0, f"{number}\n{number}")
        _, fresh = await lab.clone()
        assert await run(fresh, "cat /dev/shm/state; ls /root/disk 2>&1 | grep -c 'No such'") == (
            0,
            "template\n1",
        )

    in_lab(frozen, test)
    assert {path: digest(path) for path in before} == before


def test_stop_leaves_nothing_but_the_record(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, _ = await lab.clone()
        record = machine.record
        ended = await machine.stop()
        assert ended.reason == "stopped"
        assert await machine.stop() == await machine.wait() == ended
        assert not alive(record)
        assert [path.name for path in record.run_dir.iterdir()] == ["exit"]
        left = (record.run_dir, settings().state, record.id)
        await asyncio.to_thread(eventually, lambda: not traces(*left))
        for call in (machine.pause, machine.resume, machine.channel, machine.stats):
            with pytest.raises(ConflictError):
                await call()

    in_lab(frozen, test)


def test_killing_the_vmm_is_told_to_who_waits(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        events = machine.events()
        waiting = asyncio.create_task(machine.wait())
        call = asyncio.create_task(run(agent, "sleep 50"))
        await asyncio.sleep(0)
        os.kill(machine.record.vmm_pid, signal.SIGKILL)
        ended = await asyncio.wait_for(waiting, 10)
        assert (ended.reason, ended.code, ended.signal) == ("exited", None, signal.SIGKILL)
        with pytest.raises(LLM4AgentsError):
            await call
        assert [event.kind async for event in events][-1] == "ended"

    in_lab(frozen, test)


def test_killing_the_keeper_ends_the_vm_without_a_record(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, _ = await lab.clone()
        os.kill(machine.record.shim_pid, signal.SIGKILL)
        ended = await asyncio.wait_for(machine.wait(), 10)
        assert ended.reason == "lost"
        assert not alive(machine.record)
        assert not list(machine.record.run_dir.glob("*.sock"))

    in_lab(frozen, test)


def test_a_guest_that_panics_ends_its_machine_with_its_last_words(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        with contextlib.suppress(LLM4AgentsError):
            await run(agent, "echo c > /proc/sysrq-trigger")
        ended = await asyncio.wait_for(machine.wait(), 30)
        assert ended.reason == "exited"
        assert "Kernel panic" in ended.console_tail

    in_lab(frozen, test)


@pytest.mark.skipif(not ROOT, reason="only root can give every machine a uid of its own")
def test_every_vmm_is_jailed_apart(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machines = [(await lab.clone())[0] for _ in range(2)]
        for machine in machines:
            lines = Path(f"/proc/{machine.record.vmm_pid}/status").read_text().splitlines()
            status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
            assert status["Uid"].split() == [str(machine.record.uid)] * 4
            # Firecracker's jailer leaves the bounding set: nothing in its jail could gain by it.
            bounding = () if frozen.driver == "firecracker" else ("CapBnd",)
            sets = ("CapInh", "CapPrm", "CapEff", "CapAmb", *bounding)
            assert {status[name] for name in sets} == {"0" * 16}
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
            assert 0 not in map(int, status["Gid"].split())
        assert machines[0].record.uid != machines[1].record.uid

    in_lab(frozen, test)


def test_sockets_are_ours_alone(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, _ = await lab.clone()
        sockets = list(machine.record.run_dir.rglob("*.sock"))
        if frozen.driver == "firecracker":  # which has them in its jail
            sockets = list(Path(f"/proc/{machine.record.vmm_pid}/root").glob("*.sock"))
        assert sockets
        assert {path.stat().st_mode & 0o077 for path in sockets} == {0}

    in_lab(frozen, test)


def test_a_snapshot_of_another_identity_is_refused(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        for name in frozen.snapshot.identity:
            changed = other_identity(frozen.snapshot, **{name: "another"})
            with pytest.raises(VersionMismatchError, match=f"{name}: made with another"):
                await lab.driver.restore(changed, lab.placement(), frozen.disks(lab.overlay()))

    in_lab(frozen, test)


def test_a_damaged_snapshot_is_refused_and_leaves_nothing(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        copy = lab.home / "damaged"
        copy.mkdir()
        for path in frozen.snapshot.path.iterdir():
            (copy / path.name).symlink_to(path)
        state = (copy / "state").read_bytes()
        (copy / "state").unlink()
        (copy / "state").write_bytes(state[: len(state) // 2])
        damaged = dataclasses.replace(frozen.snapshot, path=copy)
        placement = lab.placement()
        with pytest.raises(BootError):
            await lab.driver.restore(damaged, placement, frozen.disks(lab.overlay()))
        assert not list(placement.run_dir.glob("*.sock"))
        await lab.driver.release(copy)
        (copy / "memory").unlink()
        (copy / "memory").write_bytes(b"cut off")
        with pytest.raises(VersionMismatchError, match=r"cut off|bytes"):
            await lab.driver.restore(damaged, lab.placement(), frozen.disks(lab.overlay()))

    in_lab(frozen, test)


def test_a_kernel_that_is_none_fails_to_boot_in_words(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        nonsense = lab.home / "vmlinux"
        nonsense.write_bytes(b"not a kernel at all" * 1000)
        disks = frozen.disks(lab.overlay())
        placement = lab.placement()
        with pytest.raises(BootError) as caught:
            machine = await lab.driver.boot(
                dataclasses.replace(frozen.spec, kernel=nonsense, disks=disks), placement
            )
            lab.machines.append(machine)
            await machine.wait()
            raise BootError((await machine.wait()).console_tail)
        assert str(caught.value)
        assert not list(placement.run_dir.glob("*.sock"))

    in_lab(frozen, test)


def test_what_cannot_be_frozen_says_so(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        with pytest.raises(ConflictError):
            await machine.snapshot(lab.home / "again")
        assert not (lab.home / "again").exists()
        assert await run(agent, "echo well") == (0, "well")

    in_lab(frozen, test)


def test_noise_on_the_channel_is_no_business_of_the_driver(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine = await lab.restore()
        await machine.resume()
        channel = await machine.channel()
        with socket.socket(fileno=os.dup(channel.fileno())) as raw:
            raw.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                raw.send(os.urandom(65_536))
        channel.close()
        await machine.pause()
        await machine.resume()
        agent = await talk(machine, dirty=True, timeout=15)
        await agent.ping()

    in_lab(frozen, test)


def test_a_volume_in_a_slot_is_seen_at_its_size(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        volume = lab.home / "volume.raw"
        with volume.open("wb") as file:
            file.truncate(8 << 20)
            file.write(b"a volume")
        machine = await lab.restore(more=(Disk("vol1", volume, "raw", False),))
        await machine.resume()
        agent = await wake(machine)
        script = (
            "for d in /sys/block/vd*; do n=${d##*/}; [ $(cat $d/serial) = vol1 ] && break; n=; done;"
            # Where disks do not have their slots' names they are in their slots' order.
            " d=/sys/block/${n:=vdd}; cat $d/size; head -c 8 /dev/$n; echo;"
            " printf written | dd of=/dev/$n conv=notrunc,fsync 2>/dev/null"
        )
        assert await run(agent, script) == (0, f"{8 << 11}\na volume")
        assert volume.read_bytes()[:8] == b"written" + b"e"

    in_lab(frozen, test)


def test_a_volume_lasts_and_is_one_writers_or_many_readers(frozen: Frozen) -> None:
    entry = {"slot": "vol1", "id": "one", "path": "/vol", "bytes": 0, "ro": False}

    async def mounted(agent: Agent, **changes: object) -> object:
        return await agent.post_restore(
            entropy=os.urandom(64),
            unix_ns=time.time_ns(),
            hostname="clone",
            machine_id="0" * 32,
            boot_id="b",
            volumes=[{**entry, **changes}],
        )

    async def test(lab: Lab) -> None:
        files = Files(lab.home / "volumes")
        await files.make("one", 8 << 20)
        path, size = files.path("one"), files.bytes("one")
        writes = Disk("vol1", path, "raw", False, lasts=True)
        machine, agent = await lab.clone(more=(writes,))
        assert await mounted(agent, bytes=size) == ({}, ())
        assert await run(agent, "echo kept > /vol/a && sync") == (0, "")
        with pytest.raises(ConflictError, match="in use"):
            await lab.restore(more=(writes,))
        # Mounted already it stays; of another id it is not taken for that one, and nothing else is to have its disk.
        assert await mounted(agent, bytes=size) == ({}, ())
        holds = "sleep 100 < /vol/a > /dev/null 2>&1 & cat /vol/a"
        assert await run(agent, holds) == (0, "kept")
        failed, busy = await mounted(agent, bytes=size, id="two")  # type: ignore[misc]
        assert "still uses" in failed["two"] and busy == ("vol1",)
        await machine.stop()
        before = path.read_bytes()
        machines = []
        for number in range(2):
            private = lab.home / f"reader{number}.top"
            if frozen.raw:
                reads = Disk("vol1", copy_sparse(path, private), "raw", False)
            else:
                await disk.make_overlay(path, private)
                reads = Disk("vol1", private, "qcow2", False, backing=(path,), lasts=True)
            machine, agent = await lab.clone(more=(reads,))
            assert await mounted(agent, bytes=size, ro=True) == ({}, ())
            spoil = "umount /vol; blockdev --setrw /dev/vdd; dd if=/dev/urandom of=/dev/vdd bs=1M count=4 conv=fsync"
            assert await run(agent, f"cat /vol/a; {{ {spoil}; }} > /dev/null 2>&1") == (0, "kept")
            machines.append(machine)
        if not frozen.raw:
            with pytest.raises(ConflictError, match="in use"):
                await lab.restore(more=(writes,))
        for machine in machines:
            await machine.stop()
        assert path.read_bytes() == before
        await lab.restore(more=(writes,))

    in_lab(frozen, test)


# -- when the server is gone ------------------------------------------------------------------------------


def orphan(lab: Lab, deadline: float) -> MachineRecord:
    """A clone whose server has been killed."""
    placement, overlay = lab.placement(), lab.overlay()
    arguments = [lab.frozen.driver, lab.frozen.home, placement.run_dir, overlay, deadline]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.spawner", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    with server.stdout:
        record = record_of(server.stdout.readline())
    server.kill()
    server.wait()
    return record


async def gone(record: MachineRecord, timeout: float) -> None:
    fd = os.pidfd_open(record.vmm_pid)
    try:
        async with asyncio.timeout(timeout):
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(fd, ended.set)
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


def test_a_machine_outlives_its_server_and_is_adopted(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        record = await asyncio.to_thread(orphan, lab, time.time() + 300)
        assert alive(record)
        machine = await lab.driver.adopt(MachineRecord.from_json(record.to_json()))
        assert machine is not None
        lab.machines.append(machine)
        agent = await talk(machine, dirty=True, timeout=15)
        assert await run(agent, "cat /dev/shm/state") == (0, "template")
        await machine.pause()
        await machine.resume()
        ended = await machine.stop()
        assert ended.reason == "stopped"
        assert not alive(record)
        assert await lab.driver.adopt(record) is None

    in_lab(frozen, test)


def test_the_deadline_holds_without_a_server(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        record = await asyncio.to_thread(orphan, lab, time.time() + 300)
        write_deadline(record.run_dir, time.time() - limits.KEEPER_GRACE_S + 0.5)
        await gone(record, 10)
        assert await lab.driver.adopt(record) is None
        assert '"reason":"deadline"' in (record.run_dir / "exit").read_text()

    in_lab(frozen, test)


def test_a_record_of_something_else_adopts_and_ends_nothing(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, agent = await lab.clone()
        await machine.detach()
        wrong = dataclasses.replace(machine.record, shim_start_ticks=1, vmm_start_ticks=1)
        wrong = dataclasses.replace(wrong, run_dir=lab.placement().run_dir)
        assert await lab.driver.adopt(wrong) is None
        assert alive(machine.record)
        again = await lab.driver.adopt(machine.record)
        assert again is not None
        lab.machines.remove(machine)
        lab.machines.append(again)
        assert (await run(agent, "echo still here")) == (0, "still here")

    in_lab(frozen, test)


# -- a host without room ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="mounts a small file system")
def test_a_full_host_disk_pauses_the_machine_and_loses_nothing(frozen: Frozen, small_disk: Path) -> None:
    async def test(lab: Lab) -> None:
        if not (await lab.driver.capabilities()).stops_when_full:
            pytest.skip("says nothing of Firecracker, whose guest is told of an I/O error: the next test")
        machine, agent = await lab.clone(overlay=lab.overlay(small_disk))
        events = machine.events()
        script = (
            "head -c 67108864 /dev/urandom > /root/big; sync; sha256sum < /root/big;"
            " echo 3 > /proc/sys/vm/drop_caches"
        )
        writing = asyncio.create_task(run(agent, f"{script}; sha256sum < /root/big"))

        async def first(kind: str) -> MachineEvent:
            async for event in events:
                if event.kind == kind:
                    return event
            raise AssertionError

        full = await asyncio.wait_for(first("disk_full"), 60)
        assert "upper" in full.detail
        assert not writing.done()
        subprocess.run(["mount", "-o", "remount,size=256m", str(small_disk)], check=True)
        await machine.resume()
        code, said = await writing
        assert code == 0
        assert len(set(said.splitlines())) == 1

    in_lab(frozen, test)


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="mounts a small file system")
def test_a_full_host_disk_is_an_error_of_the_guests_where_nothing_stops_it(
    frozen: Frozen, small_disk: Path
) -> None:
    async def test(lab: Lab) -> None:
        if (await lab.driver.capabilities()).stops_when_full:
            pytest.skip("its machine is stopped before the write: the test before")
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        machine, agent = await lab.clone(overlay=lab.overlay(small_disk))
        code, said = await run(
            agent,
            "dd if=/dev/zero of=/root/big bs=1M count=80 2>/dev/null; sync /root/big; dmesg | grep -c 'I/O error'",
            timeout_s=240,
        )
        assert int(said.splitlines()[-1]) > 0, (code, said)
        # The others of this host, and what of it is in memory, go on.
        assert await run(agent, "cat /dev/shm/state") == (0, "template")
        assert (await machine.stop()).reason == "stopped"

    in_lab(frozen, test)
