"""What the VMM's side of a create costs.

`jail_ms`: what jailing QEMU adds, clones with and without in turns, here. `restore_ratio`, `boot_ratio`: what our
driver adds to Firecracker, in the laboratory (`tests.bench.firecracker`, which has every step too).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator
from typing import Any

from llm4agents.vmm import shim
from tests.bench.common import Bare, finish, summary
from tests.lab.laboratory import DELEGATE, laboratory, to_stderr


@contextlib.contextmanager
def without_jail() -> Iterator[None]:
    """VMMs started meanwhile have none: only their uid, limits and flags, as every VMM has them."""
    start = shim.start

    async def bare(launch: shim.Launch) -> shim.Started:
        return await start(dataclasses.replace(launch, jail=None))

    shim.start = bare
    try:
        yield
    finally:
        shim.start = start


async def jail_ms(bare: Bare, rounds: int, template: str = "base") -> dict[str, object]:
    """Milliseconds from the restore of a clone to its agent's first answer, with the jail and without it.

    `jail_ms` is the difference of the medians; of the means of the fastest half it is `jail_ms_fast`, which
    a busy machine disturbs less.
    """
    variant, snapshot = await bare.template(template)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for jailed in (True, False) if number % 2 else (False, True):
            with contextlib.nullcontext() if jailed else without_jail():
                async with bare.clone(variant, snapshot) as (_, first_ms, machine):
                    assert bool(machine.record.extra["jail"].get("ns")) is jailed, machine.record.extra
            if number:  # the first of each reads what the others find in memory
                times[jailed].append(first_ms)
    fast = {
        jailed: statistics.fmean(sorted(found)[: max(1, len(found) // 2)]) for jailed, found in times.items()
    }
    return {
        "jail_ms": round(statistics.median(times[True]) - statistics.median(times[False]), 2),
        "jail_ms_fast": round(fast[True] - fast[False], 2),
        "jailed_ms": summary(times[True]),
        "unjailed_ms": summary(times[False]),
    }


async def measure_jail(rounds: int) -> dict[str, object]:
    bare = Bare()
    try:
        return await jail_ms(bare, rounds)
    finally:
        await bare.driver.close()


def firecracker(rounds: int, boots: int) -> dict[str, Any]:
    """Of real Firecracker, inside a nested sandbox: `restore_ratio`, `boot_ratio`, `firecracker_steps_ms`."""
    with laboratory(say=to_stderr) as lab:
        lab.shell(
            f"python3 -m tests.lab.inside && ({DELEGATE})"
        ).check()  # tells the cache in there what there is
        command = ["python3", "-m", "tests.bench.firecracker", str(rounds), str(boots)]
        done = lab.shell(command, say=to_stderr).check()
        found = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "restore_ratio": found["restore_ratio"],
        "boot_ratio": found["boot_ratio"],
        "firecracker_steps_ms": found["steps_ms"],
        "firecracker": {name: binary.sha256 for name, binary in lab.vmms.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="clones of QEMU, with and without a jail")
    parser.add_argument("--restores", type=int, default=20, help="of Firecracker, bare and driven")
    parser.add_argument("--boots", type=int, default=5, help="of Firecracker, bare and driven")
    asked = parser.parse_args()
    result = asyncio.run(measure_jail(asked.rounds))
    to_stderr(f"{json.dumps(result)}\n")
    finish({**result, **firecracker(asked.restores, asked.boots)})


if __name__ == "__main__":
    main()
