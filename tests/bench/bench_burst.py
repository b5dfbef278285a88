"""Creates all at once with the pool off: how many succeed, how many a second, and what each took. Milliseconds.

Beside it the on-demand create of an idle node, in the same run, which the crowd control must not make slower.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from llm4agents import AsyncSandbox, LLM4AgentsError
from llm4agents.sdk._async.client import AsyncClient
from tests.bench.common import finish, summary


async def one(template: str, into: list[float], kept: list[AsyncSandbox], failed: list[str]) -> None:
    began = time.perf_counter()
    try:
        kept.append(await AsyncSandbox.create(template))
    except LLM4AgentsError as error:
        failed.append(str(error))
    else:
        into.append((time.perf_counter() - began) * 1000)


async def kill(kept: list[AsyncSandbox]) -> None:
    for sandbox in kept:
        await sandbox.kill()
    kept.clear()


async def measure(count: int, idle: int, template: str) -> None:
    kept: list[AsyncSandbox] = []
    failed: list[str] = []
    async with AsyncClient() as client:
        await client.build_template(template)
        assert not any(shelf["wanted"] for shelf in (await client.pool())["data"]), "the pool is to be off"
        alone: list[float] = []
        for number in range(idle + 1):
            await one(template, alone if number else [], kept, failed)  # the first loads the template
            await kill(kept)
        taken: list[float] = []
        began = time.perf_counter()
        await asyncio.gather(*(one(template, taken, kept, failed) for _ in range(count)))
        seconds = time.perf_counter() - began
        answered = 0
        for sandbox in kept:
            answered += (await sandbox.exec(["/bin/true"])).exit_code == 0
        capacity = (await client.pool())["capacity"]
        await kill(kept)
    for why in sorted(set(failed)):
        print(f"{failed.count(why)} × {why}", file=sys.stderr)
    finish(
        {
            "n": count,
            "ok": answered,
            "per_s": round(len(taken) / seconds, 1),
            "ms": summary(taken or [0.0]),
            "idle_ms": summary(alone),
            "template": template,
            "held_mib": capacity["held_bytes"] >> 20,
            "available_mib": capacity["available_bytes"] >> 20,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100)
    parser.add_argument("--idle", type=int, default=10)
    parser.add_argument("--template", default="python")
    args = parser.parse_args()
    asyncio.run(measure(args.n, args.idle, args.template))


if __name__ == "__main__":
    main()
