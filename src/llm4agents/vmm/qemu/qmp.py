"""A client of QEMU's machine protocol over one connected unix socket: commands, answers, events, descriptors.

Not here: what the commands mean. QEMU is not trusted by its host more than a guest is (a guest may have
broken out into it): lines are bounded, answers that make no sense end the connection, nothing waits for ever.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import json
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from llm4agents.errors import ConnectionLostError, VmmError

LINE_BYTES_MAX = 1 << 20
COMMAND_TIMEOUT_S = 10.0
WORDS_MAX = 500
_READ_BYTES = 65_536

Event = dict[str, Any]


class Qmp:
    """One monitor connection. Commands are answered in the order they were sent and may be sent ahead."""

    def __init__(self, sock: socket.socket, on_event: Callable[[Event], None]) -> None:
        """Takes the socket over; must be called in the event loop that is to serve it."""
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self._in = bytearray()
        self.closed = False
        self._loop.add_reader(sock, self._readable)

    async def execute(
        self, command: str, *, fd: int | None = None, timeout: float = COMMAND_TIMEOUT_S, **arguments: Any
    ) -> Any:
        """The answer of `command`; underscores in argument names become hyphens, one at the end goes.

        Raises VmmError when QEMU refuses, ConnectionLostError when it is gone or does not answer in time.
        """
        future = self.send(command, fd=fd, **arguments)
        try:
            return await asyncio.wait_for(asyncio.shield(future), timeout)
        except TimeoutError:
            self.close(f"no answer to {command} in {timeout:g} s")
            raise ConnectionLostError(f"QEMU did not answer {command} in {timeout:g} s") from None

    def send(self, command: str, *, fd: int | None = None, **arguments: Any) -> asyncio.Future[Any]:
        """Send without waiting; the future holds the answer. `fd` travels with it (for `getfd`)."""
        future: asyncio.Future[Any] = self._loop.create_future()
        # An answer nobody came back for is not an error of its own.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self.closed:
            future.set_exception(ConnectionLostError("the connection to QEMU is closed"))
            return future
        number = next(self._ids)
        self._waiting[number] = (command, future)
        body: dict[str, Any] = {"execute": command, "id": number}
        if arguments:
            body["arguments"] = {
                name.rstrip("_").replace("_", "-"): value for name, value in arguments.items()
            }
        self._out.append((memoryview(json.dumps(body).encode() + b"\n"), fd))
        self._flush()
        return future

    def close(self, why: str = "closed") -> None:
        """Drop the connection; whoever waits gets ConnectionLostError. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionLostError(f"the connection to QEMU ended: {why}"))
        self._waiting.clear()

    def _flush(self) -> None:
        while self._out:
            data, fd = self._out[0]
            rights = (
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
            )
            try:
                sent = self._sock.sendmsg([data], rights)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                self._out.clear()
                self.close(str(error))
                return
            self._out.popleft()
            if sent < len(data):
                self._out.appendleft((data[sent:], None))
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        if not data:
            self.close("QEMU closed it")
            return
        self._in += data
        while not self.closed and (end := self._in.find(b"\n")) >= 0:
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            self._take(line)
        if len(self._in) > LINE_BYTES_MAX:
            self.close("a line beyond every bound")

    def _take(self, line: bytes) -> None:
        try:
            body = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            self.close("it sent something that is not its protocol")
            return
        if isinstance(body.get("event"), str):
            with contextlib.suppress(TypeError, KeyError, AttributeError, ValueError):
                self._on_event(body)
            return
        number = body.get("id")
        waiting = self._waiting.pop(number, None) if isinstance(number, int) else None
        if waiting is None:
            return  # the greeting, or an answer nobody asked for
        command, future = waiting
        if future.done():
            return
        if "return" in body:
            future.set_result(body["return"])
        else:
            error = body.get("error")
            desc = str(error.get("desc") or "") if isinstance(error, dict) else ""
            # For a log and a terminal: it may be a guest that speaks.
            words = "".join(letter for letter in desc[:WORDS_MAX] if letter.isprintable())
            future.set_exception(VmmError(f"QEMU refused {command}: {words or 'without a reason'}"))
