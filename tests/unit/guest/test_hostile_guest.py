"""A guest that breaks every rule: its session ends with ProtocolError, and nothing else happens."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm4agents import limits
from llm4agents.errors import LLM4AgentsError, ProtocolError
from llm4agents.guest import frames
from llm4agents.guest.channel import Session
from llm4agents.guest.frames import FrameType
from llm4agents.guest.verbs import Agent
from tests.unit.guest.fake_guest import FakeGuest, session

Move = Callable[[FakeGuest, int], Coroutine[Any, Any, None]]
REPLY, DATA, EOF, END = FrameType.REPLY, FrameType.DATA, FrameType.EOF, FrameType.END


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def say(*moves: tuple[Any, ...]) -> Move:
    """Frames (stream or None for the exec's, type, body, flags)."""

    async def move(guest: FakeGuest, stream: int) -> None:
        for where, kind, body, flags in moves:
            await guest.send(stream if where is None else where, kind, body, flags)

    return move


async def too_much(guest: FakeGuest, stream: int) -> None:
    for _ in range(limits.STREAM_CREDIT_BYTES // 65_536):
        await guest.send(stream, DATA, bytes(65_536), 1)
    await guest.send(stream, DATA, b"x", 1)
    # Until it is read: what waits in the socket when credit is given is not beyond it.
    with contextlib.suppress(EOFError):
        while True:
            await guest.take(1)


async def flood(guest: FakeGuest, _: int) -> None:
    for _ in range(100):
        await guest.raw(frames.encode(guest.tag, 0, FrameType.EVENT, 0, b"\x81\xa5event\xa1x") * 100)


async def empty_flood(guest: FakeGuest, stream: int) -> None:
    for _ in range(100):
        await guest.raw(frames.encode(guest.tag, stream, DATA, 1) * 100)


async def endless_credit(guest: FakeGuest, stream: int) -> None:
    for _ in range(5):
        await guest.send(stream, FrameType.CREDIT, (1 << 20).to_bytes(4, "little"))


async def torn(guest: FakeGuest, stream: int) -> None:
    frame = bytearray(frames.encode(guest.tag, stream, DATA, 1, b"x" * 100))
    frame[-1] ^= 1
    await guest.raw(bytes(frame))


RULES: dict[str, Move] = {
    "random bytes": lambda guest, _: guest.raw(random.Random(7).randbytes(100_000)),
    "zeros": lambda guest, _: guest.raw(bytes(100_000)),
    "a preamble in mid-session": lambda guest, _: guest.raw(frames.preamble(guest.nonce)),
    "another session's frame": lambda guest, _: guest.raw(frames.encode(guest.tag ^ 1, 0, 12, 0, b"\x80")),
    "a wrong trailer": torn,
    "an oversized length": lambda guest, _: guest.raw(b"\xff" * 16),
    "an unknown type": say((0, 99, b"", 0)),
    "a host's frame": say((0, FrameType.QUIESCE, b"", 0)),
    "an OPEN": say((9, FrameType.OPEN, {"verb": "exec"}, 0)),
    "a second greeting": say((0, FrameType.HELLO_ACK, {"version": 1}, 0)),
    "QUIESCED unasked": say((0, FrameType.QUIESCED, b"", 0)),
    "an EVENT on a stream": say((None, FrameType.EVENT, {"event": "x"}, 0)),
    "an EVENT that is no map": say((0, FrameType.EVENT, b"\xc1", 0)),
    "a flood of EVENT": flood,
    "a flood of empty DATA": empty_flood,
    "END of an unknown stream": say((77, END, {}, 0)),
    "DATA of an unknown stream": say((77, DATA, b"x", 1)),
    "CREDIT for an unknown stream": say((77, FrameType.CREDIT, b"\1\0\0\0", 0)),
    "CREDIT of nothing": say((None, FrameType.CREDIT, bytes(4), 0)),
    "CREDIT of three bytes": say((None, FrameType.CREDIT, b"\1\0\0", 0)),
    "CREDIT without end": endless_credit,
    "CREDIT of 4 G": say((None, FrameType.CREDIT, b"\xff\xff\xff\xff", 0)),
    "a second REPLY": say((None, REPLY, {"pid": 8}, 0)),
    "flags on END": say((None, END, {"exit_code": 0}, 1)),
    "DATA on a channel there is not": say((None, DATA, b"x", 3)),
    "DATA on the body of an exec": say((None, DATA, b"x", 0)),
    "DATA after EOF": say((None, EOF, b"", 1), (None, DATA, b"x", 1)),
    "EOF twice": say((None, EOF, b"", 1), (None, EOF, b"", 1)),
    "EOF with a payload": say((None, EOF, b"x", 1)),
    "more than its credit": too_much,
    "an END that is no map": say((None, END, b"\xc1", 0)),
    "an END without exit": say((None, END, {}, 0)),
    "an ERROR that is no map": say((None, FrameType.ERROR, b"\x91" * 60_000, 0)),
    "anything after END": say((None, END, {"exit_code": 0, "signal": None}, 0), (None, DATA, b"x", 1)),
}


@pytest.mark.parametrize("move", RULES.values(), ids=RULES)
def test_a_broken_rule_ends_the_session_and_nothing_else(move: Move) -> None:
    async def test() -> None:
        async with session() as (victim, guest), session() as (bystander, other):
            agent = Agent(victim)
            starting = asyncio.create_task(agent.exec(["x"], stdin=True))
            stream, _ = await guest.opened("exec")
            await guest.send(stream, REPLY, {"pid": 7})
            process = await starting
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await move(guest, stream)
            try:
                await process.wait()
            except LLM4AgentsError as error:
                assert isinstance(error, ProtocolError)
            assert isinstance(await victim.closed, ProtocolError)
            with pytest.raises(ProtocolError):
                await agent.ping()
            ping = asyncio.create_task(Agent(bystander).ping())
            stream, _ = await other.opened("ping")
            await other.send(stream, REPLY, {})
            await other.send(stream, END, {})
            await ping

    run(test())


@pytest.mark.parametrize(
    ("kind", "body"),
    [(DATA, b"x"), (END, {}), (EOF, b""), (REPLY, b"\x93"), (REPLY, {}), (REPLY, {"pid": -1})],
)
def test_what_must_be_answered_first_is(kind: FrameType, body: Any) -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            starting = asyncio.create_task(Agent(opened).exec(["x"]))
            stream, _ = await guest.opened("exec")
            await guest.send(stream, kind, body, 1 if kind in (DATA, EOF) else 0)
            with pytest.raises(ProtocolError):
                await starting
            assert isinstance(await opened.closed, ProtocolError)

    run(test())


def test_speaking_after_falling_silent_ends_the_session() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            quieting = asyncio.create_task(opened.quiesce())
            await guest.expect(FrameType.QUIESCE)
            await guest.send(0, FrameType.QUIESCED)
            await quieting
            await guest.send(0, FrameType.EVENT, {"event": "x"})
            assert isinstance(await opened.closed, ProtocolError)

    run(test())


@pytest.mark.parametrize(
    "answer",
    [b"\xc1", b"\x80", b"\x91\x80", b"\x81\xa7version\xa11", b"\x81\xa7version\xc3"],
)
def test_a_greeting_that_makes_no_sense(answer: bytes) -> None:
    from tests.unit.guest.fake_guest import pair

    async def test() -> None:
        async with pair() as (ours, guest):
            opening = asyncio.create_task(Session.open(ours))
            await guest.greeting()
            await guest.raw(frames.preamble(guest.nonce))
            await guest.send(0, FrameType.HELLO_ACK, answer)
            with pytest.raises(ProtocolError):
                await opening
            assert ours.fileno() == -1

    run(test())


def test_a_file_that_is_longer_than_it_says_ends_the_session() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            opening = asyncio.create_task(Agent(opened).read("/f"))
            stream, _ = await guest.opened("read")
            await guest.send(stream, REPLY, {"size": 1, "mode": 0o644, "mtime": 1.0})
            file = await opening
            await guest.send(stream, DATA, b"abc")
            await guest.send(stream, EOF)
            await guest.send(stream, END, {"bytes": 4})
            with pytest.raises(ProtocolError, match="number of bytes"):
                await file.read(100)
            assert isinstance(await opened.closed, ProtocolError)

    run(test())


def test_more_of_a_file_than_was_asked_for_ends_the_session() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            opening = asyncio.create_task(Agent(opened).read("/f", length=2))
            stream, _ = await guest.opened("read")
            await guest.send(stream, REPLY, {"size": 9, "mode": 0o644, "mtime": 1.0})
            file = await opening
            await guest.send(stream, DATA, b"abc")
            with pytest.raises(ProtocolError, match="asked for"):
                await file.read(100)
            assert isinstance(await opened.closed, ProtocolError)

    run(test())


def test_tiny_pieces_cost_what_they_weigh() -> None:
    """256 KiB in two-byte frames that nobody takes: no multiple of it is kept."""

    async def test() -> None:
        async with session() as (opened, guest):
            starting = asyncio.create_task(Agent(opened).exec(["x"]))
            stream, _ = await guest.opened("exec")
            await guest.send(stream, REPLY, {"pid": 7})
            process = await starting
            frame = frames.encode(guest.tag, stream, DATA, 1, b"ab")
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(limits.STREAM_CREDIT_BYTES // 2 // 1_024):
                await guest.raw(frame * 1_024)
            taken = 0
            items = aiter(process)
            await anext(items)
            kept = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert kept < 3 * limits.STREAM_CREDIT_BYTES, kept
            assert taken == 0
            await items.aclose()

    run(test())


frame_like = st.builds(
    lambda stream, kind, flags, body: (stream, kind, flags, body),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 16),
    st.sampled_from([0, 0, 0, 1, 2, 3]),
    st.one_of(st.binary(max_size=64), st.sampled_from([b"", b"\x80", b"\x81\xa3pid\x07", b"\1\0\0\0"])),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(frame_like, max_size=30), st.binary(max_size=64))
def test_any_frames_in_any_order_end_in_an_error_of_ours(
    script: list[tuple[int, int, int, bytes]], junk: bytes
) -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            calls = [
                asyncio.create_task(Agent(opened).exec(["x"], stdin=b"abc")),
                asyncio.create_task(Agent(opened).list("/")),
            ]
            await guest.opened("exec")
            await guest.opened("list")
            data = b"".join(frames.encode(guest.tag, s, k, f, body) for s, k, f, body in script)
            await guest.raw(data + junk)
            guest.sock.close()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, LLM4AgentsError), outcome
            assert isinstance(await opened.closed, LLM4AgentsError)

    run(test())
