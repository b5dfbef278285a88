"""The real application on a loopback TCP port behind its gate, over a real engine and store, without VMs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from llm4agents import config
from llm4agents.api.access.gate import guarded
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.engine import clock
from llm4agents.engine.engine import Engine
from llm4agents.engine.principal import Principal
from llm4agents.store import SandboxRow

OPERATOR = Principal.operator()


class Served:
    """A server, its context, and clients with and without keys."""

    def __init__(self, context: Context, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.context, self.port, self._loop = context, port, loop
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def on_loop(self, act: Any, *args: Any, **options: Any) -> Any:
        """The engine belongs to its event loop, also when a test asks it."""

        async def work() -> Any:
            return act(*args, **options)

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(20)

    def wait(self, work: Any) -> Any:
        """What a coroutine comes to, on the engine's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def ask(self, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {
            **options.pop("headers", {}),
            **({} if key is None else {"authorization": f"Bearer {key}"}),
        }
        return self.http.request(method, path, headers=headers, **options)

    def project(self, name: str, **quotas: Any) -> str:
        return str(self.on_loop(self.context.engine.projects.create, name, quotas).id)

    def key(self, project: str = "default", **options: Any) -> str:
        made = self.on_loop(self.context.engine.keys.create, OPERATOR, "a test's", project=project, **options)
        return str(made[1])

    def sandbox(self, ident: str, project: str, state: str = "running", **columns: Any) -> SandboxRow:
        """A row, without a machine."""
        now = clock.wall_s()
        row = SandboxRow(ident, "base", state, now, now + 3_600, 300, 1, 256, 5, project=project, **columns)
        self.on_loop(self.context.engine.store.add, row, clock.stamp())
        return row

    def audit(self, **wanted: Any) -> list[dict[str, Any]]:
        found = self.on_loop(self.context.engine.audit.page, None, limit=1_000)
        return [row for row in found if all(row[name] == value for name, value in wanted.items())]


@contextlib.contextmanager
def serving(place: Path, **env: str) -> Iterator[Served]:
    """`place`: an empty directory for state, cache and run. `env`: settings, without their prefix."""
    paths = {"STATE": place / "s", "CACHE": place / "c", "RUN": place / "r", "QEMU": "/nonexistent/qemu"}
    settings = config.load({f"LLM4AGENTS_{name}": str(value) for name, value in {**paths, **env}.items()})
    started = threading.Event()
    found: list[Any] = []
    sock = socket.create_server(("127.0.0.1", 0))

    async def main() -> None:
        engine = Engine.open(settings)
        context = Context(settings, engine)
        app = guarded(create_app(context), context, via="tcp")
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0)
        found.extend((context, server, asyncio.get_running_loop()))
        started.set()
        await task
        engine.store.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(30)
    context, server, loop = found
    served = Served(context, sock.getsockname()[1], loop)
    try:
        yield served
    finally:
        served.http.close()
        server.should_exit = True
        thread.join(30)
        sock.close()
