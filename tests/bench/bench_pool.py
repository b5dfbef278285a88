"""A pooled sandbox: create to the result of `/bin/true`, and to a first code result, beside a warm raw exec.

Each round waits until the pool is full again, so that what is measured is a pool that keeps up. Milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict

from llm4agents import AsyncSandbox
from llm4agents.sdk._async.client import AsyncClient
from tests.bench.bench_tti import Samples, true
from tests.bench.common import Bare, finish, percentile, summary

TEMPLATES = ("base", "python")
RAW_EXECS = 5


async def full(client: AsyncClient, timeout_s: float = 300.0) -> None:
    """Until every wish of the pool is met, and the machine has had a moment to itself."""
    end = time.monotonic() + timeout_s
    while any(shelf["ready"] < shelf["wanted"] for shelf in (await client.pool())["data"]):
        assert time.monotonic() < end, await client.pool()
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)


async def measure(rounds: int, wanted: int) -> None:
    into: Samples = defaultdict(list)
    bare = Bare()
    async with AsyncClient() as client:
        for name in TEMPLATES:
            await bare.template(name)
            await client.build_template(name)
            await client.set_pool(name, wanted)
        variant, snapshot = await bare.template("base")
        async with bare.clone(variant, snapshot) as (agent, _, _):
            await bare.wake(agent, variant)
            for _ in range(10):
                await true(agent)
            for number in range(rounds + 1):
                await full(client)
                raw = [await true(agent) for _ in range(RAW_EXECS)]
                began = time.perf_counter()
                async with await AsyncSandbox.create("base") as sandbox:
                    create_ms = (time.perf_counter() - began) * 1000
                    assert (await sandbox.exec(["/bin/true"])).exit_code == 0
                    exec_ms = (time.perf_counter() - began) * 1000
                    again = time.perf_counter()
                    await sandbox.exec(["/bin/true"])
                    into["second_exec_ms"].append((time.perf_counter() - again) * 1000)
                await full(client)
                began = time.perf_counter()
                async with await AsyncSandbox.create("python") as sandbox:
                    assert (await sandbox.run_code("print(6*7)")).stdout == "42\n"
                    code_ms = (time.perf_counter() - began) * 1000
                if number:  # the first round opens connections
                    into["raw_exec_ms"] += raw
                    into["create_ms"].append(create_ms)
                    into["exec_ms"].append(exec_ms)
                    into["code_ms"].append(code_ms)
                print(f"round {number} of {rounds}", file=sys.stderr)
        for name in TEMPLATES:
            await client.set_pool(name, 0)
    await bare.driver.close()
    result: dict[str, object] = {name: summary(values) for name, values in into.items()}
    over = percentile(into["exec_ms"], 50) - percentile(into["raw_exec_ms"], 50)
    finish({**result, "exec_over_raw_ms": round(over, 1), "pooled": wanted})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pooled", type=int, default=2)
    args = parser.parse_args()
    asyncio.run(measure(args.rounds, args.pooled))


if __name__ == "__main__":
    main()
