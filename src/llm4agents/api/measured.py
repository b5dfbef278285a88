"""Around every request: how long it took and how it ended, for metrics and, when they are on, traces."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm4agents.api.context import Context

_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"}


class Measured:
    """Outermost, so that refusals are seen too. Bodies and queries are not looked at."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self.app, self.context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 499  # the client went away before there was an answer

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        tracing = self.context.tracing
        method = _method(scope)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with tracing.call(method, headers) if tracing else contextlib.nullcontext() as span:
            try:
                await self.app(scope, receive, watched)
            finally:
                route = _route(scope)
                if tracing:
                    tracing.named(span, method, route, status, scope.get("path_params", {}).get("sandbox"))
                seconds = time.perf_counter() - began
                self.context.engine.metrics.call(f"{method} {route}", status, seconds)


def _method(scope: Scope) -> str:
    if scope["type"] == "websocket":
        return "WS"
    return scope["method"] if scope["method"] in _METHODS else "OTHER"


def _route(scope: Scope) -> str:
    """The pattern that matched, one of a few dozen; what matched none is one more."""
    found: Any = scope.get("route")
    return str(getattr(found, "path", None) or "unknown")
