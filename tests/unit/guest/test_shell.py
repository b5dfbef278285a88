"""Bash as an interpreter: the real one, run by the real agent; and the marks in its output, as a table."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import pytest

from llm4agents.errors import ConflictError, InvalidRequestError
from llm4agents.guest import shell as shells
from llm4agents.guest import shell_wire as wire
from llm4agents.guest.code import End, Event, Output, Raised
from llm4agents.guest.shell import Shell
from llm4agents.guest.verbs import Agent
from tests.unit.guest.agent_process import run

TOKEN = "L0123456789abcdef"


async def cell(shell: Shell, text: str, **options: Any) -> list[Event]:
    async with contextlib.aclosing(shell.run(text, **options)) as events:
        return [event async for event in events]


def said(events: list[Event], stream: str = "stdout") -> str:
    return "".join(event.text for event in events if isinstance(event, Output) and event.stream == stream)


def end(events: list[Event]) -> str:
    assert isinstance(events[-1], End)
    return events[-1].status


def error(events: list[Event]) -> Raised:
    return next(event for event in events if isinstance(event, Raised))


def with_shell(test: Any, **options: Any) -> None:
    async def whole(agent: Agent) -> None:
        shell = await Shell.open(agent, "shell.x", user=None, cwd="/", **options)
        try:
            await test(shell)
        finally:
            await shell.end()

    run(whole)


def test_state_is_kept_between_cells() -> None:
    async def test(shell: Shell) -> None:
        first = await cell(shell, 'x=5; declare -A m=([a]=1)\nf() { echo "f $x"; }\ncd /usr\nexport E=1')
        assert end(first) == "ok" and first == [End("ok", 1)]
        second = await cell(shell, "f; echo ${m[a]} $E $(pwd); echo oops >&2")
        assert said(second) == "f 5\n1 1 /usr\n" and said(second, "stderr") == "oops\n"

    with_shell(test)


def test_text_of_every_kind_goes_in_and_comes_out() -> None:
    async def test(shell: Shell) -> None:
        code = "echo 'it'\"'\"'s !x \\b' \"$(printf '\\303\\251')\" é\ncat <<X\nhey\nX\nprintf '\\0 \\377'"
        assert said(await cell(shell, code)) == "it's !x \\b é é\nhey\n\0 \ufffd"
        assert said(await cell(shell, 'cat; read a; echo "[$a]"')) == "[]\n"
        assert said(await cell(shell, f"x={'y' * 300_000}\necho ${{#x}}")) == "300000\n"
        assert len(said(await cell(shell, "head -c 3000000 /dev/zero | tr '\\0' x"))) == 3_000_000

    with_shell(test)


def test_the_status_of_a_cell() -> None:
    async def test(shell: Shell) -> None:
        failed = await cell(shell, "nothing-of-this-name")
        assert end(failed) == "error" and (error(failed).name, error(failed).value) == ("ExitStatus", "127")
        assert "command not found" in said(failed, "stderr")
        assert error(await cell(shell, "echo a; return 4")).value == "4"
        broken = await cell(shell, "echo a\nif then")
        assert error(broken).value == "2" and "line 2: syntax error" in said(broken, "stderr")
        assert end(await cell(shell, "true")) == "ok"

    with_shell(test)


def test_environment_of_a_context_and_of_a_cell() -> None:
    async def test(shell: Shell) -> None:
        found = await cell(shell, "sh -c 'echo $OWN $MORE'", env={"MORE": "two  words; $(x)"})
        assert said(found) == "mine two words; $(x)\n"
        assert said(await cell(shell, "echo $OWN [$MORE] [$PS1]")) == "mine [] []\n"
        with pytest.raises(InvalidRequestError):
            await cell(shell, "true", env={"a-b": "1"})
        assert end(await cell(shell, "true")) == "ok"

    with_shell(test, env={"OWN": "mine"})


@pytest.mark.parametrize(
    "code", ["while :; do :; done", "sleep 100; echo not", "while true; do sleep 1; done"]
)
def test_a_cell_that_is_interrupted_keeps_the_state(code: str) -> None:
    async def test(shell: Shell) -> None:
        await cell(shell, "x=kept")
        running = asyncio.create_task(cell(shell, f"echo on; {code}"))
        while shell._cell is None or not shell._cell.started.is_set():
            await asyncio.sleep(0.01)
        await shell.interrupt()
        found = await asyncio.wait_for(running, 10)
        assert end(found) == "interrupted" and error(found).name == "Interrupted"
        assert said(await cell(shell, "echo $x")) == "kept\n"

    with_shell(test)


def test_a_cell_that_takes_too_long() -> None:
    async def test(shell: Shell) -> None:
        found = await cell(shell, "sleep 100", timeout_s=0.2)
        assert end(found) == "timed_out" and error(found).name == "TimeoutError"
        assert said(await cell(shell, "echo still here")) == "still here\n"

    with_shell(test)


def test_a_cell_that_cannot_be_interrupted_ends_with_its_shell() -> None:
    async def test(shell: Shell) -> None:
        found = await cell(shell, "trap '' INT; while :; do :; done", timeout_s=0.2)
        assert end(found) == "timed_out" and error(found).name == "InterpreterDied"
        assert not shell.alive

    with_shell(test)


def test_leaving_a_cell_interrupts_it() -> None:
    async def test(shell: Shell) -> None:
        async with contextlib.aclosing(shell.run("echo on; sleep 100; echo off")) as events:
            assert await anext(events) == Output("stdout", "on\n")
        assert said(await cell(shell, "echo next")) == "next\n"

    with_shell(test)


def test_the_end_of_the_shell_is_told() -> None:
    async def test(shell: Shell) -> None:
        found = await cell(shell, "echo bye; exit 3")
        assert said(found) == "bye\n" and end(found) == "died"
        assert error(found).name == "InterpreterDied" and "status 3" in error(found).value
        assert not shell.alive

    with_shell(test)


def test_what_is_left_in_the_background_is_told_later() -> None:
    async def test(shell: Shell) -> None:
        pipe = f"/tmp/l4a-shell-{os.getpid()}"
        await cell(shell, f"mkfifo {pipe}; {{ read _ < {pipe}; echo late; echo done > {pipe}; }} & echo now")
        assert "late" in said(await cell(shell, f"echo > {pipe}; read x < {pipe}; rm {pipe}"))

    with_shell(test)


def test_a_shell_is_found_again_and_what_ran_is_interrupted() -> None:
    async def whole(agent: Agent) -> None:
        first = await Shell.open(agent, "shell.x", user=None, cwd="/")
        await cell(first, "x=kept")
        running = asyncio.create_task(cell(first, "sleep 100"))
        while first._cell is None or not first._cell.started.is_set():
            await asyncio.sleep(0.01)
        first.detach()
        assert end(await running) == "died"
        second = await Shell.open(agent, "shell.x", user=None, cwd="/")
        assert said(await cell(second, "echo $x")) == "kept\n"
        second.detach()
        await shells.end(agent, "shell.x")
        third = await Shell.open(agent, "shell.x", user=None, cwd="/")
        assert said(await cell(third, "echo [$x]")) == "[]\n"
        await cell(third, "exit 1")
        fourth = await Shell.open(agent, "shell.x", user=None, cwd="/")
        await fourth.end()
        assert not await agent.processes()

    run(whole)


def test_a_directory_that_is_not_there() -> None:
    async def whole(agent: Agent) -> None:
        with pytest.raises((InvalidRequestError, ConflictError)):
            await Shell.open(agent, "shell.x", user=None, cwd="/nothing/here")

    run(whole)


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_marks_are_found_however_they_are_cut(size: int) -> None:
    data = f"a\0b\0{TOKEN}+3\0c\0{TOKEN[:5]}d\0{TOKEN}:3:12\0é\0{TOKEN}.3\0\0".encode()
    scanner = wire.Scanner(TOKEN, 1)
    items: list[Any] = []
    for at in range(0, len(data), size):
        for item in scanner.feed(data[at : at + size]):
            if isinstance(item, str) and items and isinstance(items[-1], str):
                items[-1] += item
            else:
                items.append(item)
    assert items == [
        "a\0b",
        wire.Started(3),
        f"c\0{TOKEN[:5]}d",
        wire.Ended(3, 1, 12),
        "é",
        wire.Ended(3, 1, None),
    ]
    assert scanner.rest() == "\0"
