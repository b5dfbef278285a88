"""One running sandbox in memory: who may use it, how calls under way are ended, when it is due."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from llm4agents.engine import clock
from llm4agents.engine.live import Live
from llm4agents.errors import CapacityError, ConflictError, LLM4AgentsError, UnknownOutcomeError
from llm4agents.guest.verbs import Agent
from llm4agents.store import SandboxRow
from llm4agents.vmm.base import Machine

GIB = 1 << 30


class Stands:
    """The two calls of a machine that `Live` makes."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []
        self.resumed = 0

    async def set_deadline(self, unix: float | None, *, act: str = "kill") -> None:
        self.deadlines.append(unix)

    async def resume(self) -> None:
        self.resumed += 1


class Bench:
    def __init__(self, idle_timeout_s: float = 300.0, life_s: float = 1000.0) -> None:
        now = clock.wall_s()
        self.row = SandboxRow("sbx_x", "base", "running", now, now + life_s, idle_timeout_s, 1, 512, 5)
        self.machine = Stands()
        self.due: list[str] = []
        self.free = 10 * GIB
        self.live = Live(
            self.row,
            cast(Machine, self.machine),
            cast(Agent, object()),
            lambda _, reason: self.due.append(reason),
            lambda: self.free,
        )


def run(test: Callable[[], Awaitable[Any]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(main())


def test_calls_under_way_fail_with_the_reason_even_when_told_twice() -> None:
    async def test() -> None:
        it = Bench()
        seen: list[LLM4AgentsError] = []

        async def call() -> None:
            try:
                async with it.live.use("exec"):
                    await asyncio.Event().wait()
            except UnknownOutcomeError as error:
                seen.append(error)

        tasks = [asyncio.create_task(call()) for _ in range(2)]
        await asyncio.sleep(0)
        it.live.disk_is_full()
        it.live.disk_is_full()
        await asyncio.gather(*tasks)
        assert len(seen) == 2 and "disk is full" in str(seen[0])
        assert it.live.busy == 0

    run(test)


def test_a_callers_own_cancellation_stays_one() -> None:
    async def test() -> None:
        it = Bench()

        async def call() -> None:
            async with it.live.use("exec"):
                await asyncio.Event().wait()

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert it.live.busy == 0

    run(test)


def test_a_full_disk_refuses_until_there_is_room_and_then_goes_on() -> None:
    async def test() -> None:
        it = Bench()
        it.live.disk_is_full()
        it.free = 0
        with pytest.raises(CapacityError, match="disk is full"):
            async with it.live.use("exec"):
                raise AssertionError
        assert it.machine.resumed == 0
        it.free = 10 * GIB
        async with it.live.use("exec"):
            assert it.machine.resumed == 1
        async with it.live.use("exec"):
            assert it.machine.resumed == 1

    run(test)


def test_what_ends_takes_no_more_calls() -> None:
    async def test() -> None:
        it = Bench()
        it.live.ending = True
        with pytest.raises(ConflictError):
            async with it.live.use("exec"):
                raise AssertionError

    run(test)


def test_idle_time_is_up_once_and_at_its_time() -> None:
    async def test() -> None:
        it = Bench(idle_timeout_s=0.3)
        began = asyncio.get_running_loop().time()
        it.live.watch_deadlines()
        while not it.due:
            await asyncio.sleep(0.01)
        assert 0.29 <= asyncio.get_running_loop().time() - began < 2
        assert it.due == ["idle_timeout"]
        it.live.stop_watching()

    run(test)


def test_a_call_holds_it_open_and_the_shim_is_told_once() -> None:
    async def test() -> None:
        it = Bench(idle_timeout_s=0.3, life_s=500.0)
        it.live.watch_deadlines()
        async with it.live.use("exec"):
            await asyncio.sleep(1.2)  # past the idle time, and past the next telling of the shim
            assert it.due == []
        assert len(it.machine.deadlines) <= 2
        assert abs(it.machine.deadlines[-1] - it.row.life_ends_at) < 1
        it.live.stop_watching()

    run(test)
