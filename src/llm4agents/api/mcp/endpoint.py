"""The route `/mcp`: MCP's streamable HTTP.

A browser's page that finds its way here (DNS rebinding) has no key, and is refused before that by its Origin. A session
is its key's: for any other it is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llm4agents import limits
from llm4agents.api.access.gate import Gate
from llm4agents.api.answers import problem
from llm4agents.api.context import Context
from llm4agents.api.context import of as context_of
from llm4agents.api.context import principal as principal_of
from llm4agents.api.proxy import address
from llm4agents.api.proxy.address import Names
from llm4agents.engine.principal import Principal
from llm4agents.errors import CapacityError, ForbiddenError, LLM4AgentsError, ServerUnavailableError

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from llm4agents.api.mcp.conversations import Conversations

log = structlog.get_logger()
_SESSION = b"mcp-session-id"
_LOOK_S = 0.05


class Mcp:
    """An ASGI application; one per server. What it needs is made at the first request."""

    def __init__(self) -> None:
        self._made: _Served | None = None
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        context = context_of(request)
        try:
            check_origin(scope, context.names)
            served = await self._served(context, scope["app"])
            await served.serve(scope, receive, send)
        except LLM4AgentsError as error:
            await problem(error, context)(scope, receive, send)

    async def _served(self, context: Context, app: ASGIApp) -> _Served:
        async with self._making:
            if self._made is None or self._made.ended:
                await asyncio.to_thread(importlib.import_module, "llm4agents.tools.server")
                made = _Served(context, app)
                await made.start()
                self._made = made
            return self._made


def check_origin(scope: Scope, names: Names) -> None:
    """Raises ForbiddenError for a page of another host's, also one whose name has come to mean this server."""
    said = address.values(scope, b"origin")
    if not said:
        return
    host = address.host_of(scope)
    try:
        origin = urlsplit(said[0].decode("latin-1")).netloc.lower()
    except ValueError:
        origin = ""
    if len(said) > 1 or origin != address.header(scope, b"host").decode("latin-1").lower():
        raise ForbiddenError("MCP is not for pages of other hosts (Origin)")
    named = names if names.own is not None else Names(own=frozenset({names.domain}))
    if not named.is_own(host):
        raise ForbiddenError(
            "MCP is for pages of this server's own names alone (Origin)",
            hint="say what it is called: LLM4AGENTS_DOMAIN or LLM4AGENTS_PUBLIC_URL",
        )


class _As(Gate):
    """The gate, for calls that are made for somebody who has been let in."""

    def __init__(self, app: ASGIApp, context: Context, who: Principal) -> None:
        super().__init__(app, context, "tcp")
        self._who = who

    def _known(self, scope: Scope) -> Principal:
        return self._who


class _Served:
    def __init__(self, context: Context, app: ASGIApp) -> None:
        from mcp.server.transport_security import TransportSecuritySettings

        from llm4agents.api.mcp.conversations import Conversations
        from llm4agents.tools import server
        from llm4agents.tools.inside import InsideTransport

        def way(who: Principal) -> InsideTransport:
            return InsideTransport(context.settings, _As(app, context, who), (who.origin, 0))

        self._context = context
        self.conversations: Conversations = Conversations(way)
        tools = server.make(self._boxes, remote=True)
        # Of this application only its sessions are used. Host and Origin are checked here, who knows our names.
        tools.streamable_http_app(
            session_idle_timeout=limits.MCP_SESSION_IDLE_S,
            max_sessions=limits.MCP_SESSIONS_MAX,
            max_request_body_size=limits.REQUEST_BODY_BYTES_MAX,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        self.manager: StreamableHTTPSessionManager = tools.session_manager
        self._running: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self._running is not None and self._running.done()

    async def start(self) -> None:
        ready = asyncio.Event()

        async def run() -> None:
            # Its task group belongs to the task that opened it: no request's, which ends before the sessions do.
            async with self.manager.run():
                ready.set()
                await self._context.stop.wait()
                # Sessions would go on for ever; calls of theirs that are under way have the time that all have.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._context.settings.drain_s):
                        while self.conversations.busy:  # noqa: ASYNC110 (once in a server's life)
                            await asyncio.sleep(_LOOK_S)

        self._running = asyncio.create_task(run())
        begun = asyncio.create_task(ready.wait())
        await asyncio.wait({self._running, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._running.done():
            raise ServerUnavailableError("MCP could not be started", hint="the server's log says more")

    def _boxes(self, ctx: Any) -> Any:
        """Of whoever makes this call: each request has come through the gate."""
        from llm4agents.api.mcp.conversations import Wanted

        request: Request = ctx.request_context.request
        wanted = Wanted.of(parse_qsl(request.scope["query_string"].decode("latin-1")))
        return self.conversations.boxes(principal_of(request), request.headers.get("mcp-session-id"), wanted)

    def _sessions_of(self, project: str) -> int:
        """The package has one bound for all sessions, and no words for whose they are."""
        owners = self.manager._session_owners.values()
        return sum(owner["client_id"].partition("/")[0] == project for owner in owners)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
        from mcp.server.auth.provider import AccessToken

        from llm4agents.api.mcp.conversations import Wanted

        who = principal_of(Request(scope))
        Wanted.of(parse_qsl(scope["query_string"].decode("latin-1"))).network()
        # What a session's requests must have in common; it is no token of anything.
        owner = AccessToken(token="", client_id=f"{who.project}/{who.actor}", scopes=[])
        status = 500

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        session = address.header(scope, _SESSION).decode("latin-1")
        if not session and self._sessions_of(who.project) >= limits.MCP_SESSIONS_PER_PROJECT_MAX:
            raise CapacityError(
                f"this project has {limits.MCP_SESSIONS_PER_PROJECT_MAX} MCP sessions open",
                hint="end some (DELETE); one without a request for half an hour ends by itself",
            )
        await self.manager.handle_request({**scope, "user": AuthenticatedUser(owner)}, receive, watched)
        if scope["method"] == "DELETE" and session and status < 300:
            await self.conversations.end(who, session)
