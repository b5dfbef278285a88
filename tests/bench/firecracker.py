"""What the Firecracker driver adds to Firecracker: boots and restores to the agent's answer, bare and driven.

To be run as root where Firecracker runs, `python -m tests.bench.firecracker [ROUNDS [BOOTS]]` (in the laboratory:
`python -m tests.lab shell`), or imported (`measure`). Bare is Firecracker itself, without shim, jailer or namespaces
of its own, started and talked to by the same client code, from files that lie ready; driven is the driver as the
engine uses it. Both wait for nothing by the clock.
The last line is one JSON object: `restore_ratio`, `boot_ratio` (medians), and every step in ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.config import settings
from llm4agents.guest.channel import Session
from llm4agents.vmm import uids, unixhttp
from llm4agents.vmm.base import Placement
from llm4agents.vmm.firecracker import api, darkness, probe, vsock
from llm4agents.vmm.firecracker.driver import FirecrackerDriver
from llm4agents.vmm.firecracker.machine import FirecrackerMachine
from llm4agents.vmm.unixhttp import UnixHttp
from llm4agents.vmm.waiting import readable, watched
from tests.bench.common import finish
from tests.contract.lab import Frozen, copy_sparse, freeze

Steps = dict[str, float]
_CLONE_NEWNET = 0x4000_0000


class Watch:
    """Time since the last step, by name, in ms."""

    def __init__(self) -> None:
        self.began = self._last = time.perf_counter()
        self.steps: Steps = {}

    def step(self, name: str) -> None:
        now = time.perf_counter()
        self.steps[name] = self.steps.get(name, 0) + (now - self._last) * 1000
        self._last = now

    def end(self) -> Steps:
        return {**self.steps, "total": (time.perf_counter() - self.began) * 1000}


def _faults(pid: int) -> float:
    """Page faults of a process so far: of a clone, most are the guest's first touches."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return float(fields[7]) + float(fields[9])


async def _answer(sock: Any) -> None:
    session = await Session.open(sock, timeout=90)
    await session.close()


# -- bare -------------------------------------------------------------------------------------------------


async def _spawn(directory: Path, netns: int, watch: Watch) -> tuple[subprocess.Popen[bytes], UnixHttp]:
    with watched(directory) as made:
        # In a thread that is in that namespace: a child is where its parent's thread is, and no Python runs in it.
        process = await asyncio.to_thread(_started, directory, netns)
        watch.step("spawn")
        while True:
            try:
                client = UnixHttp(unixhttp.connect(directory / api.API_SOCKET), "Firecracker")
                watch.step("api")
                return process, client
            except FileNotFoundError:
                await readable(made)
                with contextlib.suppress(BlockingIOError):
                    os.read(made, 4096)
            except OSError:
                await asyncio.sleep(0.001)


def _started(directory: Path, netns: int) -> subprocess.Popen[bytes]:
    found: list[subprocess.Popen[bytes]] = []

    def act() -> None:
        if ctypes.CDLL(None, use_errno=True).setns(netns, _CLONE_NEWNET) == 0:
            found.append(
                subprocess.Popen(
                    [probe.find(settings().firecracker), "--api-sock", api.API_SOCKET, "--level", "Error"],
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return found[0]


def _files(directory: Path, frozen: Frozen, names: dict[str, Path]) -> None:
    """What is ready before the clock runs."""
    directory.mkdir()
    root = next(disk.path for disk in frozen.spec.disks if disk.slot == "root")
    for name, path in {"root": root, **names}.items():
        (directory / name).symlink_to(path)
    copy_sparse(frozen.home / "upper.raw", directory / "upper")
    for slot in api.VOLUME_SLOTS:
        with (directory / slot).open("wb") as file:
            file.truncate(limits.VOLUME_SLOT_BYTES)


@contextlib.asynccontextmanager
async def _ended(process: subprocess.Popen[bytes], client: UnixHttp) -> Any:
    try:
        yield
    finally:
        client.close()
        process.kill()
        process.wait()


async def bare_boot(frozen: Frozen, directory: Path, netns: int) -> Steps:
    _files(directory, frozen, {"vmlinux": frozen.spec.kernel, "initrd": frozen.spec.initrd})
    watch = Watch()
    process, client = await _spawn(directory, netns, watch)
    async with _ended(process, client):
        for request in (*api.configure(frozen.spec), api.START):
            await client.request(*request, timeout=60)
        watch.step("start")
        while not await vsock.taken(sock := vsock.ask(directory / api.VSOCK_SOCKET, api.AGENT_PORT)):
            sock.close()
            await asyncio.sleep(0.02)
        watch.step("connect")
        await _answer(sock)
        watch.step("answer")
        return watch.end()


async def bare_restore(frozen: Frozen, directory: Path, netns: int) -> Steps:
    """With the driver's own way round the reset that a restored guest makes (`machine`): the best that is known."""
    snapshot = frozen.home / "snapshot"
    _files(directory, frozen, {"memory": snapshot / "memory", "state": snapshot / "state"})
    watch = Watch()
    process, client = await _spawn(directory, netns, watch)
    async with _ended(process, client):
        await client.request(*api.load(), timeout=60)
        watch.step("load")
        early = vsock.ask(directory / api.VSOCK_SOCKET, api.AGENT_PORT)
        await client.request(*api.RESUME, timeout=60)
        watch.step("resume")
        await vsock.taken(early)
        early.close()
        await vsock.taken(sock := vsock.ask(directory / api.VSOCK_SOCKET, api.AGENT_PORT))
        watch.step("connect")
        await _answer(sock)
        watch.step("answer")
        return {**watch.end(), "faults": _faults(process.pid)}


# -- driven -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _timed(watch: Watch) -> Iterator[None]:
    """Within it the driver's own steps are told to `watch`."""
    kept: list[tuple[str, Callable[..., Any]]] = []
    for name, before, after in (
        ("attach", "launch", "api"),
        ("load", "", "load"),
        ("start", "", "start"),
    ):
        method = getattr(FirecrackerMachine, name)
        kept.append((name, method))

        def around(method: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
            async def timed(*arguments: Any) -> Any:
                if before:
                    watch.step(before)
                try:
                    return await method(*arguments)
                finally:
                    watch.step(after)

            return timed

        setattr(FirecrackerMachine, name, around(method, before, after))
    try:
        yield
    finally:
        for name, method in kept:
            setattr(FirecrackerMachine, name, method)


@contextlib.contextmanager
def _ready(netns: int) -> Iterator[None]:
    """Within it, the namespace a machine without a link asks for is this one."""
    made = darkness.make

    async def ready(uid: int) -> int:
        return netns

    darkness.make = ready
    try:
        yield
    finally:
        darkness.make = made


async def driven(frozen: Frozen, driver: FirecrackerDriver, home: Path, number: int, *, boot: bool) -> Steps:
    run_dir = home / f"run{number}"
    run_dir.mkdir(mode=0o700)
    disks = frozen.disks(frozen.fresh(home / f"top{number}"))
    placement = Placement(f"bench-{os.getpid()}-{number}", run_dir, time.time() + 300)
    # As a sandbox's link is: made ahead.
    lease = uids.lease(placement.id)
    netns = await darkness.make(lease.uid)
    os.close(lease.fd)
    watch = Watch()
    with _timed(watch), _ready(netns):
        if boot:
            machine = await driver.boot(dataclasses.replace(frozen.spec, disks=disks), placement)
        else:
            machine = await driver.restore(frozen.snapshot, placement, disks)
    try:
        await machine.resume()
        watch.step("resume")
        channel = await machine.channel()
        watch.step("connect")
        await _answer(channel)
        watch.step("answer")
        return {**watch.end(), "faults": _faults(machine.record.vmm_pid)}
    finally:
        await machine.stop()


# -- both -------------------------------------------------------------------------------------------------


async def measure(frozen: Frozen, rounds: int, boots: int = 1) -> dict[str, object]:
    """Bare and driven by turns, so that what else the machine does hits both alike. Medians, and their ratios."""
    home = Path(tempfile.mkdtemp(prefix="l4a-bench-"))
    driver = FirecrackerDriver(settings())
    await driver.capabilities()
    netns = await darkness.make(0)
    found: dict[str, list[Steps]] = {"bare_restore": [], "restore": [], "bare_boot": [], "boot": []}
    try:
        for number in range(rounds + 1):
            pair = (
                await bare_restore(frozen, home / f"bare{number}", netns),
                await driven(frozen, driver, home, number, boot=False),
            )
            if number:  # the first reads the files into the page cache
                found["bare_restore"].append(pair[0])
                found["restore"].append(pair[1])
        for number in range(boots):
            found["bare_boot"].append(await bare_boot(frozen, home / f"boot{number}", netns))
            found["boot"].append(await driven(frozen, driver, home, 1000 + number, boot=True))
    finally:
        os.close(netns)
        shutil.rmtree(home)
    medians = {
        what: {step: round(statistics.median(each[step] for each in steps), 1) for step in steps[0]}
        for what, steps in found.items()
        if steps
    }
    result: dict[str, object] = {"steps_ms": medians, "rounds": rounds, "boots": boots}
    for name in ("restore", "boot"):
        if found[name]:
            result[f"{name}_ratio"] = round(medians[name]["total"] / medians[f"bare_{name}"]["total"], 2)
    return result


async def main(rounds: int, boots: int) -> None:
    home = Path(tempfile.mkdtemp(prefix="l4a-bench-"))
    try:
        finish(await measure(await freeze("firecracker", home), rounds, boots))
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    asyncio.run(main(numbers[0] if numbers else 10, numbers[1] if numbers[1:] else 2))
