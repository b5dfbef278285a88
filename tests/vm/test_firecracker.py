"""What only Firecracker has: bounds of its devices, what its balloon tells, a jail that a dead server leaves behind."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm4agents.config import settings
from llm4agents.errors import BootError, HostSetupError
from llm4agents.vmm.base import MachineRecord
from llm4agents.vmm.firecracker import api, jail
from llm4agents.vmm.firecracker.driver import FirecrackerDriver
from llm4agents.vmm.firecracker.machine import FirecrackerMachine
from tests.contract.lab import DRIVERS, Frozen, Lab, freeze, in_lab, run, wake
from tests.contract.test_machine import orphan

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.skipif("firecracker" not in DRIVERS, reason="runs in the laboratory (tests/lab)"),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def frozen() -> Iterator[Frozen]:
    home = Path(tempfile.mkdtemp(prefix=f"l4a-firecracker-{os.getpid()}-"))
    try:
        yield asyncio.run(freeze("firecracker", home))
    finally:
        shutil.rmtree(home, ignore_errors=True)


def test_a_bounded_disk_is_as_slow_as_it_may_be(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        rate = 2 * MIB
        lab.driver = FirecrackerDriver(settings(), rates=api.Rates(disk=api.Rate(bytes=rate)))
        _, agent = await lab.clone()
        script = "dd if=/dev/zero of=/root/big bs=1M count=8 oflag=direct 2>/dev/null; cat /proc/uptime"
        began = time.monotonic()
        code, _ = await run(agent, script)
        took = time.monotonic() - began
        # One second's worth is in the bucket; the rest comes at the rate.
        assert code == 0 and took > 8 * MIB / rate - 1.5, took

    in_lab(frozen, test)


def test_the_balloon_tells_of_the_guests_memory_and_the_machine_stands_by_its_api(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        machine, _ = await lab.clone()
        assert isinstance(machine, FirecrackerMachine)
        found = await machine.balloon()
        assert (found["target_mib"], found["actual_mib"]) == (0, 0)
        assert 128 * MIB < found["total_memory"] <= 256 * MIB
        assert 0 < found["available_memory"] < found["total_memory"]

    in_lab(frozen, test)


def test_a_machine_whose_keeper_and_server_died_leaves_a_jail_that_adoption_removes(frozen: Frozen) -> None:
    async def test(lab: Lab) -> None:
        record: MachineRecord = await asyncio.to_thread(orphan, lab, time.time() + 300)
        base = jail.base_of(record.run_dir, settings().state)
        assert base.exists()
        pidfd = os.pidfd_open(record.vmm_pid)
        os.kill(record.shim_pid, signal.SIGKILL)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        await asyncio.wait_for(ended.wait(), 10)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        assert base.exists()
        assert await lab.driver.adopt(record) is None
        assert not base.exists() and not list(record.run_dir.iterdir())

    in_lab(frozen, test)


def test_what_is_missing_is_said(frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    async def main() -> None:
        for name in ("firecracker", "jailer"):
            other = dataclasses.replace(settings(), **{name: "/nowhere/firecracker"})
            with pytest.raises(HostSetupError, match="is not installed"):
                await FirecrackerDriver(other).capabilities()
        monkeypatch.setattr("llm4agents.vmm.host.KVM_DEVICE", Path("/dev/no-kvm"))
        with pytest.raises(HostSetupError, match="no /dev/kvm"):
            await FirecrackerDriver(settings()).capabilities()

    asyncio.run(main())


def test_a_jailer_that_refuses_is_told_in_its_words_and_leaves_nothing(
    frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(lab: Lab) -> None:
        placement, top = lab.placement(), lab.overlay()
        await lab.driver.capabilities()
        monkeypatch.setattr("llm4agents.vmm.firecracker.jailer.ID", "not an id!")
        with pytest.raises(BootError) as caught:
            await lab.driver.restore(frozen.snapshot, placement, frozen.disks(top))
        # The jailer's own words, wherever it was when it ended.
        assert "Invalid" in f"{caught.value} {caught.value.details}"
        assert {path.name for path in placement.run_dir.iterdir()} <= {"exit"}
        monkeypatch.undo()
        machine = await lab.restore()
        await machine.resume()
        await wake(machine)

    in_lab(frozen, test)
