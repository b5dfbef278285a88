"""Takes requests for ports of sandboxes off the application, lets in who may, and answers what goes wrong with them.

Outside the routes, since nothing of what those share (bounded bodies, JSON) is meant for a guest's traffic, and
because any path is a guest's when the host name says so.
"""

from __future__ import annotations

import time
from urllib.parse import quote_from_bytes

import structlog
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm4agents.api.context import Context
from llm4agents.api.context import principal as principal_of
from llm4agents.api.proxy import address, admission
from llm4agents.api.proxy.address import Target
from llm4agents.api.proxy.admission import Admitted, Owned
from llm4agents.api.proxy.exchange import Exchange
from llm4agents.api.proxy.refusals import refusal
from llm4agents.api.proxy.tunnel import tunnel
from llm4agents.api.proxy.upstream import Pools
from llm4agents.api.proxy.websocket import bridge
from llm4agents.engine import clock
from llm4agents.engine.traffic import Traffic
from llm4agents.errors import LLM4AgentsError, ServerUnavailableError, UnknownOutcomeError

log = structlog.get_logger()
INTERNAL, NOT_ALLOWED = 1011, 1008
REASON_BYTES_MAX = 120
_RIGHTS = (b"cookie", b"authorization", b"x-api-key", *admission.TOKENS)
_PATH_SAFE = "/%:@!$&'()*+,;=~"


class Ports:
    """ASGI middleware; one per process."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self.app, self.context = app, context
        self.pools = Pools()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        answer, target = _Answer(send), None
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
            await self._failed(error, target, scope, receive, answer)
        except Exception as error:
            if not answer.begun:
                log.error("proxy_failed", path=scope["path"], exc_info=error)
            failed = UnknownOutcomeError(
                f"the server failed: {type(error).__name__}", hint="its log says more"
            )
            await self._failed(failed, target, scope, receive, answer)

    async def _serve(self, target: Target, scope: Scope, receive: Receive, send: _Answer) -> None:
        if self.context.stop.is_set():
            raise ServerUnavailableError("this server is stopping", hint="call again; the next one starts")
        by = self._admit(target, scope)
        send.varies(target, by)
        offered_by_url = by.by == "url" and target.form == "host" and admission.is_followed(scope)
        query = scope["query_string"]
        # From here on nothing of ours is in it: the guest gets what is left.
        scope = {
            **scope,
            "headers": admission.for_the_guest(scope["headers"]),
            "query_string": admission.query_for_the_guest(query),
        }
        if offered_by_url:
            await self._as_cookie(by, target, scope)(scope, receive, send)
            return
        http = scope["type"] == "http"
        if http and target.path is None and scope["method"] in ("GET", "HEAD"):
            # Relative links of the page must resolve below the prefix.
            where = target.prefix + _location(b"/", query)
            await Response(status_code=308, headers={"location": where})(scope, receive, send)
            return
        with self.context.visitors.inside(target.sandbox, by.by):
            await self._proxy(target, scope, receive, send)

    async def _proxy(self, target: Target, scope: Scope, receive: Receive, send: _Answer) -> None:
        live = await self.context.engine.access(target.sandbox)
        async with live.use(f"port {target.port}") as agent:
            pool = self.pools.of(target.sandbox, agent)
            with pool.dialer.counted():
                if scope["type"] == "http":
                    await Exchange(pool, target, scope, receive, send).run()
                elif target.prefix and target.path == address.TUNNEL:
                    await receive()  # websocket.connect
                    await tunnel(pool.dialer, target.port, receive, send)
                else:
                    await receive()
                    await bridge(pool.dialer, target, scope, receive, send)

    def _admit(self, target: Target, scope: Scope) -> Admitted:
        row = self.context.engine.find(target.sandbox)
        found = None if row is None else Owned(row.project, Traffic.of(row.traffic))
        who, offers = principal_of(HTTPConnection(scope)), admission.offered(scope, target)
        return admission.judge(target, found, who, offers, self.context.signer, clock.wall_s())

    def _as_cookie(self, by: Admitted, target: Target, scope: Scope) -> Response:
        """The signature becomes a cookie of its host: it is in no address bar, referrer or log of the guest's."""
        row = self.context.engine.get(target.sandbox)
        assert by.expires is not None
        cookie = admission.cookie_for(
            target,
            by.expires,
            Traffic.of(row.traffic),
            self.context.signer,
            tls=scope.get("scheme") == "https",
            now=clock.wall_s(),
        )
        headers = {
            "location": _location(target.path or b"/", scope["query_string"]),
            "set-cookie": cookie,
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
        }
        return Response(status_code=302, headers=headers)

    async def _failed(
        self, error: LLM4AgentsError, target: Target | None, scope: Scope, receive: Receive, send: _Answer
    ) -> None:
        if error.http_status in (401, 403):
            scope.get("state", {})["refused"] = True  # for the audit: an answer of 401 may be the guest's own
        if not send.begun:
            await refusal(error, target, scope)(scope, receive, send)
        elif scope["type"] == "websocket":
            reason = error.message.encode()[:REASON_BYTES_MAX].decode(errors="ignore")
            code = NOT_ALLOWED if error.http_status in (401, 403) else INTERNAL
            await send.quietly({"type": "websocket.close", "code": code, "reason": reason})
        else:
            # An answer that is left unfinished is cut by the server: the client sees that it is not whole.
            log.info("proxied_answer_cut", path=scope["path"][:200], error=error.message[:200])


def _location(path: bytes, query: bytes) -> str:
    """A path and query as a Location that cannot lead to another host, whatever they look like."""
    shown = quote_from_bytes(path, safe=_PATH_SAFE)
    more = quote_from_bytes(query, safe=_PATH_SAFE + "?")
    return ("/." if shown.startswith("//") else "") + shown + (f"?{more}" if more else "")


class _Answer:
    """`send`, remembering whether anything was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self._vary: list[bytes] = []

    def varies(self, target: Target, by: Admitted) -> None:
        """A cache between must not give one's answer to whoever has no right to it, or of another sandbox."""
        self._vary = [] if by.by == "public" else list(_RIGHTS)
        if target.form == "headers":
            self._vary += [name for pair in address.BY_HEADERS for name in pair]

    async def __call__(self, message: Message) -> None:
        self.begun = self.begun or message["type"] != "http.response.early_hint"
        if message["type"] == "http.response.start" and self._vary:
            vary = (b"vary", b", ".join(self._vary))
            message = {**message, "headers": [*message.get("headers", ()), vary]}
        await self._send(message)

    async def quietly(self, message: Message) -> None:
        """To a client that may have gone."""
        try:
            await self._send(message)
        except (OSError, RuntimeError):  # uvicorn's ClientDisconnected is an OSError
            return
