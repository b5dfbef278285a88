"""A template made of a sandbox, or built by a recipe, carries no secret, token or CA key of its maker; nor is it
another project's. What the guest itself wrote to its disk is the guest's affair, and stays."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from llm4agents.engine.keys import Keys
from llm4agents.engine.principal import Principal
from llm4agents.engine.projects import Projects
from llm4agents.store import open_store
from tests.barrier import needles
from tests.support import Node, lines

pytestmark = [pytest.mark.vm, pytest.mark.root]
HOST = "credential.example"


@dataclass
class Made:
    node: Node
    http: httpx.Client
    """The maker's."""
    other: httpx.Client
    project: str
    sought: dict[str, bytes]
    own: str = field(default_factory=lambda: f"written by the guest {secrets.token_hex(16)}")

    def call(self, method: str, path: str, **options: Any) -> Any:
        answer = self.http.request(method, path, **options)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def build(self, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
        with self.http.stream("POST", "/v1/templates", json={"name": name, "recipe": recipe}) as answer:
            last = list(lines(answer))[-1]
        assert last["type"] == "template", last
        return last

    def template(self, name: str) -> Path:
        return self.node.cache / "templates" / f"{name}@{self.project}"


def ca_key(directory: Path) -> dict[str, bytes]:
    """The CA's private key as it may lie about: its text, line by line, and the number that it is."""
    found = {}
    for path in directory.iterdir():
        text = path.read_bytes()
        if b"PRIVATE KEY" in text:
            found |= {
                f"CA key, line {at}": line
                for at, line in enumerate(text.splitlines()[1:-1])
                if len(line) > 40
            }
            key = load_pem_private_key(text, None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            number = key.private_numbers().private_value.to_bytes((key.key_size + 7) // 8, "big")
            found |= {
                "CA key": number,
                "CA key reversed": number[::-1],
                "CA key, base64": base64.b64encode(number)[:40],
            }
    assert found
    return found


@pytest.fixture(scope="module")
def made(shared_nodes: Callable[..., Node]) -> Iterator[Made]:
    node = shared_nodes(LLM4AGENTS_LISTEN="127.0.0.1:0")
    node.state.mkdir(parents=True, mode=0o700)
    store = open_store(node.state / "store.db")
    projects, operator = Projects(store), Principal.operator()
    keys = Keys(store, projects)
    maker, other = projects.create("maker"), projects.create("other")
    ours = keys.create(operator, "ours", project=maker.id)[1]
    theirs = keys.create(operator, "theirs", project=other.id)[1]
    store.close()
    node.start()
    base = node.call("GET", "/v1/server")["listen"]
    values = {
        "env": f"env-{secrets.token_hex(24)}",
        "credential": f"cred-{secrets.token_hex(24)}",
        "API key": ours,
    }
    sought = needles.needles(values) | ca_key(Path(node.env["LLM4AGENTS_CA"]))
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=base, headers={"x-api-key": key}, timeout=300))
            for key in (ours, theirs)
        ]
        made = Made(node, *clients, maker.id, sought)
        made.call("PUT", "/v1/secrets/LOGIN", json={"value": values["credential"]})
        network = {
            "rules": [f"allow {HOST}"],
            "credentials": [{"secret": "LOGIN", "host": HOST, "as": "bearer"}],
        }
        box = made.call(
            "POST",
            "/v1/sandboxes",
            json={"template": "base", "memory_mib": 256, "env": {"TOKEN": values["env"]}, "network": network},
        )["id"]
        # It is in processes that run, in one that has ended, in freed memory; the credential was asked for.
        curl = f"curl -sS -m 5 https://{HOST}/ || true"
        command = f"echo '{made.own}' > own; sync; sleep 9999 & (env; env | sort) | wc -c; {curl}"
        made.call("POST", f"/v1/sandboxes/{box}/exec", json={"command": command})
        made.call("POST", f"/v1/sandboxes/{box}/snapshot", json={"name": "s-snapshot"})
        made.call("DELETE", f"/v1/sandboxes/{box}")
        made.build(
            "s-built",
            {
                "from": {"template": "s-snapshot"},
                "memory_mib": 256,
                "network": network,
                "steps": [{"run": f"{curl}; env | sort; cat own"}],
                "start": {"run": "sleep 9999"},
            },
        )
        try:
            yield made
        finally:
            for name in ("s-built", "s-snapshot"):
                clients[0].delete(f"/v1/templates/{name}")


@pytest.mark.parametrize("name", ["s-snapshot", "s-built"])
def test_nothing_of_its_maker_is_in_it(made: Made, name: str) -> None:
    files = [path for path in made.template(name).rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"memory", "state", "manifest.json", "template.json", "upper.raw"}
    assert not needles.in_files(made.template(name), made.sought)
    # It was looked where things are: what the guest wrote is there.
    assert needles.in_files(made.template(name), {"own": made.own.encode()})
    shown = made.http.get(f"/v1/templates/{name}")
    assert not needles.search([shown.content], made.sought)


def test_nothing_of_it_is_in_what_the_build_has_left(made: Made) -> None:
    for directory in (made.node.cache / "steps", made.node.state / "builds", made.node.state / "logs"):
        assert not needles.in_files(directory, made.sought), directory
    log = made.call("GET", "/v1/templates/s-built/build")
    said = json.dumps(log)
    assert made.own in said and "LOGIN" not in said
    assert not needles.search([said.encode(), made.node.log().encode()], made.sought)


def test_a_clone_of_it_has_nothing_of_its_maker(made: Made) -> None:
    box = made.call("POST", "/v1/sandboxes", json={"template": "s-built"})["id"]
    try:
        environments = "cat /proc/*/environ | tr '\\0' '\\n'"
        command = f"id -u; cat own; {environments} | grep -c TOKEN || true; env | grep -c TOKEN || true"
        answer = made.call("POST", f"/v1/sandboxes/{box}/exec", json={"command": command, "user": "root"})
        assert answer["stdout"].splitlines()[0] == "0" and answer["stdout"].split()[-2:] == ["0", "0"], answer
        network = made.call("GET", f"/v1/sandboxes/{box}/network")["network"]
        assert network["credentials"] == [] and network["rules"] == []
    finally:
        made.call("DELETE", f"/v1/sandboxes/{box}")


def test_it_is_no_other_project_s(made: Made) -> None:
    other = made.other
    for method, path in (
        ("GET", "/v1/templates/s-built"),
        ("GET", "/v1/templates/s-built/build"),
        ("DELETE", "/v1/templates/s-built/build"),
        ("DELETE", "/v1/templates/s-built"),
    ):
        assert other.request(method, path).status_code == 404, path
    assert "s-built" not in other.get("/v1/templates").text
    assert other.post("/v1/sandboxes", json={"template": "s-built"}).status_code == 404
    refused = other.post("/v1/templates", json={"name": "x", "recipe": {"from": {"template": "s-built"}}})
    assert "there is no template" in refused.text
    # Files that one has sent are no other's, whoever knows their digest.
    data = bytes(1024)
    digest = hashlib.sha256(data).hexdigest()
    made.call("PUT", f"/v1/templates/files/{digest}", content=data)
    assert made.http.get(f"/v1/templates/files/{digest}").status_code == 200
    assert other.get(f"/v1/templates/files/{digest}").status_code == 404
    # Nor is an image on the server's disk, or a name that leads elsewhere.
    local = other.post("/v1/templates", json={"name": "x", "recipe": {"from": {"image": "oci:/etc"}}})
    assert "operator" in local.text
    at = other.post(
        "/v1/templates", json={"name": f"s-built@{made.project}", "recipe": {"from": {"template": "base"}}}
    )
    assert at.status_code in (400, 404)
