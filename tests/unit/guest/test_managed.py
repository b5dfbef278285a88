"""Managed processes and terminals, against the real agent: what is kept, who holds up whom, what outlives a session."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from llm4agents.errors import (
    ConflictError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    VersionMismatchError,
)
from llm4agents.guest.channel import Session
from llm4agents.guest.handles import STDERR, STDOUT
from llm4agents.guest.processes import Attached, ProcessInfo, Terminal
from llm4agents.guest.results import ExitStatus
from llm4agents.guest.verbs import Agent
from tests.unit.guest.agent_process import Served, run
from tests.unit.guest.test_real_agent import alive, os_dup

MIB = 1_048_576
# Numbered lines: what is lost or repeated shows, and a hash of all of it can be computed here.
COUNT = "i=0; while [ $i -lt %d ]; do echo $i; i=$((i+1)); done"


def sessions(test: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        served = Served()
        try:
            await test(served)
        finally:
            served.end()

    asyncio.run(asyncio.wait_for(whole(), 60))


async def greet(served: Served, *, dirty: bool = False) -> Agent:
    return Agent(await Session.open(os_dup(served.ours), dirty=dirty))


async def sh(agent: Agent, script: str, id: str = "p", **options: Any) -> Attached:
    return await agent.start(["/bin/sh", "-c", script], id=id, user=None, **options)


async def rest(attached: Attached) -> tuple[bytes, ExitStatus]:
    """What is left of its output, checked to be without a hole, and how it ended."""
    said, at = bytearray(), attached.offset
    async for offset, _, data in attached:
        assert offset == at + len(said)
        said += data
    status = await attached.wait()
    assert attached.offset == at + len(said)
    return bytes(said), status


async def info(agent: Agent, id: str = "p") -> ProcessInfo:
    return next(process for process in await agent.processes() if process.id == id)


async def ended(agent: Agent, id: str = "p") -> ProcessInfo:
    while (found := await info(agent, id)).running:
        await agent.ping()
    return found


def test_output_has_offsets_and_can_be_read_again() -> None:
    async def test(agent: Agent) -> None:
        async with await sh(
            agent, "echo out; echo err >&2; sleep 0.05; echo more; exit 4", tag="t"
        ) as process:
            pieces = [(channel, data) async for _, channel, data in process]
            status = await process.wait()
        assert b"".join(data for channel, data in pieces if channel == STDOUT) == b"out\nmore\n"
        assert b"".join(data for channel, data in pieces if channel == STDERR) == b"err\n"
        assert (status.exit_code, process.offset) == (4, 13)
        for start in (0, 5, 13):
            async with await agent.attach("p", from_offset=start) as again:
                said, how = await rest(again)
            assert said == b"".join(data for _, data in pieces)[start:]
            assert (how.exit_code, again.gap, again.pid) == (4, 0, process.pid)
        found = await info(agent)
        assert (found.tag, found.running, found.exit_code, found.start, found.offset) == (
            "t",
            False,
            4,
            0,
            13,
        )
        assert found.argv[:2] == ("/bin/sh", "-c")
        await agent.forget("p")
        with pytest.raises(NotFoundError):
            await agent.attach("p")
        assert await agent.processes() == []

    run(test)


def test_ids_are_one_each_and_sane() -> None:
    async def test(agent: Agent) -> None:
        async with await sh(agent, "sleep 60") as process:
            with pytest.raises(ConflictError):
                await sh(agent, "true")
            for id in ("", "a/b", "x" * 65):
                with pytest.raises(InvalidRequestError):
                    await sh(agent, "true", id=id)
            with pytest.raises(InvalidRequestError, match="runs"):
                await agent.forget("p")
            with pytest.raises(InvalidRequestError, match="from"):
                await agent.attach("p", from_offset=99)
            with pytest.raises(NotFoundError):
                await agent.signal("other", 15)
            process.kill()
        assert (await ended(agent)).signal == signal.SIGKILL
        with pytest.raises(ConflictError):
            await agent.signal("p", 15)

    run(test)


def test_who_lets_go_leaves_it_running_and_a_kill_takes_its_group() -> None:
    async def test(agent: Agent) -> None:
        async with await sh(agent, "sleep 60 & echo $!; wait") as process:
            async for _, _, data in process:
                child = int(data)
                break
        await process.settle()
        assert (await info(agent)).running
        assert alive(child)
        again = await agent.attach("p", from_offset=0)
        again.kill()
        assert (await ended(agent)).signal == signal.SIGKILL
        while alive(child):
            await agent.ping()

    run(test)


def test_who_goes_away_before_he_is_attached_leaves_it_running_too() -> None:
    async def test(agent: Agent) -> None:
        async with await sh(agent, "sleep 60; exit 4"):
            pass
        for steps in range(4):  # before it is asked for, while it is on its way, when it is answered
            attaching = asyncio.create_task(agent.attach("p", from_offset=0))
            for _ in range(steps):
                await asyncio.sleep(0)
            attaching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await attaching).detach()  # it was quicker
        await agent.ping()
        assert (await info(agent)).running
        async with await agent.attach("p") as last:
            last.kill()
        assert (await ended(agent)).signal == signal.SIGKILL

    run(test)


def test_signals_and_a_timeout_without_anybody_watching() -> None:
    async def test(agent: Agent) -> None:
        async with await sh(agent, "trap 'exit 9' USR1; echo; while :; do sleep 0.01; done") as process:
            async for _ in process:
                break
        await agent.signal("p", signal.SIGUSR1)
        assert (await ended(agent)).exit_code == 9
        async with await sh(agent, "sleep 60 & echo $!; wait", id="q", timeout_s=0.2) as process:
            async for _, _, data in process:
                child = int(data)
                break
        found = await ended(agent, "q")
        assert (found.timed_out, found.signal) == (True, signal.SIGKILL)
        while alive(child):
            await agent.ping()

    run(test)


def test_a_child_that_holds_stdout_does_not_hold_the_end() -> None:
    async def test(agent: Agent) -> None:
        async with await sh(agent, "sleep 30 & echo $!") as process:
            said, status = await rest(process)
        assert status.exit_code == 0
        import os

        os.kill(int(said), signal.SIGKILL)

    run(test)


def test_stdin_of_whoever_is_attached() -> None:
    async def test(agent: Agent) -> None:
        async with await sh(agent, "cat; echo end", stdin=True) as first:
            await first.write(b"one ")
            second = await agent.attach("p", from_offset=0, stdin=True)
            async with second:
                await second.write(b"two")
                await second.close_stdin()
                assert (await rest(second))[0] == b"one twoend\n"
        async with await sh(agent, "cat", id="q", stdin=b"x" * 500_000) as fed:
            assert (await rest(fed))[0] == b"x" * 500_000
        async with await sh(agent, "sleep 60", id="r") as closed:
            with pytest.raises(InvalidRequestError, match="stdin"):
                await agent.attach("r", stdin=True)
            closed.kill()

    run(test)


def test_what_it_is_fed_goes_to_it_whole_though_its_starter_leaves() -> None:
    async def test(agent: Agent) -> None:
        async with await sh(agent, "sleep 0.1; cat | wc -c", stdin=bytes(2_000_000)):
            pass
        async with await agent.attach("p", from_offset=0) as late:
            assert (await rest(late))[0] == b"2000000\n"

    run(test)


def test_stdin_that_nobody_reads_is_bounded() -> None:
    async def test(agent: Agent) -> None:
        async with await sh(agent, "sleep 60", stdin=True) as process:
            with pytest.raises(InvalidRequestError, match="does not read"):
                for _ in range(20):
                    async with await agent.attach("p", stdin=True, output=False) as writer:
                        await writer.write(bytes(200_000))
            process.kill()

    run(test)


def test_a_session_ends_and_not_a_byte_is_lost_or_repeated() -> None:
    lines = 40_000
    whole = "".join(f"{n}\n" for n in range(lines)).encode()

    async def test(served: Served) -> None:
        agent = await greet(served)
        process = await sh(agent, COUNT % lines, full="block")
        said = bytearray()
        while len(said) < len(whole):
            # Some are taken, many more are in flight; then the session breaks off without a word.
            taken = 0
            async for _, _, data in process:
                said += data
                taken += 1
                if taken == 3:
                    break
            if len(said) == len(whole):
                break
            served.ours.setblocking(True)
            await agent.session.close()
            agent = await greet(served, dirty=True)
            process = await agent.attach("p", from_offset=len(said))
            assert process.gap == 0
        assert said == whole
        assert (await process.wait()).exit_code == 0
        await agent.session.close()

    sessions(test)


def test_a_flood_nobody_reads_keeps_the_newest_or_waits() -> None:
    async def test(served: Served) -> None:
        agent = await greet(served)
        script = "head -c 20000000 /dev/zero | tr '\\0' x; printf end"
        for full in ("drop", "block"):
            await (await sh(agent, script, id=full, full=full, keep_bytes=65_536)).__aexit__()
        found = await ended(agent, "drop")
        assert found.offset == 20_000_003
        # What was sent to somebody keeps as much as may have been on its way to him.
        assert 65_536 <= found.offset - found.start <= MIB
        async with await agent.attach("drop", from_offset=0) as late:
            said, _ = await rest(late)
            assert late.gap == found.start
        assert said.endswith(b"xend")
        waiting = await info(agent, "block")
        assert waiting.running
        assert waiting.offset - waiting.start <= MIB
        async with await agent.attach("block", from_offset=waiting.start) as reader:
            said, status = await rest(reader)
        assert len(said) == 20_000_003 - waiting.start
        assert status.exit_code == 0
        await agent.session.close()

    sessions(test)


def test_a_flood_that_is_attached_but_not_read_is_bounded_and_blocks_nobody() -> None:
    async def test(agent: Agent) -> None:
        digest = hashlib.sha256()
        async with await sh(agent, "head -c 30000000 /dev/urandom | tee /dev/stderr | cat") as flood:
            while not flood.pending():
                await agent.ping()
            for n in range(10):
                async with await sh(agent, f"echo {n}", id=f"e{n}") as small:
                    assert (await rest(small))[0] == b"%d\n" % n
            held = await info(agent)
            assert held.offset <= MIB
            slow = await agent.attach("p", from_offset=0)
            async with slow:
                both = {STDOUT: hashlib.sha256(), STDERR: hashlib.sha256()}
                count = 0

                async def read() -> None:
                    async for _, _, data in flood:
                        digest.update(data)

                reading = asyncio.create_task(read())
                async for _, channel, data in slow:
                    both[channel].update(data)
                    count += len(data)
                await reading
        assert count == 60_000_000
        assert both[STDOUT].digest() == both[STDERR].digest()

    run(test)


def test_a_terminal_is_one() -> None:
    async def test(agent: Agent) -> None:
        script = 'tty; echo "$TERM"; stty size; read line; echo "got $line"; stty size; exit 3'
        size = Terminal(33, 101, "vt100")
        async with await sh(agent, script, tty=size) as process:
            said = b""
            async for _, channel, data in process:
                assert channel == STDOUT
                said += data
                if said.count(b"\n") == 3:
                    break
            name, term, shape = said.decode().split("\r\n")[:3]
            assert name.startswith("/dev/pts/")
            assert (term, shape) == ("vt100", "33 101")
            await process.resize(40, 120)
            await process.write(b"hello\n")
            text, status = await rest(process)
        assert b"got hello\r\n40 120\r\n" in text
        assert status.exit_code == 3

    run(test)


def test_keys_of_a_terminal_are_signals_and_its_end_is_an_end() -> None:
    async def test(agent: Agent) -> None:
        script = "trap 'echo caught; hit=1' INT; echo ready; while [ -z \"$hit\" ]; do sleep 0.05; done; cat"
        async with await sh(agent, script, tty=Terminal()) as process:
            said = b""
            async for _, _, data in process:
                said += data
                if b"ready" in said:
                    break
            await process.write(b"\x03")
            async for _, _, data in process:
                said += data
                if b"caught" in said:
                    break
            await process.close_stdin()
            _, status = await rest(process)
        assert status.exit_code == 0
        # Letting go of the terminal is its end for who is left on it.
        async with await sh(agent, "sleep 60 & echo $!", id="q", tty=Terminal()) as left:
            said, status = await rest(left)
            assert status.exit_code == 0
        while alive(int(said)):
            await agent.ping()

    run(test)


def test_ports_of_whoever_listens() -> None:
    async def test(agent: Agent) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            found = {(entry.port, entry.address) for entry in await agent.ports()}
            assert (port, "127.0.0.1") in found

    run(test)


def test_a_rate_of_output() -> None:
    async def test(agent: Agent) -> None:
        await agent.limits(output_bytes_per_s=200_000)
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with await sh(agent, "head -c 100000 /dev/zero") as process:
            assert len((await rest(process))[0]) == 100_000
        assert 0.3 < loop.time() - began < 5
        with pytest.raises(LLM4AgentsError):
            await agent.limits(pids=100)  # no machine to bound

    run(test)


def test_the_ended_that_are_known_have_a_bound() -> None:
    async def test(agent: Agent) -> None:
        for n in range(260):
            async with await agent.start(["/bin/true"], id=f"n{n}", user=None) as process:
                await process.wait()
        known = [process.id for process in await agent.processes()]
        assert known == [f"n{n}" for n in range(4, 260)]

    run(test)


def test_an_agent_without_them_says_so() -> None:
    async def test(agent: Agent) -> None:
        hello = agent.session.hello
        agent.session.hello = type(hello)(hello.version, hello.agent, "", (), hello.streams_max)
        for call in (agent.processes(), agent.start(["/bin/true"], id="p"), agent.ports()):
            with pytest.raises(VersionMismatchError):
                await call

    run(test)
