"""HTTP/1.1 and WebSocket of the listener: uvicorn's protocols, with an end to every wait and a bound to every queue.

What uvicorn leaves to a proxy before it: a head that never ends, a body nobody reads, messages in a million pieces,
pongs nobody fetches.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import select
from typing import Any, cast

import h11
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame

from llm4agents import limits
from llm4agents.api.listen.counting import Bounds, Bucket, Budget, Connections, Ticket
from llm4agents.api.listen.turns import Fed, Turns
from llm4agents.errors import (
    HeadTooLargeError,
    InvalidRequestError,
    LLM4AgentsError,
    SlowRequestError,
    to_wire,
)

LINGER_BYTES_MAX = 8 << 20


class Shared:
    """What all connections of a listener have in common."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.connections = Connections(bounds)
        self.bodies, self.messages = Budget(bounds.bodies_bytes), Budget(bounds.bodies_bytes)
        self.state = ServerState()
        self.turns = Turns()
        self.waiting: set[asyncio.Transport] = set()
        """Connections on which nothing has been said yet."""
        self.leaving = False
        """Whether the server drains: connections are closed after what they are at."""
        # Strangers' bad requests are no news; what fails in the application is logged where it fails.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    def serve(self, app: Any) -> None:
        """Names the application; once, before the first connection."""
        self.app = app
        bounds = self.bounds
        self.config = Config(
            app,
            interface="asgi3",
            lifespan="off",
            proxy_headers=False,  # `edge` decides whom to believe
            log_config=None,
            access_log=False,
            timeout_keep_alive=bounds.keep_alive_s,
            server_header=False,
            h11_max_incomplete_event_size=bounds.head_bytes,
            ws_max_size=limits.WEBSOCKET_MESSAGE_BYTES_MAX,
            ws_ping_interval=None,
            ws_per_message_deflate=False,
        )
        self.config.load()


class Http1(H11Protocol):
    """One connection, until it becomes a WebSocket."""

    def __init__(self, shared: Shared, ticket: Ticket) -> None:
        super().__init__(shared.config, shared.state, {})
        self._shared, self._bounds, self._ticket = shared, shared.bounds, ticket
        self._timer: asyncio.TimerHandle | None = None
        self._lingering = 0  # bytes that are still read, once nobody wants them
        self._fed = Fed(shared.turns, self._take, lambda: self.flow.read_paused)
        self.ws_protocol_class = cast(Any, functools.partial(Socket, shared=shared, ticket=ticket))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._fed)
        self._wait(self._bounds.head_s, self._slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._unset_keepalive_if_required()
        self._shared.connections.leave(self._ticket)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._lingering -= len(data)
            if self._lingering <= 0:
                self.transport.abort()
            return
        self._fed.feed(self.transport, data)

    def _take(self, data: bytes) -> None:
        protocol = self.transport.get_protocol()
        if protocol is not self:  # it has become a WebSocket
            cast(asyncio.Protocol, protocol).data_received(data)
        elif not self._lingering:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            self._stop()
        elif self._waiting:
            # Called with bytes that are not a whole head: it has this long, from its first byte on.
            if self._timer is None and self.conn.trailing_data[0]:
                self._wait(self._bounds.head_s, self._slow)
        else:
            self._ticket.busy()
            self._stop()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._waiting:
            self._ticket.idle()
        if self._shared.leaving:
            self._unset_keepalive_if_required()
            self.transport.close()
        elif self.conn.their_state in (h11.SEND_BODY, h11.MUST_CLOSE, h11.ERROR):
            self._linger()

    def send_400_response(self, msg: str) -> None:
        """Answers what h11 cannot read; it may come in the middle of an answer, too."""
        over = len(self.conn.trailing_data[0]) > self._bounds.head_bytes
        self._refuse(
            HeadTooLargeError(f"the request's head is larger than {self._bounds.head_bytes} bytes")
            if over
            else InvalidRequestError("this is no HTTP request")
        )

    @property
    def _waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _slow(self) -> None:
        self._timer = None
        if self.conn.trailing_data[0]:
            self._refuse(SlowRequestError(f"the request's head did not arrive in {self._bounds.head_s:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: LLM4AgentsError) -> None:
        body = json.dumps(to_wire(error)).encode()
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            head = self.conn.send(h11.Response(status_code=error.http_status, headers=headers))
            self.transport.write((head or b"") + body)
            self._linger()
        except h11.LocalProtocolError:  # an answer is under way, and ends here
            self.transport.abort()

    def _linger(self) -> None:
        """To close with bytes unread would be a reset, and a client that still sends would never read our answer."""
        self._unset_keepalive_if_required()
        self._lingering = LINGER_BYTES_MAX
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait(self._bounds.linger_s, self.transport.abort)

    def _wait(self, seconds: float, then: Any) -> None:
        self._stop()
        self._timer = self.loop.call_later(seconds, then)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Flow(FlowControl):
    """What waits for its turn is not added to, whoever has taken what came before."""

    def __init__(self, transport: asyncio.Transport, fed: Fed) -> None:
        super().__init__(transport)
        self._fed = fed

    def resume_reading(self) -> None:
        super().resume_reading()
        self._fed.again()


class Socket(WebSocketsSansIOProtocol):
    """A WebSocket. What it holds of messages that are not read is counted with everyone's."""

    def __init__(self, *, shared: Shared, ticket: Ticket, **more: Any) -> None:
        super().__init__(**more)
        self._shared, self._ticket = shared, ticket
        self._messages, self._control = Bucket(shared.bounds.messages), Bucket(shared.bounds.control)
        self._held = 0
        self._fed = Fed(shared.turns, self._take, lambda: self.read_paused)
        ticket.busy()
        self._look = self.loop.call_later(shared.bounds.gone_s, self._gone)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        self._give(self._held)
        self._shared.connections.leave(self._ticket)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._shared.messages.take(len(data), self._held):
            self._fail(CloseCode.TRY_AGAIN_LATER, "the server has no room for more")
            return
        self._held += len(data)
        self._fed.feed(self.transport, data)

    def _take(self, data: bytes) -> None:
        super().data_received(data)
        if not self.frames and self.queue.empty() and self.conn.parser_exc is None:
            # Nothing whole is waiting: what is held is a part of a frame at most, and what is not read yet.
            self._give(self._held - self._unused)

    @property
    def _unused(self) -> int:
        return len(self.conn.reader.buffer) + len(self._fed)

    async def receive(self) -> Any:
        message = await super().receive()
        self._fed.again()
        if self.queue.empty():
            self._give(self._held - self._unused)
        if (wait_s := self._messages.take()) > 0:
            await asyncio.sleep(min(wait_s, 1.0))
        return message

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= limits.WEBSOCKET_FRAMES_MAX:
            self._fail(
                CloseCode.MESSAGE_TOO_BIG, f"more than {limits.WEBSOCKET_FRAMES_MAX} frames in a message"
            )
            return
        if not event.data and not event.fin:
            self._empty()
        super().handle_cont(event)

    def handle_ping(self) -> None:
        self._empty()
        super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        self._empty()
        super().handle_pong(event)

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self.read_paused:  # a client that does not fetch what it asked for is not asked for more
            self.read_paused = True
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self.transport.resume_reading()
            self._fed.again()

    def _gone(self) -> None:
        """While nothing is read, nobody would see that the client has gone: the kernel is asked."""
        self._look = self.loop.call_later(self._shared.bounds.gone_s, self._gone)
        if self.read_paused and not self.transport.is_closing():
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
            if poll.poll(0):
                self.transport.abort()

    def _empty(self) -> None:
        if self._control.take() > 0:
            self._fail(CloseCode.POLICY_VIOLATION, "too many frames that say nothing")

    def _fail(self, code: CloseCode, reason: str) -> None:
        if self.transport.is_closing():
            return
        if self.handshake_complete and not self.close_sent:
            self.conn.send_close(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": int(code), "reason": reason})
        self.transport.close()

    def _give(self, count: int) -> None:
        if count > 0:
            self._held -= count
            self._shared.messages.give(count)
