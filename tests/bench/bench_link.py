"""What a sandbox's link costs: made on demand, taken from the pool, let go of, and in kernel memory. No machine.

`gone_ms`: from the last close until the kernel has taken a namespace down; nobody waits for it. `kernel_kib`: slab,
per-CPU and vmalloc memory for each of `--alive` links, idle; of use only where nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from llm4agents.barrier.link.links import SPEC, Link, Links
from llm4agents.barrier.workers import Worker
from tests.barrier.guestside import Watched
from tests.bench.common import finish, summary

_KERNEL = ("Slab", "Percpu", "VmallocUsed", "KernelStack")


def kernel_kib() -> int:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0].rstrip(":") in _KERNEL)


def ms(began: float) -> float:
    return (time.perf_counter() - began) * 1000


async def measure(rounds: int, alive: int) -> None:
    with tempfile.TemporaryDirectory(prefix="l4a-bench-") as home:
        worker = Worker(SPEC, run=Path(home), state=Path(home), version="bench")
        await worker.start()
        try:
            finish(await _measure(worker, rounds, alive))
        finally:
            await worker.close(keep=False)


async def _measure(worker: Worker, rounds: int, alive: int) -> dict[str, object]:
    direct = Links(worker, ready=0)
    (await direct.take()).close()
    makes, closes, ends = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        link = await direct.take()
        makes.append(ms(began))
        watched = Watched(link.planted.netns)
        began = time.perf_counter()
        link.close()
        closes.append(ms(began))
        while not watched.gone():
            await asyncio.sleep(0.001)
        ends.append(ms(began))
        watched.close()

    pool = Links(worker)
    takes = []
    for _ in range(rounds):
        pool.fill()
        while not pool.ready:
            await asyncio.sleep(0.001)
        began = time.perf_counter()
        link = await pool.take()
        takes.append(ms(began))
        link.close()
    await pool.close()

    before = kernel_kib()
    links: list[Link] = [await direct.take() for _ in range(alive)]
    each = (kernel_kib() - before) / alive
    began = time.perf_counter()
    for link in links:
        link.close()
    return {
        "make_ms": summary(makes, digits=2),
        "take_ms": summary(takes, digits=3),
        "close_ms": summary(closes, digits=3),
        "gone_ms": summary(ends),
        "close_all_ms": round(ms(began), 1),
        "kernel_kib": round(each, 1),
        "alive": alive,
        "load_before": round(os.getloadavg()[2], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--alive", type=int, default=100)
    args = parser.parse_args()
    asyncio.run(measure(args.rounds, args.alive))


if __name__ == "__main__":
    main()
