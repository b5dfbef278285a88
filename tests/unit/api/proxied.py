"""A server with one sandbox whose guest is this machine: the real application, the real agent, no VM.

What the tests listen with on 127.0.0.1 is then what runs in the guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import uvicorn

from llm4agents.api.access.gate import Via, guarded
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.config import settings
from llm4agents.engine.audit import Entry
from llm4agents.engine.engine import Engine
from llm4agents.engine.keys import Held
from llm4agents.engine.live import Live
from llm4agents.engine.traffic import Traffic
from llm4agents.errors import AuthenticationError, LLM4AgentsError, SandboxNotFoundError
from llm4agents.guest.verbs import Agent
from llm4agents.store import SandboxRow
from llm4agents.store.keys import KeyRow
from tests.unit.engine.test_live import Bench
from tests.unit.guest.agent_process import serving

ID = "sbx_0123456789abcdefghij"
HOST_ID = ID.replace("_", "-")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Keys:
    """Keys are the project's name with a key's beginning."""

    def known(self, text: str) -> KeyRow:
        project = text.removeprefix("l4a_")
        if project not in ("default", "other"):
            raise AuthenticationError("this key is not known")
        return KeyRow("key_x", project, "x", b"", ["sandboxes"], 0.0)

    @contextlib.contextmanager
    def holding(self, ident: str) -> Iterator[Held]:
        self.held = Held()
        yield self.held


class _Engine:
    """One sandbox that runs, what the proxy asks of it, and a key of its project."""

    def __init__(self, live: Live) -> None:
        self.live, self.keys = live, _Keys()
        self.trouble: LLM4AgentsError | None = None
        self.audited: list[Entry] = []
        self.audit = SimpleNamespace(add=self.audited.append, add_strangers=self.audited.append)
        self.metrics = SimpleNamespace(gauges=[], call=lambda *_: None)

    def find(self, sandbox: str) -> SandboxRow | None:
        return self.live.row if sandbox == ID else None

    def get(self, sandbox: str) -> SandboxRow:
        return self.live.row

    async def access(self, sandbox: str) -> Live:
        if self.trouble is not None:
            raise self.trouble
        if sandbox != ID:
            raise SandboxNotFoundError(f"there is no sandbox {sandbox}")
        return self.live

    def set_traffic(self, *, public: bool | None = None, rotate: bool = False) -> None:
        row = self.live.row
        row.traffic = Traffic.of(row.traffic).changed(public=public, rotate=rotate).stored()


@dataclass
class Proxied:
    agent: Agent
    live: Live
    socket: Path
    http: httpx.AsyncClient
    cleanup: contextlib.AsyncExitStack
    context: Context
    engine: _Engine
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
async def proxied(via: Via = "unix") -> AsyncIterator[Proxied]:
    async with serving() as agent, contextlib.AsyncExitStack() as cleanup:
        directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="l4a-proxied-"))
        bench = Bench()
        live = bench.live
        live.agent = agent
        engine = _Engine(live)
        where = replace(settings(), state=Path(directory) / "state")
        context = Context(where, cast(Engine, engine))
        path = Path(directory) / "s"
        config = uvicorn.Config(
            guarded(create_app(context), context, via=via),
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
            yield Proxied(agent, live, path, http, cleanup, context, engine)
            while context.active:  # until the test's time is up
                await asyncio.sleep(0.005)
        finally:
            await http.aclose()
            live.stop_watching()
            server.should_exit = True
            server.force_exit = True
            await serving_task


def run(test: Callable[[Proxied], Coroutine[Any, Any, None]], via: Via = "unix") -> None:
    async def whole() -> None:
        async with asyncio.timeout(30), proxied(via) as bench:
            await test(bench)

    asyncio.run(whole())


@contextlib.asynccontextmanager
async def stalls() -> AsyncIterator[list[float]]:
    """The longest that the event loop was at one thing, in seconds of a processor: `[0]` of what it gives."""
    worst = [0.0]

    async def look() -> None:
        at = time.thread_time()
        while True:
            await asyncio.sleep(0)
            before, at = at, time.thread_time()
            worst[0] = max(worst[0], at - before)

    looking = asyncio.create_task(look())
    try:
        yield worst
    finally:
        looking.cancel()
