"""Who is let in, and where: the real application behind its gate, over TCP's and over the socket's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm4agents import config
from llm4agents.api.access.gate import guarded
from llm4agents.api.access.table import TABLE, Table
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.engine.engine import Engine
from llm4agents.engine.principal import Principal

OPERATOR = Principal.operator()


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    env = {"STATE": tmp_path / "s", "CACHE": tmp_path / "c", "RUN": tmp_path / "r", "QEMU": "/nonexistent/q"}
    settings = config.load({f"LLM4AGENTS_{name}": str(value) for name, value in env.items()})
    engine = Engine.open(settings)
    yield Context(settings, engine)
    engine.store.close()


def ask(context: Context, calls: Callable[[httpx.AsyncClient], Awaitable[Any]], *, via: Any = "tcp") -> Any:
    async def main() -> Any:
        app = create_app(context)
        gate = app if via is None else guarded(app, context, via=via)
        transport = httpx.ASGITransport(gate, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://local") as client:
            return await calls(client)

    return asyncio.run(main())


def one(
    context: Context, method: str, path: str, *, key: str | None = None, via: Any = "tcp", **options: Any
) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer: httpx.Response = ask(
        context, lambda client: client.request(method, path, headers=headers, **options), via=via
    )
    return answer


def key_of(context: Context, **options: Any) -> str:
    return context.engine.keys.create(OPERATOR, "of a test", **options)[1]


def test_an_application_without_a_gate_serves_nobody(context: Context) -> None:
    assert one(context, "GET", "/v1/sandboxes", via=None).status_code == 401
    assert one(context, "GET", "/v1/sandboxes", via="unix").status_code == 200


def test_a_key_lets_in(context: Context) -> None:
    assert one(context, "GET", "/v1/sandboxes").status_code == 401
    key = key_of(context)
    assert one(context, "GET", "/v1/sandboxes", key=key).status_code == 200
    assert ask(context, lambda c: c.get("/v1/sandboxes", headers={"x-api-key": key})).status_code == 200
    wrong = key[:-1] + ("0" if key[-1] != "0" else "1")
    for bad in (wrong, "", "l4a_", "l4a_aaaaaaaa_" + "0" * 40, "x" * 100_000):
        assert one(context, "GET", "/v1/sandboxes", key=bad).status_code == 401


def test_a_scope_lets_in_where_it_is_for(context: Context) -> None:
    key = key_of(context, scopes=["read"])
    assert one(context, "GET", "/v1/sandboxes", key=key).status_code == 200
    refused = one(context, "POST", "/v1/sandboxes", key=key, json={})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert one(context, "GET", "/v1/doctor", key=key_of(context)).status_code == 403


def test_the_table_finds_what_the_application_would(context: Context) -> None:
    table = Table()
    for pattern, methods in TABLE.items():
        path = pattern.replace("{", "x").replace("}", "y")
        for method in methods:
            found = table.find(method, path)
            assert found is not None and found.pattern == pattern and found.needs == methods[method]
    assert table.find("GET", "/v1/sandboxes/") is None
    assert table.find("GET", "/v1/none") is None
