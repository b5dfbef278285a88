"""Takes requests for ports of sandboxes off the application, and answers what goes wrong with them.

Outside the routes, since nothing of what those share (bounded bodies, JSON) is meant for a guest's traffic, and
because any path is a guest's when the host name says so.
"""

from __future__ import annotations

import time

import structlog
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm4agents.api.access import ports
from llm4agents.api.answers import problem
from llm4agents.api.context import Context
from llm4agents.api.context import principal as principal_of
from llm4agents.api.proxy import address
from llm4agents.api.proxy.address import Target
from llm4agents.api.proxy.exchange import Exchange
from llm4agents.api.proxy.tunnel import tunnel
from llm4agents.api.proxy.upstream import Pools
from llm4agents.api.proxy.websocket import bridge
from llm4agents.errors import LLM4AgentsError, ServerUnavailableError, UnknownOutcomeError

log = structlog.get_logger()
INTERNAL = 1011
REASON_BYTES_MAX = 120


class Ports:
    """ASGI middleware; one per process."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self.app, self.context = app, context
        self.pools = Pools()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        answer = _Answer(send)
        try:
            target = address.of(scope, self.context.names)
            if target is None:
                return await self.app(scope, receive, send)
            self.context.active += 1
            try:
                await self._serve(target, scope, receive, answer)
            finally:
                self.context.active -= 1
                self.context.last_request_s = time.monotonic()
        except LLM4AgentsError as error:
            await self._failed(error, scope, receive, answer)
        except Exception as error:
            if not answer.begun:
                log.error("proxy_failed", path=scope["path"], exc_info=error)
            failed = UnknownOutcomeError(
                f"the server failed: {type(error).__name__}", hint="its log says more"
            )
            await self._failed(failed, scope, receive, answer)

    async def _serve(self, target: Target, scope: Scope, receive: Receive, send: _Answer) -> None:
        if self.context.stop.is_set():
            raise ServerUnavailableError("this server is stopping", hint="call again; the next one starts")
        ports.check(self.context, principal_of(HTTPConnection(scope)), target.sandbox)
        http = scope["type"] == "http"
        if http and target.path is None and scope["method"] in ("GET", "HEAD"):
            # Relative links of the page must resolve below the prefix.
            query = scope["query_string"].decode("latin-1")
            where = f"{target.prefix}/" + (f"?{query}" if query else "")
            await Response(status_code=308, headers={"location": where})(scope, receive, send)
            return
        live = await self.context.engine.access(target.sandbox)
        async with live.use(f"port {target.port}") as agent:
            pool = self.pools.of(target.sandbox, agent)
            with pool.dialer.counted():
                if http:
                    await Exchange(pool, target, scope, receive, send).run()
                elif target.prefix and target.path == address.TUNNEL:
                    await receive()  # websocket.connect
                    await tunnel(pool.dialer, target.port, receive, send)
                else:
                    await receive()
                    await bridge(pool.dialer, target, scope, receive, send)

    async def _failed(self, error: LLM4AgentsError, scope: Scope, receive: Receive, send: _Answer) -> None:
        if not send.begun:
            await problem(error, self.context)(scope, receive, send)
        elif scope["type"] == "websocket":
            reason = error.message.encode()[:REASON_BYTES_MAX].decode(errors="ignore")
            await send.quietly({"type": "websocket.close", "code": INTERNAL, "reason": reason})
        else:
            # An answer that is left unfinished is cut by the server: the client sees that it is not whole.
            log.info("proxied_answer_cut", path=scope["path"][:200], error=error.message[:200])


class _Answer:
    """`send`, remembering whether anything was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)

    async def quietly(self, message: Message) -> None:
        """To a client that may have gone."""
        try:
            await self._send(message)
        except (OSError, RuntimeError):  # uvicorn's ClientDisconnected is an OSError
            return
