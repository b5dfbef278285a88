"""schemathesis against a real server, over its listener, with a key: what the description says holds, whatever is sent.

Every operation is called as its examples say, at the borders of what its description allows and past them, and with
random values. The seed is printed; LLM4AGENTS_FUZZ_SEED takes another, LLM4AGENTS_FUZZ_EXAMPLES more random ones.
"""

from __future__ import annotations

import json
import os
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
from tests.support import Node

pytestmark = pytest.mark.vm

SEED = os.environ.get("LLM4AGENTS_FUZZ_SEED", "6")
EXAMPLES = os.environ.get("LLM4AGENTS_FUZZ_EXAMPLES", "8")

LEFT_OUT = {
    "server_stop": "ends the server",
    "server_backup": "writes files of the node",
    "templates_import": "reads files of the node",
    "templates_export": "writes files of the node",
    "node_prune": "removes what other tests use: the cache is shared",
    "node_doctor": "takes seconds, and nothing is asked of it",
    "pool_set": "keeps machines for what it is asked",
    "files_watch": "has no end",
    "ports_wait": "of its path GET alone is ours: other methods are requests to the server in the sandbox",
    "templates_create": "boots a machine for each recipe",
    "templates_build": "boots a machine for each shape",
    "templates_remove": "removes what other tests use: the cache is shared",
}
"""Operations that are not fuzzed, each with its reason."""

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
"""


def described() -> dict[str, Any]:
    """Closed: an answer with a field that is not described fails. A stream is the list of its lines."""
    doc = document.document(create_app(cast(Context, None)), closed=True)
    for methods in doc["paths"].values():
        for operation in methods.values():
            for answer in operation["responses"].values():
                if (lines := answer.get("content", {}).get(NDJSON)) is not None:
                    lines["schema"] = {"type": "array", "items": lines["schema"]}
                    lines.pop("examples", None)
    return doc


class Held:
    """A client whose every answer is held to the description."""

    def __init__(self, url: str, key: str) -> None:
        self.doc = described()
        self.registry: Any = Registry().with_resource("urn:doc", DRAFT202012.create_resource(self.doc))
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=300)

    def __call__(self, method: str, route: str, body: Any = None, *, lines: bool = False, **at: str) -> Any:
        accept = {"accept": NDJSON} if lines else {}
        answer = self.http.request(method, route.format(**at), json=body, headers=accept)
        said = self.doc["paths"][route][method.lower()]["responses"][str(answer.status_code)]
        media = answer.headers["content-type"]
        found = [json.loads(one) for one in answer.text.splitlines()] if media == NDJSON else answer.json()
        assert answer.status_code < 300, answer.text
        schema = json.loads(json.dumps(said["content"][media]["schema"]).replace('"#/', '"urn:doc#/'))
        jsonschema.Draft202012Validator(schema, registry=self.registry).validate(found)
        return found


def answers(url: str, key: str, operators: str, box: str) -> None:
    """What is not fuzzed, because it takes long or ends things, called once each."""
    ask, one = Held(url, key), "/v1/sandboxes/{sandbox}"
    Held(url, operators)("GET", "/v1/doctor")
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
    ask("GET", "/v1/usage")
    ask("GET", "/v1/events")


def run(place: Path, url: str, key: str, *words: str, **env: str) -> str:
    """What schemathesis says, of which nothing is a finding. Its whole report is in the failure."""
    (place / "openapi.json").write_text(json.dumps(described()))
    (place / "schemathesis.toml").write_text(CONFIG)
    said = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(place / "schemathesis.toml")),
            *("run", str(place / "openapi.json"), "--url", url, "-H", f"Authorization: Bearer {key}"),
            *("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", EXAMPLES, "--seed", SEED),
            *("--checks", "all", "--exclude-checks", ",".join(NOT_CHECKED)),
            *("--generation-database", "none", "--no-color", "--workers", "1"),
            *("--request-timeout", "60", "--max-response-time", "60", "--continue-on-failure", "--no-shrink"),
            *(word for one in LEFT_OUT for word in ("--exclude-operation-id", one)),
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
    return text


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
    tags = [word for tag in OPERATORS for word in ("--include-tag", tag)]
    others = [word for tag in OPERATORS for word in ("--exclude-tag", tag)]
    answers(url, key, operators, box)
    volume = httpx.post(f"{url}/v1/volumes", json={"name": "kept", "size_mib": 64}, headers=headers).json()[
        "id"
    ]
    run(tmp_path, url, key, *others, FUZZ_SANDBOX=box, FUZZ_VOLUME=volume)
    run(tmp_path, url, operators, *tags)
    assert "request_failed" not in node.log()
    for row in node.call("GET", "/v1/sandboxes?limit=1000")[
        "data"
    ]:  # one of on_timeout=pause would outlive the server
        node.call("DELETE", f"/v1/sandboxes/{row['id']}")
