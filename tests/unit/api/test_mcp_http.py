"""MCP over HTTP with the official client, against the real application behind its gate; no VM is made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult

from llm4agents import config, limits
from llm4agents.api.access.gate import guarded
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.api.mcp.conversations import Conversations, Wanted
from llm4agents.api.mcp.endpoint import check_origin
from llm4agents.api.proxy.address import Names
from llm4agents.engine import clock
from llm4agents.engine.engine import Engine
from llm4agents.engine.principal import Principal
from llm4agents.errors import ForbiddenError
from llm4agents.store import SandboxRow

ID = "sbx_0123456789abcdefghij"
HANDSHAKE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
JSON = {"accept": "application/json, text/event-stream", "content-type": "application/json"}


class Server:
    def __init__(self, context: Context, url: str) -> None:
        self.context, self.url = context, url

    def key(self, project: str | None = None, **options: Any) -> str:
        made = self.context.engine.keys.create(Principal.operator(), "test", project=project, **options)
        return made[1]

    @contextlib.asynccontextmanager
    async def client(self, key: str, mode: Any = "auto", query: str = "") -> AsyncIterator[Client]:
        async with (
            httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=30) as http,
            Client(streamable_http_client(f"{self.url}/mcp{query}", http_client=http), mode=mode) as client,
        ):
            yield client

    @contextlib.asynccontextmanager
    async def http(self, **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
        async with httpx2.AsyncClient(base_url=self.url, headers={**JSON, **headers}, timeout=30) as http:
            yield http

    def has(self, project: str) -> None:
        now = clock.wall_s()
        row = SandboxRow(
            ID, "base", "killed", now, now + 9, 9, 1, 512, 5, ended_at=now, reason="test", project=project
        )
        self.context.engine.store.add(row, clock.stamp())


def run(test: Callable[[Server], Awaitable[None]], tmp_path: Path) -> None:
    async def whole() -> None:
        env = {
            "STATE": tmp_path / "s",
            "CACHE": tmp_path / "c",
            "RUN": tmp_path / "r",
            "QEMU": "/nonexistent/q",
        }
        settings = config.load({f"LLM4AGENTS_{name}": str(value) for name, value in env.items()})
        engine = Engine.open(settings)
        context = Context(settings, engine)
        app = guarded(create_app(context), context, via="tcp")
        server = uvicorn.Server(
            uvicorn.Config(
                app, port=0, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
            )
        )
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(60):
                await test(Server(context, f"http://127.0.0.1:{port}"))
        finally:
            context.stop.set()
            server.should_exit = True
            await serving
            engine.store.close()

    asyncio.run(whole())


def _text(done: CallToolResult) -> str:
    return "\n".join(block.text for block in done.content if block.type == "text")


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_tools_with_a_key_and_of_its_project_alone(mode: str, tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        other = server.context.engine.projects.create("other")
        server.has("default")
        async with server.client(server.key(), mode) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert {"run_code", "exec", "expose_port", "create_sandbox"} < set(tools)
            assert not {"upload", "download"} & set(tools), "no path of the server's"
            assert "URL" in (tools["expose_port"].description or "")
            assert ID in _text(await client.call_tool("list_sandboxes", {"all": True}))
            done = await client.call_tool("exec", {"command": "true", "sandbox_id": ID})
            assert done.is_error and "ended" in _text(done)
            done = await client.call_tool("create_sandbox", {"template": "nothing"})
            assert done.is_error and "is not installed" in _text(done)
        async with server.client(server.key(other.id), mode) as client:
            assert ID not in _text(await client.call_tool("list_sandboxes", {"all": True}))
            done = await client.call_tool("exec", {"command": "true", "sandbox_id": ID})
            assert done.is_error and "no sandbox" in _text(done)

    run(test, tmp_path)


def test_who_has_no_key_or_no_scope_is_refused(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        async with server.http() as http:
            for method in ("POST", "GET", "DELETE"):
                assert (await http.request(method, "/mcp")).status_code == 401
        async with server.http(authorization=f"Bearer {server.key(scopes=['read'])}") as http:
            assert (await http.post("/mcp", json=HANDSHAKE)).status_code == 403
        async with server.http(authorization=f"Bearer {server.key()}") as http:
            refused = await http.post("/mcp?shell=1", json=HANDSHAKE)
            assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
            for query in ("timeout=x", "net=none&net=public", "template=a&template=b", "vcpus=-1"):
                assert (await http.post(f"/mcp?{query}", json=HANDSHAKE)).status_code == 400
            for origin in ("http://evil.example", "null", f"{server.url}.evil.example", "http://127.0.0.1"):
                assert (
                    await http.post("/mcp", json=HANDSHAKE, headers={"origin": origin})
                ).status_code == 403
            rebound = {"origin": "http://evil.example", "host": "evil.example"}
            assert (await http.post("/mcp", json=HANDSHAKE, headers=rebound)).status_code == 403
            assert (
                await http.post("/mcp", json=HANDSHAKE, headers={"origin": server.url})
            ).status_code == 200
            large = await http.post("/mcp", content=b"x" * (limits.REQUEST_BODY_BYTES_MAX + 1))
            assert large.status_code in (400, 413)

    run(test, tmp_path)


def test_a_session_is_its_keys_and_ends(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        mine, theirs = server.key(), server.key()
        async with server.http(authorization=f"Bearer {mine}") as http:
            begun = await http.post("/mcp", json=HANDSHAKE)
            session = {
                "mcp-session-id": begun.headers["mcp-session-id"],
                "mcp-protocol-version": "2025-06-18",
            }
            await http.post(
                "/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session
            )
            listed = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
            assert "run_code" in (await http.post("/mcp", json=listed, headers=session)).text
            async with server.http(authorization=f"Bearer {theirs}") as stranger:
                for method in ("POST", "GET", "DELETE"):
                    answer = await stranger.request(method, "/mcp", json=listed, headers=session)
                    assert answer.status_code == 404
            assert (await http.delete("/mcp", headers=session)).status_code == 200
            assert (await http.post("/mcp", json=listed, headers=session)).status_code == 404

    run(test, tmp_path)


def test_a_server_that_stops_waits_for_no_session(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        async with server.http(authorization=f"Bearer {server.key()}") as http:
            begun = await http.post("/mcp", json=HANDSHAKE)
            session = {
                "mcp-session-id": begun.headers["mcp-session-id"],
                "mcp-protocol-version": "2025-06-18",
            }
            async with http.stream("GET", "/mcp", headers=session) as events:
                assert events.status_code == 200
                server.context.stop.set()
                async for _ in events.aiter_raw():
                    pass
            while server.context.active:  # until the test's time is up
                await asyncio.sleep(0.005)

    run(test, tmp_path)


def test_sessions_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MCP_SESSIONS_MAX", 3)

    async def test(server: Server) -> None:
        async with server.http(authorization=f"Bearer {server.key()}") as http:
            begun = [await http.post("/mcp", json=HANDSHAKE) for _ in range(4)]
            assert [answer.status_code for answer in begun] == [200, 200, 200, 503]
            await http.delete("/mcp", headers={"mcp-session-id": begun[0].headers["mcp-session-id"]})
            assert (await http.post("/mcp", json=HANDSHAKE)).status_code == 200

    run(test, tmp_path)


def test_one_project_does_not_take_all_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MCP_SESSIONS_PER_PROJECT_MAX", 2)

    async def test(server: Server) -> None:
        project = server.context.engine.projects.create("another").id
        other = server.key(project)
        async with server.http(authorization=f"Bearer {server.key()}") as http:
            begun = [(await http.post("/mcp", json=HANDSHAKE)).status_code for _ in range(3)]
        async with server.http(authorization=f"Bearer {other}") as http:
            assert (begun, (await http.post("/mcp", json=HANDSHAKE)).status_code) == ([200, 200, 503], 200)

    run(test, tmp_path)


def test_conversations_of_one_project_are_forgotten_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MCP_CONVERSATIONS_PER_PROJECT_MAX", 2)
    known = Conversations(lambda who: None)  # type: ignore[arg-type,return-value]
    ours, theirs = (Principal(name, "key_1", frozenset(), "") for name in ("prj_ours", "prj_theirs"))
    first = known.boxes(theirs, None, Wanted())
    mine = [known.boxes(ours, f"s{at}", Wanted()) for at in range(5)]
    assert known.boxes(theirs, None, Wanted()) is first
    assert known.boxes(ours, "s4", Wanted()) is mine[4]
    assert known.boxes(ours, "s0", Wanted()) is not mine[0]


def test_a_session_that_is_only_dropped_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MCP_SESSIONS_MAX", 1)
    monkeypatch.setattr(limits, "MCP_SESSION_IDLE_S", 0.3)

    async def test(server: Server) -> None:
        async with server.http(authorization=f"Bearer {server.key()}") as http:
            first = await http.post("/mcp", json=HANDSHAKE)
            while (await http.post("/mcp", json=HANDSHAKE)).status_code != 200:  # until the test's time is up
                await asyncio.sleep(0.05)
            again = await http.post(
                "/mcp", json=HANDSHAKE, headers={"mcp-session-id": first.headers["mcp-session-id"]}
            )
            assert again.status_code == 404

    run(test, tmp_path)


def test_origins_of_our_own_names() -> None:
    def asked(origin: str, host: str) -> dict[str, Any]:
        return {"headers": [(b"host", host.encode()), (b"origin", origin.encode())]}

    ours = Names("sbx.example", frozenset({"sbx.example", "api.sbx.example"}))
    check_origin(asked("https://api.sbx.example", "api.sbx.example"), ours)
    check_origin(asked("http://localhost:8000", "localhost:8000"), Names())
    check_origin({"headers": [(b"host", b"anything.example")]}, Names())
    for origin, host, names in (
        ("https://evil.example", "api.sbx.example", ours),
        ("https://8000-sbx-0.sbx.example", "api.sbx.example", ours),
        ("http://evil.example", "evil.example", Names()),
        ("http://evil.example", "evil.example", ours),
        ("null", "api.sbx.example", ours),
    ):
        with pytest.raises(ForbiddenError):
            check_origin(asked(origin, host), names)
