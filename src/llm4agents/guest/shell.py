"""A bash in a guest that runs cells, with the same events as an interpreter. For images that have nothing but bash.

The shell lives as long as its process; what the lines and marks are is in `shell_wire`. It is as hostile as
any guest: a cell can say marks itself, which spoils its own output and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Final, Literal

from llm4agents.errors import ConflictError, InvalidRequestError, LLM4AgentsError, TimedOutError
from llm4agents.guest import shell_wire as wire
from llm4agents.guest.code import End, Event, Output, Raised, Status, check_size
from llm4agents.guest.handles import STDERR, STDOUT, Process
from llm4agents.guest.verbs import Agent, User
from llm4agents.limits import CODE_INTERRUPT_GRACE_S, VERB_TIMEOUT_S

_SIGINT: Final = 2
_STREAMS: Final[dict[int, Literal["stdout", "stderr"]]] = {STDOUT: "stdout", STDERR: "stderr"}
_PIECES_MAX: Final = 8
"""How many pieces of output (64 KiB each) are taken ahead of whoever reads them; then the shell's pipes fill."""
_ASK_AGAIN_S: Final = 1.0


class Shell:
    """One bash. Cells run one after the other; `alive` says whether the next one finds the same state."""

    def __init__(self, agent: Agent, process: Process, token: str) -> None:
        self.agent = agent
        self._process = process
        self._token = token
        self._scanners = {stream: wire.Scanner(token, stream) for stream in _STREAMS}
        self._pieces: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(_PIECES_MAX)
        self._turn = asyncio.Lock()
        self._count = 0
        self._cell: _Cell | None = None
        self._dead = False
        self._asking: asyncio.Task[None] | None = None
        self._pump = asyncio.create_task(self._take())
        agent.session.closed.add_done_callback(self._lost)

    @classmethod
    async def start(
        cls,
        agent: Agent,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: User = "user",
    ) -> Shell:
        """A new shell. Raises ConflictError when the image has no bash, InvalidRequestError for a bad `cwd`."""
        try:
            process = await agent.exec(
                wire.ARGV, env={**(env or {}), **wire.ENVIRONMENT}, cwd=cwd, user=user, stdin=True
            )
        except InvalidRequestError as error:
            if "working directory" in error.message:
                raise InvalidRequestError(f"{cwd}: {error.message}", hint=error.hint) from None
            raise ConflictError("this sandbox has no bash", hint="use a template that has it") from error
        shell = cls(agent, process, wire.token())
        try:
            async with asyncio.timeout(VERB_TIMEOUT_S):
                await process.write_stdin(wire.hello(shell._token))
                shell._cell = cell = _Cell(0)
                while not cell.over and not shell._dead:
                    for _ in await shell._next(cell):
                        pass
        except TimeoutError as error:
            shell.kill()
            if isinstance(error, LLM4AgentsError):
                raise
            raise TimedOutError(f"bash did not answer within {VERB_TIMEOUT_S:g} s") from None
        except BaseException:
            shell.kill()
            raise
        shell._cell = None
        return shell

    @property
    def alive(self) -> bool:
        return not self._dead and not self.agent.session.closed.done()

    @property
    def executions(self) -> int:
        return self._count

    def kill(self) -> None:
        """End it and what it started."""
        self._dead = True
        self._process.cancel()
        self._lost()

    def _lost(self, _: object = None) -> None:
        """Nothing more comes from the guest."""
        self.agent.session.closed.remove_done_callback(self._lost)
        self._pump.cancel()
        self._pieces.put_nowait(None)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, if one does. Does not wait for its end."""
        if self._cell is not None:
            await self._break(self._cell)

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
                self._cell = None

    # -- output ---------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        """Move output from the process to the queue: reading it directly could not be cancelled unharmed."""
        with contextlib.suppress(LLM4AgentsError):
            async with contextlib.aclosing(aiter(self._process)) as output:
                async for piece in output:
                    await self._room.acquire()
                    self._pieces.put_nowait(piece)
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
        try:
            status = await self._process.wait()
        except LLM4AgentsError as error:
            return error.message
        if status.signal is not None:
            return f"bash was killed by signal {status.signal}"
        return f"bash exited with status {status.exit_code}"

    # -- input ----------------------------------------------------------------------------------------------

    async def _write(self, lines: bytes) -> None:
        with contextlib.suppress(LLM4AgentsError):  # the shell has ended, which its output tells
            await self._process.write_stdin(lines)

    async def _break(self, cell: _Cell) -> None:
        """SIGINT, once the shell has read the whole cell: before, it would take the rest for commands."""
        cell.interrupted = True
        with contextlib.suppress(TimeoutError, LLM4AgentsError):
            async with asyncio.timeout(CODE_INTERRUPT_GRACE_S):
                await cell.started.wait()
                if not cell.over:
                    await self._process.signal(_SIGINT)
                    self._asking = asyncio.create_task(self._again(cell))

    async def _again(self, cell: _Cell) -> None:
        """Ask for the end marks once more: the signal may have hit the lines that say them."""
        await asyncio.sleep(_ASK_AGAIN_S)
        if not cell.over and self.alive:
            await self._write(wire.farewell(self._token, cell.number))

    async def _enforce(self, cell: _Cell, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        cell.timed_out = True
        await self._break(cell)
        await asyncio.sleep(CODE_INTERRUPT_GRACE_S)
        self._process.cancel()  # whoever iterates learns it by the end of the output

    async def _stop(self, cell: _Cell) -> None:
        """Nobody wants the rest: interrupt, and end the shell if that does not end the cell."""
        try:
            async with asyncio.timeout(CODE_INTERRUPT_GRACE_S):
                await self._break(cell)
                while not cell.over and not self._dead:
                    await self._next(cell)
        except TimeoutError:
            self.kill()


class _Cell:
    """What is known of the cell that runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.started = asyncio.Event()
        self.interrupted = self.timed_out = False
        self.status: int | None = None
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
