"""Session logic as transcripts: what the guest says, what we then say, what the caller gets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import msgpack
import pytest

from llm4agents import limits
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    ConnectionLostError,
    GuestError,
    InvalidRequestError,
    PathNotFoundError,
    TimedOutError,
    VersionMismatchError,
)
from llm4agents.guest import channel, frames
from llm4agents.guest.channel import Session
from llm4agents.guest.frames import FrameType
from llm4agents.guest.verbs import Agent
from tests.unit.guest.fake_guest import ACK, FakeGuest, pair, session


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_greeting_tells_what_the_agent_is() -> None:
    async def test() -> None:
        async with pair() as (ours, guest):
            opening = asyncio.create_task(Session.open(ours))
            assert (await guest.greeting())["versions"] == [1]
            await guest.raw(b"left over from before" * 100)
            await guest.answer()
            opened = await opening
            assert opened.hello == channel.Hello(1, "9.9", "b", ("x",), 1024)
            await opened.close()
            assert await opened.closed is None
            assert ours.fileno() == -1

    run(test())


def test_a_dirty_channel_is_padded_first() -> None:
    async def test() -> None:
        async with pair() as (ours, guest):
            opening = asyncio.create_task(Session.open(ours, dirty=True))
            assert await guest.take(frames.FRAME_BYTES_MAX) == frames.PAD
            await guest.greeting()
            await guest.answer()
            await (await opening).close()

    run(test())


def test_an_unanswered_greeting_is_repeated_with_a_new_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HELLO_RETRY_S", 0.01)

    async def test() -> None:
        async with pair() as (ours, guest):
            opening = asyncio.create_task(Session.open(ours))
            await guest.greeting()
            first = guest.nonce
            late = frames.preamble(first) + frames.encode(
                guest.tag, 0, FrameType.HELLO_ACK, 0, msgpack.packb(ACK)
            )
            await guest.greeting()
            assert guest.nonce != first
            monkeypatch.setattr(channel, "HELLO_RETRY_S", 10)
            while not await guest.silence():
                await guest.greeting()
            await guest.raw(late)
            await guest.answer()
            await (await opening).close()

    run(test())


@pytest.mark.parametrize("ack", [{"version": 0, "versions": [7]}, {"version": 7}])
def test_no_common_version_is_said(ack: dict[str, Any]) -> None:
    async def test() -> None:
        async with pair() as (ours, guest):
            opening = asyncio.create_task(Session.open(ours))
            await guest.greeting()
            await guest.answer(ack)
            with pytest.raises(VersionMismatchError, match="version"):
                await opening
            assert ours.fileno() == -1

    run(test())


def test_a_version_without_a_verb_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version before ours is one more entry of the table."""
    monkeypatch.setitem(channel.DIALECTS, 0x10, channel.Dialect(0x10, frozenset({"ping"})))

    async def test() -> None:
        async with pair() as (ours, guest):
            opening = asyncio.create_task(Session.open(ours))
            assert (await guest.greeting())["versions"] == [1, 0x10]
            await guest.answer({**ACK, "version": 0x10})
            opened = await opening
            with pytest.raises(VersionMismatchError, match="metrics"):
                await Agent(opened).metrics()
            await opened.close()

    run(test())


def test_silence_times_out() -> None:
    async def test() -> None:
        async with pair() as (ours, _):
            with pytest.raises(TimedOutError, match="greeting"):
                await Session.open(ours, timeout=0.05)
            assert ours.fileno() == -1

    run(test())


def test_a_channel_that_only_owns_a_descriptor_will_do() -> None:
    class Channel:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def fileno(self) -> int:
            return self._sock.fileno()

        def close(self) -> None:
            self._sock.close()

    async def test() -> None:
        async with pair() as (ours, guest):
            opening = asyncio.create_task(Session.open(Channel(ours)))
            await guest.greeting()
            await guest.answer()
            await (await opening).close()
            assert ours.fileno() == -1
            with pytest.raises(EOFError):
                await guest.take(1)

    run(test())


async def started(guest: FakeGuest, agent: Agent, **options: Any) -> tuple[Any, int]:
    opening = asyncio.create_task(agent.exec(["x"], **options))
    stream, _ = await guest.opened("exec")
    await guest.send(stream, FrameType.REPLY, {"pid": 7})
    return await opening, stream


def test_exec_output_then_end() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            process, stream = await started(guest, Agent(opened))
            await guest.send(stream, FrameType.DATA, b"out", 1)
            await guest.send(stream, FrameType.DATA, b"err", 2)
            await guest.send(stream, FrameType.EOF, b"", 2)
            await guest.send(stream, FrameType.EOF, b"", 1)
            assert [item async for item in process] == [(1, b"out"), (2, b"err")]
            await guest.send(stream, FrameType.END, {"exit_code": 3, "signal": None})
            assert (await process.wait()).exit_code == 3
            assert (await process.wait()).exit_code == 3
            with pytest.raises(ConflictError):
                await process.signal(9)

    run(test())


def test_credit_is_given_back_in_quarters_and_only_for_what_is_taken() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            process, stream = await started(guest, Agent(opened))
            chunk = bytes(limits.FRAME_PAYLOAD_BYTES_MAX)
            for _ in range(4):
                await guest.send(stream, FrameType.DATA, chunk, 1)
            assert await guest.silence()
            items = aiter(process)
            assert len((await anext(items))[1]) == len(chunk)
            credit = await guest.expect(FrameType.CREDIT)
            assert (credit.stream, int.from_bytes(credit.payload, "little")) == (stream, len(chunk))
            await guest.send(stream, FrameType.DATA, chunk, 1)
            assert await guest.silence()
            assert not opened.closed.done()
            await items.aclose()

    run(test())


def test_sending_stops_at_the_credit_and_goes_on_with_more() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            process, stream = await started(guest, Agent(opened), stdin=True)
            writing = asyncio.create_task(process.write_stdin(bytes(limits.STREAM_CREDIT_BYTES + 10)))
            got = 0
            while got < limits.STREAM_CREDIT_BYTES:
                got += len((await guest.expect(FrameType.DATA)).payload)
            assert await guest.silence()
            assert not writing.done()
            await guest.send(stream, FrameType.CREDIT, (100).to_bytes(4, "little"))
            assert len((await guest.expect(FrameType.DATA)).payload) == 10
            await writing
            await process.close_stdin()
            await guest.expect(FrameType.EOF)

    run(test())


def test_a_guest_that_does_not_read_holds_up_writers_and_bounds_the_queue() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            process, stream = await started(guest, Agent(opened), stdin=True)
            more = limits.STREAM_WINDOW_BYTES_MAX - limits.STREAM_CREDIT_BYTES
            await guest.send(stream, FrameType.CREDIT, more.to_bytes(4, "little"))
            writing = asyncio.create_task(process.write_stdin(bytes(limits.STREAM_WINDOW_BYTES_MAX)))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not writing.done()
            assert opened._out_bytes <= limits.OUT_BYTES_MAX + frames.FRAME_BYTES_MAX
            got = 0
            while got < limits.STREAM_WINDOW_BYTES_MAX:
                got += len((await guest.expect(FrameType.DATA)).payload)
            await writing

    run(test())


def test_cancelling_a_call_cancels_it_in_the_guest_and_the_session_goes_on() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            agent = Agent(opened)
            call = asyncio.create_task(agent.stat("/x"))
            stream, _ = await guest.opened("stat")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await guest.expect(FrameType.CANCEL)).stream == stream
            await guest.send(stream, FrameType.REPLY, {"late": 1})
            await guest.send(stream, FrameType.ERROR, {"code": "cancelled"})
            ping = asyncio.create_task(agent.ping())
            stream, _ = await guest.opened("ping")
            await guest.send(stream, FrameType.REPLY, {})
            await guest.send(stream, FrameType.END, {})
            await ping
            assert not opened._streams

    run(test())


def test_a_call_times_out_and_is_cancelled() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            call = asyncio.create_task(Agent(opened).ping(timeout=0.01))
            await guest.opened("ping")
            with pytest.raises(TimedOutError, match="ping"):
                await call
            await guest.expect(FrameType.CANCEL)

    run(test())


def test_an_exec_whose_agent_forgets_its_timeout_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm4agents.guest.handles.EXEC_GRACE_S", 0.02)

    async def test() -> None:
        async with session() as (opened, guest):
            process, _ = await started(guest, Agent(opened), timeout_s=0.01)
            with pytest.raises(TimedOutError):
                await process.wait()
            await guest.expect(FrameType.CANCEL)

    run(test())


def test_leaving_a_process_cancels_it_and_wait_tells_of_the_kill() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            process, stream = await started(guest, Agent(opened))
            async with process:
                pass
            await guest.expect(FrameType.CANCEL)
            await guest.send(stream, FrameType.DATA, b"late", 1)
            await guest.send(stream, FrameType.ERROR, {"code": "cancelled", "errno": 0, "message": "m"})
            assert (await process.wait()).signal == 9

    run(test())


@pytest.mark.parametrize(
    ("code", "errno", "kind"),
    [
        ("not_found", 2, PathNotFoundError),
        ("is_directory", 21, InvalidRequestError),
        ("exec_failed", 2, InvalidRequestError),
        ("permission", 13, GuestError),
        ("no_space", 28, GuestError),
        ("too_many_streams", 0, CapacityError),
        ("of_a_later_version", 0, GuestError),
    ],
)
def test_errors_say_what_to_do(code: str, errno: int, kind: type[Exception]) -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            call = asyncio.create_task(Agent(opened).stat("/some/path"))
            stream, _ = await guest.opened("stat")
            await guest.send(stream, FrameType.ERROR, {"code": code, "errno": errno, "message": "words"})
            with pytest.raises(kind, match="/some/path: words") as caught:
                await call
            assert caught.value.details == {  # type: ignore[attr-defined]
                "code": code,
                "errno": errno or None,
                "path": "/some/path",
            }

    run(test())


def test_a_write_that_is_refused_in_the_middle_stops() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            writing = asyncio.create_task(Agent(opened).write("/f", bytes(limits.STREAM_CREDIT_BYTES * 4)))
            stream, body = await guest.opened("write")
            assert body["path"] == "/f"
            await guest.send(stream, FrameType.REPLY, {})
            await guest.expect(FrameType.DATA)
            await guest.send(stream, FrameType.ERROR, {"code": "no_space", "errno": 28})
            with pytest.raises(GuestError) as caught:
                await writing
            assert caught.value.errno == 28

    run(test())


def test_a_source_that_fails_cancels_the_write() -> None:
    async def source() -> Any:
        yield b"x" * 70_000
        raise KeyError("mine")

    async def test() -> None:
        async with session() as (opened, guest):
            writing = asyncio.create_task(Agent(opened).write("/f", source()))
            stream, _ = await guest.opened("write")
            await guest.send(stream, FrameType.REPLY, {})
            with pytest.raises(KeyError):
                await writing
            while (frame := await guest.frame()).type == FrameType.DATA:
                pass
            assert frame.type == FrameType.CANCEL

    run(test())


def test_small_pieces_are_joined_into_full_frames() -> None:
    async def source() -> Any:
        for _ in range(1_000):
            yield b"x" * 100

    async def test() -> None:
        async with session() as (opened, guest):
            writing = asyncio.create_task(Agent(opened).write("/f", source()))
            stream, _ = await guest.opened("write")
            await guest.send(stream, FrameType.REPLY, {})
            sizes = []
            while (frame := await guest.frame()).type == FrameType.DATA:
                sizes.append(len(frame.payload))
            assert sum(sizes) == 100_000
            assert len(sizes) <= 3
            await guest.send(stream, FrameType.END, {"bytes": 100_000})
            assert await writing == 100_000

    run(test())


def test_too_many_streams_is_said_without_asking_the_guest() -> None:
    async def test() -> None:
        async with pair() as (ours, guest):
            opening = asyncio.create_task(Session.open(ours))
            await guest.greeting()
            await guest.answer({**ACK, "streams_max": 1})
            opened = await opening
            process, _ = await started(guest, Agent(opened))
            with pytest.raises(CapacityError):
                await Agent(opened).ping()
            assert await guest.silence()
            await opened.close()
            with pytest.raises(ConnectionLostError):
                await process.wait()

    run(test())


def test_quiesce_silences_both_sides_until_it_is_taken_back() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            agent = Agent(opened)
            process, stream = await started(guest, agent)
            await guest.send(stream, FrameType.DATA, bytes(65_536), 1)
            quieting = asyncio.create_task(opened.quiesce())
            await guest.expect(FrameType.QUIESCE)
            await guest.send(stream, FrameType.DATA, bytes(65_536), 1)
            await guest.send(0, FrameType.QUIESCED)
            await quieting
            with pytest.raises(ConflictError):
                await opened.quiesce()
            ping = asyncio.create_task(agent.ping())
            items = aiter(process)
            await anext(items)
            await items.aclose()
            other = asyncio.create_task(agent.stat("/x"))
            assert await guest.silence()
            await opened.unquiesce()
            await guest.expect(FrameType.UNQUIESCE)
            kinds = [await guest.frame() for _ in range(3)]
            assert sorted(frame.type for frame in kinds) == [
                FrameType.OPEN,
                FrameType.OPEN,
                FrameType.CREDIT,
            ]
            for call in (ping, other):
                call.cancel()
            await asyncio.wait({ping, other})

    run(test())


def test_a_late_answer_to_a_quiesce_taken_back_is_not_wrong() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            with pytest.raises(TimedOutError):
                await opened.quiesce(timeout=0.01)
            await opened.unquiesce()
            await guest.expect(FrameType.QUIESCE)
            await guest.expect(FrameType.UNQUIESCE)
            await guest.send(0, FrameType.QUIESCED)
            ping = asyncio.create_task(Agent(opened).ping())
            stream, _ = await guest.opened("ping")
            await guest.send(stream, FrameType.REPLY, {})
            await guest.send(stream, FrameType.END, {})
            await ping

    run(test())


def test_the_end_of_the_channel_fails_every_call_and_says_why() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            agent = Agent(opened)
            process, _ = await started(guest, agent, stdin=True)
            calls = [asyncio.create_task(agent.ping()), asyncio.create_task(process.wait())]
            calls.append(asyncio.create_task(process.write_stdin(bytes(8 << 20))))
            await guest.opened("ping")
            guest.sock.close()
            for call in calls:
                with pytest.raises(ConnectionLostError):
                    await call
            assert isinstance(await opened.closed, ConnectionLostError)
            with pytest.raises(ConnectionLostError):
                await agent.ping()

    run(test())


def test_file_windows_are_raised_until_the_session_has_its_share() -> None:
    async def test() -> None:
        async with session() as (opened, guest):
            agent = Agent(opened)
            raised = 0
            calls = []
            for _ in range(20):
                calls.append(asyncio.create_task(agent.read("/f")))
                await guest.opened("read")
                for _ in range(5):
                    await asyncio.sleep(0)
                if not await guest.silence():
                    raised += int.from_bytes((await guest.expect(FrameType.CREDIT)).payload, "little")
            assert limits.WINDOW_TOTAL_BYTES_MAX * 3 // 4 <= raised <= limits.WINDOW_TOTAL_BYTES_MAX
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)

    run(test())
