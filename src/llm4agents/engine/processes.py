"""Managed processes of a running sandbox: started, watched, told, forgotten. Each outlives calls and servers.

Not here: the wire of HTTP (api), the guest's part (`guest.processes`), commands that are waited for (`calls`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import signal as signals
import string
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from llm4agents import limits
from llm4agents.engine.live import Live
from llm4agents.errors import (
    ConflictError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    SandboxPausedError,
    TimedOutError,
)
from llm4agents.guest.handles import STDOUT
from llm4agents.guest.processes import Attached as Attached
from llm4agents.guest.processes import Port, ProcessInfo
from llm4agents.guest.processes import Terminal as Terminal
from llm4agents.guest.results import ExitStatus
from llm4agents.guest.verbs import Agent

_ALPHABET = string.ascii_lowercase + string.digits
_FORGET_AFTER_S = 0.25
"""Ended commands are forgotten together, and not while the next one is being started."""
_POLL_S = (0.02, 0.25)
"""Between two looks at the ports of a guest: first, and at most."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. `timeout_s` None = no limit. `stdin`: bytes to feed it, True to keep it open, None for none."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | int = "user"
    stdin: bytes | Literal[True] | None = None
    timeout_s: float | None = limits.EXEC_TIMEOUT_S


def new_id() -> str:
    return "proc_" + "".join(secrets.choice(_ALPHABET) for _ in range(16))


def signal_number(signal: int | str) -> int:
    """A signal by number, or by name (`TERM`, `SIGTERM`, any case). Raises InvalidRequestError."""
    if isinstance(signal, int):
        number = signal
    else:
        name = signal.upper()
        if name.isdecimal() and len(name) <= 3:
            return signal_number(int(name))
        name = name if name.startswith("SIG") else f"SIG{name}"
        found = signals.Signals.__members__.get(name)
        number = -1 if found is None else int(found)
    if not 1 <= number <= 64:
        raise InvalidRequestError(f"{signal!r} is no signal", hint="a name like TERM or INT, or 1 to 64")
    return number


def piece(offset: int, channel: int, data: bytes) -> dict[str, Any]:
    """A piece of output as the wire has it."""
    name = "stdout" if channel == STDOUT else "stderr"
    return {"type": name, "offset": offset, "data_b64": base64.b64encode(data).decode("ascii")}


def ending(status: ExitStatus) -> dict[str, Any]:
    return {"exit_code": status.exit_code, "signal": status.signal, "timed_out": status.timed_out}


def describe(info: ProcessInfo) -> dict[str, Any]:
    """A process as the wire has it."""
    body = asdict(info)
    body["argv"] = list(info.argv)
    return body


# -- starting ------------------------------------------------------------------------------------------------


async def _started(
    agent: Agent,
    command: Command,
    id: str,
    tag: str | None,
    tty: Terminal | None,
    keep_bytes: int | None,
    full: Literal["drop", "block"],
) -> Attached:
    try:
        return await agent.start(
            command.argv,
            id=id,
            tag=tag,
            tty=tty,
            keep_bytes=keep_bytes,
            full=full,
            env=command.env,
            cwd=command.cwd,
            user=command.user,
            stdin=False if command.stdin is None else command.stdin,
            timeout_s=command.timeout_s,
        )
    except LLM4AgentsError as error:
        if command.cwd is None or "working directory" not in error.message:
            raise
        # The agent names the command and not the directory it could not enter.
        raise type(error)(f"{command.cwd}: {error.message}", hint=error.hint, **error.details) from error


_starting: set[asyncio.Task[Attached]] = set()


async def _start_whole(starting: asyncio.Task[Attached], *, kill: Callable[[], bool]) -> Attached:
    """The process, even if whoever waits for it goes away meanwhile: then it lives on, unless `kill`."""
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        if kill():
            starting.cancel()
        else:
            _starting.add(starting)
            starting.add_done_callback(_let_go)
        raise


def _let_go(starting: asyncio.Task[Attached]) -> None:
    _starting.discard(starting)
    if not starting.cancelled() and starting.exception() is None:
        starting.result().detach()


@contextlib.asynccontextmanager
async def running(
    live: Live,
    command: Command,
    *,
    id: str | None = None,
    tag: str | None = None,
    tty: Terminal | None = None,
    keep_bytes: int | None = None,
    full: Literal["drop", "block"] = "drop",
    kill_when_left: bool = False,
    heard: bool = True,
) -> AsyncIterator[Attached]:
    """A new process and its output, while the sandbox is held open. Leaving it lets go of the process.

    `kill_when_left`: when the caller is cancelled or closed it is killed instead (but not when the sandbox is
    paused or its server stops). A pause says in SandboxPausedError's details which process it was and from which
    `offset` on the caller has not heard of its output (from the beginning, unless what was iterated over was `heard`).
    """
    id = id or new_id()
    await _not_being_forgotten(live, id)
    attached: Attached | None = None

    def kill() -> bool:
        return kill_when_left and live.end_error is None

    try:
        async with live.use(f"exec {command.argv[0]}") as agent:
            work = _started(agent, command, id, tag, tty, keep_bytes, full)
            attached = await _start_whole(asyncio.create_task(work), kill=kill)
            try:
                yield attached
            except (asyncio.CancelledError, GeneratorExit):
                if kill():
                    attached.kill()
                raise
            finally:
                attached.detach()
    except SandboxPausedError as error:
        raise _paused(error, id, attached.offset if attached is not None and heard else 0) from None


def _paused(error: SandboxPausedError, id: str, offset: int) -> SandboxPausedError:
    # A copy: the one of the sandbox is raised in every call.
    return SandboxPausedError(
        error.message, hint=error.hint, **{**error.details, "process": id, "offset": offset}
    )


async def start(
    live: Live,
    command: Command,
    *,
    id: str | None = None,
    tag: str | None = None,
    tty: Terminal | None = None,
    keep_bytes: int | None = None,
    full: Literal["drop", "block"] = "drop",
) -> ProcessInfo:
    """Start a process and leave it to itself.

    Raises ConflictError when there is one of that `id`, InvalidRequestError when it cannot be started.
    """
    id = id or new_id()
    options: dict[str, Any] = {"id": id, "tag": tag, "tty": tty, "keep_bytes": keep_bytes, "full": full}
    async with live.use(f"start {id}") as agent:
        async with running(live, command, **options):
            pass
        return await _known(agent, id)


# -- looking -------------------------------------------------------------------------------------------------


async def _known(agent: Agent, id: str) -> ProcessInfo:
    for info in await agent.processes():
        if info.id == id:
            return info
    raise NotFoundError(f"there is no process {id!r} in this sandbox", process=id)


async def listing(live: Live) -> list[ProcessInfo]:
    """Every process that runs or is not forgotten, in the order of their starts."""
    async with live.use("processes") as agent:
        found = await agent.processes()
    return sorted(
        (info for info in found if info.id not in live.forgetting), key=lambda info: info.started_at
    )


async def get(live: Live, id: str, wait_s: float = 0) -> ProcessInfo:
    """How a process is, once it has ended or `wait_s` seconds have passed. Raises NotFoundError."""
    async with live.use("processes") as agent:
        if wait_s > 0:
            async with await agent.attach(id, output=False) as attached:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await attached.wait()
        return await _known(agent, id)


@contextlib.asynccontextmanager
async def attach(
    live: Live, id: str, *, from_offset: int | None = 0, stdin: bool = False, output: bool = True
) -> AsyncIterator[Attached]:
    """Watch a process, from an offset of its output on (None: from now on); it holds the sandbox open meanwhile.

    Raises NotFoundError, and SandboxPausedError with `process` and `offset` in its details.
    """
    attached: Attached | None = None
    try:
        async with live.use(f"process {id}") as agent:
            attached = await agent.attach(id, from_offset=from_offset, stdin=stdin, output=output)
            async with attached:
                yield attached
    except SandboxPausedError as error:
        offset = attached.offset if attached is not None else from_offset or 0
        raise _paused(error, id, offset) from None


async def follow(live: Live, id: str, from_offset: int) -> AsyncGenerator[dict[str, Any], None]:
    """`started`, then output as it comes, then `exit`; as the wire has them."""
    async with attach(live, id, from_offset=from_offset) as attached:
        yield {
            "type": "started",
            "id": id,
            "pid": attached.pid,
            "offset": attached.offset,
            "gap": attached.gap,
            "tty": attached.tty,
        }
        async for offset, channel, data in attached:
            yield piece(offset, channel, data)
        yield {"type": "exit", **ending(await attached.wait()), "offset": attached.offset}


async def output(live: Live, id: str, from_offset: int, wait_s: float) -> dict[str, Any]:
    """What there is of its output from an offset on, OUTPUT_BYTES_MAX or little more at most.

    When there is nothing yet, waits `wait_s` for something, or for its end. `offset` is where to read on.
    """
    pieces: list[dict[str, Any]] = []
    async with live.use(f"process {id}") as agent:
        now = await _known(agent, id)
        async with await agent.attach(id, from_offset=from_offset) as attached:
            gap, begin = attached.gap, attached.offset
            if begin < now.offset or (now.running and wait_s):
                wait = wait_s if begin >= now.offset else limits.STALL_TIMEOUT_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        async for offset, channel, data in attached:
                            pieces.append(piece(offset, channel, data))
                            enough = attached.offset - begin >= limits.OUTPUT_BYTES_MAX
                            if enough or (attached.offset >= now.offset and not attached.pending()):
                                break
            reached = attached.offset
        now = await _known(agent, id)
    state = {"running": now.running, **ending(ExitStatus(now.exit_code, now.signal, now.timed_out))}
    return {"data": pieces, "offset": reached, "gap": gap, **state, "more": now.offset > reached}


# -- telling -------------------------------------------------------------------------------------------------


async def write_stdin(live: Live, id: str, data: bytes, *, eof: bool) -> None:
    """Write to its stdin, and end it with `eof`. Raises TimedOutError when it does not read what waits there."""
    async with (
        live.use(f"stdin of {id}") as agent,
        await agent.attach(id, stdin=True, output=False) as attached,
    ):
        try:
            async with asyncio.timeout(limits.VERB_TIMEOUT_S):
                await attached.write(data)
        except TimeoutError:
            raise TimedOutError(
                f"{id} does not read its stdin", hint="a part was written; attach to write as it reads"
            ) from None
        if eof:
            await attached.close_stdin()
        attached.detach()
        await attached.settle()


async def resize(live: Live, id: str, rows: int, cols: int) -> None:
    """The size of its terminal."""
    async with live.use(f"resize {id}") as agent, await agent.attach(id, output=False) as attached:
        if not attached.tty:
            raise ConflictError(f"{id} has no terminal", hint="start it with tty")
        await attached.resize(rows, cols)
        attached.detach()
        await attached.settle()


async def signal(live: Live, id: str, signal: int | str) -> None:
    """To its process group. Raises NotFoundError, ConflictError when it has ended."""
    async with live.use(f"signal {id}") as agent:
        await agent.signal(id, signal_number(signal))


async def end(live: Live, id: str) -> ProcessInfo:
    """Kill it and all it has started, if it runs, and forget it. How it had ended, or ended now."""
    async with live.use(f"end {id}") as agent:
        attached = await agent.attach(id, output=False)
        attached.kill()  # nothing if it has ended
        await attached.settle()
        async with await agent.attach(id, output=False) as watched:
            await watched.wait()
        info = await _known(agent, id)
        await agent.forget(id)
        return info


# -- forgetting ----------------------------------------------------------------------------------------------


async def forget(live: Live, id: str) -> None:
    """Forget one that has ended. Raises NotFoundError, InvalidRequestError while it runs."""
    async with live.use(f"forget {id}") as agent:
        await agent.forget(id)


async def forget_soon(live: Live, id: str) -> None:
    """Forget a command whose answer has been sent, beside whatever comes next; nobody sees it from now on."""
    if live.forgetting:
        live.forgetting.append(id)
        return
    live.forgetting.append(id)
    asyncio.get_running_loop().call_later(_FORGET_AFTER_S, _forget_now, live)


_forgetters: set[asyncio.Task[None]] = set()


def _forget_now(live: Live) -> None:
    task = asyncio.create_task(_forget_all(live))
    _forgetters.add(task)
    task.add_done_callback(_forgetters.discard)


async def _forget_all(live: Live) -> None:
    ids, live.forgetting[:] = live.forgetting[:], []
    if ids and not live.ending and not live.disk_full:
        with contextlib.suppress(LLM4AgentsError):  # it is over, or the guest forgot by itself
            await live.agent.forget(*ids)


async def _not_being_forgotten(live: Live, id: str) -> None:
    if id in live.forgetting:
        await _forget_all(live)


# -- ports ---------------------------------------------------------------------------------------------------


async def ports(live: Live) -> list[Port]:
    """TCP ports on which something in the guest listens, lowest first."""
    async with live.use("ports") as agent:
        return await agent.ports()


async def wait_port(live: Live, port: int, timeout_s: float) -> Port:
    """Wait until something listens on a TCP port. Raises TimedOutError."""
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + timeout_s, _POLL_S[0]
    async with live.use(f"wait for port {port}") as agent:
        while True:
            for found in await agent.ports():
                if found.port == port:
                    return found
            left = until - loop.time()
            if left <= 0:
                raise TimedOutError(
                    f"nothing listens on port {port} within {timeout_s:g} s",
                    hint="the process's output may say why; a longer timeout waits on",
                )
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, _POLL_S[1])
