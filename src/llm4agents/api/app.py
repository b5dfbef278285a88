"""The ASGI application: routes, errors as problem details, and the count of requests that keeps a server alive."""

from __future__ import annotations

import time
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from llm4agents import __version__, limits
from llm4agents.api.answers import check_json, problem, unforeseen
from llm4agents.api.context import Context
from llm4agents.api.description import Description
from llm4agents.api.mcp.endpoint import Mcp
from llm4agents.api.measured import Measured
from llm4agents.api.proxy.door import Ports
from llm4agents.api.routes import (
    access,
    calls,
    contexts,
    files,
    health,
    jobs,
    network,
    node,
    observe,
    pool,
    processes,
    sandboxes,
    secrets,
    states,
    templates,
    traffic,
    trees,
    volumes,
)
from llm4agents.errors import (
    AuthenticationError,
    CapacityError,
    InvalidRequestError,
    LLM4AgentsError,
    MethodNotAllowedError,
    NotFoundError,
    ServerUnavailableError,
    TooLargeError,
)

log = structlog.get_logger()
_WHILE_STOPPING = ("/v1/server", "/v1/server/stop", "/health")


class Gated:
    """Refuses what no gate has let in for a route (`api.access.gate`): an application served bare serves nobody."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self.app, self.context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                if scope.get("state", {}).get("admitted") != "route":
                    raise AuthenticationError("this call came through no gate")
            except LLM4AgentsError as error:
                await _refuse(error, self.context, scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _refuse(
    error: LLM4AgentsError, context: Context, scope: Scope, receive: Receive, send: Send
) -> None:
    refusal = problem(error, context)
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(refusal)
    else:
        await refusal(scope, receive, send)


class Counted:
    """Counts requests and WebSockets under way, and refuses new ones while the server is stopping."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self.app, self.context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        if self.context.stop.is_set() and scope["path"] not in _WHILE_STOPPING:
            error = ServerUnavailableError("this server is stopping", hint="call again; the next one starts")
            await _refuse(error, self.context, scope, receive, send)
            return
        self.context.active += 1
        try:
            # A PUT is a file, and streams, but where it is not.
            whole = scope.get("method", "PUT") != "PUT" or scope["path"].endswith("/network")
            await self.app(scope, _bounded(receive) if whole else receive, send)
        finally:
            self.context.active -= 1
            self.context.last_request_s = time.monotonic()


def _bounded(receive: Receive) -> Receive:
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limits.REQUEST_BODY_BYTES_MAX:
            raise TooLargeError(
                f"the request is larger than {limits.REQUEST_BODY_BYTES_MAX} bytes",
                hint="large data goes through files",
            )
        return message

    return bounded


def _words(error: RequestValidationError) -> str:
    def one(found: Any) -> str:
        place = ".".join(str(part) for part in found["loc"] if part not in ("body", "query"))
        message = str(found["msg"]).removeprefix("Value error, ")
        if found["type"] == "extra_forbidden":
            message = "there is no such field"
        return f"{place}: {message}" if place else message

    return "; ".join(one(found) for found in error.errors()[:5])


def create_app(context: Context) -> FastAPI:
    app = FastAPI(
        title="LLM4Agents sandbox", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.context = context
    for module in (
        health,
        access,
        node,
        sandboxes,
        states,
        network,
        calls,
        contexts,
        processes,
        files,
        jobs,
        observe,
        pool,
        secrets,
        templates,
        traffic,
        trees,
        volumes,
    ):
        app.include_router(module.router)
    app.router.routes.append(Route("/openapi.json", Description(), methods=["GET"], include_in_schema=False))
    app.router.routes.append(Route("/mcp", Mcp(), methods=["GET", "POST", "DELETE"], include_in_schema=False))
    app.add_middleware(Counted, context=context)
    app.add_middleware(Measured, context=context)
    app.add_middleware(Gated, context=context)
    app.add_middleware(Ports, context=context)

    @app.exception_handler(LLM4AgentsError)
    async def _ours(_: Request, error: LLM4AgentsError) -> Response:
        return problem(error, context)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        if any(found["loc"][:1] == ("body",) and found["type"] != "missing" for found in error.errors()):
            try:
                check_json(request)
            except LLM4AgentsError as refused:
                return problem(refused, context)
        return problem(InvalidRequestError(_words(error)), context)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, LLM4AgentsError):  # of ours, from within the reading of a body
            return problem(error.__cause__, context)
        if error.status_code == 404:
            return problem(NotFoundError(f"there is no {request.url.path} here"), context)
        if error.status_code == 405:
            allow = (error.headers or {}).get("Allow", "").split(", ")
            words = f"{request.url.path} has no method {request.method[:40]}"
            return problem(MethodNotAllowedError(words, allow=allow), context)
        return problem(InvalidRequestError(f"{request.method} {request.url.path}: {error.detail}"), context)

    @app.exception_handler(ClientDisconnect)
    async def _gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(OSError)
    async def _host(request: Request, error: OSError) -> Response:
        told = unforeseen(error)
        return (
            problem(told, context) if isinstance(told, CapacityError) else await _unforeseen(request, error)
        )

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> Response:
        log.error("request_failed", method=request.method, path=request.url.path, exc_info=error)
        return problem(unforeseen(error), context)

    return app
