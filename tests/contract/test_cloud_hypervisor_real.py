"""The Cloud Hypervisor driver on the real program, wherever one is found and KVM really runs guests.

One machine's whole life in one test: each step is seconds where this runs (a nested guest, mostly). What is asked of
every driver is the conformance suite's; what is asked here is what only this one promises.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llm4agents.config import settings
from llm4agents.errors import HostSetupError
from llm4agents.vmm import snapshot
from llm4agents.vmm.base import Capabilities, Disk, Placement
from llm4agents.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from llm4agents.vmm.cloud_hypervisor.machine import CloudHypervisorMachine
from llm4agents.vmm.jail import isolation
from llm4agents.vmm.jail.promises import compare, expected

from .lab import build_spec, run, talk, wake

pytestmark = pytest.mark.vm
MEMORY_MIB = 256


@pytest.fixture(scope="module")
def able() -> Capabilities:
    if shutil.which(settings().cloud_hypervisor) is None:
        pytest.skip(f"there is no {settings().cloud_hypervisor} on PATH")
    try:
        return asyncio.run(CloudHypervisorDriver(settings()).capabilities())
    except HostSetupError as error:
        pytest.skip(error.message)


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="l4a-ch-real-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def test_a_machine_is_frozen_cloned_paused_resumed_and_gone(able: Capabilities, home: Path) -> None:
    driver = CloudHypervisorDriver(settings())
    machines: list[CloudHypervisorMachine] = []

    def place() -> Placement:
        run_dir = home / f"run{len(machines)}"
        run_dir.mkdir(mode=0o700)
        return Placement(f"real-{os.getpid()}-{len(machines)}", run_dir, time.time() + 600)

    def top(name: str) -> Disk:
        shutil.copyfile(home / "upper.raw", home / f"{name}.raw")
        return Disk("upper", home / f"{name}.raw", "raw", False)

    async def life() -> None:
        spec = await build_spec(home, MEMORY_MIB)
        root = spec.disks[0]
        machines.append(booted := await driver.boot(spec, place()))
        agent = await talk(booted)
        seen = "grep -cE ' (svm|vmx) ' /proc/cpuinfo; test -e /dev/kvm; echo $?; cat /sys/block/vda/ro"
        report = await asyncio.to_thread(isolation.report, booted.record)
        broken = compare(report, expected("cloud-hypervisor", root=True))
        assert not [str(each) for each in broken if not each.host]
        assert (await run(agent, f"{seen}; echo template > /dev/shm/state"))[1].split() == ["0", "1", "1"]
        await agent.freeze()
        await agent.session.quiesce()
        await booted.pause()
        base = await booted.snapshot(home / "snapshot")
        await booted.stop()
        assert {path.name for path in booted.record.run_dir.iterdir()} == {"exit"}

        with (home / "volume.raw").open("wb") as file:
            file.truncate(8 << 20)
        volume = Disk("vol0", home / "volume.raw", "raw", False)
        machines.append(first := await driver.restore(base, place(), (root, top("a"), volume)))
        machines.append(second := await driver.restore(base, place(), (root, top("b"))))
        agents = []
        for clone in (first, second):
            await clone.resume()
            agents.append(await wake(clone))
        sizes = "cat /sys/block/vdc/size /sys/block/vdd/size"
        assert (await run(agents[0], sizes))[1].split() == [str(8 << 11), str(1 << 11)]
        for number, agent in enumerate(agents):
            keep = f"echo {number} | tee /dev/shm/state > /root/disk; sync"
            assert (await run(agent, f"cat /dev/shm/state; {keep}"))[1] == "template"
        drawn = {(await run(agent, "head -c 16 /dev/urandom | od -An -tx1"))[1] for agent in agents}
        assert len(drawn) == 2

        # A pause is what it changed, over its template; it goes on, and is had again from that.
        agent = agents[0]
        await agent.freeze()
        await agent.session.quiesce()
        await first.pause()
        diff = await (await first.checkpoint(home / "diff", base=base)).durable()
        assert diff.pages_bytes < base.memory_bytes
        await first.resume()
        await agent.session.unquiesce()
        await agent.thaw()
        assert (await run(agent, "cat /dev/shm/state"))[1] == "0"
        await first.stop()
        disks = (root, Disk("upper", home / "a.raw", "raw", False), volume)
        machines.append(
            again := await driver.restore(base, place(), disks, diff=snapshot.load_diff(diff.path))
        )
        await again.resume()
        agent = await wake(again)
        assert (await run(agent, "cat /dev/shm/state /root/disk"))[1].split() == ["0", "0"]
        adopted = await driver.adopt(again.record)
        assert adopted is not None
        await adopted.detach()

        # A guest that resets finds no kernel to start again.
        assert (await run(agents[1], "sync; (sleep 0.2; echo b > /proc/sysrq-trigger) &"))[0] == 0
        assert (await second.wait()).reason == "exited"

    async def main() -> None:
        try:
            async with asyncio.timeout(300):
                await life()
        finally:
            for machine in machines:
                await machine.stop()

    asyncio.run(main())


def test_a_nested_machine_may_run_machines(able: Capabilities, home: Path) -> None:
    if not able.nested:
        pytest.skip("this host's KVM does not let its guests run guests")

    async def main() -> None:
        spec = replace(await build_spec(home, MEMORY_MIB), nested=True)
        (home / "run").mkdir(mode=0o700)
        driver = CloudHypervisorDriver(settings())
        machine = await driver.boot(spec, Placement(f"nested-{os.getpid()}", home / "run", time.time() + 300))
        try:
            agent = await talk(machine)
            assert (await run(agent, "grep -qE ' (svm|vmx) ' /proc/cpuinfo"))[0] == 0
        finally:
            await machine.stop()

    asyncio.run(main())
