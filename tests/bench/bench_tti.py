"""Time to interactive: from asking for a sandbox to its first answers, beside bare clones in the same run.

Every round takes one of each, in turn, so that noise of the machine meets all alike. Milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from llm4agents import AsyncSandbox, limits
from llm4agents.engine import contact
from llm4agents.engine.templates import warm_up
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk, spec
from llm4agents.images.progress import silent
from llm4agents.vmm import procfs
from llm4agents.vmm.base import Placement
from tests.bench.common import Bare, finish, percentile, summary

Samples = dict[str, list[float]]


async def true(agent: Agent) -> float:
    began = time.perf_counter()
    process = await agent.exec(["/bin/true"])
    assert (await process.wait()).exit_code == 0
    return (time.perf_counter() - began) * 1000


async def bare_round(bare: Bare, names: list[str], into: Samples) -> None:
    for name in names:
        variant, snapshot = await bare.template(name)
        began = time.perf_counter()
        async with bare.clone(variant, snapshot) as (agent, first_ms, _):
            into["floor_ms" if name == "base" else f"floor_{name}_ms"].append(first_ms)
            if name == "base":
                await bare.wake(agent, variant)
                await true(agent)
                into["raw_exec_first_ms"].append((time.perf_counter() - began) * 1000)
                into["raw_exec_ms"] += [await true(agent) for _ in range(5)]


async def product_round(into: Samples) -> None:
    began = time.perf_counter()
    async with await AsyncSandbox.create("base") as sandbox:
        into["on_demand_ms"].append((time.perf_counter() - began) * 1000)
        await sandbox.exec(["/bin/true"])
        into["exec_first_ms"].append((time.perf_counter() - began) * 1000)
        for _ in range(5):
            at = time.perf_counter()
            await sandbox.exec(["/bin/true"])
            into["exec_ms"].append((time.perf_counter() - at) * 1000)
    began = time.perf_counter()
    async with await AsyncSandbox.create("python") as sandbox:
        into["create_python_ms"].append((time.perf_counter() - began) * 1000)
        assert (await sandbox.run_code("print(6*7)")).stdout == "42\n"
        into["code_ms"].append((time.perf_counter() - began) * 1000)
        for _ in range(5):
            at = time.perf_counter()
            await sandbox.run_code("print(6*7)")
            into["cell_ms"].append((time.perf_counter() - at) * 1000)


def cli_round(into: Samples) -> None:
    command = [str(Path(sys.executable).with_name("llm4agents")), "run", "-c", "print(6*7)"]
    began = time.perf_counter()
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    into["cli_ms"].append((time.perf_counter() - began) * 1000)
    assert run.stdout == "42\n", run


async def cold_boot(bare: Bare, into: Samples) -> None:
    """`python` from power-on to an interpreter that answers, and from there on nothing is frozen."""
    variant, _ = await bare.template("python")
    wanted = spec.get("python")
    made_of = await bare.templates.parts_of(wanted, bare.driver, silent)
    run_dir = bare.settings.run_dir / "bench" / f"boot-{os.getpid()}-{len(into['cold_boot_ms'])}"
    run_dir.mkdir(parents=True, mode=0o700)
    upper = run_dir / "upper.raw"
    await disk.make_upper(upper, limits.DISK_GIB << 30)
    machine_spec = made_of.machine(variant.shape, upper)
    began = time.perf_counter()
    machine = await bare.driver.boot(machine_spec, Placement(run_dir.name, run_dir, time.time() + 600))
    try:
        agent = await contact.greet(machine, timeout=limits.BOOT_TIMEOUT_S)
        into["boot_to_agent_ms"].append((time.perf_counter() - began) * 1000)
        await warm_up(agent, wanted, services_only=True)
        into["cold_boot_ms"].append((time.perf_counter() - began) * 1000)
    finally:
        await machine.stop()
        subprocess.run(["rm", "-rf", run_dir], check=True)


async def alive(bare: Bare, name: str, count: int, window_s: float) -> tuple[float, float]:
    """Median Pss (MiB) and CPU (percent of a core) of each of `count` idle clones."""
    variant, snapshot = await bare.template(name)
    async with contextlib.AsyncExitStack() as stack:
        machines = []
        for _ in range(count):
            agent, _, machine = await stack.enter_async_context(bare.clone(variant, snapshot))
            await bare.wake(agent, variant)
            machines.append(machine)
        # Seconds in which they are left alone; the one place where time itself is what is measured.
        await asyncio.sleep(5)
        before = [(await machine.stats()).cpu_ns for machine in machines]
        await asyncio.sleep(window_s)
        after = [await machine.stats() for machine in machines]
        cpu = [(now.cpu_ns - then) / (window_s * 1e7) for now, then in zip(after, before, strict=True)]
        return percentile([now.pss_bytes / 2**20 for now in after], 50), percentile(cpu, 50)


async def measure(rounds: int, boots: int, count: int) -> None:
    into: Samples = defaultdict(list)
    bare = Bare()
    for name in ("base", "python"):
        await bare.template(name)
    await product_round(defaultdict(list))  # starts the server, loads templates there
    await bare_round(bare, ["base", "python"], defaultdict(list))
    for number in range(rounds):
        await bare_round(bare, ["base", "python"], into)
        await product_round(into)
        if number < 10:
            await asyncio.to_thread(cli_round, into)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    for _ in range(boots):
        await cold_boot(bare, into)
    pss, idle = {}, {}
    for name in ("base", "python"):
        pss[name], idle[name] = await alive(bare, name, count, 20.0)
    await bare.driver.close()
    result: dict[str, object] = {name: summary(values) for name, values in into.items()}
    middle = {name: percentile(values, 50) for name, values in into.items()}
    result["on_demand_ratio"] = round(middle["on_demand_ms"] / middle["floor_ms"], 2)
    result["code_ratio"] = round(middle["code_ms"] / middle["floor_ms"], 2)
    result["exec_first_ratio"] = round(middle["exec_first_ms"] / middle["raw_exec_first_ms"], 2)
    result["exec_ratio"] = round(middle["exec_ms"] / middle["raw_exec_ms"], 2)
    result["pss_mib"] = {name: round(value, 1) for name, value in pss.items()}
    result["idle_cpu_pct"] = {name: round(value, 2) for name, value in idle.items()}
    result["alive"] = count
    result["load_before"] = round(os.getloadavg()[2], 1)
    result["host_boot"] = procfs.host_boot_id()[:8]
    finish(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--boots", type=int, default=3)
    parser.add_argument("--alive", type=int, default=20)
    args = parser.parse_args()
    asyncio.run(measure(args.rounds, args.boots, args.alive))


if __name__ == "__main__":
    main()
