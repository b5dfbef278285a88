"""The SDK's way to the server that it runs in: calls of the application in this process, as whoever asked.

So tools that the server itself serves go through the same gate, routes, quotas and audit as everybody's calls. Not
here: who that is (`app` is an application behind a gate that knows).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpcore

from llm4agents.config import Settings
from llm4agents.errors import ConnectionLostError
from llm4agents.sdk._async.transport import AsyncTransport

Message = MutableMapping[str, Any]
Asgi = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
_HELD_MAX = 16
"""Pieces of an answer that wait for their reader."""


class InsideTransport(AsyncTransport):
    """`origin`: (address, port) of the peer that the calls are made for."""

    def __init__(self, settings: Settings, app: Asgi, origin: tuple[str, int] | None) -> None:
        super().__init__(settings)
        self._app, self._origin = app, origin

    def retain(self) -> None:
        return

    async def release(self) -> None:
        return

    async def server(self) -> dict[str, Any]:
        """It is here."""
        return {}

    async def _send(
        self, method: str, target: str, content: Any, headers: list[tuple[str, str]], wait_s: float | None
    ) -> httpcore.Response:
        path, _, query = target.partition("?")
        fields = [(b"host", b"inside"), *((name.lower().encode(), value.encode()) for name, value in headers)]
        if isinstance(content, bytes):
            fields.append((b"content-length", str(len(content)).encode()))
        elif content is not None:
            fields.append((b"transfer-encoding", b"chunked"))
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": _decoded(path),
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": fields,
            "client": self._origin,
            "server": ("inside", 0),
            "state": {},
        }
        call = _Call(self._app, scope, content)
        return await call.answer()


def _decoded(path: str) -> str:
    from urllib.parse import unquote

    return unquote(path)


class _Call:
    """One request under way. Whoever reads its answer sets its pace; closing the answer ends it."""

    def __init__(self, app: Asgi, scope: Message, content: Any) -> None:
        self._app, self._scope, self._content = app, scope, content
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_HELD_MAX)
        self._head: asyncio.Future[httpcore.Response] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._body = self._sent()
        self._task: asyncio.Task[None] | None = None

    async def answer(self) -> httpcore.Response:
        self._task = asyncio.create_task(self._run())
        try:
            return await asyncio.shield(self._head)
        except asyncio.CancelledError:
            await self.aclose()
            raise

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
            error: Exception | None = None
        except Exception as caught:
            error = caught
        if not self._head.done():
            lost = ConnectionLostError("the server gave no answer", hint="its log says more")
            lost.__cause__ = error
            self._head.set_exception(lost)
        if not self._gone.is_set():
            await self._pieces.put(None)

    async def _sent(self) -> AsyncIterator[Message]:
        if isinstance(self._content, bytes) or self._content is None:
            yield {"type": "http.request", "body": self._content or b"", "more_body": False}
            return
        async for piece in self._content:
            yield {"type": "http.request", "body": piece, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    async def _receive(self) -> Message:
        async for message in self._body:
            return message
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            fields = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            self._head.set_result(httpcore.Response(message["status"], headers=fields, content=_Body(self)))
        elif message["type"] == "http.response.body" and message.get("body") and not self._gone.is_set():
            await self._pieces.put(bytes(message["body"]))

    async def next(self) -> bytes | None:
        return await self._pieces.get()

    async def aclose(self) -> None:
        """The reader has gone: the application hears of it, and is not waited for longer than it takes to end."""
        self._gone.set()
        if self._task is None:
            return
        while not self._pieces.empty():  # what it may be waiting to put
            self._pieces.get_nowait()
        if not self._task.done():
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


class _Body:
    """The body of an answer, as httpcore has it."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._call.next()) is not None:
            yield piece

    async def aclose(self) -> None:
        await self._call.aclose()
