"""schemathesis against a real server, over its listener, with a key: what the description says holds, whatever is sent.

Every operation is called as its examples say, at the borders of what its description allows and past them, and with
random values. The seed is printed; LLM4AGENTS_FUZZ_SEED takes another, LLM4AGENTS_FUZZ_EXAMPLES more random ones.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.api.schema import document
from llm4agents.api.schema.kinds import NDJSON
from tests.support import Node, copied_cache

pytestmark = pytest.mark.vm

SEED = os.environ.get("LLM4AGENTS_FUZZ_SEED", "6")
EXAMPLES = os.environ.get("LLM4AGENTS_FUZZ_EXAMPLES", "8")

OF_THE_NODE = (
    "templates_create",
    "templates_build",
    "templates_remove",
    "templates_export",
    "templates_import",
    "server_backup",
    "server_stop",
    "node_prune",
    "node_doctor",
    "pool_set",
)
"""Operations that are fuzzed against a server with a cache and files of its own: they change what other tests use.

None is left out. What has no end, ends the server or boots a machine each time is bounded by `fuzz_hooks`, and called
once as it is meant (`answers`, `answers_of_the_node`).
"""

NOT_CHECKED = {
    "use_after_free": "what has ended is still told of: sandboxes, jobs, keys",
    "object_level_authorization": "tests/unit/api/test_access_routes.py asks for everything as another project",
}
"""Checks of schemathesis that are left out, each with its reason."""

OPERATORS = ("Access", "Node", "Server", "Observe")
"""Tags of what is asked with the scopes `node` and `project`; the rest with an ordinary key."""

CONFIG = """
[checks]
# 502 and 504 are the guest's: a port that nothing answers on, a wait that was too short. 503 is no room.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "502", "503", "504"]
negative_data_rejection.expected-statuses = ["4xx", "502", "504"]
# What a schema cannot say (one of two fields, a rule's grammar, names that are taken) is said by a 400.
positive_data_acceptance.expected-statuses = ["2xx", "3xx", "4xx", "502", "503", "504"]

[generation]
# Else good calls have a random key beside the good one.
with-security-parameters = false

[[operations]]
# Of its path GET alone is ours: other methods are requests to the server in the sandbox.
include-operation-id = "ports_wait"
phases.coverage.unexpected-methods = []

[[operations]]
# Takes seconds, and nothing is asked of it.
include-operation-id = "node_doctor"
phases.fuzzing.enabled = false
"""

_COMMAND = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_STEPS = {
    "run": _COMMAND,
    "copy": {"type": "string"},
    "to": {"type": "string"},
    "sha256": {"enum": ["0" * 64, "0", None]},
    "env": {"type": "object", "additionalProperties": {"type": "string"}},
    "workdir": {"type": "string"},
    "user": {"type": ["string", "integer"]},
    "as": {"type": ["string", "integer", "null"]},
    "timeout_s": {"type": ["number", "null"]},
    **dict.fromkeys(("apt", "pip", "npm"), _COMMAND),
}
RECIPE = {
    "type": "object",
    "properties": {
        "from": {"type": "object"},
        "steps": {"type": "array", "items": {"type": "object", "properties": _STEPS, "maxProperties": 3}},
        "start": {
            "type": ["object", "string", "null"],
            "properties": {"run": _COMMAND, "ready": {"type": ["integer", "string", "null"]}},
        },
        "warm": {"type": "array", "items": _COMMAND},
        "network": {"type": ["string", "array", "object"]},
        "vcpus": {"type": ["integer", "null"]},
        "memory_mib": {"type": ["integer", "null"]},
        "description": {"type": "string"},
    },
}
"""Roughly what a recipe is, so that what is sent is like one: the description says no more than that it is a table."""


def described() -> dict[str, Any]:
    """Closed: an answer with a field that is not described fails. A stream is the list of its lines."""
    doc = document.document(create_app(cast(Context, None)), closed=True)
    for methods in doc["paths"].values():
        for operation in methods.values():
            for answer in operation["responses"].values():
                if (lines := answer.get("content", {}).get(NDJSON)) is not None:
                    lines["schema"] = {"type": "array", "items": lines["schema"]}
                    lines.pop("examples", None)
    doc["components"]["schemas"]["TemplateCreate"]["properties"]["recipe"] = RECIPE
    return doc


class Held:
    """A client whose every answer is held to the description."""

    def __init__(self, url: str, key: str) -> None:
        self.doc = described()
        self.registry: Any = Registry().with_resource("urn:doc", DRAFT202012.create_resource(self.doc))
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=300)

    def begins(self, route: str, query: dict[str, str], **at: str) -> None:
        """A stream without an end: its first line."""
        said = self.doc["paths"][route]["get"]["responses"]["200"]["content"][NDJSON]["schema"]
        with self.http.stream("GET", route.format(**at), params=query) as answer:
            self._valid([json.loads(next(answer.iter_lines()))], said)

    def _valid(self, found: Any, schema: Any) -> None:
        schema = json.loads(json.dumps(schema).replace('"#/', '"urn:doc#/'))
        jsonschema.Draft202012Validator(schema, registry=self.registry).validate(found)

    def __call__(self, method: str, route: str, body: Any = None, *, lines: bool = False, **at: str) -> Any:
        accept = {"accept": NDJSON} if lines else {}
        answer = self.http.request(method, route.format(**at), json=body, headers=accept)
        said = self.doc["paths"][route][method.lower()]["responses"][str(answer.status_code)]
        media = answer.headers["content-type"]
        found = [json.loads(one) for one in answer.text.splitlines()] if media == NDJSON else answer.json()
        assert answer.status_code < 300, answer.text
        self._valid(found, said["content"][media]["schema"])
        return found


def answers(url: str, key: str, operators: str, box: str) -> None:
    """What is not fuzzed, because it takes long or ends things, called once each."""
    ask, one = Held(url, key), "/v1/sandboxes/{sandbox}"
    Held(url, operators)("POST", "/v1/templates/{name}/build", {"memory_mib": 256}, name="base")
    ask("GET", f"{one}/isolation", sandbox=box)
    assert (
        ask("POST", f"{one}/exec", {"command": "echo 42", "stream": True}, sandbox=box)[-1]["exit_code"] == 0
    )
    ask("POST", f"{one}/code", {"code": "echo 42", "language": "bash", "stream": True}, sandbox=box)
    ask("POST", f"{one}/code", {"code": "false", "language": "bash"}, sandbox=box)
    job = ask("POST", f"{one}/jobs", {"command": "echo 42"}, sandbox=box)["id"]
    assert ask("GET", f"{one}/jobs/{{job}}", sandbox=box, job=job)["sandbox"] == box
    child = ask("POST", f"{one}/fork", {"count": 1}, sandbox=box)["data"][0]["id"]
    assert ask("POST", f"{one}/pause", {}, sandbox=child)["pause"]["memory"]
    assert ask("POST", f"{one}/resume", {}, lines=True, sandbox=child)[-1]["state"] == "running"
    assert ask("DELETE", one, sandbox=child)["state"] == "killed"
    ask("GET", f"{one}/events", sandbox=child)
    ask("GET", f"{one}/logs", sandbox=child)
    answers_when_gone(ask, child)
    ask("GET", "/v1/usage")
    ask("GET", "/v1/events")
    ask.begins(f"{one}/files/watch", {"path": "/tmp"}, sandbox=box)


def answers_of_the_node(ask: Held, files: Path) -> None:
    """What `fuzz_hooks` keeps from what it would do, called once each as it is meant."""
    recipe = {"from": {"template": "base"}, "memory_mib": 256, "network": [], "steps": [{"env": {"A": "b"}}]}
    one = str(files / "one.l4a")
    built = ask("POST", "/v1/templates", {"name": "t-fuzz", "recipe": recipe})[-1]
    assert ask("POST", "/v1/templates/{name}/export", {"file": one}, name="t-fuzz")["file"] == one
    ask("DELETE", "/v1/templates/{name}", name="t-fuzz")
    assert ask("POST", "/v1/templates/import", {"file": one})["key"] == built["key"]
    ask("POST", "/v1/server/backup", {"file": str(files / "backup"), "with_disks": True})
    kept = {"template": "t-fuzz", "memory_mib": 256, "wanted": 1}
    assert ask("PUT", "/v1/pool", {"data": [kept]})["data"][0]["wanted"] == 1
    ask("PUT", "/v1/pool", {"data": [kept | {"wanted": 0}]})


def answers_when_gone(ask: Held, box: str) -> None:
    """Whatever is asked of a sandbox that has ended, its answer is one of those described."""
    at = {"process": "p", "job": "job_none", "ident": "default", "port": "8000", "sandbox": box}
    undescribed = []
    for route, methods in ask.doc["paths"].items():
        for method, operation in methods.items() if "{sandbox}" in route else ():
            sent = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            body, query = sent.get("example"), {"path": "/tmp"} if "/files" in route else {}
            answer = ask.http.request(method, route.format(**at), json=body, params=query)
            if str(answer.status_code) not in operation["responses"]:
                undescribed.append(f"{operation['operationId']} {answer.status_code}")
    assert not undescribed, undescribed


def run(
    place: Path,
    url: str,
    key: str,
    *words: str,
    phases: str = "examples,coverage,fuzzing,stateful",
    **env: str,
) -> int:
    """How many operations schemathesis has called without a finding. Its whole report is in the failure."""
    (place / "openapi.json").write_text(json.dumps(described()))
    (place / "schemathesis.toml").write_text(CONFIG)
    said = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(place / "schemathesis.toml")),
            *("run", str(place / "openapi.json"), "--url", url, "-H", f"Authorization: Bearer {key}"),
            *("--phases", phases, "--max-examples", EXAMPLES, "--seed", SEED),
            *("--checks", "all", "--exclude-checks", ",".join(NOT_CHECKED)),
            *("--generation-database", "none", "--no-color", "--workers", "1"),
            *("--request-timeout", "60", "--max-response-time", "60", "--continue-on-failure", "--no-shrink"),
            *words,
        ],
        cwd=place,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("fuzz_hooks.py")), **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    text = said.stdout + said.stderr
    assert said.returncode == 0, f"seed {SEED}\n{text}"
    tested = re.search(r"Tested: (\d+)", text)
    assert tested, text
    return int(tested[1])


def test_what_is_sent_is_taken_or_refused_as_described(
    shared_nodes: Callable[..., Node], tmp_path: Path
) -> None:
    node = shared_nodes(LLM4AGENTS_LISTEN="127.0.0.1:0").start()
    url = str(node.call("GET", "/v1/server")["listen"])
    quotas = {"sandboxes": 2, "volumes_mib": 512, "templates": 0}
    project = node.call("POST", "/v1/projects", json={"name": "fuzzed", "quotas": quotas})["id"]
    wish = {"name": "fuzz", "project": project}
    key = node.call("POST", "/v1/keys", json=wish)["key"]
    operators = node.call("POST", "/v1/keys", json={**wish, "scopes": ["node", "project", "templates"]})[
        "key"
    ]
    headers = {"authorization": f"Bearer {key}"}
    small = {"template": "base", "memory_mib": 256}
    box = httpx.post(f"{url}/v1/sandboxes", json=small, headers=headers, timeout=300).json()["id"]
    apart = [word for one in OF_THE_NODE for word in ("--exclude-operation-id", one)]
    tags = [word for tag in OPERATORS for word in ("--include-tag", tag)]
    others = [word for tag in OPERATORS for word in ("--exclude-tag", tag)]
    try:
        answers(url, key, operators, box)
        wanted = {"name": "kept", "size_mib": 64}
        volume = httpx.post(f"{url}/v1/volumes", json=wanted, headers=headers).json()["id"]
        tested = run(tmp_path, url, key, *others, *apart, FUZZ_SANDBOX=box, FUZZ_VOLUME=volume)
        tested += run(tmp_path, url, operators, *tags, *apart)
        assert tested == sum(map(len, described()["paths"].values())) - len(OF_THE_NODE)
        assert "request_failed" not in node.log()
    finally:  # a sandbox of on_timeout=pause would outlive the server
        for kind in ("sandboxes", "volumes", "keys"):
            for row in node.call("GET", f"/v1/{kind}?limit=1000")["data"]:
                node.call("DELETE", f"/v1/{kind}/{row['id']}")


def test_what_changes_the_node_is_taken_or_refused_as_described(
    nodes: Callable[..., Node], tmp_path: Path
) -> None:
    files = tmp_path / "files"
    (files / "srv").mkdir(parents=True)
    (files / "garbage").write_bytes(b"\x1f\x8b garbage")
    (files / "empty").touch()
    os.mkfifo(files / "fifo")
    with copied_cache("blobs", "index", "probe", "build/bin", "templates/base") as cache:
        node = nodes(cache=cache, LLM4AGENTS_LISTEN="127.0.0.1:0").start()
        url = str(node.call("GET", "/v1/server")["listen"])
        wish = {"name": "fuzz", "scopes": ["node", "project", "templates"]}
        key = node.call("POST", "/v1/keys", json=wish)["key"]
        ask = Held(url, key)
        answers_of_the_node(ask, files)
        these = [word for one in OF_THE_NODE for word in ("--include-operation-id", one)]
        phases = "examples,coverage,fuzzing"
        assert run(tmp_path, url, key, *these, phases=phases, FUZZ_FILES=str(files)) == len(OF_THE_NODE)
        assert "request_failed" not in node.log()
        removed = ask("POST", "/v1/prune", {"all": True})["removed"]
        assert {"template base", "template t-fuzz"} <= set(removed), removed
        assert ask("POST", "/v1/server/stop", {"keep": False})["stopping"]
        assert node.process is not None and node.process.wait(60) == 0
        node.stop()
