"""Every route, from outside: who is not known is refused, who is may do what his key is for, to what is his project's.

Over TCP, against the real application. There is no VM: rows of sandboxes are enough to be somebody else's.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Mount, Route, WebSocketRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from llm4agents.api.access.table import OPEN, TABLE, Table
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.engine import keys
from llm4agents.engine.principal import SCOPES
from llm4agents.store import volumes
from llm4agents.store.volumes import VolumeRow
from tests.unit.api.served import Served, serving

MINE, THEIRS, NEVER = ("sbx_" + letter * 20 for letter in "mtn")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("access")) as here:
        yield here


def routes(context: Context) -> Iterator[tuple[str, str]]:
    """(method or WS, pattern) of every route that the application has, however it is nested."""

    def walk(found: Any) -> Iterator[tuple[str, str]]:
        for route in found:
            if (inner := getattr(route, "original_router", None)) is not None:
                yield from walk(inner.routes)
            elif isinstance(route, WebSocketRoute):
                yield "WS", route.path
            elif isinstance(route, Mount):
                yield "*", route.path
            elif isinstance(route, Route):
                for method in route.methods or {"GET"}:
                    yield method, route.path
            else:
                raise AssertionError(f"a route of a kind this test does not know: {route!r}")

    yield from walk(create_app(context).routes)


def paths(
    served: Served, sandbox: str = NEVER, *, everything: bool = False
) -> Iterator[tuple[str, str, str]]:
    """(method, pattern, a path of it)"""
    known = {"sandbox": sandbox, "port": "8080", "name": "base", "volume": "vol_" + "a" * 20}
    for method, pattern in routes(served.context):
        if method == "HEAD" and "HEAD" not in TABLE.get(pattern, ()) and not everything:
            continue
        yield method, pattern, re.sub(r"\{(\w+)(:path)?\}", lambda m: known.get(m[1], "x"), pattern)


def test_every_route_is_in_the_table_and_found_there(served: Served) -> None:
    table = Table()
    for method, pattern, path in paths(served, everything=True):
        found = table.find(method, path)
        assert found is not None and found.pattern == pattern, (
            f"{method} {pattern} is not in api/access/table.py"
        )
        if found.needs is None:
            assert method == "HEAD", (
                f"{method} {pattern} is not in api/access/table.py"
            )  # refused by the gate
            continue
        assert found.needs == OPEN or set(found.needs.split()) <= set(SCOPES), pattern
    open_ones = {pattern for pattern, methods in TABLE.items() for needs in methods.values() if needs == OPEN}
    assert open_ones <= {"/health", "/openapi.json", "/v1/register"}


def status(served: Served, method: str, path: str, headers: dict[str, str]) -> int:
    if method == "WS":
        try:
            with connect(
                served.url.replace("http", "ws") + path, additional_headers=headers, open_timeout=20
            ):
                return 101
        except InvalidStatus as error:
            return error.response.status_code
    return served.http.request("POST" if method == "*" else method, path, headers=headers).status_code


def test_no_route_but_the_open_ones_serves_who_is_not_known(served: Served) -> None:
    project = served.project("gone")
    disabled, revoked, expired = served.key(project), served.key(), served.key(expires_days=0.000_000_01)
    engine = served.context.engine
    served.on_loop(engine.projects.disable, project)
    served.on_loop(engine.keys.revoke, f"key_{revoked[4:12]}", None)
    good = served.key(scopes=["node"])
    wrong = good[:-4] + ("0000" if good[-4:] != "0000" else "1111")
    headers: list[dict[str, str]] = [{}] + [
        {"authorization": f"Bearer {bad}"} for bad in (disabled, revoked, expired, wrong, "x")
    ]
    headers += [{"x-api-key": wrong}, {"authorization": f"Basic {good}"}, {"cookie": f"key={good}"}]
    port = f"/v1/sandboxes/{NEVER}/ports/8080/"
    everything = [
        (method, path) for method, pattern, path in paths(served) if OPEN not in TABLE[pattern].values()
    ]
    for at, (method, path) in enumerate([*everything, ("GET", port), ("WS", port), ("WS", port + "tcp")]):
        # Each way of not being known on the first few, then one of them each: they all come to the same line.
        for one in headers if at < 5 or path.startswith(port) else [headers[at % len(headers)]]:
            assert status(served, method, path, one) == 401, (method, path, one)
    assert served.ask("GET", "/v1/whoami", good).status_code == 200
    assert served.ask("GET", "/openapi.json").status_code == 200
    refused = served.ask("GET", "/v1/whoami")
    assert refused.headers["www-authenticate"] == "Bearer" and refused.json()["code"] == "unauthenticated"
    for bad in (disabled, revoked, expired, wrong):
        said = served.ask("GET", "/v1/whoami", bad)
        assert bad not in said.text and bad[13:] not in said.text
    assert "project enable" in served.ask("GET", "/v1/whoami", disabled).json()["hint"]


def test_a_key_does_what_it_is_for_and_nothing_else(served: Served) -> None:
    for scope in SCOPES:
        if scope == "node":
            continue
        key = served.key(scopes=[scope])
        for method, pattern, path in paths(served):
            needs = TABLE[pattern].get(method) or TABLE[pattern]["*"]
            if needs != OPEN and scope not in needs.split():
                assert status(served, method, path, {"x-api-key": key}) == 403, (scope, method, path)
    reader = served.key(scopes=["read"])
    assert served.ask("GET", "/v1/sandboxes", reader).status_code == 200
    assert served.ask("GET", f"/v1/sandboxes/{NEVER}/ports/80/", reader).status_code in (403, 404)


def test_what_another_project_has_is_as_what_never_was(served: Served) -> None:
    ours, theirs = served.project("ours"), served.project("theirs")
    served.sandbox(MINE, ours)
    served.sandbox(THEIRS, theirs)
    volume, no_volume = "vol_" + "a" * 20, "vol_" + "b" * 20
    store = served.context.engine.store
    row = VolumeRow(volume, theirs, "v", "volume", 1, 0.0, None, "ready")
    served.on_loop(volumes.add, store, row, most=9, most_bytes=None)
    key = served.key(ours, scopes=[scope for scope in SCOPES if scope != "node"])
    for method, pattern, path in paths(served, THEIRS):
        if method == "WS" or not ("{sandbox}" in pattern or "{volume}" in pattern):
            continue
        said = served.ask(method, path, key)
        never = served.ask(method, path.replace(THEIRS, NEVER).replace(volume, no_volume), key)
        assert said.status_code == never.status_code == 404, (method, path, said.text)
        assert said.text.replace(THEIRS, NEVER).replace(volume, no_volume) == never.text
    for path in ("ports/8080/", "ports/8080/some/file", "ports/22/tcp"):
        said = served.ask("GET", f"/v1/sandboxes/{THEIRS}/{path}", key)
        assert (said.status_code, said.json()["code"]) == (404, "sandbox_not_found")
    assert status(served, "WS", f"/v1/sandboxes/{THEIRS}/ports/22/tcp", {"x-api-key": key}) == 404
    attach = f"/v1/sandboxes/{THEIRS}/processes/p/attach"
    assert status(served, "WS", attach, {"x-api-key": key}) == 404
    by_name = {"host": f"8080-{THEIRS.replace('_', '-')}.localhost"}
    refused = served.ask("GET", "/", key, headers=by_name)
    assert (
        refused.status_code == 502 and "there is no sandbox" in refused.text.lower()
    )  # by name: as a gateway's
    by_header = {"x-sandbox-id": THEIRS, "x-sandbox-port": "8080"}
    refused = served.ask("GET", "/v1/whoami", key, headers=by_header)
    assert refused.status_code == 502 and "there is no sandbox" in refused.text.lower()
    assert served.ask("GET", f"/v1/sandboxes/{MINE}", key).json()["project"] == ours
    assert volume not in served.ask("GET", "/v1/volumes", key).text
    # A port's refusal is ours to write down, whoever would answer there.
    asked = served.ask("GET", f"/v1/sandboxes/{MINE}/ports/80/", headers={"x-request-id": "a-port"})
    assert asked.status_code == 401
    assert [row["action"] for row in served.audit(request="a-port")] == ["GET a port"]


def test_what_another_project_has_is_not_reached_through_ones_own(served: Served) -> None:
    ours, theirs = served.project("reaches"), served.project("reached")
    mine, their = ("sbx_" + letter * 20 for letter in "xy")
    served.sandbox(mine, ours, "paused")
    served.sandbox(their, theirs)
    volume = "vol_" + "c" * 20
    row = VolumeRow(volume, theirs, "theirs", "volume", 1, 0.0, None, "ready")
    served.on_loop(volumes.add, served.context.engine.store, row, most=9, most_bytes=None)
    key = served.key(ours, scopes=[scope for scope in SCOPES if scope != "node"])
    owner = served.key(theirs, scopes=[scope for scope in SCOPES if scope != "node"])
    wish = {"command": "true", "at": time.time() + 3_600}
    made = served.ask("POST", f"/v1/sandboxes/{their}/jobs", owner, json=wish)
    assert made.status_code == 201, made.text
    job, owner_id, here = made.json()["id"], f"key_{owner[4:12]}", f"/v1/sandboxes/{mine}"
    mount = {"path": "/data", "mode": "ro"}
    asked: list[tuple[str, str, dict[str, Any] | None, str]] = [
        ("POST", f"{here}/volumes", {**mount, "volume": volume}, volume),
        ("POST", f"{here}/volumes", {**mount, "volume": "theirs"}, "theirs"),
        ("POST", f"{here}/volumes/detach", {"volume": volume}, volume),
        ("POST", f"{here}/volumes/detach", {"volume": "theirs"}, "theirs"),
        ("GET", f"{here}/jobs/{job}", None, job),
        ("DELETE", f"{here}/jobs/{job}", None, job),
        ("POST", f"{here}/jobs/{job}/run", None, job),
        ("GET", f"{here}/jobs/{job}/runs", None, job),
        ("GET", f"{here}/jobs/{job}/output", None, job),
        ("GET", f"/v1/keys/{owner_id}", None, owner_id),
        ("DELETE", f"/v1/keys/{owner_id}", None, owner_id),
    ]
    for method, path, body, theirs_id in asked:
        never = theirs_id[:4] + "z" * (len(theirs_id) - 4)

        def instead(text: str, name: str = theirs_id, other: str = never) -> str:
            return text.replace(name, other)

        said = served.ask(method, path, key, **({} if body is None else {"json": body}))
        other = None if body is None else json.loads(instead(json.dumps(body)))
        none = served.ask(method, instead(path), key, **({} if other is None else {"json": other}))
        assert said.status_code == none.status_code == 404, (method, path, said.text, none.text)
        assert instead(said.text) == none.text
    assert served.ask("GET", f"/v1/sandboxes/{their}/jobs/{job}", owner).json()["state"] == "waiting"
    rows = served.ask("GET", f"/v1/audit?actor={owner_id}", owner).json()["data"]
    assert [row["action"] for row in rows] == ["POST /v1/sandboxes/{sandbox}/jobs"]
    assert served.ask("GET", f"/v1/audit?actor={owner_id}", key).json()["data"] == []


def test_a_volume_is_attached_by_who_may_have_volumes(served: Served) -> None:
    project = served.project("attaching")
    ident = "sbx_" + "v" * 20
    served.sandbox(ident, project, "paused")
    mount = {"volume": "none-such", "path": "/data", "mode": "ro"}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/sandboxes", {"template": "base", "volumes": [mount]}),
        (f"/v1/sandboxes/{ident}/volumes", mount),
    ]
    for path, body in asked:
        told = {}
        for scopes in ("sandboxes", "sandboxes volumes"):
            key = served.key(project, scopes=scopes.split())
            told[scopes] = served.ask("POST", path, key, json=body).json()
        refused, let_through = told.values()
        assert (refused["code"], refused["details"]["needs"]) == ("forbidden", ["volumes"])
        assert let_through["code"] in (
            "not_found",
            "host_setup",
        )  # no such volume, or first no VMM: no host is here


def test_lists_are_of_ones_own(served: Served) -> None:
    ours, theirs = served.project("listed"), served.project("hidden")
    mine, their = ("sbx_" + letter * 20 for letter in "lh")
    served.sandbox(mine, ours)
    served.sandbox(their, theirs)
    key, all_of_it = served.key(ours, scopes=["read", "project", "secrets"]), served.key(scopes=["node"])
    asked = (
        "sandboxes",
        "events",
        "usage",
        "usage?totals=1",
        "jobs",
        "top",
        "keys",
        "audit",
        "templates",
        "secrets",
    )
    for path in (*asked, f"events?sandbox={their}", f"usage?sandbox={their}", f"sandboxes?after={their}"):
        said = served.ask("GET", f"/v1/{path}", key)
        assert said.status_code == 200 and their not in said.text and theirs not in said.text, path
    assert [one["id"] for one in served.ask("GET", "/v1/sandboxes", key).json()["data"]] == [mine]
    assert {one["sandbox"] for one in served.ask("GET", "/v1/events", key).json()["data"]} == {mine}
    seen = {one["id"] for one in served.ask("GET", "/v1/sandboxes?limit=1000", all_of_it).json()["data"]}
    assert {mine, their} <= seen
    assert served.ask("GET", "/v1/top", key).json()["node"] is None
    server = served.ask("GET", "/v1/server", key).json()
    assert server["log"] is server["state"] is server["pid"] is None and server["sandboxes"] == 1
    assert str(served.context.settings.state) not in json.dumps(server)


def test_jobs_of_a_project_are_had_page_by_page(served: Served) -> None:
    project, other = served.project("paged"), served.project("beside")
    key, theirs = served.key(project), served.key(other)
    at, made = time.time() + 3_600, []
    boxes = ["sbx_" + letter * 20 for letter in "efg"]
    for box in boxes:
        served.sandbox(box, other if box == boxes[2] else project)
    for box in (*boxes, *boxes):
        owner = theirs if box == boxes[2] else key
        said = served.ask("POST", f"/v1/sandboxes/{box}/jobs", owner, json={"command": "true", "at": at})
        made.append((box, said.json()["id"]))
    mine = [job for box, job in reversed(made) if box != boxes[2]]
    seen, after = [], None
    while True:
        where = "" if after is None else f"&after={after}"
        page = served.ask("GET", f"/v1/jobs?limit=3{where}", key).json()
        seen += [job["id"] for job in page["data"]]
        after = page["next"]
        if after is None:
            break
        assert len(page["data"]) == 3
    assert seen == mine
    assert served.ask("GET", "/v1/jobs?limit=4", key).json()["next"] is None
    every = served.ask("GET", "/v1/jobs?limit=1", served.key(scopes=["node"])).json()
    assert [job["id"] for job in every["data"]] == [made[-1][1]] and every["next"] == made[-1][1]


def test_a_project_s_secrets_are_its_own(served: Served) -> None:
    one, other = served.key(served.project("with secrets")), served.key(served.project("without"))
    assert served.ask("PUT", "/v1/secrets/TOKEN", one, json={"value": "canary-of-one"}).status_code == 200
    assert served.ask("GET", "/v1/secrets", other).json()["data"] == []
    assert served.ask("DELETE", "/v1/secrets/TOKEN", other).status_code == 404
    assert (
        served.ask("PUT", "/v1/secrets/TOKEN", other, json={"value": "canary-of-other"}).json()["version"]
        == 1
    )
    secrets = served.context.engine.secrets
    projects = {row.name: row.id for row in served.context.engine.projects.list()}
    values = [
        served.on_loop(secrets.resolve, ["TOKEN"], projects[name]) for name in ("with secrets", "without")
    ]
    assert values == [{"TOKEN": "canary-of-one"}, {"TOKEN": "canary-of-other"}]
    assert served.on_loop(secrets.resolve, ["TOKEN"]) == {}


def test_a_key_makes_no_key_that_may_more(served: Served) -> None:
    project = served.project("of keys")
    key = served.key(project, scopes=["project", "read"])
    made = served.ask("POST", "/v1/keys", key, json={"name": "less", "scopes": ["read"]})
    assert made.status_code == 201 and made.json()["project"] == project
    assert served.ask("GET", "/v1/sandboxes", made.json()["key"]).status_code == 200
    plain = served.ask("POST", "/v1/keys", key, json={"name": "plain"}).json()
    assert plain["scopes"] == ["read"]
    for scopes in (["node"], ["sandboxes"], ["read", "secrets"]):
        said = served.ask("POST", "/v1/keys", key, json={"name": "more", "scopes": scopes})
        assert (said.status_code, said.json()["code"]) == (403, "forbidden")
    said = [
        served.ask("POST", "/v1/keys", key, json={"name": "x", "project": name})
        for name in ("default", "never was")
    ]
    assert [answer.status_code for answer in said] == [404, 404]
    assert said[0].json()["hint"] == said[1].json()["hint"]  # nor does it tell which projects there are
    own = served.ask("POST", "/v1/keys", key, json={"name": "x", "project": "of keys", "scopes": ["read"]})
    assert own.status_code == 201
    other = served.key()
    for ident in (f"key_{other[4:12]}", "key_nothing0"):
        assert served.ask("DELETE", f"/v1/keys/{ident}", key).status_code == 404
    assert served.ask("DELETE", f"/v1/keys/{plain['id']}", key).json()["revoked_at"] is not None
    assert served.ask("GET", "/v1/sandboxes", plain["key"]).status_code == 401
    assert plain["key"] not in served.ask("GET", "/v1/keys", key).text


def test_names_of_templates_are_of_the_project_or_built_in(served: Served) -> None:
    key = served.key(served.project("of templates"))
    for name in ("../x", "..", "a@prj_000000000000", "base@default", "%2e%2e", "no such"):
        said = served.ask("POST", "/v1/sandboxes", key, json={"template": name})
        assert said.status_code in (400, 404), (name, said.text)
        removed = served.ask(
            "DELETE", f"/v1/templates/{name.replace('/', '%2f').replace('..', '%2e%2e')}", key
        )
        assert removed.status_code in (400, 404), (name, removed.text)
    assert served.ask("DELETE", "/v1/templates/base", key).status_code == 403
    assert served.ask("POST", "/v1/templates/base/build", key, json={"force": True}).status_code == 403
    cache = served.context.settings.cache
    (cache / "templates").mkdir(parents=True, exist_ok=True)
    operator = served.key(scopes=["node"])
    assert served.ask("DELETE", "/v1/templates/%2e%2e", operator).status_code in (400, 404)
    assert (cache / "templates").is_dir()


def test_keys_are_compared_in_constant_time() -> None:
    """Of structure: a digest is compared once, by the one function for it, whether or not the id is known."""
    tree = ast.parse(inspect.getsource(keys))
    known = next(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "known")
    calls = [one for one in ast.walk(known) if isinstance(one, ast.Call)]
    compares = [
        one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "compare_digest"
    ]
    assert len(compares) == 1
    for one in ast.walk(tree):
        if isinstance(one, ast.Compare):
            assert "digest" not in ast.dump(one), "a digest is compared by hmac.compare_digest alone"


def test_what_is_under_way_ends_with_its_key(served: Served) -> None:
    project, engine = served.project("leaves"), served.context.engine
    revoked, disabled = served.key(), served.key(project)
    for key, end in (
        (revoked, lambda: served.ask("DELETE", f"/v1/keys/key_{revoked[4:12]}", served.key(scopes=["node"]))),
        (disabled, lambda: served.on_loop(engine.projects.disable, project)),
    ):
        headers = {"authorization": f"Bearer {key}"}
        with served.http.stream("GET", "/v1/events?follow=true", headers=headers) as stream:
            assert stream.status_code == 200
            end()
            with contextlib.suppress(httpx.RemoteProtocolError):  # broken off in its midst
                assert list(stream.iter_bytes()) == []
    short = {"authorization": f"Bearer {served.key(expires_days=1.5 / 86_400)}"}
    with served.http.stream("GET", "/v1/events?follow=true", headers=short) as stream:
        assert stream.status_code == 200
        with contextlib.suppress(httpx.RemoteProtocolError):  # by itself, a second and a half later
            assert list(stream.iter_bytes()) == []
    own = served.key(scopes=["project"])
    assert served.ask("DELETE", f"/v1/keys/key_{own[4:12]}", own).json()["revoked_at"] is not None
    assert served.ask("GET", "/v1/whoami", own).status_code == 401
    assert served.on_loop(lambda: engine.keys._held) == {}
