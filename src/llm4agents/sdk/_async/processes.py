"""Processes of a sandbox that outlive calls: start, find again, read on, tell, wait."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llm4agents import limits
from llm4agents.errors import (
    ConnectionLostError,
    LLM4AgentsError,
    NotFoundError,
    ProgramFailedError,
    ServerUnavailableError,
    TimedOutError,
)
from llm4agents.sdk import _process, _wire, results
from llm4agents.sdk._async.terminal import AsyncTerminal
from llm4agents.sdk._async.transport import AsyncEventStream, AsyncTransport

_FOLLOW_END = frozenset({"exit"})
_POLL_S = 20.0
"""How long the server holds one question whose answer is not there yet."""
_RETRIES = 3

Full = Literal["drop", "block"]


class AsyncProcesses:
    """`sandbox.processes`: what was started to go on by itself, and every command that runs."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport, self._sandbox = transport, sandbox
        self._path = f"/v1/sandboxes/{sandbox}/processes"

    async def start(
        self,
        cmd: str | Sequence[str],
        *,
        id: str | None = None,
        tag: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool | str | bytes = False,
        tty: tuple[int, int] | None = None,
        term: str | None = None,
        timeout: float | None = None,
        keep_bytes: int | None = None,
        full: Full = "drop",
    ) -> AsyncProcess:
        """Starts a command and leaves it to itself: a string in a shell, a sequence as it is.

        `stdin`: True to write to it later, text or bytes to feed it, False for none. `tty`: (rows, columns) of a
        terminal of its own. `timeout`: seconds until it and all it started are killed; none by default. The
        newest `keep_bytes` of its output (1 MiB) can be read again; when nobody reads, the oldest go
        (`full="drop"`), or it waits (`"block"`). Raises ConflictError when `id` is taken.
        """
        body = _process.start_body(
            cmd,
            id=id,
            tag=tag,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin,
            tty=tty,
            term=term,
            timeout=timeout,
            keep_bytes=keep_bytes,
            full=full,
        )
        made = await self._transport.json("POST", self._path, body, sandbox=self._sandbox)
        return AsyncProcess(self._transport, self._sandbox, results.process_info(made))

    async def list(self) -> list[AsyncProcess]:
        """Those that run and those that have ended and were not removed, oldest first."""
        body = await self._transport.json("GET", self._path, sandbox=self._sandbox)
        return [
            AsyncProcess(self._transport, self._sandbox, results.process_info(item))
            for item in body.get("data") or ()
        ]

    async def get(self, id: str) -> AsyncProcess:
        """One by its id. Raises NotFoundError."""
        return await self.connect(id)

    async def connect(self, id: str, offset: int = 0) -> AsyncProcess:
        """One by its id, to be read on from `offset` of its output: where a former handle was."""
        path = _process.path_of(self._sandbox, id)
        info = results.process_info(await self._transport.json("GET", path, sandbox=self._sandbox))
        return AsyncProcess(self._transport, self._sandbox, info, offset)


class AsyncProcess:
    """A process: iterate for its output from `offset` on. Letting go of the handle ends nothing.

    Iterating goes on over a lost connection and a server that was started anew: not a byte is lost or comes twice
    as long as it is kept. `offset` is where the next iteration begins, to be given to `processes.connect`.
    """

    def __init__(
        self, transport: AsyncTransport, sandbox: str, info: results.ProcessInfo, offset: int = 0
    ) -> None:
        self._transport, self._sandbox = transport, sandbox
        self._path = _process.path_of(sandbox, info.id)
        self.info = info
        """As it was when last asked; `refresh` asks again."""
        self.offset = offset
        self.gap = 0
        """Bytes that iterating had to skip, because they were no longer kept."""
        self._events: AsyncEventStream | None = None

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def pid(self) -> int:
        """In the guest."""
        return self.info.pid

    @property
    def tag(self) -> str | None:
        return self.info.tag

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self._sandbox}>"

    async def refresh(self) -> results.ProcessInfo:
        """How it is now."""
        body = await self._transport.json("GET", self._path, sandbox=self._sandbox)
        self.info = results.process_info(body)
        return self.info

    # Output.

    def __aiter__(self) -> AsyncProcess:
        return self

    async def __anext__(self) -> results.Output:
        """The next piece of output; ends when the process has ended and all of it was given."""
        failures = 0
        while True:
            try:
                if self._events is None:
                    self._events = await self._follow()
                event = await self._events.__anext__()
            except LLM4AgentsError as error:
                await self.aclose()
                failures += 1
                if not isinstance(error, ConnectionLostError | ServerUnavailableError) or failures > _RETRIES:
                    raise
                continue
            kind = event.get("type")
            if kind == "started":
                self.gap += int(event.get("gap") or 0)
                self.offset = int(event.get("offset") or 0)
            elif kind == "exit":
                await self.aclose()
                raise StopAsyncIteration
            elif (output := _process.output_of(event)) is not None:
                self.offset = (output.offset or 0) + len(output.data)
                return output

    async def _follow(self) -> AsyncEventStream:
        params = {"from": self.offset, "follow": "true"}
        stream = await self._transport.stream(
            "GET", f"{self._path}/output", params=params, wait_s=None, sandbox=self._sandbox
        )
        return AsyncEventStream(stream, _FOLLOW_END)

    async def aclose(self) -> None:
        """Stops following its output, for now; the process goes on."""
        events, self._events = self._events, None
        if events is not None:
            await events.aclose()

    async def read(self, offset: int | None = None, wait: float = 0) -> results.ProcessOutput:
        """What there is of its output from `offset` on (default: where iterating is), 4 MiB at most.

        `wait`: seconds to wait for something when there is nothing yet and it runs. Moves nothing.
        """
        start = self.offset if offset is None else offset
        params = {"from": start, "wait_s": wait}
        body = await self._transport.json(
            "GET",
            f"{self._path}/output",
            params=params,
            wait_s=wait + _wire.DEFAULT_WAIT_S,
            sandbox=self._sandbox,
        )
        pieces = [piece for item in body.get("data") or () if (piece := _process.output_of(item)) is not None]
        return results.ProcessOutput(
            pieces=pieces,
            offset=int(body.get("offset") or 0),
            gap=int(body.get("gap") or 0),
            running=bool(body.get("running")),
            more=bool(body.get("more")),
        )

    async def wait_for_log(
        self, pattern: str | re.Pattern[str], timeout: float = limits.EXEC_TIMEOUT_S, *, offset: int = 0
    ) -> str:
        """The first line of its output, from `offset` on, in which the regular expression is found.

        The search is here, not in the server; iterating is not moved by it. Raises TimedOutError, and
        ProgramFailedError when it ends without having said it.
        """
        search, until, at = _process.Search(pattern), time.monotonic() + timeout, offset
        while True:
            left = until - time.monotonic()
            found = await self.read(at, max(0.0, min(left, _POLL_S)))
            for piece in found.pieces:
                line = search.feed(piece)
                if line is not None:
                    return line
            at = found.offset
            if found.more:
                continue
            if not found.running:
                info = await self.refresh()
                raise ProgramFailedError(
                    f"process {self.id} ended before it said {pattern!r}",
                    exit_code=info.exit_code,
                    signal=info.signal,
                    offset=at,
                )
            if left <= 0:
                raise TimedOutError(
                    f"process {self.id} did not say {pattern!r} within {timeout:g} s",
                    hint="read() shows what it said",
                )

    # Telling it.

    async def write_stdin(self, data: str | bytes) -> None:
        """Writes to its stdin, or terminal. Raises InvalidRequestError when it was started without."""
        await self._tell("stdin", _process.stdin_body(data, eof=False))

    async def close_stdin(self) -> None:
        """Ends its stdin; to a terminal it is a Ctrl-D."""
        await self._tell("stdin", _process.stdin_body(b"", eof=True))

    async def signal(self, signal: int | str = "TERM") -> None:
        """A signal, by number or name, to its process group. Raises ConflictError when it has ended."""
        await self._tell("signal", {"signal": signal})

    async def resize(self, rows: int, cols: int) -> None:
        """The size of its terminal."""
        await self._tell("resize", {"rows": rows, "cols": cols})

    async def _tell(self, what: str, body: Mapping[str, Any]) -> None:
        await self._transport.json("POST", f"{self._path}/{what}", body, sandbox=self._sandbox)

    async def attach(self, *, offset: int | None = None, stdin: bool = False) -> AsyncTerminal:
        """A live view, both ways: as a terminal shows it. From `offset` on, or (None) from now on.

        Letting go of it ends nothing.
        """
        return await AsyncTerminal._attach(
            self._transport, self._sandbox, self.id, offset, stdin=stdin, owned=False
        )

    async def kill(self) -> results.ProcessInfo:
        """Kills it and all it has started, if it runs, and removes it from the list. How it had ended, or ended now."""
        await self.aclose()
        try:
            body = await self._transport.json("DELETE", self._path, sandbox=self._sandbox)
        except NotFoundError:
            if self.info.running:
                raise
            return self.info
        self.info = results.process_info(body)
        return self.info

    async def wait(self, timeout: float | None = None) -> results.ProcessInfo:
        """How it ended, once it has. Raises TimedOutError after `timeout` seconds; it goes on then."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.info.running:
            left = _POLL_S if until is None else until - time.monotonic()
            body = await self._transport.json(
                "GET",
                self._path,
                params={"wait_s": max(0.0, min(left, _POLL_S))},
                sandbox=self._sandbox,
            )
            self.info = results.process_info(body)
            if self.info.running and left <= 0:
                raise TimedOutError(f"process {self.id} still runs after {timeout:g} s")
        return self.info
