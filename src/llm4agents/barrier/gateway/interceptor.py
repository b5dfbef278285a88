"""The way to the interceptor: flows are handed to it with the guest's own descriptor, audit records and ends come back.

It is another process and may be gone at any moment: then its flows have ended, and new ones are told so.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llm4agents import limits
from llm4agents.barrier import sockets, wire

if TYPE_CHECKING:
    from llm4agents.barrier.gateway.flows import Flow

_MESSAGES = 64


class Interceptor:
    def __init__(self, on_event: Callable[[dict[str, Any]], None], on_lost: Callable[[], None]) -> None:
        self._on_event, self._on_lost = on_event, on_lost
        self._sock: socket.socket | None = None
        self._turn = asyncio.Lock()

    @property
    def up(self) -> bool:
        return self._sock is not None

    def use(self, fd: int) -> None:
        """The interceptor's end of the line, in place of any before: of another one, or of the same, told anew (by a
        server that came after the one before), which still has what it was given."""
        if self._sock is not None:
            self._read(self._sock)  # an end that has not been noticed yet
        if self._sock is not None:
            self._drop()
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        wire.enlarge(sock)
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read, sock)

    async def hand(self, flow: Flow) -> str | None:
        """Give it the flow's connection, of which nothing has been read; the caller closes his copy. Else: why not."""
        asked = flow.asked
        message = {
            "flow": flow.id,
            "sandbox": flow.box.id,
            "name": asked.name,
            "address": None if asked.address is None else str(asked.address),
            "port": asked.port,
            "tls": flow.protocol == "tls",
        }
        try:
            async with asyncio.timeout(limits.FIRST_BYTES_S), self._turn:
                while (sock := self._sock) is not None:
                    try:
                        wire.send(sock, message, [flow.client.fileno()])
                        return None
                    except BlockingIOError:
                        await sockets.writable(sock)
                    except wire.WireError:
                        self._lost(sock)
        except TimeoutError:
            return (
                "the interceptor, which reads requests for the rule of this host, does not keep up: try again"
            )
        return "the interceptor, which reads requests for the rule of this host, is not running: try again"

    def _read(self, sock: socket.socket) -> None:
        for _ in range(_MESSAGES):
            try:
                message, fds = wire.receive(sock)
            except BlockingIOError:
                return
            except wire.WireError:
                self._lost(sock)
                return
            wire.close(fds)
            self._on_event(message)

    def _lost(self, sock: socket.socket) -> None:
        if sock is self._sock:
            self.close()

    def close(self) -> None:
        if self._sock is not None:
            self._drop()
            self._on_lost()

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        assert sock is not None
        asyncio.get_running_loop().remove_reader(sock.fileno())
        asyncio.get_running_loop().remove_writer(sock.fileno())
        sock.close()
