"""A guest that lies about its processes: its session ends, and what it says costs no more than it weighs."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from llm4agents import limits
from llm4agents.errors import LLM4AgentsError, ProtocolError
from llm4agents.guest.frames import FrameType
from llm4agents.guest.verbs import Agent
from tests.unit.guest.fake_guest import FakeGuest, session

ATTACHED = {"pid": 3, "id": "p", "running": True, "start": 0, "offset": 5, "gap": 0, "tty": False}
PROCESS = {
    "id": "p",
    "pid": 3,
    "tag": None,
    "argv": ["a"],
    "cwd": "/",
    "user": "u",
    "tty": False,
    "started_at": 1.0,
    "running": True,
    "exit_code": None,
    "signal": None,
    "timed_out": False,
    "start": 0,
    "offset": 0,
}


def run(test: Any) -> None:
    async def whole() -> None:
        async with session() as (opened, guest):
            hello = opened.hello
            opened.hello = type(hello)(1, hello.agent, "", ("managed",), hello.streams_max)
            await test(Agent(opened), guest)

    asyncio.run(asyncio.wait_for(whole(), 20))


@pytest.mark.parametrize(
    "lie",
    [{"offset": 6}, {"offset": -1}, {"gap": 1}, {"gap": "x"}, {"pid": 0}, {"tty": 3}, {"offset": 2**63}],
    ids=str,
)
def test_what_it_says_of_an_attachment_must_add_up(lie: dict[str, Any]) -> None:
    async def test(agent: Agent, guest: FakeGuest) -> None:
        attaching = asyncio.create_task(agent.attach("p", from_offset=5))
        stream, _ = await guest.opened("attach")
        await guest.send(stream, FrameType.REPLY, {**ATTACHED, **lie})
        with pytest.raises(ProtocolError):
            await attaching
        assert isinstance(await agent.session.closed, ProtocolError)

    run(test)


@pytest.mark.parametrize(
    "end", [{}, {"exit_code": 1, "signal": 2, "offset": 3}, {"exit_code": 0, "offset": -3}], ids=str
)
def test_an_end_must_be_one(end: dict[str, Any]) -> None:
    async def test(agent: Agent, guest: FakeGuest) -> None:
        attaching = asyncio.create_task(agent.attach("p", from_offset=5))
        stream, _ = await guest.opened("attach")
        await guest.send(stream, FrameType.REPLY, ATTACHED)
        attached = await attaching
        await guest.send(stream, FrameType.END, end)
        with pytest.raises(ProtocolError):
            await attached.wait()
        assert isinstance(await agent.session.closed, ProtocolError)

    run(test)


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\x01" * 1000,
        msgpack.packb({**PROCESS, "pid": -1}),
        msgpack.packb({**PROCESS, "argv": "a"}),
        msgpack.packb({**PROCESS, "argv": [1]}),
        msgpack.packb({**PROCESS, "started_at": float("nan")}),
        msgpack.packb(PROCESS) * (limits.PROCESSES_MAX + 1),
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_list_that_is_none(body: bytes) -> None:
    async def test(agent: Agent, guest: FakeGuest) -> None:
        listing = asyncio.create_task(agent.processes())
        stream, _ = await guest.opened("processes")
        await guest.send(stream, FrameType.REPLY, {})
        for at in range(0, len(body), 60_000):
            await guest.send(stream, FrameType.DATA, body[at : at + 60_000])
        await guest.send(stream, FrameType.EOF)
        await guest.send(stream, FrameType.END, {})
        with pytest.raises(ProtocolError):
            await listing
        assert isinstance(await agent.session.closed, ProtocolError)

    run(test)


@pytest.mark.parametrize(
    "ports", [None, [3], [{}], [{"port": 0, "address": "x", "inode": 1}], [{}] * 300], ids=str
)
def test_ports_that_are_none(ports: Any) -> None:
    async def test(agent: Agent, guest: FakeGuest) -> None:
        asking = asyncio.create_task(agent.ports())
        stream, _ = await guest.opened("ports")
        await guest.send(stream, FrameType.REPLY, {"ports": ports})
        await guest.send(stream, FrameType.END, {})
        with pytest.raises(LLM4AgentsError):
            await asking

    run(test)


def test_what_is_said_after_letting_go_is_dropped_and_its_end_is_the_end() -> None:
    async def test(agent: Agent, guest: FakeGuest) -> None:
        attaching = asyncio.create_task(agent.attach("p", from_offset=5))
        stream, _ = await guest.opened("attach")
        await guest.send(stream, FrameType.REPLY, ATTACHED)
        attached = await attaching
        attached.detach()
        await guest.expect(FrameType.DETACH)
        await guest.send(stream, FrameType.DATA, b"late", 1)
        await guest.send(stream, FrameType.END, {"detached": True, "offset": 9})
        await attached.settle()
        assert not agent.session.closed.done()
        assert attached.offset == 5

    run(test)
