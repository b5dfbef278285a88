"""The outermost ASGI application of the TCP listener: whom a request is for, how large and how slow it may be.

Outside the authentication, so everything in here is what strangers meet. Not here: connections (`listener`).
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from llm4agents import limits
from llm4agents.api.access.crowd import Crowd
from llm4agents.api.answers import problem
from llm4agents.api.context import Context
from llm4agents.api.listen import origin
from llm4agents.api.listen.counting import Bounds, Budget
from llm4agents.api.proxy import address
from llm4agents.engine.invites import network_of
from llm4agents.errors import (
    AmbiguousRequestError,
    CapacityError,
    HeadTooLargeError,
    InvalidRequestError,
    LLM4AgentsError,
    MisdirectedError,
    SlowRequestError,
    TooLargeError,
)

_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
_WITHOUT_KEY = "/v1/register"
_STREAMED = frozenset({"/v1/templates/files"})


class Edge:
    """ASGI middleware; one per listener."""

    def __init__(
        self,
        app: ASGIApp,
        context: Context,
        hosts: origin.Hosts,
        proxies: origin.Proxies,
        bounds: Bounds,
        bodies: Budget,
    ) -> None:
        self.app, self.context = app, context
        self.hosts, self.proxies, self.bounds, self.bodies = hosts, proxies, bounds, bodies
        self.active = 0
        self._crowd = Crowd(bounds.requests, bounds.crowded)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        began = time.perf_counter()
        answer = _Answer(send, began)
        self.active += 1
        body: _Body | None = None
        try:
            self._admit(scope)
            client = scope["client"]
            with self._crowd.inside(network_of(client[0]) if client else ""):
                if scope["type"] == "http":
                    body = _Body(self, scope, receive)
                    body.check()
                await self.app(scope, body or receive, answer)
        except LLM4AgentsError as error:
            if answer.begun:
                return None  # it ends unfinished, which the client sees
            refusal = problem(error, self.context)
            if isinstance(error, AmbiguousRequestError):
                refusal.headers["connection"] = "close"
            if scope["type"] == "websocket":
                await WebSocket(scope, receive, send).send_denial_response(refusal)
            else:
                await refusal(scope, receive, send)
        finally:
            self.active -= 1
            if body is not None:
                body.close()

    def _admit(self, scope: Scope) -> None:
        """Reads the head; `scope` then says what is to be believed. Raises what the client is told."""
        headers = scope["headers"]
        if len(headers) > self.bounds.headers:
            raise HeadTooLargeError(f"the request has more than {self.bounds.headers} headers")
        target = scope.get("raw_path") or b""
        size = (
            len(target) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in headers)
        )
        if size > self.bounds.head_bytes:
            raise HeadTooLargeError(f"the request's head is larger than {self.bounds.head_bytes} bytes")
        if not target.startswith(b"/") and not (target == b"*" and scope.get("method") == "OPTIONS"):
            raise InvalidRequestError("the request's target is not a path", hint="this server is no proxy")
        names = {name for name, _ in headers}
        if b"transfer-encoding" in names and b"content-length" in names:
            # Whatever is before us may have read it by the other one, and what follows as another's request.
            raise AmbiguousRequestError("the request says its length in two ways")
        if self.active > self.bounds.requests:
            raise CapacityError("this server has too much to do", hint="call again in a second")
        peer = scope["client"]
        found = origin.read(headers, peer[0] if peer else None, scope["scheme"], self.proxies)
        name = origin.name_of(found.host or "")
        if name is None:
            raise InvalidRequestError("the request says no host, or none that can be read")
        server = scope.get("server")
        if not self.hosts.are(name, server[0] if server else None):
            raise MisdirectedError(
                f"this server is not {name}",
                hint="whoever runs it names it with --domain or LLM4AGENTS_PUBLIC_URL",
            )
        scope["headers"], scope["scheme"] = found.headers, found.scheme
        if peer and found.client != peer[0]:
            scope["client"] = (found.client, 0)


class _Body:
    """`receive` of one request: it ends when nothing comes, or too little of what is read whole, or too much."""

    def __init__(self, edge: Edge, scope: Scope, receive: Receive) -> None:
        self._edge, self._scope, self._receive = edge, scope, receive
        self._whole = scope["method"] not in _BODILESS and not _streams(scope, edge.context.names)
        self._limit = limits.REQUEST_BODY_BYTES_MAX
        if scope["path"] == _WITHOUT_KEY:
            self._limit = limits.LISTEN_REGISTER_BYTES_MAX
        self._began: float | None = None
        self._seen = self._held = 0
        self._over = False

    def check(self) -> None:
        """Refuses by its head what would be too large; nothing of it has been read then."""
        if not self._whole:
            return
        for name, value in self._scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value[:20]) > self._limit):
                raise self._too_large()

    async def __call__(self) -> Message:
        if self._over:
            return await self._receive()
        bounds = self._edge.bounds
        if self._began is None:
            self._began = time.monotonic()
        wait_s = bounds.stall_s
        if self._whole:
            due = self._began + bounds.stall_s + self._seen / bounds.body_bytes_per_s
            wait_s = min(wait_s, max(0.0, due - time.monotonic()))
        try:
            async with asyncio.timeout(wait_s):
                message = await self._receive()
        except TimeoutError:
            raise SlowRequestError(
                "the request's body does not arrive",
                hint=f"nothing for {bounds.stall_s:g} s, or less than {bounds.body_bytes_per_s} bytes a second",
            ) from None
        self._over = message["type"] != "http.request" or not message.get("more_body", False)
        count = len(message.get("body", b""))
        self._seen += count
        if self._whole:
            if self._seen > self._limit:
                raise self._too_large()
            if not self._edge.bodies.take(count, self._held):
                raise CapacityError("the server has no room for this request", hint="call again in a second")
            self._held += count
        return message

    def close(self) -> None:
        self._edge.bodies.give(self._held)
        self._held = 0

    def _too_large(self) -> LLM4AgentsError:
        return TooLargeError(
            f"the request's body is larger than {self._limit} bytes", hint="large data goes through files"
        )


class _Answer:
    """`send`, remembering that it began, and saying how long the server took until then."""

    def __init__(self, send: Send, began: float) -> None:
        self._send, self._began = send, began
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if not self.begun:
            self.begun = True
            if message["type"] == "http.response.start" and message["status"] < 300:
                took = f"total;dur={(time.perf_counter() - self._began) * 1000:.2f}"
                message = {
                    **message,
                    "headers": [*message.get("headers", []), (b"server-timing", took.encode())],
                }
        await self._send(message)


def _streams(scope: Scope, names: address.Names) -> bool:
    """Whether the body is read as it comes and may be as large as it likes: files, and what a guest is sent."""
    path: str = scope["path"]
    if scope["method"] == "PUT" and not path.endswith("/network"):
        return True
    return path in _STREAMED or address.of(scope, names) is not None
