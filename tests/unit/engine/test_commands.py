"""Commands over sessions that end, against the real agent: what a pause tells, what leaving does, what is forgotten."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from llm4agents.engine import calls, clock, processes
from llm4agents.engine.live import Live
from llm4agents.engine.processes import Command
from llm4agents.errors import ConflictError, InvalidRequestError, SandboxPausedError
from llm4agents.guest.channel import Session
from llm4agents.guest.verbs import Agent
from llm4agents.store import SandboxRow
from llm4agents.vmm.base import Machine
from tests.unit.guest.agent_process import Served


class Stands:
    async def set_deadline(self, unix: float | None, *, act: str = "kill") -> None:
        pass


class Sandbox:
    """A sandbox whose guest is an agent's process, and what a pause does to it."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def wake(self, *, dirty: bool = False) -> Live:
        sock = socket.socket(fileno=os.dup(self._served.ours.fileno()))
        agent = Agent(await Session.open(sock, dirty=dirty))
        now = clock.wall_s()
        row = SandboxRow("sbx_x", "base", "running", now, now + 1000, 300, 1, 512, 5)
        self.live = Live(row, cast(Machine, Stands()), agent, lambda *_: None, lambda: 1 << 40, env={})
        return self.live

    async def pause(self) -> None:
        self.live.interrupt(SandboxPausedError("paused"))
        await self.live.agent.session.quiesce()
        await self.live.agent.session.close()
        self.live.stop_watching()


@contextlib.asynccontextmanager
async def sandbox() -> AsyncIterator[Sandbox]:
    served = Served()
    made = Sandbox(served)
    try:
        await made.wake()
        yield made
        made.live.stop_watching()
        await made.live.agent.session.close()
    finally:
        served.end()


def run(test: Callable[[Sandbox], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(40), sandbox() as made:
            await test(made)

    asyncio.run(whole())


def command(script: str, **more: Any) -> Command:
    return Command(["/bin/sh", "-c", script], user=os.getuid(), timeout_s=None, **more)


COUNT = "i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done"
WHOLE = b"".join(b"%d\n" % n for n in range(20_000))


def test_a_pause_in_a_stream_says_what_to_read_on_from() -> None:
    async def test(it: Sandbox) -> None:
        said, taken = bytearray(), 0
        with pytest.raises(SandboxPausedError) as caught:
            # As the server does: what is under way may be a piece that is just being sent.
            async with contextlib.aclosing(calls.exec_stream(it.live, command(COUNT))) as events:
                async for event in events:
                    if event["type"] == "stdout":
                        assert event["offset"] == len(said)
                        said += base64.b64decode(event["data_b64"])
                        taken += 1
                        if taken == 2:
                            pausing = asyncio.create_task(it.pause())
                            await asyncio.sleep(0)
        await pausing
        assert caught.value.details["offset"] == len(said) < len(WHOLE)
        id = caught.value.details["process"]
        await it.wake()
        async for event in processes.follow(it.live, id, len(said)):
            if event["type"] == "stdout":
                assert event["offset"] == len(said)
                said += base64.b64decode(event["data_b64"])
        assert said == WHOLE and event["exit_code"] == 0
        await processes.forget(it.live, id)

    run(test)


def test_a_pause_of_a_command_that_is_waited_for_tells_its_id_and_the_beginning() -> None:
    async def test(it: Sandbox) -> None:
        waiting = asyncio.create_task(calls.exec_wait(it.live, command("echo said; sleep 0.5; exit 3")))
        while not [info for info in await processes.listing(it.live) if info.offset]:
            await asyncio.sleep(0)
        await it.pause()
        with pytest.raises(SandboxPausedError) as caught:
            await waiting
        assert caught.value.details["offset"] == 0
        await it.wake()
        assert (await processes.get(it.live, caught.value.details["process"], 10)).exit_code == 3

    run(test)


def test_leaving_a_command_leaves_it_or_kills_it() -> None:
    async def test(it: Sandbox) -> None:
        for kill in (False, True):
            manner = calls.Manner(id=f"k{kill}", kill_when_left=kill)
            waiting = asyncio.create_task(calls.exec_wait(it.live, command("echo; sleep 0.3"), manner))
            while not [
                info for info in await processes.listing(it.live) if info.id == manner.id and info.offset
            ]:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            ended = await processes.get(it.live, f"k{kill}", 10)
            assert ended.signal == (9 if kill else None) and not ended.running

    run(test)


def test_who_leaves_before_it_has_started_leaves_it_too() -> None:
    async def test(it: Sandbox) -> None:
        waiting = asyncio.create_task(calls.exec_wait(it.live, command("exit 4"), calls.Manner(id="p")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while not await processes.listing(it.live):
            await asyncio.sleep(0)
        assert (await processes.get(it.live, "p", 10)).exit_code == 4

    run(test)


def test_what_is_to_be_forgotten_is_not_seen_and_its_id_is_free() -> None:
    async def test(it: Sandbox) -> None:
        for _ in range(3):
            body = await calls.exec_wait(it.live, command("echo x"), calls.Manner(id="same"))
            assert body["stdout"] == "x\n"
            await processes.forget_soon(it.live, body["id"])
            assert await processes.listing(it.live) == []
        async with asyncio.timeout(10):
            while await it.live.agent.processes():
                await asyncio.sleep(0.02)

    run(test)


def test_signals_have_names() -> None:
    assert [processes.signal_number(name) for name in ("TERM", "sigkill", "9", 15)] == [15, 9, 9, 15]
    for wrong in ("NOPE", "", 0, 65, -1, "999"):
        with pytest.raises(InvalidRequestError):
            processes.signal_number(wrong)


def test_a_resize_without_a_terminal_is_a_conflict() -> None:
    async def test(it: Sandbox) -> None:
        info = await processes.start(it.live, command("sleep 60"))
        with pytest.raises(ConflictError, match="terminal"):
            await processes.resize(it.live, info.id, 3, 4)
        assert (await processes.end(it.live, info.id)).signal == 9

    run(test)
