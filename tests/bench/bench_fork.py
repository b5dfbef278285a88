"""Twenty forks of a running `python` sandbox: forks per second, and what each holds in memory."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from llm4agents import AsyncSandbox
from llm4agents.config import settings
from llm4agents.vmm import procfs, shim
from tests.bench.common import finish, summary


def pss_mib() -> list[float]:
    """Of every VMM of this node."""
    shims = shim.running(settings().run_dir / "vm")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent in shims and (stats := procfs.stats(int(entry.name))) is not None:
                found.append(stats.pss_bytes / 2**20)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates, pss, firsts = [], [], []
    async with await AsyncSandbox.create("python", timeout=600) as sandbox:
        await sandbox.run_code("import pandas as pd; df = pd.DataFrame({'a': range(100_000)}); df.a.sum()")
        for _ in range(options.rounds):
            began = time.perf_counter()
            children = await sandbox.fork(options.count)
            rates.append(options.count / (time.perf_counter() - began))
            began = time.perf_counter()
            answer = await children[0].run_code("print(df.a.sum())")
            firsts.append((time.perf_counter() - began) * 1000)
            assert answer.stdout == "4999950000\n", answer
            for child in children[1:]:
                assert (await child.run_code("print(len(df))")).stdout == "100000\n"
            pss += pss_mib()
            for child in children:
                await child.kill()
    finish(
        {
            "per_s": summary(rates, digits=2),
            "pss_mib": summary(pss),
            "first_code_ms": summary(firsts),
            "count": options.count,
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
