"""HTTP/2 of the listener: ASGI over the frames of h2. No push, no priorities, no WebSocket (browsers use HTTP/1.1).

Every stream has its own queue and its own waits, so that an upload that nobody reads holds up no other stream. What
a client may do without saying anything (resets, pings, settings, empty frames) is counted: an attack ends its
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from llm4agents import limits
from llm4agents.api.listen.counting import Bucket, Ticket
from llm4agents.api.listen.http1 import Shared
from llm4agents.api.listen.turns import Fed

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_OF_HTTP1 = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_SMALL = 1_024
_log = logging.getLogger("uvicorn.error")


class _Frames(h2.connection.H2Connection):
    """Counts frames: there are some of which h2 makes no event."""

    received = 0

    def _receive_frame(self, frame: Any) -> list[h2.events.Event]:
        self.received += 1
        return super()._receive_frame(frame)


class Http2(asyncio.Protocol):
    """One connection."""

    def __init__(self, shared: Shared, ticket: Ticket) -> None:
        self._shared, self._bounds, self._ticket = shared, shared.bounds, ticket
        self._loop = asyncio.get_running_loop()
        self.conn = _Frames(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.conn.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: self._bounds.streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: self._bounds.head_bytes,
                SettingCodes.INITIAL_WINDOW_SIZE: limits.LISTEN_STREAM_WINDOW_BYTES,
            },
        )
        self.conn.decoder.max_header_list_size = self._bounds.head_bytes
        self._streams: dict[int, _Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._fed = Fed(shared.turns, self._take, lambda: not self.writable.is_set())
        self.credit = 0
        """Windows that the client may open for what it was sent."""
        self._resets, self._control = Bucket(self._bounds.resets), Bucket(self._bounds.control)
        self._timer: asyncio.TimerHandle | None = None
        self._going = False
        self.transport: asyncio.Transport
        self.writable = asyncio.Event()
        self.writable.set()

    # -- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._shared.state.connections.add(self)  # type: ignore[arg-type]
        self.client, self.server = get_remote_addr(transport), get_local_addr(transport)
        self.scheme = "https" if is_ssl(transport) else "http"
        self.conn.initiate_connection()
        self.conn.increment_flow_control_window(limits.LISTEN_WINDOW_BYTES - 65_535)
        self.flush()
        self._wait(self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._shared.state.connections.discard(self)
        self._shared.connections.leave(self._ticket)
        self.writable.set()
        for stream in list(self._streams.values()):
            stream.gone()
        self._streams.clear()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.writable.clear()
        with contextlib.suppress(RuntimeError):
            self.transport.pause_reading()  # or its pings would queue up as answers

    def resume_writing(self) -> None:
        self.writable.set()
        with contextlib.suppress(RuntimeError):
            self.transport.resume_reading()
            self._fed.again()

    def data_received(self, data: bytes) -> None:
        self._fed.feed(self.transport, data)

    def _take(self, data: bytes) -> None:
        frames = self.conn.received
        try:
            events = self.conn.receive_data(data)
        except h2.exceptions.ProtocolError:
            self.flush()  # says why
            self.transport.close()
            return
        if len(self.conn.incoming_buffer._data) > self.conn.max_inbound_frame_size + 9:
            # h2 would hear such a frame out, up to its 16 MiB, before it refuses it.
            self._attack(ErrorCodes.FRAME_SIZE_ERROR)
            return
        useful = 0
        for event in events:
            useful += self._handle(event)
            if self.transport.is_closing():
                break
        noise = self.conn.received - frames - useful
        if noise > 0 and self._control.take(noise) > 0:
            self._attack()
        self.flush()

    def flush(self) -> None:
        data = self.conn.data_to_send()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def shutdown(self) -> None:
        """Takes no new stream; ends when those under way have.

        GOAWAY comes last and not first: there are clients that give up everything when they see one.
        """
        self._going = True
        if not self._streams and not self.transport.is_closing():
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self.conn.close_connection()
            self.flush()
            self.transport.close()

    # -- frames

    def _handle(self, event: h2.events.Event) -> bool:
        """Whether there was anything in it; the others are counted, see `_take`."""
        if isinstance(event, h2.events.RequestReceived):
            self._begin(event)
            return True
        if isinstance(event, h2.events.TrailersReceived):
            return True
        if isinstance(event, h2.events.DataReceived):
            self._data(event)
            return bool(event.data) or event.stream_ended is not None
        if isinstance(event, h2.events.StreamEnded):
            if (stream := self._streams.get(event.stream_id or 0)) is not None:
                stream.end()
        elif isinstance(event, h2.events.StreamReset):
            if event.remote_reset and self._resets.take() > 0:
                self._attack()
            if (stream := self._streams.pop(event.stream_id or 0, None)) is not None:
                stream.gone()
                self._over()
            return True
        elif isinstance(event, h2.events.WindowUpdated):
            self._opened()
            self.credit -= 1
            return self.credit >= 0
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            # What it offers to remember of our heads, up to 4 GiB, is looked through for every one.
            self.conn.encoder.header_table_size = min(4_096, self.conn.remote_settings.header_table_size)
            self._opened()
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.transport.close()
        return False

    def _opened(self) -> None:
        self.credit = max(self.credit, 0)
        for stream in self._streams.values():
            stream.window.set()

    def _begin(self, event: h2.events.RequestReceived) -> None:
        ident = event.stream_id or 0
        if self._going or self._shared.leaving or len(self._tasks) >= 2 * self._bounds.streams:
            # Streams that were taken back count until what they started has ended.
            self.reset(ident, ErrorCodes.REFUSED_STREAM)
            if self._resets.take() > 0:
                self._attack()
            return
        scope = self._scope(event.headers or [])
        if scope is None:
            self.reset(ident, ErrorCodes.PROTOCOL_ERROR)
            return
        self._ticket.busy()
        self._stop()
        stream = self._streams[ident] = _Stream(self, ident, scope["method"] == "HEAD")
        task = self._loop.create_task(stream.run(self._shared.app, scope))
        for tasks in (self._tasks, self._shared.state.tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _scope(self, headers: list[tuple[bytes, bytes]]) -> dict[str, Any] | None:
        pseudo = {name: value for name, value in headers if name.startswith(b":")}
        fields = [(name, value) for name, value in headers if not name.startswith(b":")]
        method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
        try:
            path, said = target.partition(b"?")[0].decode("ascii"), method.decode("ascii")
        except UnicodeDecodeError:
            return None
        if not target or method == b"CONNECT":
            return None
        if (authority := pseudo.get(b":authority")) is not None:
            if any(name == b"host" and value != authority for name, value in fields):
                return None
            fields = [(b"host", authority), *(pair for pair in fields if pair[0] != b"host")]
        crumbs = [value for name, value in fields if name == b"cookie"]
        if len(crumbs) > 1:
            fields = [pair for pair in fields if pair[0] != b"cookie"]
            fields.append((b"cookie", b"; ".join(crumbs)))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "2",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": said,
            "root_path": "",
            "path": unquote(path),
            "raw_path": target.partition(b"?")[0],
            "query_string": target.partition(b"?")[2],
            "headers": fields,
            "state": {},
        }

    def _data(self, event: h2.events.DataReceived) -> None:
        ident, length = event.stream_id or 0, event.flow_controlled_length or 0
        stream = self._streams.get(ident)
        if stream is None or stream.disconnected:
            self.acknowledge(ident, length)  # nobody waits for it, and others have the same window
            return
        padding = length - len(event.data or b"")
        if padding:
            self.acknowledge(ident, padding)
        stream.feed(event.data or b"")

    def acknowledge(self, ident: int, count: int) -> None:
        """Lets the client send `count` bytes more."""
        if count:
            with contextlib.suppress(h2.exceptions.ProtocolError, ValueError):
                self.conn.acknowledge_received_data(count, ident)

    def reset(self, ident: int, code: ErrorCodes) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.conn.reset_stream(ident, code)
        self.flush()

    def finished(self, stream: _Stream) -> None:
        """The application is done with it."""
        if self._streams.pop(stream.ident, None) is not None:
            self.acknowledge(stream.ident, stream.forget())
            self.flush()
            self._over()

    def _over(self) -> None:
        if self._streams or self.transport.is_closing():
            return
        if self._going or self._shared.leaving:
            self.shutdown()
            return
        self._ticket.idle()
        self._wait(self._bounds.keep_alive_s)

    def _attack(self, why: ErrorCodes = ErrorCodes.ENHANCE_YOUR_CALM) -> None:
        if not self.transport.is_closing():
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self.conn.close_connection(why)
            self.flush()
            self.transport.close()
            for stream in list(self._streams.values()):
                stream.gone()
            self._streams.clear()

    def _wait(self, seconds: float) -> None:
        self._stop()
        self._timer = self._loop.call_later(seconds, self.shutdown)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Stream:
    """One request, and its answer."""

    def __init__(self, connection: Http2, ident: int, head: bool) -> None:
        self._connection, self.ident, self._head = connection, ident, head
        self.window = asyncio.Event()
        self.disconnected = False
        self._body, self._ended, self._told = bytearray(), False, False
        self._news = asyncio.Event()
        self._status: int | None = None
        self._complete = False

    # -- from the connection

    def feed(self, data: bytes) -> None:
        self._body += data
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    def gone(self) -> None:
        self.disconnected = True
        self._news.set()
        self.window.set()

    def forget(self) -> int:
        """How many bytes nobody will read any more."""
        count = len(self._body)
        self._body.clear()
        return count

    # -- the application's side

    async def run(self, app: Any, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:
            _log.error("Exception in ASGI application", exc_info=error)
        finally:
            self._finish()

    def _finish(self) -> None:
        connection = self._connection
        if not self.disconnected:
            if self._status is None:
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    connection.conn.send_headers(self.ident, [(b":status", b"500")], end_stream=True)
                self._complete = True
            if not self._complete:
                connection.reset(
                    self.ident, ErrorCodes.INTERNAL_ERROR
                )  # it is not whole, and must not look so
            elif not self._ended:
                connection.reset(self.ident, ErrorCodes.NO_ERROR)  # it need not send the rest
        self.disconnected = True
        connection.finished(self)

    async def receive(self) -> dict[str, Any]:
        while not (self._body or self.disconnected or self._complete or (self._ended and not self._told)):
            self._news.clear()
            await self._news.wait()
        if self.disconnected or self._complete:
            return {"type": "http.disconnect"}
        body, more = bytes(self._body), not self._ended
        self._body.clear()
        self._told = not more
        self._connection.acknowledge(self.ident, len(body))
        self._connection.flush()
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(self, message: dict[str, Any]) -> None:
        if self.disconnected:
            return
        conn = self._connection.conn
        try:
            if message["type"] == "http.response.start":
                self._status = int(message["status"])
                fields = [
                    (bytes(name).lower(), bytes(value))
                    for name, value in message.get("headers", [])
                    if bytes(name).lower() not in _OF_HTTP1
                ]
                conn.send_headers(self.ident, [(b":status", b"%d" % self._status), *fields])
                self._connection.flush()
            elif message["type"] == "http.response.body":
                more = message.get("more_body", False)
                await self._write(b"" if self._head else bytes(message.get("body", b"")), end=not more)
                if not more:
                    self._complete = True
                    self._news.set()
        except (h2.exceptions.ProtocolError, KeyError):
            self.gone()  # the client has taken it back

    async def _write(self, data: bytes, *, end: bool) -> None:
        conn, at = self._connection.conn, 0
        while at < len(data):
            await self._connection.writable.wait()
            if self.disconnected:
                return
            room = min(conn.local_flow_control_window(self.ident), conn.max_outbound_frame_size)
            if room <= 0:
                self.window.clear()
                await self.window.wait()
                continue
            piece = data[at : at + room]
            at += len(piece)
            conn.send_data(self.ident, piece, end_stream=end and at == len(data))
            if len(piece) >= _SMALL or at == len(data):  # small ones may be the client's own doing
                self._connection.credit += 2
            self._connection.flush()
        if end and not data:
            conn.end_stream(self.ident)
            self._connection.flush()
