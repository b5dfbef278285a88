"""The verbs against the real agent, serving a socketpair instead of a virtual machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.errors import (
    ConflictError,
    ConnectionLostError,
    GuestError,
    InvalidRequestError,
    LLM4AgentsError,
    PathNotFoundError,
)
from llm4agents.guest import frames
from llm4agents.guest.channel import Session
from llm4agents.guest.frames import FrameType
from llm4agents.guest.handles import STDERR, STDOUT, Process
from llm4agents.guest.results import ExitStatus
from llm4agents.guest.verbs import Agent
from tests.unit.guest.agent_process import Served, run


async def finish(process: Process) -> tuple[ExitStatus, bytes, bytes]:
    """Everything of a process: how it ended, stdout, stderr."""
    out = {STDOUT: b"", STDERR: b""}
    async with process:
        async for channel, data in process:
            out[channel] += data
        return await process.wait(), out[STDOUT], out[STDERR]


async def sh(agent: Agent, script: str, **options: Any) -> tuple[ExitStatus, bytes, bytes]:
    return await finish(await agent.exec(["/bin/sh", "-c", script], user=None, **options))


def test_the_greeting() -> None:
    async def test(agent: Agent) -> None:
        assert agent.session.hello.version == 1
        await agent.ping()
        metrics = await agent.metrics()
        assert 0 < metrics.mem_available <= metrics.mem_total

    run(test)


def test_output_streams_and_exit_code_are_separate() -> None:
    async def test(agent: Agent) -> None:
        status, out, err = await sh(agent, "echo to out; echo to err >&2; exit 7")
        assert (status.exit_code, status.signal, status.timed_out) == (7, None, False)
        assert (out, err) == (b"to out\n", b"to err\n")

    run(test)


def test_a_signal_is_told() -> None:
    async def test(agent: Agent) -> None:
        process = await agent.exec(["/bin/sleep", "60"], user=None)
        await process.signal(signal.SIGTERM)
        assert (await process.wait()).signal == signal.SIGTERM

    run(test)


def test_stdin_environment_and_directory(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        status, out, _ = await sh(
            agent,
            'cat; printf "%s|" "$A" "$B"; pwd',
            stdin=b"in\xff\0",
            env={"A": "ä b", "B": "\udcff"},
            cwd=tmp_path,
        )
        assert status.exit_code == 0
        assert out == b"in\xff\0" + "ä b|".encode() + b"\xff|" + bytes(tmp_path) + b"\n"
        process = await agent.exec(["/bin/cat"], user=None, stdin=True)
        await process.write_stdin(b"one ")
        await process.write_stdin(b"two")
        await process.close_stdin()
        assert (await finish(process))[1] == b"one two"
        with pytest.raises(ConflictError, match="stdin"):
            await (await agent.exec(["/bin/true"], user=None)).write_stdin(b"x")

    run(test)


def test_more_stdin_than_any_window_while_it_comes_back() -> None:
    async def test(agent: Agent) -> None:
        data = os.urandom(3_000_000)
        status, out, _ = await finish(await agent.exec(["/bin/cat"], user=None, stdin=data))
        assert status.exit_code == 0
        assert out == data

    run(test)


def test_a_process_that_does_not_read_its_stdin_still_ends() -> None:
    async def test(agent: Agent) -> None:
        status, _, _ = await sh(agent, "exit 3", stdin=bytes(3_000_000))
        assert status.exit_code == 3

    run(test)


def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        for argv, options in [
            (["/no/such/program"], {}),
            ([str(tmp_path)], {}),
            (["/bin/true"], {"cwd": "/no/such/directory"}),
        ]:
            with pytest.raises((InvalidRequestError, PathNotFoundError)) as caught:
                await agent.exec(argv, user=None, **options)
            assert caught.value.details["errno"]
        with pytest.raises(InvalidRequestError):
            await agent.exec([], user=None)
        with pytest.raises(InvalidRequestError, match="bytes"):
            await agent.exec(["/bin/echo", "x" * 100_000], user=None)

    run(test)


def test_a_timeout_kills_the_whole_group() -> None:
    async def test(agent: Agent) -> None:
        started = time.monotonic()
        status, out, _ = await sh(agent, "sleep 60 & echo $!; wait", timeout_s=0.3)
        assert status.timed_out
        assert status.signal == signal.SIGKILL
        assert time.monotonic() - started < 5
        while alive(int(out)):
            await agent.ping()

    run(test)


def test_cancelling_kills_the_whole_group() -> None:
    async def test(agent: Agent) -> None:
        async with await agent.exec(["/bin/sh", "-c", "sleep 60 & echo $!; wait"], user=None) as process:
            async for _, data in process:
                child = int(data)
                break
        assert (await process.wait()).signal == signal.SIGKILL
        # The answer to CANCEL may come a moment before the kernel is done.
        while alive(child):
            await agent.ping()

    run(test)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_200_mb_that_nobody_reads_hold_up_nobody_else() -> None:
    async def test(agent: Agent) -> None:
        flood = await agent.exec(["/bin/sh", "-c", "head -c 200000000 /dev/zero; echo done >&2"], user=None)
        while not flood._stream.has_arrived():
            await agent.ping()
        for _ in range(20):
            assert (await sh(agent, "echo fine"))[1] == b"fine\n"
        assert flood._stream._may_arrive >= 0
        assert (await flood.wait()).exit_code == 0

    run(test)


def test_waiting_after_reading_only_the_beginning() -> None:
    async def test(agent: Agent) -> None:
        process = await agent.exec(["/bin/sh", "-c", "head -c 5000000 /dev/zero"], user=None)
        async for _ in process:
            break
        assert (await process.wait()).exit_code == 0

    run(test)


def test_200_mb_are_read_whole() -> None:
    async def test(agent: Agent) -> None:
        process = await agent.exec(["/bin/sh", "-c", "head -c 200000000 /dev/zero"], user=None)
        count = 0
        async for _, data in process:
            count += len(data)
        assert count == 200_000_000
        assert (await process.wait()).exit_code == 0

    run(test)


def test_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        data = os.urandom(10_000_000)
        target = tmp_path / "new" / "directory" / "file"
        assert await agent.write(target, data, user=None, mode=0o600) == len(data)
        assert target.read_bytes() == data
        file = await agent.read(target, user=None)
        assert (file.info.size, file.info.mode & 0o777) == (len(data), 0o600)
        assert await file.read(len(data)) == data
        part = await agent.read(target, offset=5, length=70_000, user=None)
        assert await part.read(70_000) == data[5:70_005]
        with pytest.raises(InvalidRequestError, match="more than 10"):
            await (await agent.read(target, user=None)).read(10)
        with pytest.raises(InvalidRequestError, match="regular"):
            await agent.read("/dev/zero", user=None)
        assert await agent.write(target, b"", user=None) == 0
        assert await (await agent.read(target, user=None)).read(0) == b""

    run(test)


def test_a_write_in_pieces(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for size in (1, 70_000, 0, 5, 300_000):
            yield b"\xa5" * size

    async def test(agent: Agent) -> None:
        assert await agent.write(tmp_path / "f", pieces(), user=None) == 370_006
        assert (tmp_path / "f").read_bytes() == b"\xa5" * 370_006

    run(test)


def test_a_cancelled_write_leaves_nothing_and_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.write_bytes(b"old")
    reached = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        reached.set()
        await asyncio.Event().wait()

    async def test(agent: Agent) -> None:
        writing = asyncio.create_task(agent.write(target, pieces(), user=None))
        await reached.wait()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        # The answer to CANCEL may come a moment before the disk is done.
        while len(list(tmp_path.iterdir())) > 1:
            await agent.ping()
        assert [path.name for path in tmp_path.iterdir()] == ["f"]
        assert target.read_bytes() == b"old"

    run(test)


def test_directories(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        await agent.mkdir(tmp_path / "a" / "b", user=None)
        await agent.write(tmp_path / "a" / "b" / "f", b"1234", user=None)
        (tmp_path / "a" / "link").symlink_to("b/f")
        listing = await agent.list(tmp_path / "a", depth=2, user=None)
        assert not listing.truncated
        assert {(entry.name, entry.kind, entry.target) for entry in listing.entries} == {
            ("b", "directory", None),
            ("f", "file", None),
            ("link", "symlink", "b/f"),
        }
        entry = await agent.stat(tmp_path / "a" / "b" / "f", user=None)
        assert (entry.size, entry.kind, entry.uid) == (4, "file", os.getuid())
        assert abs(entry.mtime - time.time()) < 60
        assert (await agent.stat(tmp_path / "a" / "link", follow=False, user=None)).kind == "symlink"
        assert (await agent.stat(tmp_path / "a" / "link", user=None)).kind == "file"
        await agent.move(tmp_path / "a" / "b" / "f", tmp_path / "a" / "g", user=None)
        assert (tmp_path / "a" / "g").read_bytes() == b"1234"
        with pytest.raises(LLM4AgentsError) as caught:
            await agent.remove(tmp_path / "a", user=None)
        assert caught.value.details["code"] == "not_empty"
        await agent.remove(tmp_path / "a", recursive=True, user=None)
        assert list(tmp_path.iterdir()) == []
        await agent.remove(tmp_path / "a", missing_ok=True, user=None)

    run(test)


def test_a_long_listing_survives_its_frames(tmp_path: Path) -> None:
    for number in range(3_000):
        (tmp_path / f"{number:04}-{'x' * 100}").touch()

    async def test(agent: Agent) -> None:
        listing = await agent.list(tmp_path, user=None)
        assert len({entry.name for entry in listing.entries}) == 3_000

    run(test)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    raw = bytes(tmp_path) + b"/caf\xe9\xff"

    async def test(agent: Agent) -> None:
        await agent.write(raw, b"x", user=None)
        entry = (await agent.list(tmp_path, user=None)).entries[0]
        assert os.fsencode(entry.path) == raw
        assert await (await agent.read(entry.path, user=None)).read(10) == b"x"
        assert (await finish(await agent.exec(["/bin/cat", raw], user=None)))[1] == b"x"
        with pytest.raises(PathNotFoundError):
            await agent.stat(raw + b"\xfe", user=None)

    run(test)


def test_errors_of_files(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        with pytest.raises(PathNotFoundError) as missing:
            await agent.read(tmp_path / "none", user=None)
        assert missing.value.errno == 2
        for call in (agent.read(tmp_path, user=None), agent.write(tmp_path, b"x", user=None)):
            with pytest.raises(InvalidRequestError) as caught:
                await call
            assert caught.value.details["code"] == "is_directory"
        with pytest.raises(LLM4AgentsError):
            await agent.mkdir(tmp_path, exist_ok=False, user=None)
        with pytest.raises(InvalidRequestError, match="absolute"):
            await agent.stat("relative", user=None)
        with pytest.raises(LLM4AgentsError):
            await agent.freeze()
        await agent.ping()

    run(test)


def test_a_lost_session_resets_its_connections_and_an_ended_one_does_not() -> None:
    async def main() -> None:
        ends: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                ends.put_nowait(await reader.read())
            except ConnectionResetError:
                ends.put_nowait(None)
            writer.close()

        listener = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        served = Served()
        try:
            session = await Session.open(served.ours.dup())  # type: ignore[arg-type]
            async with await Agent(session).connect(port) as connection:
                await connection.write(b"all of it")
                await connection.close_write()
                assert await connection.read() == b""
            assert await ends.get() == b"all of it"
            await Agent(session).connect(port)
            # As the host of a clone does: a new session on the same stream, without a word about the old one.
            await session.close()
            session = await Session.open(served.ours.dup(), dirty=True)  # type: ignore[arg-type]
            assert await asyncio.wait_for(ends.get(), 10) is None
            await session.close()
        finally:
            served.end()
            listener.close()
            await listener.wait_closed()

    asyncio.run(main())


def test_connections(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.write(b"bye")
        writer.close()

    async def test(agent: Agent) -> None:
        tcp = await asyncio.start_server(echo, "127.0.0.1", 0)
        unix = await asyncio.start_unix_server(echo, tmp_path / "s")
        port = tcp.sockets[0].getsockname()[1]
        async with tcp, unix:
            for where in ({"port": port}, {"unix": tmp_path / "s"}):
                async with await agent.connect(**where) as connection:  # type: ignore[arg-type]
                    data = os.urandom(1_000_000)
                    writing = asyncio.create_task(connection.write(data))
                    got = b""
                    while len(got) < len(data):
                        got += await connection.read()
                    await writing
                    await connection.close_write()
                    while chunk := await connection.read():
                        got += chunk
                    assert got == data + b"bye"
        for first in (b"", b"hello"):
            with pytest.raises(GuestError) as refused:
                await agent.connect(port, first=first)
            assert refused.value.details["code"] == "refused"
        with pytest.raises(LLM4AgentsError):
            await agent.connect(unix=tmp_path / "none")

    run(test)


def test_a_torn_frame_then_a_dirty_adoption() -> None:
    async def test() -> None:
        served = Served()
        try:
            first = await Session.open(os_dup(served.ours))
            process = await Agent(first).exec(["/bin/sleep", "60"], user=None)
            torn = frames.encode(first._tag, 9, FrameType.OPEN, 0, b"\x80" + bytes(5_000))[:1_000]
            served.ours.setblocking(True)
            await first.close()
            served.ours.sendall(torn)
            second = await Session.open(os_dup(served.ours), dirty=True)
            assert second.hello.boot_id == first.hello.boot_id
            assert (await sh(Agent(second), "echo again"))[1] == b"again\n"
            while alive(process.pid):
                await Agent(second).ping()
            with pytest.raises(ConnectionLostError):
                await process.wait()
            await second.close()
        finally:
            served.end()

    asyncio.run(asyncio.wait_for(test(), 30))


def os_dup(sock: socket.socket) -> socket.socket:
    return socket.socket(fileno=os.dup(sock.fileno()))


def test_quiesce_and_on() -> None:
    async def test(agent: Agent) -> None:
        process = await agent.exec(["/bin/sh", "-c", "head -c 3000000 /dev/zero"], user=None)
        await agent.session.quiesce()
        await agent.session.unquiesce()
        assert (await finish(process))[0].exit_code == 0

    run(test)


SAID = "seq 200000; read x; echo $x"


def test_a_quiet_session_goes_on_over_another_connection(tmp_path: Path) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            served = Served(listener)
            try:
                session = await Session.open(os_dup(served.ours))
                agent = Agent(session)
                process = await agent.exec(["/bin/sh", "-c", SAID], user=None, stdin=True)
                with pytest.raises(ConflictError):
                    session.reconnect(socket.socket(socket.AF_UNIX))
                await session.quiesce()
                served.ours.shutdown(socket.SHUT_RDWR)  # as a guest sees its host go
                session.reconnect(dial(listener))
                await session.unquiesce()
                await process.write_stdin(b"said\n")
                status, out, _ = await finish(process)
                numbers = "".join(f"{number}\n" for number in range(1, 200001))
                assert (status.exit_code, out.decode()) == (0, f"{numbers}said\n")
                # The same, told by the old connection's end first; and another host's greeting begins anew.
                lasting = await agent.exec(["/bin/sleep", "60"], user=None)
                await session.quiesce()
                served.ours.close()
                second = await Session.open(dial(listener))
                while alive(lasting.pid):
                    await Agent(second).ping()
                # One that has lost its connection and gets no other says so.
                with pytest.raises(ConnectionLostError):
                    while True:
                        await session.unquiesce()
                        await session.quiesce()
                # What breaks in mid-frame goes with its connection, and so do calls of a session that is not quiet.
                lasting = await Agent(second).exec(["/bin/sleep", "60"], user=None)
                torn = frames.encode(second._tag, 9, FrameType.OPEN, 0, b"\x80" + bytes(5_000))[:1_000]
                third = dial(listener)
                third.sendall(torn)
                fourth = await Session.open(dial(listener))
                assert (await sh(Agent(fourth), "echo again"))[1] == b"again\n"
                while alive(lasting.pid):
                    await Agent(fourth).ping()
                with pytest.raises(ConnectionLostError):
                    await lasting.wait()
                for it in (second, fourth):
                    await it.close()
                third.close()
            finally:
                served.end()

    asyncio.run(asyncio.wait_for(test(), 60))


def dial(listener: socket.socket) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(listener.getsockname())
    return sock


def test_the_agents_end_is_told() -> None:
    async def test() -> None:
        served = Served()
        try:
            session = await Session.open(served.ours)
            process = await Agent(session).exec(["/bin/sleep", "60"], user=None)
            served.process.kill()
            with pytest.raises(ConnectionLostError):
                await process.wait()
            assert isinstance(await session.closed, ConnectionLostError)
            os.kill(process.pid, signal.SIGKILL)
        finally:
            served.end()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_many_calls_at_once() -> None:
    async def test(agent: Agent) -> None:
        outcomes = await asyncio.gather(*(sh(agent, f"echo {n}") for n in range(50)))
        assert [int(out) for _, out, _ in outcomes] == list(range(50))
        assert agent.session.hello.streams_max == limits.STREAMS_PER_SESSION_MAX

    run(test)
