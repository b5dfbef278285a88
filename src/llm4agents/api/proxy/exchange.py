"""One HTTP request to a guest's port: both bodies stream at once, each as fast as its taker takes it.

Not here: what is changed in heads (`heads`), where connections come from (`upstream`), errors' answers (`door`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import h11
from starlette.types import Receive, Scope, Send

from llm4agents import limits
from llm4agents.api.proxy import heads
from llm4agents.api.proxy.address import Target
from llm4agents.api.proxy.upstream import Connection, Pool, port_error
from llm4agents.errors import GuestError, InvalidRequestError, LLM4AgentsError, PortError

_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})
_BODILESS = frozenset({*_REPEATABLE, "TRACE", "DELETE", "CONNECT"})


class Exchange:
    """`run` it once. Raises PortRefusedError, PortError, CapacityError and what ends a session."""

    def __init__(self, pool: Pool, target: Target, scope: Scope, receive: Receive, send: Send) -> None:
        self._pool, self._target, self._scope = pool, target, scope
        self._receive, self._send = receive, send
        self._go = asyncio.Event()
        """The guest wants the body (Expect: 100-continue)."""
        self._gone = False
        self._broken: LLM4AgentsError | None = None
        """Why the rest of the client's body does not come."""
        self._sent = False
        """The whole request has been written to the guest."""
        fields = heads.request(scope, target)
        self._chunked = bool(heads.named(scope["headers"], b"transfer-encoding"))
        if self._chunked:
            fields = [field for field in fields if field[0] != b"content-length"]
            fields.append((b"transfer-encoding", b"chunked"))
        length = heads.named(fields, b"content-length")
        self._has_body = self._chunked or (bool(length) and length[0] != b"0")
        self._expects = b"100-continue" in [v.lower() for v in heads.named(fields, b"expect")]
        self._untold = scope["http_version"] not in ("1.0", "1.1") and not self._chunked and not length
        """Nothing in the head says whether there is a body: HTTP/2 says so by its frames."""
        self._first: asyncio.Future[Any] | None = None
        """The message that was asked for before its time."""
        self._head = self._made(fields)

    def _made(self, fields: heads.Fields) -> h11.Request:
        query = self._scope["query_string"]
        path = (self._target.path or b"/") + (b"?" + query if query else b"")
        try:
            return h11.Request(method=self._scope["method"], target=path, headers=fields)
        except h11.LocalProtocolError as error:
            raise InvalidRequestError(f"this request cannot be passed on: {error}") from error

    async def _look_for_a_body(self) -> None:
        """By what comes first, if it comes soon; what takes longer is the beginning of a body."""
        self._first = asyncio.ensure_future(self._receive())
        done, _ = await asyncio.wait({self._first}, timeout=limits.PORT_BODY_S)
        message: Any = self._first.result() if done else {"more_body": True}
        fields = [(name, value) for name, value in self._head.headers]
        if message.get("more_body"):
            self._has_body = self._chunked = True
            self._head = self._made([*fields, (b"transfer-encoding", b"chunked")])
        elif body := message.get("body", b""):
            self._has_body = True
            self._head = self._made([*fields, (b"content-length", str(len(body)).encode())])
        elif self._scope["method"] not in _BODILESS:
            self._head = self._made([*fields, (b"content-length", b"0")])

    async def _message(self) -> Any:
        """The client's next message."""
        if self._first is not None:
            try:
                return await self._first
            finally:
                self._first = None
        return await self._receive()

    async def run(self) -> None:
        if self._untold:
            await self._look_for_a_body()
        try:
            await self._exchanged()
        finally:
            if self._first is not None:
                self._first.cancel()

    async def _exchanged(self) -> None:
        # A kept connection may be closed by the guest just as we write: only what can be repeated goes there.
        repeatable = not self._has_body and self._scope["method"] in _REPEATABLE
        if repeatable and (kept := self._pool.take(self._target.port)) is not None:
            with contextlib.suppress(_Stale):
                await self._over(kept)
                return
        await self._over(Connection(self._target.port))

    async def _over(self, connection: Connection) -> None:
        client = None
        try:
            await self._open(connection)
            client = asyncio.create_task(self._client(connection))
            head = await self._answer_head(connection)
            if head is None:
                return
            await self._send(
                {
                    "type": "http.response.start",
                    "status": head.status_code,
                    "headers": heads.answer(list(head.headers), self._scope, self._target),
                }
            )
            while True:
                body, last = await self._body(connection)
                if self._gone:
                    return
                if last:
                    # Before the client hears of the end, which it may answer with the next request.
                    await _end(client)
                    if self._sent:
                        self._pool.give(connection)
                    else:
                        connection.close()
                await self._send({"type": "http.response.body", "body": body, "more_body": not last})
                if last:
                    return
        except (h11.RemoteProtocolError, GuestError) as error:
            connection.close()
            if self._broken is not None:
                raise self._broken from error
            if not self._gone:
                raise port_error(self._target.port, error) from error
        except BaseException:
            connection.close()
            raise
        finally:
            if client is not None:
                await _end(client)
            if self._gone:
                connection.close()

    async def _open(self, connection: Connection) -> None:
        """Send the head, and with it the connection's first bytes if it is a new one."""
        head = connection.protocol.send(self._head) or b""
        if not self._has_body:
            head += connection.protocol.send(h11.EndOfMessage()) or b""
            self._sent = True
        if connection.socket is None:
            connection.socket = await self._pool.dialer.dial(self._target.port, head)
            return
        try:
            await connection.socket.write(head)
        except LLM4AgentsError as error:
            raise _Stale from error

    async def _answer_head(self, connection: Connection) -> h11.Response | None:
        """The final answer's head; None when the client has gone. Of interim answers hints alone are passed on."""
        for _ in range(limits.PORT_INTERIM_MAX):
            try:
                event = await connection.receive()
            except (h11.RemoteProtocolError, GuestError) as error:
                if connection.reused:
                    raise _Stale from error
                raise
            if isinstance(event, h11.Response):
                if not 200 <= event.status_code <= 599:
                    raise PortError(f"port {self._target.port} answered with status {event.status_code}")
                return event
            if self._gone:
                return None
            if isinstance(event, h11.InformationalResponse):
                connection.reused = False  # it has answered: no second try
                if event.status_code == 100:
                    self._go.set()
                elif event.status_code == 103:
                    await self._hint(event)
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                raise PortError(f"port {self._target.port} of the sandbox closed the connection unanswered")
        raise PortError(f"port {self._target.port} of the sandbox sent interim answers and no answer")

    async def _hint(self, event: h11.InformationalResponse) -> None:
        links = heads.named(event.headers, b"link")
        if links and "http.response.early_hint" in (self._scope.get("extensions") or {}):
            await self._send({"type": "http.response.early_hint", "links": links})

    async def _body(self, connection: Connection) -> tuple[bytes, bool]:
        """What has come of the answer's body, joined but never waited for; and whether that was all."""
        pieces: list[Any] = []
        event = await connection.receive()
        until = time.monotonic() + limits.LISTEN_SLICE_S
        while isinstance(event, h11.Data):
            pieces.append(event.data)
            if time.monotonic() > until:  # tiny chunks by the ten thousand: everybody else has a turn
                await asyncio.sleep(limits.LISTEN_SLICE_S)
                return b"".join(pieces), False
            event = connection.at_hand()
        return b"".join(pieces), isinstance(event, h11.EndOfMessage)

    async def _client(self, connection: Connection) -> None:
        """Pass the request's body on; then wait for the client to go away, which ends the guest's side too."""
        with contextlib.suppress(LLM4AgentsError, h11.LocalProtocolError):
            # The guest may have enough of a body it has not read to its end: its answer is still to come.
            if self._has_body and not await self._upload(connection):
                self._gone = True
                connection.close()
                return
        while (await self._message())["type"] != "http.disconnect":
            pass
        self._gone = True
        connection.close()

    async def _upload(self, connection: Connection) -> bool:
        if self._expects:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.PORT_EXPECT_S):
                    await self._go.wait()
        while True:
            try:
                message = await self._message()
            except LLM4AgentsError as error:
                # Too slow, or too much of it: the guest would wait for the rest, and is left instead.
                self._broken = error
                connection.close()
                raise
            if message["type"] == "http.disconnect":
                return False
            if body := message.get("body"):
                await connection.send(h11.Data(data=body))
            if not message.get("more_body"):
                await connection.send(h11.EndOfMessage())
                self._sent = True
                return True


class _Stale(Exception):
    """A kept connection turned out to have ended before the guest had answered anything."""


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
