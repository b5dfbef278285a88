# Generated from _async/terminal.py by scripts/unasync.py: change that file, then run the script.
"""A live view of a process, as a terminal shows it."""

from __future__ import annotations

import contextlib
import json
from types import TracebackType

from llm4agents.errors import ConflictError, InvalidRequestError, NotFoundError
from llm4agents.sdk import _process, results
from llm4agents.sdk._sync.transport import Transport
from llm4agents.sdk._websocket import PIECE_BYTES, WebSocket


class Terminal:
    """Iterate for the bytes that a screen would be given; `write` what a keyboard would say.

    One that `sandbox.terminal` opened kills its process when it is left as a context manager; `detach` lets it live.
    """

    def __init__(self, transport: Transport, sandbox: str, id: str, socket: WebSocket, owned: bool) -> None:
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
    def _attach(
        cls,
        transport: Transport,
        sandbox: str,
        process: str,
        offset: int | None,
        *,
        stdin: bool,
        owned: bool,
    ) -> Terminal:
        params = {"from": "now" if offset is None else offset, "stdin": "1" if stdin else "0"}
        path = f"{_process.path_of(sandbox, process)}/attach"
        socket = transport.websocket(path, params, sandbox=sandbox)
        made = cls(transport, sandbox, process, socket, owned)
        try:
            made._next(30.0)
        except BaseException:
            socket.close()
            raise
        return made

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or when a signal ended it."""
        return None if self.exit is None else self.exit.exit_code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned and self.exit is None:
            self.kill()
        self.detach()

    def __iter__(self) -> Terminal:
        return self

    def __next__(self) -> bytes:
        while self.exit is None:
            output = self._next(None)
            if output is not None:
                return output.data
        raise StopIteration

    def read(self, timeout: float | None = None) -> results.Output | None:
        """The next piece of output; None when it has ended. Raises TimedOutError when nothing comes in time."""
        while self.exit is None:
            output = self._next(timeout)
            if output is not None:
                return output
        return None

    def _next(self, timeout: float | None) -> results.Output | None:
        message = self._socket.receive(timeout)
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

    def write(self, data: str | bytes) -> None:
        """To its stdin, or terminal: text as it is typed (a newline is the Enter key)."""
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
        for at in range(0, len(raw), PIECE_BYTES):
            self._socket.send(raw[at : at + PIECE_BYTES])

    def close_stdin(self) -> None:
        """Ends its stdin; to a terminal it is a Ctrl-D."""
        self._socket.send(json.dumps({"eof": True}))

    def resize(self, rows: int, cols: int) -> None:
        """The size of the terminal; what runs in it is told by SIGWINCH."""
        if not (1 <= rows <= 10_000 and 1 <= cols <= 10_000):
            raise InvalidRequestError(f"{rows} rows, {cols} columns is no size of a terminal")
        self._socket.send(json.dumps({"resize": [rows, cols]}))

    def signal(self, signal: int | str) -> None:
        """To its process group, by number or name."""
        self._socket.send(json.dumps({"signal": signal}))

    def wait(self) -> results.ProcessInfo:
        """How it ended; what it says until then is dropped."""
        while self.exit is None:
            self._next(None)
        return self.exit

    def kill(self) -> None:
        """Kills it and all it has started, and removes it from the list. Nothing when it has ended and gone."""
        path = _process.path_of(self._sandbox, self.id)
        with contextlib.suppress(NotFoundError):
            self._transport.json("DELETE", path, sandbox=self._sandbox)

    def detach(self) -> None:
        """Closes the view; the process goes on."""
        self._socket.close()
