"""HTTP/1.1 connections to ports of guests, and the idle ones that are kept for the next request.

h11 over a GuestSocket. Everything the guest sends is bounded: a head by PORT_HEAD_BYTES_MAX, a body by the
stream's credit.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import h11

from llm4agents import limits
from llm4agents.engine.dialing import Agent, Dialer, GuestSocket
from llm4agents.errors import GuestError, PortError

_TOGETHER_BYTES_MAX = 262_144


@dataclass(slots=True)
class Connection:
    """One to a guest's port. Only one request at a time; not opened before there is something to send."""

    port: int
    socket: GuestSocket | None = None
    reused: bool = False
    protocol: h11.Connection = field(
        default_factory=lambda: h11.Connection(
            h11.CLIENT, max_incomplete_event_size=limits.PORT_HEAD_BYTES_MAX
        )
    )

    async def receive(self) -> Any:
        """The next event of h11. Raises h11.RemoteProtocolError, or what ended the connection."""
        assert self.socket is not None
        while (event := self.protocol.next_event()) is h11.NEED_DATA:
            self.protocol.receive_data(await self._arrived())
        return event

    async def _arrived(self) -> bytes:
        """The next bytes, with what else has come already: each piece costs several calls on its way."""
        assert self.socket is not None
        pieces = [await self.socket.read()]
        size = len(pieces[0])
        while self.socket.has_arrived() and size < _TOGETHER_BYTES_MAX:
            pieces.append(await self.socket.read())
            size += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def at_hand(self) -> Any:
        """The next event that needs no more bytes from the guest, or None."""
        event = self.protocol.next_event()
        return None if event is h11.NEED_DATA else event

    async def send(self, event: Any) -> None:
        assert self.socket is not None
        if data := self.protocol.send(event):
            await self.socket.write(data)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()


class Pool:
    """The connections to one guest's ports. Idle ones are kept PORT_IDLE_S and do not hold the sandbox open."""

    def __init__(self, dialer: Dialer) -> None:
        self.dialer = dialer
        self._idle: dict[int, list[tuple[Connection, asyncio.TimerHandle]]] = {}
        dialer.ended.add_done_callback(lambda _: self.close())

    def take(self, port: int) -> Connection | None:
        """An idle connection to a port that has not ended meanwhile."""
        waiting = self._idle.get(port, [])
        while waiting:
            connection, timer = waiting.pop()
            timer.cancel()
            assert connection.socket is not None
            if not connection.socket.has_moved():
                connection.reused = True
                return connection
            connection.close()
        return None

    def give(self, connection: Connection) -> None:
        """Keep a connection whose answer is complete, if it may be used again."""
        protocol = connection.protocol
        if protocol.our_state is not h11.DONE or protocol.their_state is not h11.DONE:
            connection.close()
            return
        protocol.start_next_cycle()
        waiting = self._idle.setdefault(connection.port, [])
        most = limits.PORT_IDLE_CONNECTIONS_MAX
        if protocol.trailing_data[0] or self.dialer.ended.done() or self._kept() >= most:
            connection.close()
            return
        timer = asyncio.get_running_loop().call_later(limits.PORT_IDLE_S, self._expire, connection)
        waiting.append((connection, timer))

    def _kept(self) -> int:
        return sum(len(waiting) for waiting in self._idle.values())

    def _expire(self, connection: Connection) -> None:
        waiting = self._idle.get(connection.port, [])
        waiting[:] = [item for item in waiting if item[0] is not connection]
        if not waiting:
            self._idle.pop(connection.port, None)
        connection.close()

    def close(self) -> None:
        """Drop what is idle: the guest has gone, or is another one now."""
        idle, self._idle = self._idle, {}
        for waiting in idle.values():
            for connection, timer in waiting:
                timer.cancel()
                connection.close()


class Pools:
    """The pool of each sandbox that is being used; a sandbox that was resumed has a new agent, and so a new pool."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}

    def of(self, sandbox: str, agent: Agent) -> Pool:
        pool = self._pools.get(sandbox)
        if pool is None or pool.dialer.agent is not agent:
            pool = self._pools[sandbox] = Pool(Dialer(agent))
            pool.dialer.ended.add_done_callback(lambda _: self._drop(sandbox, pool))
        return pool

    def _drop(self, sandbox: str, pool: Pool) -> None:
        if self._pools.get(sandbox) is pool:
            del self._pools[sandbox]


def port_error(port: int, error: h11.ProtocolError | GuestError) -> PortError:
    """What the client is told when the guest's server did not answer as HTTP has it."""
    if isinstance(error, GuestError):
        return PortError(f"port {port} of the sandbox broke the connection: {error.message}", port=port)
    return PortError(
        f"port {port} of the sandbox sent no whole HTTP/1.1 answer: {error}",
        hint="its own output may say why; what is not HTTP goes through llm4agents forward",
        port=port,
    )
