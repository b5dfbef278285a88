"""The session with the agent of a real machine: quiesce and clone, a host that died in mid-stream, a guest gone mad."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from llm4agents import binaries, limits
from llm4agents.barrier.ca import Authority
from llm4agents.config import settings
from llm4agents.errors import ConnectionLostError, HostSetupError, LLM4AgentsError
from llm4agents.guest.channel import Session
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk, spec
from llm4agents.images.cache import Cache
from llm4agents.images.initramfs import build_initrd
from llm4agents.images.kernel import build_kernel
from llm4agents.images.rootfs import build_rootfs
from llm4agents.vmm.base import Disk, Machine, MachineSpec, Placement
from llm4agents.vmm.qemu.driver import QemuDriver

pytestmark = pytest.mark.vm


class Bench:
    """A driver and the parts of `base`; machines made through it are ended with it."""

    def __init__(self, driver: QemuDriver, work: Path, spec: MachineSpec) -> None:
        self.driver, self.work, self.spec = driver, work, spec
        self.machines: list[Machine] = []

    def place(self, name: str) -> Placement:
        run_dir = self.work / name
        run_dir.mkdir(mode=0o700)
        return Placement(f"guest-test-{name}", run_dir, time.time() + 300)

    def disks(self, name: str) -> tuple[Disk, ...]:
        """The spec's, over an upper of its own."""
        root, upper = self.spec.disks
        own = self.work / f"{name}.qcow2"
        shutil.copyfile(upper.path, own)
        return root, Disk("upper", own, "qcow2", False, backing=upper.backing)

    async def boot(self) -> Machine:
        machine = await self.driver.boot(self.spec, self.place("first"))
        self.machines.append(machine)
        return machine


@contextlib.asynccontextmanager
async def bench(work: Path) -> AsyncIterator[Bench]:
    cache = Cache(settings().cache)

    def quiet(step: str, detail: str, fraction: float | None) -> None: ...

    # That of the tests' servers: their templates' root file system, built once for all.
    authority = Authority.open(settings().ca_directory).certificate_pem
    try:
        async with cache.building(quiet):
            kernel = await build_kernel(cache, quiet)
            initrd = build_initrd(kernel, binaries.path(binaries.AGENT), cache)
            rootfs = await build_rootfs(spec.get("base"), cache, quiet, authority=authority)
    except HostSetupError as error:
        pytest.skip(str(error))
    await disk.make_upper(work / "upper.raw", limits.DISK_GIB << 30)
    await disk.make_overlay(work / "upper.raw", work / "upper.qcow2")
    driver = QemuDriver(settings(), probe_kernel=kernel.vmlinux)
    shape = MachineSpec(
        vcpus=1,
        memory_mib=512,
        kernel=kernel.vmlinux,
        initrd=initrd.path,
        disks=(
            Disk("root", rootfs.path, "raw", True),
            Disk("upper", work / "upper.qcow2", "qcow2", False, backing=(work / "upper.raw",)),
        ),
        kernel_release=kernel.release,
    )
    made = Bench(driver, work, shape)
    try:
        yield made
    finally:
        for machine in made.machines:
            await machine.stop()
        await driver.close()


def run(work: Path, test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with bench(work) as made:
            await test(made)

    asyncio.run(asyncio.wait_for(whole(), 580))


async def output(agent: Agent, script: str, **options: Any) -> bytes:
    found = b""
    async with await agent.exec(["/bin/sh", "-c", script], **options) as process:
        async for _, data in process:
            found += data
        assert (await process.wait()).exit_code == 0, found
    return found


def test_quiesce_freeze_and_a_clone_that_speaks_at_once(tmp_path: Path) -> None:
    async def test(made: Bench) -> None:
        machine = await made.boot()
        session = await Session.open(await machine.channel(), timeout=limits.BOOT_TIMEOUT_S)
        agent = Agent(session)
        data = os.urandom(20_000_000)
        await agent.write("/home/user/file", data)
        # Output that nobody has read when the machine stops.
        await agent.exec(["/usr/bin/yes"])
        await agent.freeze()
        await session.quiesce()
        await machine.pause()
        frozen = await machine.snapshot(tmp_path / "snapshot")
        disks = made.disks("clone")
        await session.close()
        await machine.stop()
        clone = await made.driver.restore(frozen, made.place("clone"), disks)
        made.machines.append(clone)
        channel = await clone.channel()
        await clone.resume()
        session = await Session.open(channel, timeout=limits.RESTORE_TIMEOUT_S)
        agent = Agent(session)
        await agent.post_restore(
            entropy=os.urandom(64),
            unix_ns=time.time_ns(),
            hostname="clone",
            machine_id="0123456789abcdef" * 2,
            boot_id="11111111-2222-3333-4444-555555555555",
            env={"FROM": "clone"},
        )
        assert await output(agent, "hostname; echo $FROM") == b"clone\nclone\n"
        assert abs(float(await output(agent, "date +%s")) - time.time()) < 5
        assert await (await agent.read("/home/user/file")).read(len(data)) == data
        await session.close()

    run(tmp_path, test)


def test_a_dead_host_in_mid_stream_then_a_guest_gone_mad(tmp_path: Path) -> None:
    async def test(made: Bench) -> None:
        machine = await made.boot()
        session = await Session.open(await machine.channel(), timeout=limits.BOOT_TIMEOUT_S)
        process = await Agent(session).exec(["/usr/bin/yes"])
        writing = asyncio.create_task(Agent(session).write("/home/user/half", bytes(50_000_000)))
        async for _ in process:
            break
        await session.close()
        with pytest.raises(ConnectionLostError):
            await writing
        session = await Session.open(await machine.channel(), dirty=True, timeout=limits.RESTORE_TIMEOUT_S)
        agent = Agent(session)
        listing = await agent.list("/home/user")
        assert not [entry for entry in listing.entries if entry.name == "half"]
        # Root in the guest does what it can to the port the agent speaks through.
        mad = (
            "for port in /dev/vport* /dev/hvc*; do timeout 2 cat /dev/urandom > $port; done; kill -9 1; true"
        )
        with contextlib.suppress(LLM4AgentsError):
            await output(agent, mad, user="root", timeout_s=20)
        with contextlib.suppress(LLM4AgentsError):
            await agent.ping()
            assert await output(agent, "echo fine") == b"fine\n"
        await session.close()
        # The end of the machine ends a session, and says so.
        session = await Session.open(await machine.channel(), dirty=True, timeout=limits.RESTORE_TIMEOUT_S)
        sleeping = await Agent(session).exec(["/bin/sleep", "600"])
        waiting = asyncio.create_task(sleeping.wait())
        await machine.stop()
        with pytest.raises(ConnectionLostError):
            await waiting
        assert isinstance(await session.closed, ConnectionLostError)

    run(tmp_path, test)
