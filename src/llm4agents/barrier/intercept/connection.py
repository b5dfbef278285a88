"""One connection of a guest: mitmproxy's proxy core over a descriptor, with dialling and pacing of our own.

No listening port, no flow storage, no options file: `ConnectionHandler` gets its streams from here and says what it
wants through hooks. Not here: what a request may do (`exchange`), the reading of HTTP/1 (`http1`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mitmproxy import http
from mitmproxy.connection import Client, ConnectionState, Server
from mitmproxy.proxy import commands, events, layer
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers import tls
from mitmproxy.proxy.layers.http import HttpLayer, HTTPMode, _hooks
from mitmproxy.proxy.layers.websocket import WebsocketEndHook, WebsocketMessageHook
from mitmproxy.proxy.server import ConnectionHandler, ConnectionIO
from OpenSSL import SSL

from llm4agents import limits
from llm4agents.barrier.dial import DialError
from llm4agents.barrier.gateway.meter import Meter
from llm4agents.barrier.intercept.credentials import Withheld
from llm4agents.barrier.intercept.exchange import Denied, Exchange, Unreadable, failed
from llm4agents.barrier.intercept.heads import Head
from llm4agents.barrier.intercept.http1 import Admitted, GuestHttp1, Refusal
from llm4agents.barrier.intercept.streams import CountingWriter, streams
from llm4agents.barrier.intercept.turns import PIECE_BYTES_MAX, piece
from llm4agents.barrier.policy import Target
from llm4agents.barrier.worker_side import say

if TYPE_CHECKING:
    from llm4agents.barrier.intercept.box import Box
    from llm4agents.barrier.intercept.process import Interceptor

_QUEUED_EVENTS_MAX = 8
"""Pieces of a body that wait for the origin's connection; then the guest is not read."""
_OWN_BUFFER_BYTES_MAX = 262_144
_UNRECOGNIZED_NAME = b"\x15\x03\x03\x00\x02\x02\x70"
_DISCARD_S = 10.0


class Options:
    """The options of mitmproxy that its layers ask for."""

    connection_strategy = "lazy"
    websocket = True
    rawtcp = False
    validate_inbound_headers = True
    normalize_outbound_headers = True
    body_size_limit = None
    stream_large_bodies = None
    store_streamed_bodies = False
    keep_host_header = True
    http2_ping_keepalive = 58
    http_connect_send_host_header = True
    tcp_timeout = limits.INTERCEPT_IDLE_TIMEOUT_S
    proxy_debug = False


_OPTIONS: Any = Options()


class _Root(layer.Layer):
    """What the others hang from; mitmproxy's TLS layer looks one up."""

    def _handle_event(self, event: events.Event) -> Any:
        yield from ()


class _GuestTls(tls.ClientTLSLayer):
    def send_close(self, command: commands.CloseConnection) -> Any:
        """With a close_notify: who reads to the end knows that it was the end."""
        with contextlib.suppress(SSL.Error, AttributeError):
            self.tls.shutdown()
            yield from self.tls_interact()
        yield from super().send_close(command)


class Connection(ConnectionHandler):
    """Made by `open`; `run` ends when the guest's connection has."""

    @classmethod
    async def open(
        cls,
        interceptor: Interceptor,
        box: Box,
        sock: socket.socket,
        *,
        flow: str,
        asked: Target,
        encrypted: bool,
    ) -> Connection:
        """Owns `sock` from here on."""
        sock.setblocking(False)
        reader, writer = await streams(sock)
        return cls(interceptor, box, reader, writer, flow=flow, asked=asked, encrypted=encrypted)

    def __init__(
        self, interceptor: Interceptor, box: Box, reader: asyncio.StreamReader, writer: CountingWriter, *,
        flow: str, asked: Target, encrypted: bool,
    ) -> None:  # fmt: skip
        client = Client(
            peername=("guest", 0),
            sockname=("interceptor", 0),
            timestamp_start=time.time(),
            state=ConnectionState.OPEN,
        )
        context = Context(client, _OPTIONS)
        super().__init__(context)
        self.interceptor, self.box, self.flow = interceptor, box, flow
        self.asked, self.port, self.encrypted = asked, asked.port, encrypted
        self.target = box.policy.rewrite(asked)
        self.dialled: str | None = None
        self.carried: set[bytes] = set()
        """Forms of the secrets that any request on this connection was given: an origin may answer late."""
        self.exchange: Exchange | None = None
        self.opened = time.monotonic()
        self.timeout_watchdog.timeout = int(limits.INTERCEPT_IDLE_TIMEOUT_S)
        self._writer = writer
        self._read = self._counted_in = self._counted_out = 0
        self._progress = asyncio.Event()
        self._dial_error: DialError | None = None
        self._cut: str | None = None
        self._rule: str | None = None
        self._meter: Meter | None = None
        self.transports[client] = ConnectionIO(handler=None, reader=reader, writer=writer)
        self._layers(context)

    def _layers(self, context: Context) -> None:
        context.server = Server(address=(self.target.host, self.target.port), tls=self.encrypted)
        root = _Root(context)
        inner: layer.Layer
        if self.encrypted:
            outer = _GuestTls(context)
            inner = self.http = HttpLayer(context, HTTPMode.transparent)
            outer.child_layer = inner
            self.layer = outer
        else:
            self.layer = inner = self.http = HttpLayer(context, HTTPMode.transparent)
        assert root in context.layers
        self.guest = GuestHttp1(context.fork(), self)
        self.http.connections[context.client] = self.guest

    async def run(self) -> None:
        try:
            await self.handle_client()
        finally:
            if self.exchange is not None:
                self.exchange.done(reason=self._cut or "the connection ended before the answer did")
            with contextlib.suppress(Exception):
                self._writer.close()

    # -- how it is going ----------------------------------------------------------------------------------

    @property
    def sent(self) -> int:
        return self._writer.sent

    @property
    def received(self) -> int:
        return self._read

    def count(self) -> tuple[int, int]:
        """Bytes from and to the guest since the last time."""
        found = (self._read - self._counted_out, self._writer.sent - self._counted_in)
        self._counted_out, self._counted_in = self._read, self._writer.sent
        return found

    def overdue(self, now: float) -> str | None:
        """Why it has had its time; None: it has not."""
        if (
            self.encrypted
            and not self.client.tls_established
            and now - self.opened > limits.INTERCEPT_HEAD_TIMEOUT_S
        ):
            return "the TLS handshake took too long"
        if (
            self.guest.head_since is not None
            and now - self.guest.head_since > limits.INTERCEPT_HEAD_TIMEOUT_S
        ):
            return "the request's head took too long"
        if self.guest.discarding_since is not None and now - self.guest.discarding_since > _DISCARD_S:
            return "refused"
        return None

    def expire(self, now: float) -> None:
        """Cut it if it has had its time."""
        reason = self.overdue(now)
        if reason is not None:
            self.cut(reason, None if reason == "refused" else "framing")

    def denied(self) -> dict[str, str]:
        """The rule and the reason for which it was cut, if it was denied."""
        return {} if self._rule is None else {"rule": self._rule, "reason": self._cut or ""}

    def denied_now(self) -> tuple[str, str] | None:
        """By which rule and why the sandbox's policy, which has changed, forbids what is open; None: it does not."""
        policy = self.box.policy
        if policy.rewrite(self.asked) != self.target:
            return "policy", "it would go elsewhere now"
        verdict = policy.connect(self.target, "tls" if self.encrypted else "http")
        if verdict.allowed and self.exchange is not None and not self.exchange.over:
            verdict = policy.request(self.target, self.exchange.request())
        if verdict.allowed and self.dialled is not None:
            verdict = policy.address(self.target, self.dialled, self.interceptor.dialler.own_addresses())
        return None if verdict.allowed else (verdict.rule, verdict.reason)

    def cut(self, reason: str, rule: str | None = None) -> None:
        """End it at once, with a reset. `rule`: what denies it, which is told of the whole connection."""
        if self._cut is not None:
            return
        self._cut = reason
        self._rule = rule
        for io in list(self.transports.values()):
            if io.writer is not None:
                sock = io.writer.get_extra_info("socket")
                with contextlib.suppress(OSError, AttributeError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                io.writer.transport.abort()
            elif io.handler is not None:
                io.handler.cancel("cut")
        self._progress.set()

    # -- the gate (http1) ---------------------------------------------------------------------------------

    def admit(self, head: Head) -> Admitted | Refusal:
        if self.exchange is not None:
            self.exchange.done()
        scheme = "https" if self.encrypted else "http"
        self.exchange = exchange = Exchange(self.box, self.flow, self.target, scheme, head, self.carried)
        try:
            target, fields = exchange.admit()
        except Denied as error:
            return Refusal(error.status, error.text, error.close)
        assert exchange.verdict is not None
        self._meter = self.box.meter(exchange.verdict)
        self._dial_error = None
        return Admitted(target, fields, exchange)

    def malformed(self, status: int, reason: str) -> str:
        exchange = self.exchange
        if exchange is None or exchange.over:
            bytes_out, bytes_in = self.count()
            self.box.write(
                flow=self.flow, verdict="deny", rule="framing", reason=reason, name=self.target.name, port=self.port,
                protocol="tls" if self.encrypted else "http", status=status, bytes_in=bytes_in, bytes_out=bytes_out,
            )  # fmt: skip
        else:
            exchange.done(status, deny=("framing", reason))
        return f"LLM4Agents sandbox: this request is let through nowhere.\n\nreason: {reason}\n"

    def failed(self, message: str) -> tuple[int, str]:
        exchange = self.exchange
        if exchange is not None and exchange.switched:
            return 0, ""
        error = self._dial_error
        if error is not None:
            status = {"denied": 403, "timeout": 504}.get(error.kind, 502)
            reason = error.reason
        elif message.startswith("Certificate verify failed"):
            status, reason = 502, f"{self.target.host}: its certificate is not trusted ({message[27:120]})"
        elif "certificate" in message.lower() and "OpenSSL" in message:
            status, reason = 502, f"{self.target.host}: its certificate is not trusted"
        elif message == "killed":
            return 0, ""
        else:
            status, reason = 502, f"{self.target.host} broke off, or answered with what is no HTTP"
        if exchange is None:
            return status, failed("the request", reason)
        if error is not None and error.kind == "denied":
            exchange.done(status, deny=(error.rule or "address", reason))
        else:
            exchange.done(status, reason=reason)
        return status, failed(exchange.what, reason)

    def overrun(self) -> None:
        self.cut("the guest sent requests ahead without waiting for answers")

    # -- mitmproxy's I/O, with our dialling and pacing ----------------------------------------------------

    async def open_connection(self, command: commands.OpenConnection) -> None:
        server = command.connection
        target = self.target
        try:
            if self._cut is not None:
                raise DialError("refused", self._cut)
            there = await self.interceptor.dialler.dial(
                target.name or str(target.address),
                target.port,
                judge=lambda address: self.box.policy.address(
                    target, address, self.interceptor.dialler.own_addresses()
                ),
                plain=not self.encrypted,
                owner=self.box.id,
                short=self.box.policy.names(target),
            )
            reader, writer = await streams(there.socket)
        except (DialError, OSError) as error:
            self._dial_error = error if isinstance(error, DialError) else DialError("refused", str(error))
            self.transports.pop(server, None)
            await self.server_event(events.OpenConnectionCompleted(command, "no connection"))
            return
        except asyncio.CancelledError:
            self.transports.pop(server, None)
            raise
        self.dialled = there.address
        server.state = ConnectionState.OPEN
        server.timestamp_start = server.timestamp_tcp_setup = time.time()
        server.peername = server.sockname = ("origin", 0)
        self.transports[server] = ConnectionIO(handler=asyncio.current_task(), reader=reader, writer=writer)
        await self.server_event(events.OpenConnectionCompleted(command, None))
        await self.handle_connection(server)

    async def handle_connection(self, connection: Any) -> None:
        """As mitmproxy's, and: a side is read only as fast as the other one takes it and the rule allows."""
        io = self.transports[connection]
        reader, writer = io.reader, io.writer
        cancelled: asyncio.CancelledError | None = None
        try:
            size = PIECE_BYTES_MAX
            while self._cut is None and (data := await reader.read(size)):
                if connection is self.client:
                    self._read += len(data)
                received = events.DataReceived(connection, data)
                size = piece(size, await self.box.turns.take(partial(self.server_event, received)))
                await self._drained(connection)
                if connection is self.client:
                    await self._caught_up()
                if self._meter is not None:
                    await self._paced(self._meter, len(data))
        except OSError:
            pass
        except asyncio.CancelledError as error:
            cancelled = error
        connection.state = (
            ConnectionState.CLOSED if cancelled or self._cut else connection.state & ~ConnectionState.CAN_READ
        )
        await self.server_event(events.ConnectionClosed(connection))
        if connection.state is ConnectionState.CAN_WRITE:
            try:  # the other direction goes on until it is told to end
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                cancelled = error
        with contextlib.suppress(OSError):
            writer.close()
        self.transports.pop(connection, None)
        if cancelled:
            raise cancelled

    async def _drained(self, source: Any) -> None:
        for connection, io in list(self.transports.items()):
            if io.writer is None:
                continue
            if connection is source and io.writer.transport.get_write_buffer_size() < _OWN_BUFFER_BYTES_MAX:
                continue
            try:
                await io.writer.drain()
            except OSError:
                if io.handler is not None and io.handler is not asyncio.current_task():
                    io.handler.cancel("the peer has gone")

    async def _caught_up(self) -> None:
        """What the guest sends while its origin is being dialled is not taken in without bound."""
        while self._cut is None and any(
            len(one._paused_event_queue) > _QUEUED_EVENTS_MAX
            for one in (self.layer, self.http, *self.http.streams.values())
        ):
            self._progress.clear()
            await self._progress.wait()

    async def _paced(self, meter: Meter, size: int) -> None:
        meter.take(size)
        while self._cut is None:
            if meter.spent:
                self.cut(f"its rule lets {meter.most} bytes through, and they are")
                return
            if meter.room(time.monotonic()) > 0:
                return
            await asyncio.sleep(meter.wait())

    async def server_event(self, event: events.Event) -> None:
        await super().server_event(event)
        self._progress.set()

    def log(self, message: str, level: int = 20, exc_info: Any = None) -> None:
        """mitmproxy's words may quote traffic, so they are not kept; what ends a connection is told by its kind."""
        if exc_info:
            error = exc_info[1] if isinstance(exc_info, tuple) else None
            if error is None:
                error = sys.exc_info()[1]
            broken(error)
            self.cut("it broke a protocol")

    # -- hooks --------------------------------------------------------------------------------------------

    async def handle_hook(self, hook: commands.StartHook) -> None:
        act = _HOOKS.get(type(hook))
        if act is None:
            return
        try:
            act(self, *hook.args())
        except Exception as error:
            broken(error)
            self.cut("an error of the interceptor's own")

    def _tls_clienthello(self, data: Any) -> None:
        sni = data.client_hello.sni
        seen_as = self.target.seen_as
        if sni is not None:
            sni = sni.lower().removesuffix(".")
        if sni != seen_as and not (sni is None and self.target.name is None and self.target.asked is None):
            self.box.write(
                flow=self.flow, verdict="deny", rule="SNI", name=seen_as, port=self.port, protocol="tls",
                reason=f"the TLS server name is {sni or 'missing'}, and the connection goes to {seen_as}",
            )  # fmt: skip
            self._writer.write(_UNRECOGNIZED_NAME)
            self._writer.close()
            self.refused = True

    refused = False

    def _tls_start_client(self, data: Any) -> None:
        authority = self.interceptor.authority
        if self.refused or authority is None:
            return
        data.ssl_conn = SSL.Connection(authority.context(self.target.seen_as))
        data.ssl_conn.set_accept_state()

    def _tls_start_server(self, data: Any) -> None:
        data.ssl_conn = self.interceptor.origins.connection(self.target.host)

    def _request_headers(self, flow: http.HTTPFlow) -> None:
        exchange = getattr(flow.request, "exchange", None)
        flow.request.stream = exchange is None or not exchange.waits

    def _request(self, flow: http.HTTPFlow) -> None:
        exchange: Exchange | None = getattr(flow.request, "exchange", None)
        if exchange is None or not exchange.waits:
            return
        data = flow.request.data
        try:
            path, fields, body = exchange.put_in(data.path, list(data.headers.fields), data.content)
        except Withheld as error:
            exchange.done(error.status, reason=error.reason)
            exchange.ours = self._answer(error.status, failed(exchange.what, error.reason))
            flow.response = exchange.ours
            return
        data.path, data.headers, data.content = path, http.Headers(fields), body

    def _response_headers(self, flow: http.HTTPFlow) -> None:
        exchange: Exchange | None = getattr(flow.request, "exchange", None)
        response = flow.response
        if exchange is None or response is None or exchange.ours is not None:
            return
        data = response.data
        patterns = exchange.patterns()
        try:
            fields, through = exchange.answer(data.status_code, data.headers.fields)
        except Unreadable as error:
            self._replace(flow, exchange, str(error))
            return
        reason = bytes(byte for byte in data.reason if byte >= 32 and byte != 127)
        data.reason = patterns.strike(reason) if patterns else reason
        data.headers = http.Headers(fields)
        response.stream = True if through is None else self._guarded(exchange, flow, through)

    def _guarded(self, exchange: Exchange, flow: http.HTTPFlow, through: Callable[[bytes], bytes]) -> Any:
        def step(data: bytes) -> bytes:
            try:
                return through(data)
            except Unreadable as error:  # the answer has begun: it can only be broken off
                exchange.done(502, reason=str(error))
                self.cut(str(error))
                return b""

        return step

    def _replace(self, flow: http.HTTPFlow, exchange: Exchange, reason: str) -> None:
        """Our answer for the origin's, whose body is not waited for."""
        text = failed(exchange.what, f"the answer of {self.target.host} is not let through: {reason}")
        exchange.done(502, reason=reason)
        origin = flow.server_conn
        exchange.ours = flow.response = self._answer(502, text)
        content: bytes = flow.response.data.content
        flow.response.data.content = None
        told = False

        def once(_: bytes) -> bytes:
            nonlocal told
            if told:
                return b""
            told = True
            asyncio.get_running_loop().call_soon(self._abandon, origin)
            return content

        exchange.ours_content = content  # type: ignore[attr-defined]
        flow.response.stream = once

    def _abandon(self, origin: Any) -> None:
        io = self.transports.get(origin)
        if io is not None and io.writer is not None:
            io.writer.transport.abort()

    def _response(self, flow: http.HTTPFlow) -> None:
        exchange: Exchange | None = getattr(flow.request, "exchange", None)
        response = flow.response
        if exchange is None or response is None:
            return
        if exchange.ours is not None:
            content = getattr(exchange, "ours_content", None)
            if (
                content is not None and response.data.content is not None
            ):  # a 101 or bodiless answer was replaced
                response.data.content = content
                self._abandon(flow.server_conn)
            return
        if response.status_code == 101:
            exchange.switched = True
        else:
            exchange.done(response.status_code)

    def _websocket_message(self, flow: http.HTTPFlow) -> None:
        exchange: Exchange | None = getattr(flow.request, "exchange", None)
        assert flow.websocket is not None
        message = flow.websocket.messages[-1]
        patterns = None if exchange is None or message.from_client else exchange.patterns()
        if patterns:
            message.content = patterns.strike(message.content)
        flow.websocket.messages.clear()

    def _websocket_end(self, flow: http.HTTPFlow) -> None:
        exchange: Exchange | None = getattr(flow.request, "exchange", None)
        if exchange is not None:
            exchange.done(101)

    @staticmethod
    def _answer(status: int, text: str) -> http.Response:
        body = text.encode()
        return http.Response.make(
            status,
            body,
            http.Headers(
                [
                    (b"content-type", b"text/plain; charset=utf-8"),
                    (b"content-length", str(len(body)).encode()),
                    (b"cache-control", b"no-store"),
                    (b"x-llm4agents", b"barrier"),
                    (b"connection", b"close"),
                ]
            ),
        )


_HOOKS: dict[type, Callable[..., None]] = {
    tls.TlsClienthelloHook: Connection._tls_clienthello,
    tls.TlsStartClientHook: Connection._tls_start_client,
    tls.TlsStartServerHook: Connection._tls_start_server,
    _hooks.HttpRequestHeadersHook: Connection._request_headers,
    _hooks.HttpRequestHook: Connection._request,
    _hooks.HttpResponseHeadersHook: Connection._response_headers,
    _hooks.HttpResponseHook: Connection._response,
    WebsocketMessageHook: Connection._websocket_message,
    WebsocketEndHook: Connection._websocket_end,
}


def broken(error: BaseException | None) -> None:
    """An error in the log: its kind and where, never its words, which may hold traffic."""
    where, trace = [], error.__traceback__ if error is not None else None
    while trace is not None:
        where.append(f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    say("broken", error=type(error).__name__, trace=where[-6:])
