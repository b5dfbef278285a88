"""A bash in a guest that runs cells, with the same events as an interpreter. For images that have nothing but bash.

The shell is a managed process: it outlives the server and pauses, and is found again by its id. What the lines and
marks are is in `shell_wire`. It is as hostile as any guest: a cell can say marks itself, which spoils its own output
and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Final, Literal

from llm4agents.errors import (
    ConflictError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    TimedOutError,
)
from llm4agents.guest import shell_wire as wire
from llm4agents.guest.code import End, Event, Output, Raised, Status, check_size
from llm4agents.guest.handles import STDERR, STDOUT
from llm4agents.guest.processes import Attached
from llm4agents.guest.verbs import Agent, User
from llm4agents.limits import CODE_INTERRUPT_GRACE_S

_SIGINT: Final = 2
_SIGKILL: Final = 9
_TRIES: Final = 3
_NEW_S: Final = 3.0
"""How long a shell that runs nothing may take to say its first marks."""
_GREETING_S: Final = 10.0
_STREAMS: Final[dict[int, Literal["stdout", "stderr"]]] = {STDOUT: "stdout", STDERR: "stderr"}
_PIECES_MAX: Final = 8
"""How many pieces of output (64 KiB each) are taken ahead of whoever reads them; then the shell's pipes fill."""
_PRESS_S: Final = 0.3
_PRESS_S_MAX: Final = 2.0


class Shell:
    """One bash. Cells run one after the other; `alive` says whether the next one finds the same state."""

    def __init__(self, agent: Agent, process: Attached) -> None:
        self.agent = agent
        self._process = process
        self._token = token = wire.token()
        self._scanners = {stream: wire.Scanner(token, stream) for stream in _STREAMS}
        self._pieces: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(_PIECES_MAX)
        self._turn = asyncio.Lock()
        self._count = 0
        self._cell: _Cell | None = None
        self._dead = self._detached = False
        self._pump = asyncio.create_task(self._take())
        agent.session.closed.add_done_callback(self._lost)

    @classmethod
    async def open(
        cls,
        agent: Agent,
        id: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: User = "user",
    ) -> Shell:
        """The shell of that id: the one that runs, with its state, else a new one.

        A cell that a server before us has left running is interrupted. Raises ConflictError when the image has no
        bash, InvalidRequestError for a bad `cwd`.
        """
        for _ in range(_TRIES):
            try:
                process = await _started(agent, id, env, cwd, user)
            except ConflictError as error:
                if error.details.get("process") != id:
                    raise
                process = await agent.attach(id, stdin=True)
            shell = cls(agent, process)
            try:
                if await shell._greet():
                    return shell
            except BaseException:
                shell.detach()
                raise
            await shell.end()
        raise TimedOutError(f"bash did not answer within {_TRIES * _GREETING_S:g} s")

    async def _greet(self) -> bool:
        """Wait for its first marks; False when they do not come."""
        self._cell = cell = _Cell(0)
        for patience in (_NEW_S, _GREETING_S - _NEW_S):
            try:
                async with asyncio.timeout(patience):
                    await self._write(wire.hello(self._token))
                    while not cell.over and not self._dead:
                        await self._next(cell)
            except TimeoutError as error:
                if isinstance(error, LLM4AgentsError):
                    raise
                # It runs a cell, or has read a part of one.
                with contextlib.suppress(LLM4AgentsError):
                    await self._process.signal(_SIGINT)
                continue
            break
        self._cell = None
        return cell.over and not self._dead

    @property
    def alive(self) -> bool:
        return not self._dead and not self.agent.session.closed.done()

    @property
    def executions(self) -> int:
        return self._count

    def detach(self) -> None:
        """Let go of it: `open` finds it again. Idempotent."""
        self._detached = True
        self._lost()
        self._process.detach()

    async def end(self) -> None:
        """End it and what it started, and forget it."""
        self._lost()
        self._process.kill()
        await _bury(self.agent, self._process.id)

    def _lost(self, _: object = None) -> None:
        """Nothing more comes from the guest."""
        self._dead = True
        self.agent.session.closed.remove_done_callback(self._lost)
        self._pump.cancel()
        self._pieces.put_nowait(None)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, if one does. Does not wait for its end."""
        if self._cell is not None:
            self._break(self._cell)

    async def run(
        self, code: str, *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Run a cell; yields its events as they come, the last one an End. Close it (`aclosing`) to interrupt.

        An exit status that is not 0 is the error `ExitStatus`; a shell that ended, `InterpreterDied`.
        """
        check_size(code)
        async with self._turn:
            self._count += 1
            cell = self._cell = _Cell(self._count)
            lines = wire.cell(self._token, cell.number, code, env or {})
            feeding = asyncio.create_task(self._write(lines))
            keeper = None if timeout_s is None else asyncio.create_task(self._enforce(cell, timeout_s))
            try:
                while not cell.over and not self._dead:
                    for event in await self._next(cell):
                        yield event
                for event in await self._end(cell):
                    yield event
            finally:
                if keeper is not None:
                    keeper.cancel()
                if not cell.over and self.alive:
                    # A task of its own, so that a second cancellation does not leave the cell running.
                    await asyncio.shield(asyncio.create_task(self._stop(cell)))
                feeding.cancel()
                if cell.breaking is not None:
                    cell.breaking.cancel()
                self._cell = None

    # -- output ---------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        """Move output from the process to the queue: reading it directly could not be cancelled unharmed."""
        with contextlib.suppress(LLM4AgentsError):
            async with contextlib.aclosing(aiter(self._process)) as output:
                async for _, channel, data in output:
                    await self._room.acquire()
                    self._pieces.put_nowait((channel, data))
        self._pieces.put_nowait(None)

    async def _next(self, cell: _Cell) -> list[Event]:
        piece = await self._pieces.get()
        if piece is None:
            self._dead = True
            texts = [(stream, scanner.rest()) for stream, scanner in self._scanners.items()]
            return [Output(_STREAMS[stream], text) for stream, text in texts if text]
        self._room.release()
        return list(self._events(cell, *piece))

    def _events(self, cell: _Cell, stream: int, data: bytes) -> Iterator[Event]:
        for item in self._scanners[stream].feed(data):
            if isinstance(item, str):
                yield Output(_STREAMS[stream], item)
            elif item.cell == cell.number:
                cell.note(item)

    async def _end(self, cell: _Cell) -> list[Event]:
        """The last events of a cell that is over, or whose shell is."""
        if self._dead and not cell.over:
            status: Status = "timed_out" if cell.timed_out else "died"
            return [Raised("InterpreterDied", await self._death(), ""), End(status, self._count)]
        code = cell.status or 0
        if code == 0:
            return [End("ok", self._count)]
        if cell.timed_out:
            words = "the cell ran longer than its timeout and was interrupted"
            return [Raised("TimeoutError", words, ""), End("timed_out", self._count)]
        if cell.interrupted:
            return [Raised("Interrupted", "the cell was interrupted", ""), End("interrupted", self._count)]
        words = f"the last command of the cell exited with status {code}"
        return [Raised("ExitStatus", str(code), words), End("error", self._count)]

    async def _death(self) -> str:
        if self._detached:
            return "bash was let go of"
        try:
            status = await self._process.wait()
            await self.agent.forget(self._process.id)
        except LLM4AgentsError as error:
            return error.message
        if status.signal is not None:
            return f"bash was killed by signal {status.signal}"
        return f"bash exited with status {status.exit_code}"

    # -- input ----------------------------------------------------------------------------------------------

    async def _write(self, lines: bytes) -> None:
        with contextlib.suppress(LLM4AgentsError):  # the shell has ended, which its output tells
            await self._process.write(lines)

    def _break(self, cell: _Cell) -> None:
        """Begin to interrupt the cell."""
        cell.interrupted = True
        if cell.breaking is None:
            cell.breaking = asyncio.create_task(self._press(cell))

    async def _press(self, cell: _Cell) -> None:
        """SIGINT until the cell ends, as one presses ^C: one that comes between fork and exec ends nothing.

        Not before the shell has read the whole cell, or it would take the rest for commands. And the end marks are
        asked for again: the signal may have hit the lines that say them.
        """
        await cell.started.wait()
        pause = _PRESS_S
        with contextlib.suppress(LLM4AgentsError):  # the shell has ended
            while not cell.over and self.alive:
                await self._process.signal(_SIGINT)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PRESS_S_MAX)
                if not cell.over and self.alive:
                    await self._process.write(wire.farewell(self._token, cell.number))

    async def _enforce(self, cell: _Cell, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        cell.timed_out = True
        self._break(cell)
        await asyncio.sleep(CODE_INTERRUPT_GRACE_S)
        with contextlib.suppress(LLM4AgentsError):  # it has ended by itself
            await self.agent.signal(
                self._process.id, _SIGKILL
            )  # who iterates learns it by the end of the output

    async def _stop(self, cell: _Cell) -> None:
        """Nobody wants the rest: interrupt, and end the shell if that does not end the cell."""
        try:
            async with asyncio.timeout(CODE_INTERRUPT_GRACE_S):
                self._break(cell)
                while not cell.over and not self._dead:
                    await self._next(cell)
        except TimeoutError:
            await self.end()


class _Cell:
    """What is known of the cell that runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.started = asyncio.Event()
        self.interrupted = self.timed_out = False
        self.status: int | None = None
        self.breaking: asyncio.Task[None] | None = None
        self._ended: set[int] = set()

    @property
    def over(self) -> bool:
        return len(self._ended) == len(_STREAMS)

    def note(self, mark: wire.Started | wire.Ended) -> None:
        self.started.set()
        if isinstance(mark, wire.Ended):
            self._ended.add(mark.stream)
            if mark.status is not None:
                self.status = mark.status


async def _started(
    agent: Agent, id: str, env: Mapping[str, str] | None, cwd: str | None, user: User
) -> Attached:
    variables = {**(env or {}), **wire.ENVIRONMENT}
    try:
        return await agent.start(
            wire.ARGV, id=id, tag="code context", env=variables, cwd=cwd, user=user, stdin=True
        )
    except InvalidRequestError as error:
        if "working directory" in error.message:
            raise InvalidRequestError(f"{cwd}: {error.message}", hint=error.hint) from None
        raise ConflictError("this sandbox has no bash", hint="use a template that has it") from error


async def end(agent: Agent, id: str) -> None:
    """End the shell of that id, whether anybody is attached to it or not."""
    with contextlib.suppress(NotFoundError):
        (await agent.attach(id, output=False)).kill()
        await _bury(agent, id)


async def _bury(agent: Agent, id: str) -> None:
    """Wait for the end of what was killed, and have it forgotten."""
    with contextlib.suppress(LLM4AgentsError, TimeoutError):
        async with asyncio.timeout(CODE_INTERRUPT_GRACE_S):
            async with await agent.attach(id, output=False) as process:
                await process.wait()
            await agent.forget(id)
