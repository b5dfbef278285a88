"""The Cloud Hypervisor driver against a faithful fake (`tests/cloud_hypervisor/fake.py`), in the real jail, for root.

What needs a kernel is the conformance suite's, where there is a real one. Here: every request and file, the order of
things, what a clone's memory is, and a conversation with a real agent over the vsock socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from llm4agents import binaries
from llm4agents.config import Settings, settings
from llm4agents.errors import (
    BootError,
    ConflictError,
    CorruptSnapshotError,
    HostSetupError,
    InvalidRequestError,
    SandboxDiedError,
    VersionMismatchError,
)
from llm4agents.guest.channel import Session
from llm4agents.guest.verbs import Agent
from llm4agents.vmm import host, pages, procfs, snapshot
from llm4agents.vmm.base import Capabilities, Disk, MachineSpec, Placement, Snapshot
from llm4agents.vmm.cloud_hypervisor import api, command, probe
from llm4agents.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from llm4agents.vmm.cloud_hypervisor.machine import CloudHypervisorMachine
from llm4agents.vmm.jail import isolation
from llm4agents.vmm.jail.promises import compare, expected
from tests.cloud_hypervisor import fake
from tests.support import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a jail like that only root can make")
HERE = Path(fake.__file__).parent
MEMORY_MIB = 256
DEVICE_GID, GROUP = probe.device_gid, 3_999
DEVICES = (api.URANDOM, "/dev/null")
"""Of the host, for the fake and its agent; it needs no /dev/kvm."""
CAN = Capabilities(
    vmm="cloud-hypervisor",
    version=fake.VERSION,
    accelerator="kvm",
    why_not_kvm=None,
    private_memory_clone=True,
    differential_pause=True,
    nested=True,
    cpu="a processor",
    tsc_khz=2_000_000,
    disk_format="raw",
)


@dataclass
class Bench:
    """The fake installed, a driver for it, and what machines are made of."""

    home: Path
    settings: Settings
    spec: MachineSpec
    parts: list[Path]
    """What the fake reads by name in its jail."""

    async def driver(self) -> CloudHypervisorDriver:
        driver = CloudHypervisorDriver(self.settings)
        driver._capabilities = CAN
        await self.prepare(driver._cells.prepare)
        return driver

    async def prepare(self, prepare: Callable[..., Awaitable[dict[str, str]]]) -> dict[str, str]:
        """The root of a program that is Python's and no ELF file."""
        modules = [part for part in self.parts if part.suffix == ".so"]
        files = [part for part in self.parts if part.suffix != ".so"]
        return await prepare(PYTHON, modules=modules, files=files, places=(*command.PLACES, "/dev/null"))

    def disks(self, name: str, *more: Disk) -> tuple[Disk, ...]:
        top = self.home / f"{name}.raw"
        if not top.exists():
            shutil.copyfile(self.home / "upper.raw", top)
        return (self.spec.disks[0], Disk("upper", top, "raw", False), *more)


PYTHON = str(Path(sys._base_executable or sys.executable).resolve())  # type: ignore[attr-defined]


def _modules(program: Path) -> list[Path]:
    """The files Python reads when it runs `program`."""
    script = (
        f"import sys, runpy; sys.argv = ['x', '--version']\n"
        f"try: runpy.run_path({str(program)!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "import encodings.utf_8, encodings.ascii\n"
        "print('\\n'.join(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)))"
    )
    said = subprocess.run([PYTHON, "-IS", "-c", script], capture_output=True, text=True, check=True)
    return [Path(line) for line in said.stdout.splitlines() if line.startswith("/")]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    home = Path(tempfile.mkdtemp(prefix=f"l4a-ch-{os.getpid()}-"))
    try:
        binary = home / "bin" / "cloud-hypervisor"
        binary.parent.mkdir()
        text = (HERE / "fake.py").read_text().partition("\n")[2]
        binary.write_text(f"#!{PYTHON} -IS\n{text}")
        shutil.copy(HERE / "schema.py", binary.parent)
        shutil.copy(binaries.path(binaries.AGENT), binary.parent / binaries.AGENT)
        for path in binary.parent.iterdir():
            path.chmod(0o755)
        kernel, initrd, root = home / "vmlinux", home / "initrd", home / "root.erofs"
        kernel.write_bytes(b"\x7fELF" + bytes(60))
        initrd.write_bytes(os.urandom(20_000))
        root.write_bytes(bytes(8192))
        with (home / "upper.raw").open("wb") as file:
            file.truncate(1 << 20)
        disks = (Disk("root", root, "raw", True), Disk("upper", home / "upper.raw", "raw", False))
        spec = MachineSpec(1, MEMORY_MIB, kernel, initrd, disks, kernel_release="6.1.0-fake")
        own = list(binary.parent.iterdir())
        yield Bench(
            home,
            replace(settings(), cache=home / "cache", cloud_hypervisor=str(binary)),
            spec,
            [*_modules(binary), *own],
        )
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(autouse=True)
def without_kvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "DEVICES", DEVICES)
    monkeypatch.setattr(probe, "device_gid", lambda: None)


class World:
    """One test's driver and machines."""

    def __init__(self, bench: Bench, driver: CloudHypervisorDriver, home: Path) -> None:
        self.bench, self.driver, self.home = bench, driver, home
        self.machines: list[CloudHypervisorMachine] = []
        self._places = itertools.count()

    def place(self, **more: object) -> Placement:
        run_dir = self.home / f"run{next(self._places)}"
        run_dir.mkdir(mode=0o700)
        return Placement(f"fake-{os.getpid()}-{run_dir.name}", run_dir, time.time() + 60, **more)  # type: ignore[arg-type]

    async def boot(
        self, *, memory_mib: int = MEMORY_MIB, nested: bool = False, **more: object
    ) -> CloudHypervisorMachine:
        disks = self.bench.disks(f"boot{time.monotonic_ns()}")
        spec = replace(self.bench.spec, disks=disks, memory_mib=memory_mib, nested=nested)
        machine = await self.driver.boot(spec, self.place(**more))
        self.machines.append(machine)
        return machine

    async def frozen(self, memory_mib: int = MEMORY_MIB, *, nested: bool = False) -> Snapshot:
        """A snapshot of a machine whose agent was talked to once."""
        machine = await self.boot(memory_mib=memory_mib, nested=nested)
        await talk(machine)
        await machine.pause()
        made = await machine.snapshot(self.home / f"snap{time.monotonic_ns()}")
        await machine.stop()
        return made

    async def restore(
        self, base: Snapshot, *disks: Disk, diff: Snapshot | None = None
    ) -> CloudHypervisorMachine:
        tops = self.bench.disks(f"clone{time.monotonic_ns()}", *disks)
        machine = await self.driver.restore(base, self.place(), tops, diff=diff)
        self.machines.append(machine)
        return machine


def in_world(bench: Bench, test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        home = Path(tempfile.mkdtemp(prefix="w", dir=bench.home))
        world = World(bench, await bench.driver(), home)
        try:
            async with asyncio.timeout(60):
                await test(world)
        finally:
            for machine in world.machines:
                await machine.stop()
                assert {path.name for path in machine.record.run_dir.iterdir()} <= {"exit"}
            shutil.rmtree(home, ignore_errors=True)

    asyncio.run(main())


async def talk(machine: CloudHypervisorMachine) -> None:
    """A whole conversation with the agent in the guest."""
    session = await Session.open(await machine.channel(), timeout=20)
    await Agent(session).ping()
    await session.close()


def talks(machine: CloudHypervisorMachine) -> int:
    """How often its agent was connected to, as each piece of its memory has it."""
    maps = Path(f"/proc/{machine.record.vmm_pid}/maps").read_text()
    size = machine._spec.memory_mib << 20 if machine._spec is not None else MEMORY_MIB << 20
    places = pages.of_file(maps, size) or [pages.Place(_booted(maps, size), size)]
    with Path(f"/proc/{machine.record.vmm_pid}/mem").open("rb") as memory:
        found = set()
        for place in places:
            memory.seek(place.address + fake.MARK * fake.PAGE)
            found.add(int(struct.unpack("<Q", memory.read(8))[0]))
    assert len(found) == 1
    return found.pop()


def _booted(maps: str, size: int) -> int:
    """Where a booted machine has its memory in one piece."""
    for line in maps.splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if end - start == size:
            return start
    raise AssertionError("it has no memory")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_machine_boots_talks_stands_still_and_goes_on(bench: Bench) -> None:
    async def test(world: World) -> None:
        machine = await world.boot()
        await talk(machine)
        with pytest.raises(ConflictError, match="while it runs"):
            await machine.snapshot(world.home / "none")
        await machine.pause()
        await machine.pause()
        await machine.flush_disks()
        await machine.resume()
        await machine.resume()
        await talk(machine)
        assert talks(machine) == 2
        assert await machine.disk_inode("upper") == os.stat(machine._spec.disks[1].path).st_ino  # type: ignore[union-attr]
        with pytest.raises(ConflictError, match="whole files"):
            await machine.switch_disk("upper", machine._spec.disks[1])  # type: ignore[union-attr]
        assert sorted(path.name for path in (machine.record.run_dir / "io").iterdir()) == [api.VSOCK]
        report = await asyncio.to_thread(isolation.report, machine.record)
        broken = compare(report, expected("cloud-hypervisor", root=True))
        # The fake's guest is a process in its jail.
        assert not [str(each) for each in broken if not each.host and each.name != "processes"]
        first, *others = report.processes[0].threads or ()
        assert first.seccomp_filters == 1 and others
        assert {thread.seccomp_filters for thread in others} == {2}  # ours, and that of what it is
        jail = machine.record.extra["jail"]
        assert jail["root"] == "pivot" and machine.record.uid != 0
        ended = await machine.stop()
        assert ended.reason == "stopped"
        with pytest.raises(ConflictError, match="was stopped"):
            await machine.pause()

    in_world(bench, test)


def test_clones_share_memory_and_write_none_of_it(bench: Bench) -> None:
    async def test(world: World) -> None:
        base = await world.frozen()
        assert 0 < base.memory_bytes < 1 << 20
        before = {path.name: digest(path) for path in base.path.iterdir()}
        clones = await asyncio.gather(*(world.restore(base) for _ in range(2)))
        for number, clone in enumerate(clones):
            assert talks(clone) == 1
            await clone.resume()
            for _ in range(number + 1):
                await talk(clone)
        assert [talks(clone) for clone in clones] == [2, 3]
        assert talks(await world.restore(base)) == 1
        assert {path.name: digest(path) for path in base.path.iterdir()} == before
        # What a clone has of its own is a few pages; the rest is the template's file.
        assert (await clones[0].stats()).rss_bytes < 64 << 20
        with pytest.raises(ConflictError, match="clone"):
            await clones[0].snapshot(world.home / "none")

    in_world(bench, test)


def test_a_pause_is_what_changed_and_a_resume_has_it(bench: Bench) -> None:
    async def test(world: World) -> None:
        base = await world.frozen()
        clone = await world.restore(base)
        await clone.resume()
        await talk(clone)
        with pytest.raises(ConflictError, match="while it runs"):
            await clone.checkpoint(world.home / "cp", base=base)
        await clone.pause()
        first = await clone.checkpoint(world.home / "cp", base=base)
        diff = await first.durable()
        assert diff.pages_bytes < 1 << 20
        # It goes on, and can be copied again.
        await clone.resume()
        await talk(clone)
        await clone.pause()
        second = await (await clone.checkpoint(world.home / "cp2", base=base)).durable()
        await clone.stop()
        for each, count in ((diff, 2), (second, 3)):
            again = await world.restore(base, diff=snapshot.load_diff(each.path))
            assert talks(again) == count
            await again.resume()
            await talk(again)
            assert talks(again) == count + 1
        # A resumed one is paused over the same base.
        await again.pause()
        third = await (await again.checkpoint(world.home / "cp3", base=base)).durable()
        assert talks(await world.restore(base, diff=third)) == 4
        with (diff.path / snapshot.PAGES).open("r+b") as file:
            file.seek(fake.PAGE)
            file.write(b"damage")
        with pytest.raises(CorruptSnapshotError):
            await world.restore(base, diff=diff)

    in_world(bench, test)


def test_a_booted_one_is_paused_over_its_template_too(bench: Bench) -> None:
    async def test(world: World) -> None:
        base = await world.frozen()
        booted = await world.boot()
        for _ in range(5):
            await talk(booted)
        await booted.pause()
        diff = await (await booted.checkpoint(world.home / "cold", base=base)).durable()
        assert talks(await world.restore(base, diff=diff)) == 5

    in_world(bench, test)


def test_memory_on_both_sides_of_the_hole_is_one_file(bench: Bench) -> None:
    async def test(world: World) -> None:
        base = await world.frozen(4096)
        assert (base.path / snapshot.MEMORY).stat().st_size == 4096 << 20
        clone = await world.restore(base)
        assert talks(clone) == 1
        await clone.resume()
        await talk(clone)
        assert talks(clone) == 2
        await clone.pause()
        diff = await (await clone.checkpoint(world.home / "cp", base=base)).durable()
        assert talks(await world.restore(base, diff=diff)) == 2
        assert talks(await world.restore(base)) == 1
        booted = await world.boot(memory_mib=4096)
        await booted.pause()
        with pytest.raises(ConflictError, match="cannot be looked through"):
            await booted.checkpoint(world.home / "cold", base=base)

    in_world(bench, test)


def test_a_volume_is_told_of_once_the_clone_runs(bench: Bench) -> None:
    async def test(world: World) -> None:
        base = await world.frozen()
        volume = world.home / "volume.raw"
        with volume.open("wb") as file:
            file.truncate(4 << 20)
        # The fake, as the real one, would never answer a resize before.
        clone = await world.restore(base, Disk("vol1", volume, "raw", False))
        await clone.resume()
        assert volume.stat().st_size == 4 << 20
        assert await clone.disk_inode("vol1") == volume.stat().st_ino

    in_world(bench, test)


def test_another_server_takes_it_over(bench: Bench) -> None:
    async def test(world: World) -> None:
        machine = await world.boot()
        await talk(machine)
        await machine.pause()
        record = type(machine.record).from_json(json.loads(json.dumps(machine.record.to_json())))
        await machine.detach()
        adopted = await (await bench.driver()).adopt(record)
        assert adopted is not None
        world.machines.append(adopted)
        await adopted.resume()
        await talk(adopted)
        assert talks(adopted) == 2
        os.kill(record.vmm_pid, 9)
        ended = await adopted.wait()
        assert ended.signal == 9
        assert await world.driver.adopt(record) is None
        world.machines.remove(machine)

    in_world(bench, test)


def test_the_tap_of_a_sandbox_is_opened_anew_where_it_is(bench: Bench) -> None:
    async def test(world: World) -> None:
        tap, netns = _link()
        try:
            released = []
            machine = await world.boot(
                tap=tap, netns=netns, release_tap=lambda: (released.append(tap), os.close(tap))
            )
            await talk(machine)
            assert released == [tap]
            with pytest.raises(HostSetupError, match="network namespace"):
                await world.boot(tap=0)
        finally:
            os.close(netns)

    in_world(bench, test)


def _link() -> tuple[int, int]:
    """A namespace with a tap without vnet_hdr that outlives its holder, as the barrier makes them."""
    found: list[int] = []

    def make() -> None:
        assert ctypes.CDLL(None).unshare(0x4000_0000) == 0
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(tap, 0x4004_54CA, struct.pack("16sH22x", b"tap0", 0x1002))
        fcntl.ioctl(tap, 0x4004_54CB, 1)
        found.extend((tap, os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return found[0], found[1]


def test_what_does_not_fit_is_refused_in_words(bench: Bench) -> None:
    async def test(world: World) -> None:
        base = await world.frozen()
        disks = bench.disks("misfit")
        for wrong, words in (
            (disks[:1], "needs the disks"),
            ((*disks, replace(disks[1], slot="vol9")), "disk slot"),
            ((disks[0], replace(disks[1], format="qcow2")), "raw files"),
            ((replace(disks[0], read_only=False), disks[1]), "read-only"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                await world.driver.restore(base, world.place(), wrong)
        with pytest.raises(VersionMismatchError, match="vmm"):
            await world.restore(replace(base, identity={**base.identity, "vmm": "52.0"}))
        with pytest.raises(HostSetupError, match="cannot be opened"):
            gone = replace(disks[1], path=world.home / "gone")
            await world.driver.restore(base, world.place(), (disks[0], gone))
        memory = base.path / snapshot.MEMORY
        memory.rename(world.home / "memory")
        memory.write_bytes(b"cut off")
        with pytest.raises(VersionMismatchError, match="7 bytes"):
            await world.restore(base)
        (world.home / "memory").rename(memory)
        # Its own refusal comes with its words, and nothing is left of it.
        (base.path / snapshot.STATE).write_text('{"snapshots": {}}')
        with pytest.raises(BootError, match=r"did not load its snapshot.*KeyError"):
            await world.restore(base)
        spec = replace(bench.spec, kernel=bench.spec.initrd, disks=disks)
        with pytest.raises(BootError, match="Cannot load the kernel"):
            await world.driver.boot(spec, world.place())

    in_world(bench, test)


def test_one_that_hangs_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        machine = await world.boot()
        os.kill(machine.record.vmm_pid, 19)  # as after a NIC's thread that is gone
        threads = list(Path(f"/proc/{machine.record.vmm_pid}/task").iterdir())
        await asyncio.to_thread(
            eventually, lambda: all(") T " in (thread / "stat").read_text() for thread in threads)
        )
        with pytest.raises(SandboxDiedError, match="did not answer"):
            await machine.ask(api.PAUSE, timeout=0.2)
        assert not procfs.alive(machine.record.vmm_pid, machine.record.vmm_start_ticks)

    in_world(bench, test)


def test_a_guest_that_ends_ends_its_monitor(bench: Bench) -> None:
    async def test(world: World) -> None:
        machine = await world.boot()
        channel = await machine.channel()
        threads = Path(f"/proc/{machine.record.vmm_pid}/task").iterdir()
        (child,) = "".join((thread / "children").read_text() for thread in threads).split()
        os.kill(int(child), 9)
        ended = await machine.wait()
        assert (ended.reason, ended.code) == ("exited", 1)
        assert channel.recv(1) == b""
        channel.close()

    in_world(bench, test)


def test_what_it_can_do_is_asked_of_host_and_program_and_each_refusal_has_its_words(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `capabilities`, but for its root: the device is a file, which the fake does not open."""
    device = bench.home / "kvm"
    device.touch()
    os.chown(device, 0, GROUP)
    monkeypatch.setattr(host, "KVM_DEVICE", device)
    monkeypatch.setattr(probe, "device_gid", DEVICE_GID)

    def program(name: str, script: str) -> str:
        path = bench.home / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    def driver(**changes: object) -> CloudHypervisorDriver:
        # A cache of its own: what was found of KVM is kept there.
        made = CloudHypervisorDriver(replace(bench.settings, cache=bench.home / "can", **changes))  # type: ignore[arg-type]
        real = made._cells.prepare
        monkeypatch.setattr(made._cells, "prepare", lambda binary, places: bench.prepare(real))
        return made

    async def refused(match: str, **changes: object) -> None:
        with pytest.raises(HostSetupError, match=match):
            await driver(**changes).capabilities()

    async def test(world: World) -> None:
        await refused("is not installed", cloud_hypervisor=str(bench.home / "none"))
        await refused("asks for software emulation", accel="tcg")
        old = program("old", "echo cloud-hypervisor v40.0.0")
        await refused("40.0.0 is too old: it lacks landlock", cloud_hypervisor=old)
        words = (
            f'[ "$1" = --version ] && exec echo cloud-hypervisor v{fake.VERSION}; echo no vcpus >&2; exit 1'
        )
        useless = program("useless", words)
        await refused("Cloud Hypervisor could not use it: no vcpus", cloud_hypervisor=useless)
        device.chmod(0o600)
        await refused("may be opened by root alone")
        device.rename(bench.home / "gone")
        await refused("needs KVM: there is no /dev/kvm")
        (bench.home / "gone").rename(device)
        device.chmod(0o660)
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 1000)
            await refused("only root can make")

        found = []
        for nests in (False, True):
            monkeypatch.setattr(host, "kvm_nests", lambda nests=nests: nests)
            world.driver = driver()
            found.append(await world.driver.capabilities())
        assert [can.nested for can in found] == [False, True]
        can = found[1]
        assert (can.version, can.accelerator, can.why_not_kvm) == (fake.VERSION, "kvm", None)
        assert (can.disk_format, can.bounds_files, can.jail.get("root")) == ("raw", False, "pivot")

        # A nested machine has what it asked for, in the device's group, and so have those cloned from it.
        base = await world.frozen(nested=True)
        clone = await world.restore(base)
        await clone.resume()
        await talk(clone)
        config = (await clone.ask(api.INFO, method="GET"))["config"]
        assert config["cpus"]["nested"] is True
        status = Path(f"/proc/{clone.record.vmm_pid}/status").read_text()
        assert f"\nGid:\t{GROUP}\t" in status
        world.driver._capabilities = found[0]
        with pytest.raises(HostSetupError, match="does not let its guests run guests"):
            await world.restore(base)

    in_world(bench, test)


def test_version_and_probe_are_asked_of_the_program_itself(bench: Bench) -> None:
    async def main() -> None:
        binary = probe.find(bench.settings.cloud_hypervisor)
        assert await probe.version(binary) == fake.VERSION
        assert await probe._boot(binary) is None
        other = bench.home / "other"
        other.write_text("#!/bin/sh\necho nothing of the kind\n")
        other.chmod(0o755)
        with pytest.raises(HostSetupError, match="no Cloud Hypervisor"):
            await probe.version(str(other))
        assert "ended without a word" in str(await probe._boot("/bin/false"))
        other.write_bytes(b"\x7fELF")
        with pytest.raises(HostSetupError, match="does not run"):
            await probe.version(str(other))

    asyncio.run(main())
