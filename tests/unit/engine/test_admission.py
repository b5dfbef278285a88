"""Who is admitted: the decision, the queue, what follows a sandbox's life, and settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.config import PoolWish, load, pool_of
from llm4agents.engine import admission
from llm4agents.engine.admission import Admission, Policy, charge_bytes, decide
from llm4agents.engine.host import Host, busy, host
from llm4agents.errors import CapacityError, InvalidRequestError
from llm4agents.store import SandboxRow
from llm4agents.store.store import Stamp

MIB, GIB = 1 << 20, 1 << 30
BIG = Host(24 * GIB, 23 * GIB, 100 * GIB)


def refusal(
    now: Host, *, memory_mib: int = 1024, held: int = 0, commit: float = 0.15
) -> admission.Refusal | None:
    charge, whole = charge_bytes(memory_mib, commit), charge_bytes(memory_mib, 1.0)
    return decide(now, Policy(commit), held_bytes=held, charge=charge, whole=whole)


def run(test: Callable[[], Awaitable[Any]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(main())


def fitting(now: Host, memory_mib: int, commit: float) -> int:
    held, count = 0, 0
    while refusal(now, memory_mib=memory_mib, held=held, commit=commit) is None:
        held += charge_bytes(memory_mib, commit)
        count += 1
    return count


def test_a_burst_of_a_hundred_fits_a_host_of_24_gib_and_nothing_is_promised_twice_at_one() -> None:
    assert fitting(BIG, 1024, limits.MEMORY_COMMIT) >= 100
    never = fitting(BIG, 1024, 1.0)
    assert never * (1024 + limits.TB_SIZE_MIB + admission.VMM_MIB) * MIB <= BIG.memory_total_bytes


def test_a_refusal_names_what_is_full_how_much_is_free_and_what_would_help() -> None:
    assert refusal(BIG) is None
    full = refusal(BIG, held=int(22.7 * GIB))
    assert (
        full is not None and "full" in full.message and "free" in full.message and "kill" not in full.message
    )
    assert "LLM4AGENTS_MEMORY_COMMIT" in full.hint and not full.final
    assert full.error().details["free_bytes"] == full.free_bytes < full.needed_bytes
    short = refusal(Host(24 * GIB, 700 * MIB, 100 * GIB))
    assert short is not None and "short of memory" in short.message and "goes on" in short.message
    disk = refusal(Host(24 * GIB, 20 * GIB, limits.DISK_FREE_BYTES_MIN - 1))
    assert disk is not None and "disk" in disk.message
    never = refusal(Host(8 * GIB, 8 * GIB, 100 * GIB), memory_mib=8192)
    assert never is not None and never.final and "ask for less memory" in never.hint


class Node:
    def __init__(self, total_mib: int = 4096, **policy: Any) -> None:
        self.now = Host(total_mib * MIB, total_mib * MIB, 100 * GIB)
        self.admission = Admission(Policy(**{"commit": 1.0, "reserve_mib": 512, **policy}), lambda: self.now)


def test_the_queue_is_first_come_first_served_and_has_a_deadline() -> None:
    async def test() -> None:
        node = Node()  # 3584 MiB: three of 1024 (+168 each) do not leave room for a fourth
        gate = node.admission
        for name in "abc":
            await gate.reserve(name, 1024)
        with pytest.raises(CapacityError, match="full"):
            await gate.reserve("d", 1024)
        order: list[str] = []

        async def queue(name: str, memory_mib: int) -> None:
            await gate.reserve(name, memory_mib, wait_s=10)
            order.append(name)

        tasks = []
        for name, memory_mib in (("big", 2048), ("small", 256), ("late", 256)):
            tasks.append(asyncio.create_task(queue(name, memory_mib)))
            await asyncio.sleep(0)
        gate.release("a")  # enough for the small ones, who stand behind the big one
        await asyncio.sleep(0.01)
        assert order == [] and gate.waiting == 3
        with pytest.raises(CapacityError, match="3 creates are waiting"):
            await gate.reserve("e", 256)
        with pytest.raises(CapacityError, match=r"waited 0\.05 s"):
            await gate.reserve("f", 256, wait_s=0.05)
        gate.release("b")
        await asyncio.gather(*tasks[:1])
        assert order[0] == "big"
        tasks[2].cancel()
        gate.release("c")
        await tasks[1]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["big", "small"] and gate.waiting == 0
        assert gate.holds("late") == 0, "who went away holds nothing"

    run(test)


def test_what_one_project_waits_for_holds_up_no_other() -> None:
    async def test() -> None:
        gate = Node().admission
        for name in "abc":
            await gate.reserve(name, 1024, project="others")
        big = asyncio.create_task(gate.reserve("big", 3072, wait_s=10, project="greedy"))
        small = asyncio.create_task(gate.reserve("small", 256, wait_s=10, project="greedy"))
        await asyncio.sleep(0)
        gate.release("a")
        await asyncio.sleep(0.01)
        assert not big.done() and not small.done()  # within a project nobody overtakes
        await gate.reserve("d", 256, project="others")
        with pytest.raises(CapacityError, match="2 creates are waiting"):
            await gate.reserve("pool's", 256)
        for name in "bcd":
            gate.release(name)
        await big
        gate.release("big")
        await small

    run(test)


def test_who_waits_hears_of_memory_that_others_gave_back() -> None:
    async def test() -> None:
        node = Node()
        node.now = Host(4 * GIB, 300 * MIB, 100 * GIB)
        waiting = asyncio.create_task(node.admission.reserve("a", 1024, wait_s=10))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        node.now = Host(4 * GIB, 4 * GIB, 100 * GIB)
        await waiting

    run(test)


def test_what_a_sandbox_holds_follows_its_life() -> None:
    async def test() -> None:
        gate = Node().admission
        row = SandboxRow("sbx_x", "base", "running", 0, 0, 0, 1, 1024, 5)
        for ended in ("paused", "killed", "failed"):
            await gate.reserve(row.id, 1024)
            await gate.reserve(row.id, 1024)  # held once
            assert gate.held_bytes == charge_bytes(1024, 1.0)
            gate.on_transition(row, "running", "pausing", None, Stamp(0, 0, ""))
            assert gate.holds(row.id)
            gate.on_transition(row, "running", ended, None, Stamp(0, 0, ""))
            assert gate.held_bytes == 0
        with pytest.raises(CapacityError):
            await gate.reserve_all(["a", "b", "c", "d"], 1024)
        assert gate.held_bytes == 0, "all or none"
        async with gate.building("build", 2048):
            with pytest.raises(CapacityError):
                await gate.reserve("a", 2048)
        assert gate.held_bytes == 0

    run(test)


def test_what_nobody_asked_for_makes_room() -> None:
    async def test() -> None:
        gate = Node().admission
        for name in "abc":
            await gate.reserve(name, 1024)

        async def make_room(_: int) -> bool:
            gate.release("a")
            return True

        gate.make_room = make_room
        await gate.reserve("d", 1024)

    run(test)


def test_turns_are_bounded() -> None:
    async def test() -> None:
        gate, most, now = Node().admission, 0, 0

        async def start() -> None:
            nonlocal most, now
            async with gate.turn():
                now += 1
                most = max(most, now)
                await asyncio.sleep(0.001)
                now -= 1

        await asyncio.gather(*(start() for _ in range(30)))
        assert 1 < most <= admission.starts_at_once(__import__("os").cpu_count() or 1) and gate.starting == 0

    run(test)


def test_the_figures_of_this_host_can_be_read(tmp_path: Any) -> None:
    now = host(tmp_path)
    assert 0 < now.memory_available_bytes <= now.memory_total_bytes and now.disk_free_bytes > 0
    assert busy() in (True, False)


def test_settings() -> None:
    given = load({"LLM4AGENTS_POOL": "python=2, base/2x512=1", "LLM4AGENTS_MEMORY_COMMIT": "1", "HOME": "/x"})
    assert given.pool == (PoolWish("python", 2), PoolWish("base", 1, 2, 512))
    assert given.memory_commit == 1.0 and given.memory_reserve_mib is None
    assert pool_of("") == ()
    for bad in ({"POOL": "python"}, {"POOL": "a=x"}, {"MEMORY_COMMIT": "0"}, {"MEMORY_COMMIT": "nan"}):
        with pytest.raises(InvalidRequestError, match="LLM4AGENTS_"):
            load({**{f"LLM4AGENTS_{name}": value for name, value in bad.items()}, "HOME": "/x"})
