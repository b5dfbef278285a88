"""Cold boots in a row: how many of them come up to an answering agent at the first try."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time

from llm4agents import limits
from llm4agents.engine import contact
from llm4agents.engine.parts import Shape
from llm4agents.errors import LLM4AgentsError
from llm4agents.images import disk, spec
from llm4agents.images.progress import silent
from llm4agents.vmm.base import Placement
from tests.bench.common import Bare, finish, summary


async def measure(count: int) -> None:
    bare = Bare()
    made_of = await bare.templates.parts_of(spec.get("base"), bare.driver, silent)
    run_dir = bare.settings.run_dir / "bench" / "boot"
    run_dir.mkdir(parents=True, mode=0o700)
    of = Shape("base", 1, limits.DEFAULT_MEMORY_MIB, bare.driver.name)
    times, failures = [], []
    try:
        for number in range(count):
            upper = run_dir / "upper.raw"
            await disk.make_upper(upper, limits.DISK_GIB << 30)
            began = time.perf_counter()
            machine = None
            try:
                shape = made_of.machine(of, upper)
                placement = Placement(f"bench-boot-{number}", run_dir, time.time() + 300)
                machine = await bare.driver.boot(shape, placement)
                await contact.greet(machine, timeout=limits.BOOT_TIMEOUT_S)
                times.append((time.perf_counter() - began) * 1000)
            except LLM4AgentsError as error:
                failures.append(f"{error} {error.details.get('console', '')}"[:2000])
            finally:
                if machine is not None:
                    await machine.stop()
                upper.unlink(missing_ok=True)
            if number % 10 == 9:
                print(f"{number + 1} boots, {len(failures)} failed", file=sys.stderr)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
        await bare.driver.close()
    finish({"ok": len(times), "n": count, "boot_ms": summary(times), "failures": failures})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    asyncio.run(measure(parser.parse_args().count))


if __name__ == "__main__":
    main()
