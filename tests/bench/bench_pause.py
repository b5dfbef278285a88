"""Pause and resume by difference: how long the guest stands still, until it is durable, and until it answers again.

`pause_ms`: from the first freeze of a process until all of the machine is copied (from then on it could go on).
`durable_ms`: from the call until every part is synced and has its digest. `resume_ms`: from the call of an exec on the
paused sandbox to its result. With 32 MiB of own pages (a file of random bytes in memory, rewritten each round).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from llm4agents import AsyncSandbox
from llm4agents.config import settings
from tests.bench.common import finish, summary

OWN_MIB = 32


async def rounds(memory_mib: int, count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"pause_ms": [], "durable_ms": [], "resume_ms": [], "pages_mib": []}
    async with await AsyncSandbox.create("base", memory_mib=memory_mib, timeout=600) as sandbox:
        await sandbox.exec(["/bin/true"])
        for _ in range(count):
            wrote = await sandbox.exec(f"head -c {OWN_MIB << 20} /dev/urandom > /dev/shm/own", timeout=120)
            assert wrote.exit_code == 0, wrote
            info = await sandbox.pause()
            assert info.pause is not None
            found["pause_ms"].append(info.pause["pause_ms"])
            found["durable_ms"].append(info.pause["durable_ms"])
            found["pages_mib"].append(info.pause["pages_bytes"] / 2**20)
            began = time.perf_counter()
            await sandbox.exec(["/bin/true"])
            found["resume_ms"].append((time.perf_counter() - began) * 1000)
        await sandbox.kill()
    return found


async def many(count: int) -> dict[str, float]:
    """`count` sandboxes paused side by side: what they cost on disk."""
    made = [await AsyncSandbox.create("base", timeout=3600)]
    await made[0].exec(["/bin/true"])
    while len(made) < count:
        for child in await made[0].fork(min(20, count - len(made))):
            await child.pause()
            made.append(child)
    await made[0].pause()
    state = Path(settings().state)
    total = sum(
        path.stat().st_blocks * 512
        for root in ("sandboxes", "layers")
        for path in (state / root).rglob("*")
        if path.is_file()
    )
    alive = 0
    for some in made[:: max(1, count // 10)]:  # they come back
        alive += (await some.exec("echo here")).stdout == "here\n"
        await some.pause()
    for each in made:
        await each.kill()
    return {"paused": len(made), "came_back": alive, "mib_each": round(total / len(made) / 2**20, 1)}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--many", type=int, default=0, help="also: so many sandboxes paused at once")
    parser.add_argument("--sizes", default="256,512,1024,2048", help="MiB of memory")
    options = parser.parse_args()
    at_size = await rounds(1024, options.rounds)
    by_memory = {}
    for size in map(int, options.sizes.split(",")):
        by_memory[size] = summary((await rounds(size, max(3, options.rounds // 4)))["pause_ms"])
    result: dict[str, object] = {
        "pause_ms": summary(at_size["pause_ms"]),
        "durable_ms": summary(at_size["durable_ms"]),
        "resume_ms": summary(at_size["resume_ms"]),
        "pause_ms_by_memory_mib": by_memory,
        "bytes_per_paused": round(sum(at_size["pages_mib"]) / len(at_size["pages_mib"]) * 2**20),
    }
    if options.many:
        result["many"] = await many(options.many)
    finish(result)


if __name__ == "__main__":
    asyncio.run(main())
