"""Time to interactive as ComputeSDK measures it: from the call that creates a sandbox to the end of `node -v` in it.

Three modes: `sequential` (one after the other), `staggered` (one begins every 200 ms, however the others are doing),
`burst` (all at once). Ending a sandbox is not timed; one that takes more than 120 s, or fails, is a failure.

Medians and percentiles of what succeeded, without the fastest and slowest 5% (as theirs are), and their score: each of
median, p95 and p99 is worth 100 * (1 - ms / 10,000), 0 at the least; they count 0.60, 0.25 and 0.15; the sum is
multiplied by the part that succeeded. Definition: METHODOLOGY.md of github.com/computesdk/benchmarks, as of
6fafdd0d7446 (2026-03). What is ours: the client and the server are on one machine, so there is no network between
them, and theirs has one; all of a burst share this machine's processors.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable

from llm4agents import AsyncSandbox
from tests.bench.common import finish, percentile

TIMEOUT_S = 120.0
STAGGER_S = 0.2
CEILING_MS = 10_000.0
TRIMMED = 0.05
WEIGHTS = {"p50": 0.60, "p95": 0.25, "p99": 0.15}

Tti = tuple[float | None, str | None]
"""Milliseconds, or what went wrong."""


async def one(wait_s: float) -> Tti:
    """`wait_s`: how long a create may queue for room on this machine."""
    sandbox: AsyncSandbox | None = None
    began = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            sandbox = await AsyncSandbox.create("node", wait=wait_s)
            done = await sandbox.exec(["node", "-v"])
            took = (time.perf_counter() - began) * 1000
        if done.exit_code != 0 or not done.stdout.startswith("v"):
            return None, f"node -v: {done.exit_code} {done.stderr[:200]}"
        return took, None
    except Exception as error:  # each is a failure, whatever it was
        return None, f"{type(error).__name__}: {error}"[:300]
    finally:
        if sandbox is not None:
            await sandbox.kill()


async def sequential(count: int, wait_s: float) -> list[Tti]:
    return [await one(wait_s) for _ in range(count)]


async def staggered(count: int, wait_s: float) -> list[Tti]:
    async def later(number: int) -> Tti:
        await asyncio.sleep(number * STAGGER_S)  # the very thing that is measured under
        return await one(wait_s)

    return await asyncio.gather(*(later(number) for number in range(count)))


async def burst(count: int, wait_s: float) -> list[Tti]:
    return await asyncio.gather(*(one(wait_s) for _ in range(count)))


MODES: dict[str, Callable[[int, float], Awaitable[list[Tti]]]] = {
    "sequential": sequential,
    "staggered": staggered,
    "burst": burst,
}


def scored(found: list[Tti], wall_s: float) -> dict[str, object]:
    """Their summary of one mode. Pure."""
    times = sorted(ms for ms, _ in found if ms is not None)
    part = len(times) / len(found)
    problems = sorted({text for _, text in found if text is not None})
    result: dict[str, object] = {"n": len(found), "success": round(part, 4), "wall_s": round(wall_s, 1)}
    if problems:
        result["problems"] = problems[:5]
    if not times:
        return {**result, "score": 0.0}
    cut = int(len(times) * TRIMMED)
    kept = times[cut : len(times) - cut]
    stats = {name: percentile(kept, float(name[1:])) for name in WEIGHTS}
    worth = {name: max(0.0, 100.0 * (1.0 - ms / CEILING_MS)) for name, ms in stats.items()}
    score = part * sum(WEIGHTS[name] * worth[name] for name in WEIGHTS)
    return {
        **result,
        **{f"{name}_ms": round(ms, 1) for name, ms in stats.items()},
        "first_ms": round(times[0], 1),
        "last_ms": round(times[-1], 1),
        "score": round(score, 2),
    }


async def measure(count: int, modes: list[str], wait_s: float) -> None:
    await one(600.0)  # starts the server, builds or loads the template
    result: dict[str, object] = {"load_before": round(os.getloadavg()[0], 1)}
    for mode in modes:
        began = time.perf_counter()
        found = await MODES[mode](count, wait_s)
        result[mode] = scored(found, time.perf_counter() - began)
        print(f"{mode}: {result[mode]}", file=sys.stderr)
    finish(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="sandboxes of each mode")
    parser.add_argument("--modes", default=",".join(MODES), help="which, in that order")
    parser.add_argument("--wait", type=float, default=TIMEOUT_S, help="seconds a create may queue for room")
    args = parser.parse_args()
    asyncio.run(measure(args.count, args.modes.split(","), args.wait))


if __name__ == "__main__":
    main()
