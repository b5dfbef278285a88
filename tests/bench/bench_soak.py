"""Create and kill, over and over: does the server's memory stay flat? Half of them run something, one in ten is paused
and resumed, one in ten is killed in the middle of a command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path

from llm4agents import AsyncSandbox
from llm4agents.errors import LLM4AgentsError
from llm4agents.sdk._async.transport import transport
from tests.bench.common import finish


async def server_pid() -> int:
    async with transport() as way:
        return int((await way.json("GET", "/v1/server"))["pid"])


def rss_mib(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def cycle(index: int) -> None:
    sandbox = await AsyncSandbox.create("base", metadata={"n": str(index)})
    try:
        if index % 2:
            assert (await sandbox.exec("echo x")).stdout == "x\n"
        if index % 10 == 3:
            await sandbox.pause()
            assert (await sandbox.exec("echo y")).stdout == "y\n"
        if index % 10 == 7:
            running = asyncio.create_task(sandbox.exec("sleep 5"))
            await asyncio.sleep(0)
            await sandbox.kill()
            with contextlib.suppress(LLM4AgentsError):
                await running
    finally:
        await sandbox.kill()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args()
    warm = max(20, options.cycles // 10)
    gate = asyncio.Semaphore(options.at_once)

    async def one(index: int) -> None:
        async with gate:
            await cycle(index)

    await asyncio.gather(*(one(index) for index in range(warm)))
    pid = await server_pid()
    before = rss_mib(pid)
    await asyncio.gather(*(one(index) for index in range(options.cycles)))
    assert await server_pid() == pid
    after = rss_mib(pid)
    finish({"cycles": options.cycles, "rss_growth_mib": round(after - before, 1), "rss_mib": round(after, 1)})


if __name__ == "__main__":
    asyncio.run(main())
