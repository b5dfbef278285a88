"""Profile `packages` against the registries this host's own tools are set up to use: installs work, uploads do not.

On this host's real network, so these need one that reaches them; nothing here names a registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import Node, eventually

pytestmark = [pytest.mark.vm, pytest.mark.root]


@pytest.fixture(scope="module")
def node(shared_nodes: Callable[..., Node]) -> Node:
    return shared_nodes().start()


@pytest.fixture(scope="module")
def python(node: Node) -> Iterator[str]:
    sandbox = node.create("python", network="packages")
    yield sandbox
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def run(
    node: Node, sandbox: str, command: str, *, user: str = "user", timeout_s: int = 240
) -> dict[str, Any]:
    done = node.exec(sandbox, command, user=user, timeout_s=timeout_s)
    return {"code": done["exit_code"], "text": f"{done['stdout']}{done['stderr']}"}


def records(node: Node, sandbox: str) -> list[dict[str, Any]]:
    answer = node.call("GET", f"/v1/sandboxes/{sandbox}/network/log", params={"limit": 10_000})
    return list(answer["data"])


def test_pip(node: Node, python: str) -> None:
    install = "pip install -q --user --no-cache-dir iniconfig six && pip list --user"
    done = run(node, python, install)
    assert done["code"] == 0 and "iniconfig" in done["text"], done
    assert [one for one in records(node, python) if one["kind"] == "request" and one["verdict"] == "allow"]


def test_apt(node: Node, python: str) -> None:
    done = run(
        node,
        python,
        "apt-get update -q && apt-get install -qy --no-install-recommends hello && hello",
        user="root",
    )
    assert done["code"] == 0 and "Hello, world!" in done["text"], done


def test_npm(node: Node) -> None:
    sandbox = node.create("node", network="packages")
    try:
        install = "mkdir -p /tmp/p && cd /tmp/p && npm init -y >/dev/null && npm install --no-audit left-pad"
        done = run(node, sandbox, f"{install} && ls node_modules")
        assert done["code"] == 0 and "left-pad" in done["text"], done
    finally:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")


UPLOAD = """
import json, sys, urllib.error, urllib.parse, urllib.request
found = {}
for base in sys.argv[1:]:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("", "legacy/", "/legacy/", "/-/npm/v1/publish"):
            request = urllib.request.Request(urllib.parse.urljoin(base, path), b"stolen=token", method=method)
            try:
                urllib.request.urlopen(request, timeout=20)
                found[f"{method} {path}"] = "accepted"
            except urllib.error.HTTPError as error:
                found[f"{method} {path}"] = f"{error.code} {error.read(400).decode(errors='replace')}"
            except OSError as error:
                found[f"{method} {path}"] = type(error).__name__
print(json.dumps(found))
"""


def test_nothing_is_published(node: Node, python: str) -> None:
    """Read-only: a stolen token publishes nothing, and other hosts are not there."""
    asked = [one for one in records(node, python) if one["kind"] == "request" and one["verdict"] == "allow"]
    bases = {f"https://{one['name']}:{one['port']}{one['path']}" for one in asked if one["port"] == 443}
    assert bases, "the installs above went to hosts that are read"
    node.http.put(
        f"/v1/sandboxes/{python}/files", params={"path": "/tmp/upload.py"}, content=UPLOAD
    ).raise_for_status()
    done = run(node, python, f"python3 /tmp/upload.py {' '.join(sorted(bases)[:2])}")
    found = json.loads(done["text"].strip().splitlines()[-1])
    assert found and all(value.startswith("403 ") for value in found.values()), found

    def denied() -> list[dict[str, Any]]:
        return [one for one in records(node, python) if one.get("method") == "POST"]

    assert {one["verdict"] for one in eventually(denied)} == {"deny"}
    elsewhere = run(node, python, "curl -sS -m 10 https://example.com/")
    assert elsewhere["code"] not in (0, 28), elsewhere
