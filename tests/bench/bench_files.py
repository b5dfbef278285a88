"""A 64 MiB file in and out through the product, beside what the raw channel of the same machine kind does.

Raw: the same bytes as frames of the protocol with nothing behind them: into `cat >/dev/null`'s stdin, and out of
`cat FILE`'s stdout for a file in the guest's memory. `in_ratio` = product / raw, of bytes per second.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time

from llm4agents import AsyncSandbox
from tests.bench.common import Bare, finish, percentile

SIZE = 64 << 20
ROUNDS = 5


async def raw(bare: Bare) -> tuple[list[float], list[float]]:
    variant, snapshot = await bare.template("base")
    data = os.urandom(1 << 20)
    into, out = [], []
    async with bare.clone(variant, snapshot) as (agent, _, _machine):
        await bare.wake(agent, variant)
        make = await agent.exec(["head", "-c", str(SIZE), "/dev/urandom"], user="root")
        async for _ in make:
            pass
        maker = await agent.exec(["sh", "-c", f"head -c {SIZE} /dev/urandom > /dev/shm/file"], user="root")
        assert (await maker.wait()).exit_code == 0
        for _ in range(ROUNDS):
            began = time.perf_counter()
            process = await agent.exec(["sh", "-c", "exec cat >/dev/null"], stdin=True)
            for _ in range(SIZE // len(data)):
                await process.write_stdin(data)
            await process.close_stdin()
            await process.wait()
            into.append(SIZE / (time.perf_counter() - began))
            began, seen = time.perf_counter(), 0
            process = await agent.exec(["cat", "/dev/shm/file"], user="root")
            async for _, chunk in process:
                seen += len(chunk)
            assert seen == SIZE
            out.append(SIZE / (time.perf_counter() - began))
    return into, out


async def product() -> tuple[list[float], list[float]]:
    data = os.urandom(SIZE)
    digest = hashlib.sha256(data).hexdigest()
    into, out = [], []
    async with await AsyncSandbox.create("base") as sandbox:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await sandbox.files.write("file", data)
            into.append(SIZE / (time.perf_counter() - began))
            began = time.perf_counter()
            back = await sandbox.files.read("file", format="bytes")
            out.append(SIZE / (time.perf_counter() - began))
            assert hashlib.sha256(back).hexdigest() == digest, "the file came back changed"
    return into, out


async def measure() -> None:
    bare = Bare()
    raw_in, raw_out = await raw(bare)
    print("raw done", file=sys.stderr)
    own_in, own_out = await product()
    await bare.driver.close()
    mib = {
        name: round(percentile(values, 50) / 2**20, 1)
        for name, values in (("in", own_in), ("out", own_out), ("raw_in", raw_in), ("raw_out", raw_out))
    }
    finish(
        {
            "in_ratio": round(mib["in"] / mib["raw_in"], 2),
            "out_ratio": round(mib["out"] / mib["raw_out"], 2),
            "mib_per_s": mib,
            "bytes": SIZE,
            "n": ROUNDS,
            "intact": True,
        }
    )


if __name__ == "__main__":
    asyncio.run(measure())
