"""What the API refuses before any VM is asked for, and how: the real application over a real engine and store."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm4agents import config, limits
from llm4agents.api.access.gate import guarded
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.engine.engine import Engine
from llm4agents.errors import all_errors

SANDBOX = "sbx_" + "a" * 20


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    env = {
        "STATE": tmp_path / "s",
        "CACHE": tmp_path / "c",
        "RUN": tmp_path / "r",
        "QEMU": "/nonexistent/qemu",
    }
    settings = config.load({f"LLM4AGENTS_{name}": str(value) for name, value in env.items()})
    engine = Engine.open(settings)
    yield Context(settings, engine)
    engine.store.close()


def ask(context: Context, calls: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        transport = httpx.ASGITransport(
            guarded(create_app(context), context, via="unix"), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://local") as client:
            return await calls(client)

    return asyncio.run(main())


def one(context: Context, method: str, path: str, **options: Any) -> httpx.Response:
    answer: httpx.Response = ask(context, lambda client: client.request(method, path, **options))
    return answer


def refused(answer: httpx.Response, status: int, code: str, *words: str) -> None:
    body = answer.json()
    assert (answer.status_code, body["code"]) == (status, code), body
    assert set(body) == {"type", "title", "status", "detail", "code", "outcome", "hint", "details"}
    assert answer.headers["content-type"] == "application/problem+json"
    assert body["outcome"] == all_errors()[code].outcome
    assert all(word in body["detail"] for word in words), body["detail"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tempalte": "base"}, "tempalte: there is no such field"),
        ({"template": ""}, "template"),
        ({"template": 5}, "template"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": limits.IDLE_TIMEOUT_S_MAX + 1}, "timeout_s"),
        ({"timeout_s": "300"}, "timeout_s"),
        ({"life_s": limits.LIFE_S_MAX + 1}, "life_s"),
        ({"memory_mib": 1024.5}, "memory_mib"),
        ({"memory_mib": True}, "memory_mib"),
        ({"vcpus": "1"}, "vcpus"),
        ({"env": {"A=B": "x"}}, "cannot be a variable"),
        ({"env": {"": "x"}}, "cannot be a variable"),
        ({"env": {"A": "x\0y"}}, "cannot be a variable"),
        ({"env": {"A": 1}}, "env.A"),
        ({"env": {"A": "é" * limits.ENV_BYTES_MAX}}, "bytes of environment"),
        ({"metadata": {"k": "v" * limits.METADATA_BYTES_MAX}}, "bytes of metadata"),
        ({"metadata": [1]}, "metadata"),
        ([], ""),
        (None, ""),
    ],
)
def test_a_create_that_is_wrong_says_where(context: Context, body: Any, words: str) -> None:
    refused(one(context, "POST", "/v1/sandboxes", json=body), 400, "invalid_request", words)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff\xfe", b'{"template": NaN}', b'{"timeout_s": Infinity}', b'"x"']
)
def test_bodies_that_are_no_json(context: Context, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    refused(one(context, "POST", "/v1/sandboxes", content=raw, headers=headers), 400, "invalid_request")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "either argv or command"),
        ({"argv": ["a"], "command": "a"}, "either argv or command"),
        ({"argv": []}, "empty"),
        ({"argv": [""]}, "empty"),
        ({"command": "   "}, "empty"),
        ({"argv": ["a\0b"]}, "NUL"),
        ({"command": "x" * (limits.ARGV_BYTES_MAX + 1)}, "write it to a file"),
        ({"command": "true", "stdin": "not base64!"}, "base64"),
        ({"command": "true", "timeout_s": -1}, "timeout_s"),
        ({"command": "true", "timeout_s": "1"}, "timeout_s"),
        ({"command": "true", "cwd": ""}, "cwd"),
        ({"command": "true", "shell": "zsh"}, "no such field"),
    ],
)
def test_an_exec_that_is_wrong_says_where(context: Context, body: Any, words: str) -> None:
    refused(one(context, "POST", f"/v1/sandboxes/{SANDBOX}/exec", json=body), 400, "invalid_request", words)


def test_code_is_bounded(context: Context) -> None:
    path = f"/v1/sandboxes/{SANDBOX}/code"
    refused(
        one(context, "POST", path, json={"code": "x" * (limits.CODE_BYTES_MAX + 1)}), 400, "invalid_request"
    )
    refused(one(context, "POST", path, json={}), 400, "invalid_request", "code")


@pytest.mark.parametrize("ident", [SANDBOX, "sbx_1", "..%2f..%2fetc", "sbx_" + "A" * 20, "%00", "x" * 5000])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_ids_that_are_none_are_not_found(context: Context, method: str, ident: str) -> None:
    answer = one(context, method, f"/v1/sandboxes/{ident}")
    assert answer.status_code == 404 and answer.json()["code"] in ("sandbox_not_found", "not_found")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/sandboxes?state=alive", "no state"),
        ("/v1/sandboxes?limit=0", "limit"),
        ("/v1/sandboxes?limit=many", "limit"),
    ],
)
def test_listings_that_cannot_be(context: Context, path: str, words: str) -> None:
    refused(one(context, "GET", path), 400, "invalid_request", words)


def test_unknown_paths_and_methods_are_problems_too(context: Context) -> None:
    refused(one(context, "GET", "/v2/else"), 404, "not_found", "/v2/else")
    refused(one(context, "PATCH", "/v1/sandboxes"), 405, "method_not_allowed", "PATCH")


def test_what_is_no_template_or_no_file_of_the_host_is_refused(context: Context) -> None:
    refused(one(context, "POST", "/v1/templates/none/build", json={}), 404, "template_not_found", "none")
    refused(one(context, "DELETE", "/v1/templates/none"), 404, "template_not_found")
    for name in ("a/b", "..", "%2e%2e"):
        assert one(context, "DELETE", f"/v1/templates/{name}").status_code in (400, 404)
    bad = {
        "x": "absolute",
        "/": "cannot be",
        "/a\0b": "cannot be",
        "/" + "x" * 300: "too long",
    }
    for file, word in bad.items():
        body = json.dumps({"file": file}).encode()
        for path in ("/v1/templates/import", "/v1/templates/base/export", "/v1/server/backup"):
            headers = {"content-type": "application/json"}
            refused(one(context, "POST", path, content=body, headers=headers), 400, "invalid_request", word)


def test_without_qemu_a_create_names_the_package_and_the_log(context: Context) -> None:
    answer = one(context, "POST", "/v1/sandboxes", json={"template": "base"})
    refused(answer, 503, "host_setup", "qemu")
    assert answer.json()["details"]["log"] == str(context.settings.server_log)
    assert one(context, "GET", "/v1/server").json()["accelerator"] is None


def test_a_body_without_an_end_is_cut_off(context: Context) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'{"template": "'
        while sent < 4 * limits.REQUEST_BODY_BYTES_MAX:
            sent += 1 << 20
            yield b"x" * (1 << 20)

    answer = one(
        context, "POST", "/v1/sandboxes", content=endless(), headers={"content-type": "application/json"}
    )
    refused(answer, 413, "too_large", "larger than")
    assert sent <= limits.REQUEST_BODY_BYTES_MAX + (2 << 20)


def test_a_server_that_stops_refuses_work_and_answers_about_itself(context: Context) -> None:
    async def calls(client: httpx.AsyncClient) -> list[httpx.Response]:
        stopped = await client.post("/v1/server/stop", json={"keep": True})
        refused_ = await client.get("/v1/sandboxes")
        return [stopped, refused_, await client.get("/v1/server")]

    stopped, work, about = ask(context, calls)
    assert stopped.status_code == 202 and context.keep
    refused(work, 503, "server_unavailable", "stopping")
    assert about.status_code == 200


def test_names_that_are_not_text_are_escaped_in_json() -> None:
    from llm4agents.api.answers import dump

    assert json.loads(dump({"name": "\udcff"}))["name"] == "\udcff"
    assert dump({"name": "é"}) == '{"name":"é"}'.encode()


def test_stdin_is_taken_as_it_is() -> None:
    from llm4agents.api.models import Exec

    raw = bytes(range(256))
    assert Exec(command="cat", stdin=base64.b64encode(raw).decode()).stdin_bytes() == raw
    assert Exec(command="cat").stdin_bytes() is None
