"""A live view of a process, as a terminal shows it. Written once, asynchronously."""

from __future__ import annotations

import contextlib
import json
from types import TracebackType

from llm4agents.errors import ConflictError, InvalidRequestError, NotFoundError
from llm4agents.sdk import _process, results
from llm4agents.sdk._async.transport import AsyncTransport
from llm4agents.sdk._websocket import PIECE_BYTES, AsyncWebSocket


class AsyncTerminal:
    """Iterate for the bytes that a screen would be given; `write` what a keyboard would say.

    One that `sandbox.terminal` opened kills its process when it is left as a context manager; `detach` lets it live.
    """

    def __init__(
        self, transport: AsyncTransport, sandbox: str, id: str, socket: AsyncWebSocket, owned: bool
    ) -> None:
        self._transport, self._sandbox, self._socket, self._owned = transport, sandbox, socket, owned
        self.id = id
        """Of the process: `sandbox.processes.connect(id)` finds it again."""
        self.pid = 0
        self.offset = 0
        """Of the next byte in all that the process has said."""
        self.gap = 0
        self.exit: results.ProcessInfo | None = None
        """How it ended, once iterating or `wait` has come to the end."""

    @classmethod
    async def _attach(
        cls,
        transport: AsyncTransport,
        sandbox: str,
        process: str,
        offset: int | None,
        *,
        stdin: bool,
        owned: bool,
    ) -> AsyncTerminal:
        params = {"from": "now" if offset is None else offset, "stdin": "1" if stdin else "0"}
        path = f"{_process.path_of(sandbox, process)}/attach"
        socket = await transport.websocket(path, params, sandbox=sandbox)
        made = cls(transport, sandbox, process, socket, owned)
        try:
            await made._next(30.0)
        except BaseException:
            await socket.aclose()
            raise
        return made

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or when a signal ended it."""
        return None if self.exit is None else self.exit.exit_code

    async def __aenter__(self) -> AsyncTerminal:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned and self.exit is None:
            await self.kill()
        await self.detach()

    def __aiter__(self) -> AsyncTerminal:
        return self

    async def __anext__(self) -> bytes:
        while self.exit is None:
            output = await self._next(None)
            if output is not None:
                return output.data
        raise StopAsyncIteration

    async def read(self, timeout: float | None = None) -> results.Output | None:
        """The next piece of output; None when it has ended. Raises TimedOutError when nothing comes in time."""
        while self.exit is None:
            output = await self._next(timeout)
            if output is not None:
                return output
        return None

    async def _next(self, timeout: float | None) -> results.Output | None:
        message = await self._socket.receive(timeout)
        if message is None:
            raise ConflictError("this view was closed", hint=f"attach to {self.id} again")
        if isinstance(message, bytes):
            output = _process.piece(message)
            self.offset = (output.offset or 0) + len(output.data)
            return output
        kind, body = _process.told(message)
        if kind == "started":
            self.pid, self.offset = int(body.get("pid") or 0), int(body.get("offset") or 0)
            self.gap = int(body.get("gap") or 0)
        elif kind == "exit":
            self.exit = results.process_info({"id": self.id, "pid": self.pid, **body})
        return None

    async def write(self, data: str | bytes) -> None:
        """To its stdin, or terminal: text as it is typed (a newline is the Enter key)."""
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
        for at in range(0, len(raw), PIECE_BYTES):
            await self._socket.send(raw[at : at + PIECE_BYTES])

    async def close_stdin(self) -> None:
        """Ends its stdin; to a terminal it is a Ctrl-D."""
        await self._socket.send(json.dumps({"eof": True}))

    async def resize(self, rows: int, cols: int) -> None:
        """The size of the terminal; what runs in it is told by SIGWINCH."""
        if not (1 <= rows <= 10_000 and 1 <= cols <= 10_000):
            raise InvalidRequestError(f"{rows} rows, {cols} columns is no size of a terminal")
        await self._socket.send(json.dumps({"resize": [rows, cols]}))

    async def signal(self, signal: int | str) -> None:
        """To its process group, by number or name."""
        await self._socket.send(json.dumps({"signal": signal}))

    async def wait(self) -> results.ProcessInfo:
        """How it ended; what it says until then is dropped."""
        while self.exit is None:
            await self._next(None)
        return self.exit

    async def kill(self) -> None:
        """Kills it and all it has started, and removes it from the list. Nothing when it has ended and gone."""
        path = _process.path_of(self._sandbox, self.id)
        with contextlib.suppress(NotFoundError):
            await self._transport.json("DELETE", path, sandbox=self._sandbox)

    async def detach(self) -> None:
        """Closes the view; the process goes on."""
        await self._socket.aclose()
