"""The interpreter's client: against the real runner, and against one that lies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.errors import (
    ConflictError,
    ConnectionLostError,
    InvalidRequestError,
    ProtocolError,
    TimedOutError,
)
from llm4agents.guest import code
from llm4agents.guest.code import End, Event, Output, Raised, Result
from llm4agents.guest.verbs import Agent
from tests.unit.guest.agent_process import serving

RUNNER = Path(code.__file__).parents[1] / "images" / "data" / "runner" / "zygote.py"


def run(test: Callable[[Agent], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with serving() as agent:
            await test(agent)

    asyncio.run(asyncio.wait_for(whole(), 60))


async def cell(agent: Agent, text: str, **options: Any) -> list[Event]:
    async with contextlib.aclosing(code.run(agent, text, **options)) as events:
        return [event async for event in events]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Output) and event.stream == "stdout")


def listens_at(path: str) -> None:
    object.__setattr__(code.PYTHON, "socket", path)  # the agent of these tests shares our file system


@contextlib.asynccontextmanager
async def interpreter(where: Path) -> AsyncIterator[None]:
    """The real runner, listening where the client looks."""
    path = str(where / "p.sock")
    listens_at(path)
    ready = where / "ready"
    runner = subprocess.Popen(
        [sys.executable, "-I", RUNNER, "--socket", path, "--ready", ready, "--cwd", where]
    )
    try:
        while not ready.exists():
            assert runner.poll() is None
            await asyncio.sleep(0.01)
        yield
    finally:
        runner.terminate()
        runner.wait()


@pytest.fixture(autouse=True)
def _socket() -> Iterator[None]:
    before = code.PYTHON.socket
    listens_at("/nonexistent/python.sock")
    yield
    listens_at(before)


@pytest.mark.skipif(not RUNNER.exists(), reason="the runner is not here")
def test_cells_of_the_real_interpreter(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        async with interpreter(tmp_path):
            await code.ping(agent)
            assert text(await cell(agent, "print(6*7)")) == "42\n"
            events = await cell(agent, "x = 20\nx + 1")
            result = next(event for event in events if isinstance(event, Result))
            assert (result.main, result.data["text/plain"]) == (True, "21")
            assert events[-1] == End("ok", 2)
            events = await cell(agent, "import sys; print('e', file=sys.stderr); 1/0")
            assert any(isinstance(event, Output) and event.stream == "stderr" for event in events)
            raised = next(event for event in events if isinstance(event, Raised))
            assert raised.name == "ZeroDivisionError"
            assert events[-1] == End("error", 3)
            assert text(await cell(agent, "import os; print(os.environ['A'])", env={"A": "b"})) == "b\n"
            assert text(await cell(agent, "print('x' in globals())", context="other")) == "False\n"
            await code.restart(agent)
            assert text(await cell(agent, "print('x' in globals())")) == "False\n"

    run(test)


@pytest.mark.skipif(not RUNNER.exists(), reason="the runner is not here")
def test_ending_a_cell_early_leaves_the_interpreter_its_state(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        async with interpreter(tmp_path):
            await cell(agent, "x = 1")
            async with contextlib.aclosing(
                code.run(agent, "print('go', flush=True)\nwhile True: pass")
            ) as events:
                assert await anext(events) == Output("stdout", "go\n")
            assert text(await cell(agent, "print(x)")) == "1\n"
            running = await busy(agent)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert text(await cell(agent, "print(x)")) == "1\n"
            events = await cell(agent, "import time; time.sleep(60)", timeout_s=0.2)
            assert isinstance(events[-1], End)
            assert events[-1].status == "timed_out"
            running = await busy(agent)
            await code.interrupt(agent)
            end = (await running)[-1]
            assert isinstance(end, End)
            assert end.status == "interrupted"
            events = await cell(agent, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
            assert [event.name for event in events if isinstance(event, Raised)] == ["InterpreterDied"]
            assert text(await cell(agent, "print('again')")) == "again\n"
            while agent.session._streams:
                await agent.ping()

    run(test)


async def busy(agent: Agent) -> asyncio.Task[list[Event]]:
    """A cell that has begun and would run for a minute."""
    begun = asyncio.Event()

    async def whole() -> list[Event]:
        found = []
        source = "import time; print('go', flush=True); time.sleep(60)"
        async with contextlib.aclosing(code.run(agent, source)) as events:
            async for event in events:
                begun.set()
                found.append(event)
        return found

    running = asyncio.create_task(whole())
    await begun.wait()
    return running


@pytest.mark.skipif(not RUNNER.exists(), reason="the runner is not here")
def test_output_nobody_takes_holds_up_the_cell_and_nothing_else(tmp_path: Path) -> None:
    async def test(agent: Agent) -> None:
        async with interpreter(tmp_path):
            lines = 200_000
            events = code.run(agent, f"for n in range({lines}): print('x' * 98)")
            got = len(text([await anext(events)]))
            assert text(await cell(agent, "print(1)", context="other")) == "1\n"
            assert isinstance(events, AsyncIterator)
            async for event in events:
                got += len(text([event]))
            assert got == lines * 99

    run(test)


# An interpreter that lies. It is played by a test, since the real one cannot be made to.

Play = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def liar(where: Path, play: Play) -> AsyncIterator[list[dict[str, Any]]]:
    path = str(where / "p.sock")
    listens_at(path)
    asked: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = struct.unpack("<I", await reader.readexactly(4))[0]
        op = json.loads(await reader.readexactly(size))
        asked.append(op)
        await play(op, writer)

    cells = await asyncio.start_unix_server(serve, path)
    control = await asyncio.start_unix_server(serve, path + ".control")
    async with cells, control:
        yield asked


def message(body: bytes | dict[str, Any]) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack("<I", len(data)) + data


LIES: dict[str, bytes] = {
    "no JSON": message(b"\xff\xfe"),
    "no object": message(b"[]"),
    "a length of 4 G": b"\xff\xff\xff\xff",
    "deep nesting": message(b"[" * 100_000),
    "wide nesting": message(b"[" + b"[]," * 300_000 + b"[]]"),
    "an end without a status": message({"type": "end", "status": "fine"}),
    "a result that is a list": message({"type": "result", "data": []}),
    "a result of numbers": message({"type": "result", "data": {"text/plain": 1}}),
    "output of a number": message({"type": "stdout", "text": 1}),
    "an error without a name": message({"type": "error", "value": "", "traceback": ""}),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_ends_the_cell_and_not_the_session(tmp_path: Path, lie: bytes) -> None:
    async def play(op: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(lie if op["op"] == "run" else message({"type": "end", "status": "ok"}))
        writer.close()

    async def test(agent: Agent) -> None:
        async with liar(tmp_path, play):
            with pytest.raises(ProtocolError):
                await cell(agent, "1")
            await agent.ping()

    run(test)


def test_an_interpreter_that_hangs_up_is_said(tmp_path: Path) -> None:
    async def play(op: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def test(agent: Agent) -> None:
        async with liar(tmp_path, play):
            with pytest.raises(ConnectionLostError, match="interpreter"):
                await cell(agent, "1")

    run(test)


def test_a_timeout_the_interpreter_ignores_is_enforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_OWN_TIMEOUT_GRACE_S", 0.01)
    monkeypatch.setattr(code, "CODE_INTERRUPT_GRACE_S", 0.1)
    held: list[asyncio.StreamWriter] = []

    async def play(op: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if op["op"] == "run":
            held.append(writer)
        elif op["op"] == "restart" and op["context"] == "obeys":
            held[-1].write(message({"type": "end", "status": "died", "execution_count": 4}))

    async def test(agent: Agent) -> None:
        async with liar(tmp_path, play) as asked:
            assert await cell(agent, "1", timeout_s=0.01, context="obeys") == [End("timed_out", 4)]
            assert [op["op"] for op in asked] == ["run", "interrupt", "restart"]
            asked.clear()
            started = time.monotonic()
            with pytest.raises(TimedOutError):
                await cell(agent, "1", timeout_s=0.01)
            assert [op["op"] for op in asked] == ["run", "interrupt", "restart"]
            assert time.monotonic() - started < 10

    run(test)


def test_what_no_encoder_takes_is_replaced() -> None:
    assert code.parse(rb'{"a": "\ud800x", "b": [NaN, "\ud83d\ude00"]}') == {"a": "?x", "b": [None, "😀"]}
    assert code.event({"type": "of a later version"}) is None


@pytest.mark.parametrize("opens", [b"[", b'{"a":'], ids=["lists", "objects"])
def test_what_no_reader_after_us_could_take_apart_is_refused(opens: bytes) -> None:
    """Python's own bound of calls is met by who has more of them on: the server's answer, a client's notebook."""
    closes = {b"[": b"]"}.get(opens, b"}")

    def message(levels: int) -> bytes:
        data = opens * levels + b"1" + closes * levels
        return b'{"type": "result", "data": {"application/json": ' + data + b"}}"

    assert isinstance(code.event(code.parse(message(150))), code.Result)
    for levels in (300, 900, 100_000):
        with pytest.raises(ProtocolError):
            code.parse(message(levels))


def test_a_large_honest_message_is_taken() -> None:
    body = json.dumps({"type": "stdout", "text": 'a,"[{\\' * 300_000}).encode()
    assert len(code.parse(body)["text"]) == 300_000 * 6


@given(st.binary(max_size=300))
def test_random_messages_are_events_or_protocol_errors(body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        code.event(code.parse(body))


def test_no_interpreter_and_too_much_code_are_said() -> None:
    async def test(agent: Agent) -> None:
        with pytest.raises(ConflictError, match="no Python interpreter"):
            await cell(agent, "1")
        with pytest.raises(InvalidRequestError, match="bytes"):
            await cell(agent, "#" * 5_000_000)

    run(test)
