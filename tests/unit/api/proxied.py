"""A server with one sandbox whose guest is this machine: the real application, the real agent, no VM.

What the tests listen with on 127.0.0.1 is then what runs in the guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn
from tests.unit.engine.test_live import Bench
from tests.unit.guest.agent_process import serving

from llm4agents.api.access.gate import guarded
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.config import settings
from llm4agents.engine.engine import Engine
from llm4agents.engine.live import Live
from llm4agents.guest.verbs import Agent

ID = "sbx_0123456789abcdefghij"
HOST_ID = ID.replace("_", "-")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Engine:
    """`access` alone, of a sandbox that runs."""

    def __init__(self, live: Live) -> None:
        self.live = live

    async def access(self, sandbox: str) -> Live:
        return self.live


@dataclass
class Proxied:
    agent: Agent
    live: Live
    socket: Path
    http: httpx.AsyncClient
    cleanup: contextlib.AsyncExitStack
    connections: list[int] = field(default_factory=list)
    """One entry for each connection that the handlers of `listen` got."""

    async def listen(self, handler: Handler, host: str = "127.0.0.1") -> int:
        """A port of the guest where `handler` has each connection, which is closed when it returns."""

        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections.append(1)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await handler(reader, writer)
            writer.close()

        server = await asyncio.start_server(one, host, 0)
        self.cleanup.callback(server.close)
        return int(server.sockets[0].getsockname()[1])

    async def answering(self, *answers: bytes) -> int:
        """A port that reads a request's head and writes the next answer, on as many connections as come."""
        left = list(answers)

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while left:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(left.pop(0))
                if not left or left[0] == b"":
                    left[:1] = []
                    return

        return await self.listen(handler)

    def path(self, port: int, path: str = "/") -> str:
        return f"/v1/sandboxes/{ID}/ports/{port}{path}"

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        self.cleanup.callback(writer.close)
        return reader, writer


@contextlib.asynccontextmanager
async def proxied() -> AsyncIterator[Proxied]:
    async with serving() as agent, contextlib.AsyncExitStack() as cleanup:
        directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="l4a-proxied-"))
        bench = Bench()
        live = bench.live
        live.agent = agent
        context = Context(settings(), cast(Engine, _Engine(live)))
        path = Path(directory) / "s"
        config = uvicorn.Config(
            guarded(create_app(context), context, via="unix"),
            uds=str(path),
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving_task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        http = httpx.AsyncClient(transport=transport, base_url="http://public.example", timeout=20)
        try:
            yield Proxied(agent, live, path, http, cleanup)
            while context.active:  # until the test's time is up
                await asyncio.sleep(0.005)
        finally:
            await http.aclose()
            live.stop_watching()
            server.should_exit = True
            server.force_exit = True
            await serving_task


def run(test: Callable[[Proxied], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(30), proxied() as bench:
            await test(bench)

    asyncio.run(whole())
