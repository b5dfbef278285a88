"""The listening socket: accepts, counts, hands over to the protocol the client speaks, and drains.

Connections are accepted here and not by asyncio's server: one is counted from its first byte on, while its TLS
handshake is not done too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import resource
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog

from llm4agents import limits
from llm4agents.api.listen.counting import Ticket
from llm4agents.api.listen.http1 import Http1, Shared
from llm4agents.api.listen.http2 import PREFACE, Http2
from llm4agents.api.listen.origin import Proxies
from llm4agents.engine.metrics import Gauge
from llm4agents.errors import HostSetupError, InvalidRequestError

log = structlog.get_logger()
ALPN = ["h2", "http/1.1"]
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """`HOST:PORT`, `[V6]:PORT`. Raises InvalidRequestError."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or int(port) > 65_535:
            raise InvalidRequestError(
                f"LLM4AGENTS_LISTEN (--listen) {text!r} is not HOST:PORT",
                hint="for example 127.0.0.1:7400, 0.0.0.0:7400 or [::]:7400",
            )
        return cls(host, int(port))

    @property
    def own(self) -> bool:
        """Whether only this very host can reach it."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def bind(address: Address) -> socket.socket:
    """A bound socket that does not listen yet. Raises HostSetupError."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and where[0] == "::":
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind(where)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        raise HostSetupError(
            f"cannot listen on {address}: {why}", hint="another --listen, or end what has it"
        ) from error
    sock.setblocking(False)
    return sock


class Listener:
    """One listening address. `start` it once the application can answer; `leave`, then `close` it."""

    def __init__(
        self, sock: socket.socket, shared: Shared, tls: ssl.SSLContext | None, proxies: Proxies
    ) -> None:
        self._sock, self._shared, self._tls, self._proxies = sock, shared, tls, proxies
        self._accepting: asyncio.Task[None] | None = None
        self._entering: set[asyncio.Task[None]] = set()
        self._spare = _spare()
        host, port = sock.getsockname()[:2]
        self.address = Address(host, port)

    def start(self) -> None:
        _raise_files()
        self._sock.listen(limits.LISTEN_BACKLOG)
        self._accepting = asyncio.create_task(self._accept())

    async def leave(self) -> None:
        """Accept nobody any more; connections end when they have nothing to do, the others after what they do."""
        self._shared.leaving = True
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
        self._sock.close()
        for connection in list(self._shared.state.connections):
            if not hasattr(connection, "handshake_complete"):  # a WebSocket is a call under way
                connection.shutdown()
        for task in list(self._entering):
            task.cancel()
        for transport in list(self._shared.waiting):
            transport.abort()

    async def close(self) -> None:
        """End what is left."""
        await self.leave()
        for connection in list(self._shared.state.connections):
            with contextlib.suppress(Exception):
                connection.shutdown()
        tasks = [*self._shared.state.tasks, *self._entering]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=limits.LISTEN_LINGER_S)
            for task in late:
                task.cancel()
        self._shared.connections.close_all()
        if self._spare is not None:
            self._spare.close()

    def gauges(self) -> Iterator[Gauge]:
        connections = self._shared.connections
        yield Gauge("listener_connections", "Connections of the listener.", len(connections))
        yield Gauge("listener_connections_idle", "Of them, waiting for a request.", connections.idle)
        for kind, budget in (("body", self._shared.bodies), ("message", self._shared.messages)):
            yield Gauge(
                "listener_held_bytes", "Of what clients sent, not yet used.", budget.used, {"kind": kind}
            )
        for reason in ("address", "full", "evicted", "handshake"):
            yield Gauge(
                "listener_refused",
                "Connections refused or ended for want of room.",
                connections.refused[reason],
                {"reason": reason},
            )

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._sock)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    await self._out_of_files()
                elif error.errno in (errno.ENOBUFS, errno.ENOMEM):
                    await asyncio.sleep(0.1)
                elif self._sock.fileno() < 0:
                    return
                continue
            self._enter(sock, str(peer[0]))

    async def _out_of_files(self) -> None:
        """Whoever waits is turned away with the file kept for it: left in the queue he would be asked for for ever."""
        if self._spare is not None:
            self._spare.close()
            with contextlib.suppress(OSError):
                turned, _ = self._sock.accept()
                turned.close()
            self._shared.connections.refused["full"] += 1
            self._spare = _spare()
        else:
            self._spare = _spare()
        await asyncio.sleep(0.01)

    def _enter(self, sock: socket.socket, address: str) -> None:
        holder: list[Any] = [sock]
        ticket = self._shared.connections.enter(
            address, lambda: _abort(holder[0]), counted=not self._proxies.trust(address)
        )
        if ticket is None:
            _abort(sock)
            return
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        task = asyncio.create_task(self._greet(sock, ticket, holder))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _greet(self, sock: socket.socket, ticket: Ticket, holder: list[Any]) -> None:
        """The TLS handshake, if there is one; whoever does not get through it leaves no trace."""
        if sock.fileno() < 0:
            return  # it had to make room already
        holder[0] = asyncio.current_task()
        handshake_s = self._shared.bounds.handshake_s if self._tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Doorway(self._shared, ticket, holder),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=None if self._tls is None else limits.LISTEN_LINGER_S,
            )
        except (OSError, TimeoutError):  # ssl.SSLError is an OSError
            self._shared.connections.refused["handshake"] += 1
            self._shared.connections.leave(ticket)  # the transport has closed its socket
        except asyncio.CancelledError:
            self._shared.connections.leave(ticket)
            raise


class _Doorway(asyncio.Protocol):
    """A connection until it is known what is spoken on it: ALPN says so, or the first bytes."""

    def __init__(self, shared: Shared, ticket: Ticket, holder: list[Any]) -> None:
        self._shared, self._ticket, self._holder = shared, ticket, holder
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = self._holder[0] = transport
        spoken = transport.get_extra_info("ssl_object")
        if spoken is not None:
            self._hand_over(h2=spoken.selected_alpn_protocol() == "h2")
            return
        self._shared.waiting.add(transport)
        self._timer = asyncio.get_running_loop().call_later(self._shared.bounds.head_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._first += data
        start = self._first[: len(PREFACE)]
        if start == PREFACE:
            self._hand_over(h2=True)
        elif not PREFACE.startswith(start):
            self._hand_over(h2=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._shared.connections.leave(self._ticket)

    def _hand_over(self, *, h2: bool) -> None:
        self._stop()
        protocol = (Http2 if h2 else Http1)(self._shared, self._ticket)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._first:
            protocol.data_received(self._first)

    def _stop(self) -> None:
        self._shared.waiting.discard(self._transport)
        if self._timer is not None:
            self._timer.cancel()


def _abort(held: Any) -> None:
    """Ends a connection at once, whatever of it there is yet."""
    if isinstance(held, socket.socket):
        held.close()
    elif isinstance(held, asyncio.Task):
        held.cancel()
    else:
        held.abort()


def _spare() -> socket.socket | None:
    """A file descriptor to be given up when there is no other."""
    try:
        return socket.socket(socket.AF_UNIX)
    except OSError:
        return None


def _raise_files() -> None:
    """Each connection is a file: as many as the host lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.LISTEN_CONNECTIONS_MAX * 2 + 16_384
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
