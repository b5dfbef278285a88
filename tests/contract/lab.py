"""What the conformance suite works with: real parts, a frozen machine of each driver, clones of it.

Everything is made once per test session; a test gets a `Lab` in its own event loop and leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from llm4agents import binaries
from llm4agents.barrier.ca import Authority
from llm4agents.barrier.link.links import Link
from llm4agents.config import settings
from llm4agents.guest.channel import Session
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk, spec
from llm4agents.images.cache import Cache
from llm4agents.images.initramfs import build_initrd
from llm4agents.images.kernel import build_kernel
from llm4agents.images.rootfs import build_rootfs
from llm4agents.vmm import memory, procfs
from llm4agents.vmm import snapshot as qemu_snapshot
from llm4agents.vmm.base import Disk, Driver, Machine, MachineRecord, MachineSpec, Placement, Snapshot
from llm4agents.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from llm4agents.vmm.firecracker.driver import FirecrackerDriver
from llm4agents.vmm.qemu.driver import QemuDriver

UPPER_BYTES = 1 << 28

_MAKERS: dict[str, Callable[[], Driver]] = {
    "qemu": lambda: QemuDriver(settings()),
    "firecracker": lambda: FirecrackerDriver(settings()),
    "cloud-hypervisor": lambda: CloudHypervisorDriver(settings()),
}
DRIVERS = {name: _MAKERS[name] for name in os.environ.get("LLM4AGENTS_TEST_DRIVERS", "qemu").split(",")}
"""Those the suite runs on, by LLM4AGENTS_TEST_DRIVERS. None is left out for what its host lacks: that fails."""
RAW = {"firecracker", "cloud-hypervisor"}
"""Whose disks are whole files."""
MEMORY_MIB = {"qemu": 512, "firecracker": 256, "cloud-hypervisor": 256}
PATIENCE = 1 if set(DRIVERS) <= {"qemu"} else 5
"""Times as long is waited where guests run as guests of an emulated machine (the laboratory)."""


@dataclass
class Frozen:
    """A machine of `driver` that answered once and was frozen. `home` holds all its files."""

    driver: str
    home: Path
    spec: MachineSpec

    @property
    def snapshot(self) -> Snapshot:
        return qemu_snapshot.load(self.home / "snapshot")

    @property
    def raw(self) -> bool:
        return self.driver in RAW

    def top(self, path: Path, layers: tuple[Path, ...] = ()) -> Disk:
        """The file a clone writes to, over `layers` and the frozen disk where there are layers."""
        if self.raw:
            return Disk("upper", path, "raw", False)
        return Disk("upper", path, "qcow2", False, backing=(*layers, self.home / "upper.raw"))

    def disks(self, overlay: Path, layers: tuple[Path, ...] = ()) -> tuple[Disk, ...]:
        root = next(part for part in self.spec.disks if part.slot == "root")
        return (root, self.top(overlay, layers))

    def fresh(self, path: Path) -> Path:
        """`path`, made as a clone's top: what the template froze, and nothing of its own."""
        if self.raw:
            copy_sparse(self.home / "upper.raw", path)
        else:
            shutil.copyfile(self.home / "empty.qcow2", path)
        return path


def copy_sparse(source: Path, target: Path) -> Path:
    """A copy whose holes are holes."""
    with source.open("rb") as of, target.open("xb") as to:
        size = os.fstat(of.fileno()).st_size
        to.truncate(size)
        for start, end in memory.extents(of.fileno(), size):
            while start < end:  # by hand: also from one file system to another
                start += os.pwrite(
                    to.fileno(), os.pread(of.fileno(), min(1 << 20, end - start), start), start
                )
    return target


async def build_spec(home: Path, memory_mib: int = 512) -> MachineSpec:
    """The parts of a small machine from the cache (built on the first run), with an upper disk of its own."""
    cache = Cache(settings().cache)

    def quiet(step: str, detail: str, fraction: float | None) -> None:
        pass

    # That of the tests' servers: their templates' root file system, built once for all.
    authority = Authority.open(settings().ca_directory).certificate_pem
    async with cache.building(quiet):
        kernel = await build_kernel(cache, quiet)
        initrd = build_initrd(kernel, binaries.path(binaries.AGENT), cache)
        rootfs = await build_rootfs(spec.get("base"), cache, quiet, authority=authority)
    await disk.make_upper(home / "upper.raw", UPPER_BYTES)
    disks = (Disk("root", rootfs.path, "raw", True), Disk("upper", home / "upper.raw", "raw", False))
    return MachineSpec(1, memory_mib, kernel.vmlinux, initrd.path, disks, kernel_release=kernel.release)


async def talk(machine: Machine, *, dirty: bool = False, timeout: float = 90.0) -> Agent:
    channel = await machine.channel()
    return Agent(await Session.open(channel, dirty=dirty, timeout=timeout * PATIENCE))


async def freeze(name: str, home: Path, memory_mib: int | None = None) -> Frozen:
    """Boot once, let it answer, freeze it."""
    driver = DRIVERS[name]()
    machine_spec = await build_spec(home, memory_mib or MEMORY_MIB[name])
    run_dir = home / "boot"
    run_dir.mkdir(mode=0o700)
    machine = await driver.boot(machine_spec, Placement("conformance-boot", run_dir, time.time() + 300))
    try:
        agent = await talk(machine)
        assert (await run(agent, "mkdir -p /dev/shm; echo template > /dev/shm/state"))[0] == 0
        await agent.freeze()
        await agent.session.quiesce()
        await machine.pause()
        await machine.snapshot(home / "snapshot")
    finally:
        await machine.stop()
    if name not in RAW:
        await disk.make_overlay(home / "upper.raw", home / "empty.qcow2")
    return Frozen(name, home, machine_spec)


async def run(agent: Agent, script: str, timeout_s: float = 60) -> tuple[int | None, str]:
    """A shell command as root in the guest: its exit code and everything it said."""
    process = await agent.exec(["/bin/sh", "-c", script], user="root", timeout_s=timeout_s)
    said = b""
    async for _, data in process:
        said += bytes(data)
    return (await process.wait()).exit_code, said.decode(errors="replace").strip()


class Lab:
    """One test's driver and machines; `lab()` ends them all."""

    def __init__(self, frozen: Frozen, driver: Driver, home: Path) -> None:
        self.frozen, self.driver, self.home = frozen, driver, home
        self.machines: list[Machine] = []
        self._count = self._overlays = 0

    def placement(self, deadline_unix: float | None = None, link: Link | None = None) -> Placement:
        self._count += 1
        run_dir = self.home / f"run{self._count}"
        run_dir.mkdir(mode=0o700)
        place = Placement(f"conformance-{os.getpid()}-{self._count}", run_dir, deadline_unix)
        if link is not None:
            place = dataclasses.replace(
                place,
                tap=link.tap,
                netns=link.planted.netns,
                release_tap=link.release_tap,
                serve=link.planted.names(),
            )
        return place

    def overlay(self, directory: Path | None = None) -> Path:
        self._overlays += 1
        return self.frozen.fresh((directory or self.home) / f"upper{self._overlays}.top")

    async def restore(
        self,
        *,
        deadline_unix: float | None = None,
        overlay: Path | None = None,
        layers: tuple[Path, ...] = (),
        more: tuple[Disk, ...] = (),
        diff: Snapshot | None = None,
        link: Link | None = None,
    ) -> Machine:
        """A clone, paused as the driver left it. `layers` lie between `overlay` and the frozen disk."""
        placement = self.placement(deadline_unix, link)
        disks = (*self.frozen.disks(overlay or self.overlay(), layers), *more)
        machine = await self.driver.restore(self.frozen.snapshot, placement, disks, diff=diff)
        self.machines.append(machine)
        return machine

    async def clone(self, **options: object) -> tuple[Machine, Agent]:
        """A clone that runs and answers."""
        machine = await self.restore(**options)  # type: ignore[arg-type]
        await machine.resume()
        return machine, await wake(machine)


async def stand_still(machine: Machine, agent: Agent, **how: bool) -> None:
    """Nothing runs in the guest and nothing is on its way, as before a pause."""
    await agent.freeze(**how)
    await agent.session.quiesce()
    await machine.pause()


async def go_on(machine: Machine, agent: Agent) -> None:
    await machine.resume()
    if machine.channel_cut:
        agent.session.reconnect(await machine.channel())
    await agent.session.unquiesce()
    await agent.thaw()


async def wake(machine: Machine, *, network: bool | None = None) -> Agent:
    agent = await talk(machine, timeout=15.0)
    await agent.post_restore(
        entropy=os.urandom(64),
        unix_ns=time.time_ns(),
        hostname="clone",
        machine_id="0" * 32,
        boot_id="b",
        env={},
        network=network,
    )
    return agent


@contextlib.asynccontextmanager
async def lab(frozen: Frozen) -> AsyncIterator[Lab]:
    driver = DRIVERS[frozen.driver]()
    home = Path(tempfile.mkdtemp(prefix="l4a-lab-"))
    it = Lab(frozen, driver, home)
    try:
        yield it
    finally:
        for machine in it.machines:
            await machine.stop()
        await driver.release(frozen.snapshot.path)
        shutil.rmtree(home, ignore_errors=True)


def in_lab(frozen: Frozen, test: Callable[[Lab], object]) -> None:
    """Run the coroutine function `test` with a lab of its own."""

    async def main() -> None:
        async with lab(frozen) as it, asyncio.timeout(120 * PATIENCE):
            await test(it)  # type: ignore[misc]

    asyncio.run(main())


def alive(record: MachineRecord) -> bool:
    return procfs.alive(record.vmm_pid, record.vmm_start_ticks)


def other_identity(snapshot: Snapshot, **changes: str) -> Snapshot:
    return dataclasses.replace(snapshot, identity={**snapshot.identity, **changes})


def record_of(text: str) -> MachineRecord:
    return MachineRecord.from_json(json.loads(text))
