"""A recipe of N steps, built, and built again with its last step changed: which steps ran, and what share of the time.

`ratio`: of the whole rebuild to the whole build; `steps_ratio` leaves out what both do once, the boot and freeze of the
machine that sandboxes are cloned from. `unchanged_s`: the same recipe again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import time

from llm4agents import AsyncTemplate, TemplateNotFoundError
from llm4agents.sdk._async.client import AsyncClient
from llm4agents.sdk._recipes import BuiltTemplate
from tests.bench.common import finish, summary

NAME = "bench-rebuild"
WORK = "head -c 4000000 /dev/urandom > data-{at}; sha256sum data-* > sums"
"""What a step does: four million random bytes, read again by every later step."""


def recipe(own: str, count: int, last: str) -> AsyncTemplate:
    made = (
        AsyncTemplate().from_template("base").size(memory_mib=256).network([]).env(OWN=own).workdir("/work")
    )
    for at in range(count - 1):
        made = made.run(WORK.format(at=at))
    return made.run(f"echo {last} > last")


async def timed(template: AsyncTemplate) -> tuple[BuiltTemplate, float]:
    began = time.perf_counter()
    return await template.build(NAME), time.perf_counter() - began


def ran(done: BuiltTemplate) -> list[int]:
    """Places of the steps that were run."""
    return [step.step or 0 for step in done.steps if step.status == "done"]


def ran_ms(done: BuiltTemplate) -> float:
    return sum(step.ms or 0.0 for step in done.steps if step.status == "done")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    full, changed, same, ratios, steps = [], [], [], [], []
    only_last = True
    try:
        for _ in range(options.rounds):
            own = secrets.token_hex(8)
            first, first_s = await timed(recipe(own, options.steps, "one"))
            # env and workdir are steps too, and only noted.
            assert ran(first) == list(range(2, options.steps + 2)), first
            second, second_s = await timed(recipe(own, options.steps, "two"))
            only_last = only_last and ran(second) == [options.steps + 1]
            third, third_s = await timed(recipe(own, options.steps, "two"))
            assert ran(third) == [] and third.key == second.key
            full.append(first_s)
            changed.append(second_s)
            same.append(third_s)
            ratios.append(second_s / first_s)
            steps.append(ran_ms(second) / ran_ms(first))
    finally:
        with contextlib.suppress(TemplateNotFoundError):
            async with AsyncClient() as client:
                await client.remove_template(NAME)
    finish(
        {
            "only_last_ran": only_last,
            "ratio": summary(ratios, digits=3),
            "steps_ratio": summary(steps, digits=3),
            "build_s": summary(full, digits=2),
            "rebuild_s": summary(changed, digits=2),
            "unchanged_s": summary(same, digits=2),
            "steps": options.steps,
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
