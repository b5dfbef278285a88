"""Commands and code in a running sandbox: as a stream of events, or collected into one answer with bounds.

Events and answers are JSON-able dicts as docs/design/interfaces.md has them. Not here: HTTP.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llm4agents import limits
from llm4agents.engine import contexts, processes
from llm4agents.engine.live import Live
from llm4agents.engine.processes import Command
from llm4agents.guest import code as interpreter
from llm4agents.guest.handles import STDOUT
from llm4agents.guest.results import ExitStatus
from llm4agents.guest.verbs import Agent

SHELL = "/bin/sh"


def shell(command: str) -> list[str]:
    """A command line as argv: bash where the image has it, else sh, decided in the guest by one exec."""
    return [
        SHELL,
        "-c",
        'if [ -x /bin/bash ]; then exec /bin/bash -c "$1"; else exec /bin/sh -c "$1"; fi',
        "sh",
        command,
    ]


@dataclass(frozen=True, slots=True)
class Cell:
    """What to run. `language` None: that of the context, or of the template."""

    code: str
    context: str = contexts.DEFAULT
    language: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = limits.CODE_TIMEOUT_S


class _Kept:
    """The first bytes of a channel, up to a bound; the rest is only counted."""

    def __init__(self, most: int) -> None:
        self._room = most
        self._parts: list[bytes] = []
        self.truncated = False

    def add(self, data: bytes) -> None:
        if len(data) > self._room:
            self.truncated = True
            data = data[: self._room]
        if data:
            self._parts.append(data)
            self._room -= len(data)

    def into(self, body: dict[str, Any], name: str) -> None:
        raw = b"".join(self._parts)
        try:
            body[name] = raw.decode()
        except UnicodeDecodeError:
            body[name] = raw.decode(errors="replace")
            body[f"{name}_b64"] = base64.b64encode(raw).decode("ascii")
        body[f"{name}_truncated"] = self.truncated


def _exit(status: ExitStatus, began: float) -> dict[str, Any]:
    return {**processes.ending(status), "duration_ms": round((time.perf_counter() - began) * 1000, 1)}


@dataclass(frozen=True, slots=True)
class Manner:
    """How a command that is waited for is managed: its id and tag, and what becomes of it when its caller leaves."""

    id: str | None = None
    tag: str | None = None
    kill_when_left: bool = False


async def exec_stream(
    live: Live, command: Command, manner: Manner = Manner()
) -> AsyncGenerator[dict[str, Any], None]:
    """`started`, then `stdout`/`stderr` as they come, then `exit`; the command is forgotten after that.

    Closing it leaves the command to itself, unless the manner says otherwise.
    """
    began = time.perf_counter()
    async with processes.running(
        live, command, id=manner.id, tag=manner.tag, kill_when_left=manner.kill_when_left
    ) as process:
        yield {"type": "started", "pid": process.pid, "id": process.id}
        async for offset, channel, data in process:
            yield processes.piece(offset, channel, data)
        status = await process.wait()
    yield {"type": "exit", **_exit(status, began), "offset": process.offset}
    await processes.forget_soon(live, process.id)


async def exec_wait(live: Live, command: Command, manner: Manner = Manner()) -> dict[str, Any]:
    """Run to the end; keeps EXEC_OUTPUT_BYTES_MAX of each channel. `processes.forget_soon` when it has been sent."""
    began = time.perf_counter()
    kept = {"stdout": _Kept(limits.EXEC_OUTPUT_BYTES_MAX), "stderr": _Kept(limits.EXEC_OUTPUT_BYTES_MAX)}
    async with processes.running(
        live, command, id=manner.id, tag=manner.tag, kill_when_left=manner.kill_when_left, heard=False
    ) as process:
        async for _, channel, data in process:
            kept["stdout" if channel == STDOUT else "stderr"].add(data)
        body = {"id": process.id, **_exit(await process.wait(), began)}
    for name, channel_kept in kept.items():
        channel_kept.into(body, name)
    return body


async def code_stream(live: Live, cell: Cell) -> AsyncGenerator[dict[str, Any], None]:
    """The interpreter's events; the last is `end`. Closing it interrupts the cell."""
    began = time.perf_counter()
    async with live.use("run_code") as agent:
        if live.env is None:
            live.env = await _env_of(agent)
        events = contexts.run(
            live,
            agent,
            cell.code,
            context=cell.context,
            language=cell.language,
            env=cell.env,
            sandbox_env=live.env,
            timeout_s=cell.timeout_s,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                body = event.to_json()
                if isinstance(event, interpreter.End):
                    body["duration_ms"] = round((time.perf_counter() - began) * 1000, 1)
                yield body


async def _env_of(agent: Agent) -> dict[str, str]:
    """The environment that the agent gives to every command, asked of a guest that was adopted."""
    said = b""
    async with await agent.exec(["/usr/bin/env", "-0"], timeout_s=limits.EXEC_TIMEOUT_S) as process:
        async with contextlib.aclosing(aiter(process)) as output:
            async for channel, data in output:
                if channel == STDOUT and len(said) < 2 * limits.ENV_BYTES_MAX:  # the guest may say anything
                    said += data
        await process.wait()
    pairs = (entry.partition("=") for entry in said.decode("utf-8", "replace").split("\0"))
    return {name: value for name, sign, value in pairs if sign and name != "PWD"}


async def code_wait(live: Live, cell: Cell) -> dict[str, Any]:
    """Run to the end; keeps CODE_OUTPUT_BYTES_MAX characters of text and as much of results, and says if it cut."""
    text: dict[str, list[str]] = {"stdout": [], "stderr": []}
    room = {"stdout": limits.CODE_OUTPUT_BYTES_MAX, "stderr": limits.CODE_OUTPUT_BYTES_MAX}
    results: list[dict[str, Any]] = []
    results_room = 4 * limits.CODE_OUTPUT_BYTES_MAX
    body: dict[str, Any] = {"error": None, "truncated": False}
    async with contextlib.aclosing(code_stream(live, cell)) as events:
        async for event in events:
            kind = event.pop("type")
            if kind in text:
                said = event["text"]
                if len(said) > room[kind]:
                    body["truncated"] = True
                    said = said[: room[kind]]
                room[kind] -= len(said)
                text[kind].append(said)
            elif kind == "result":
                size = sum(len(value) if isinstance(value, str) else 256 for value in event["data"].values())
                if size > results_room:
                    body["truncated"] = True
                    continue
                results_room -= size
                results.append(event)
            elif kind == "error":
                body["error"] = event
            else:
                body.update(event)
    return {**body, "results": results, "stdout": "".join(text["stdout"]), "stderr": "".join(text["stderr"])}
