"""The isolation report of a sandbox as its owner gets it: over HTTP, by the SDK, on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from llm4agents import Sandbox
from tests.support import Node, eventually, sdk_of, stranger

pytestmark = pytest.mark.vm
ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def node(shared_nodes: Callable[..., Node]) -> Node:
    return shared_nodes().start()


def doctor(node: Node, *arguments: str) -> tuple[int, str]:
    argv = [sys.executable, "-m", "llm4agents", "doctor", *arguments]
    done = subprocess.run(argv, env=node.env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_everything_promised_of_a_sandbox_holds_and_its_owner_can_see_it(node: Node) -> None:
    sandbox = node.create(network="public" if ROOT else "none")
    try:
        path = f"/v1/sandboxes/{sandbox}/isolation"
        # The gateway is told of a sandbox when it runs already.
        body = eventually(
            lambda: len((found := node.call("GET", path))["processes"]) == (3 if ROOT else 2) and found
        )
        assert body["differences"] == []
        assert (body["ok"], body["id"], body["driver"]) == (True, sandbox, node.get(sandbox)["vmm"])
        roles = {process["role"]: process for process in body["processes"]}
        assert set(roles) == ({"vmm", "shim", "gateway"} if ROOT else {"vmm", "shim"})
        assert roles["vmm"]["pid"] == node.vmm(sandbox)
        with sdk_of(node):
            found = Sandbox.connect(sandbox).isolation()
        assert (found.ok, found.differences) == (True, ())
        assert found.report["processes"][0]["executable_sha256"] == roles["vmm"]["executable_sha256"]
        code, text = doctor(node, "--isolation", sandbox)
        assert code == 0, text
        assert "everything that is promised holds" in text
        assert f"pid {node.vmm(sandbox)}" in text
        assert text.isprintable() or all(line.isprintable() for line in text.splitlines())
        code, text = doctor(node, "--isolation", sandbox[4:], "--json")
        assert (code, json.loads(text)["id"]) == (0, sandbox)
        if ROOT:
            with stranger(node.vmm(sandbox)) as pid:
                code, text = doctor(node, "--isolation", sandbox)
            assert code == 1
            assert f"1 more process lives in its pid namespace: {pid}\n" in text
        node.call("POST", f"/v1/sandboxes/{sandbox}/pause", json={})
        answer = node.http.get(path)
        assert answer.status_code == 409, answer.text
        assert "paused: it has no process" in answer.text
        code, text = doctor(node, "--isolation", sandbox)
        assert code not in (0, 1)
        assert "resume it first" in text
        assert node.get(sandbox)["state"] == "paused", "looking at it wakes nobody"
    finally:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    assert node.http.get(path).status_code >= 400
    assert node.http.get("/v1/sandboxes/sbx_00000000000000000000/isolation").status_code == 404


def test_its_files_stay_its_own_through_forks_a_servers_crash_pauses_and_volumes(
    nodes: Callable[..., Node],
) -> None:
    """What was given to a VMM at its start is not what it has later: none of that may look like another's."""
    node = nodes().start()
    for name in ("mine", "read"):
        node.call("POST", "/v1/volumes", json={"name": name, "size_mib": 16})
    volumes = [{"volume": "mine", "path": "/mine"}, {"volume": "read", "path": "/read", "mode": "ro"}]
    first = node.create(memory_mib=256, network="public" if ROOT else "none", volumes=volumes)

    def clean(*sandboxes: str) -> None:
        for sandbox in sandboxes:
            found = node.call("GET", f"/v1/sandboxes/{sandbox}/isolation")
            assert (found["differences"], found["ok"]) == ([], True), sandbox
            files = [one for one in found["processes"][0]["descriptors"] if one["kind"] == "file"]
            assert {one["given"] for one in files} <= {"read", "read-write"}

    def fork(sandbox: str) -> str:
        (child,) = node.call("POST", f"/v1/sandboxes/{sandbox}/fork", json={"volumes": "leave"})["data"]
        return str(child["id"])

    clean(first)
    child = fork(first)
    clean(first, child)
    fork(first)  # another layer
    node.kill9()
    node.start()
    clean(first, child)
    node.call("POST", f"/v1/sandboxes/{first}/pause", json={})
    node.call("POST", f"/v1/sandboxes/{first}/volumes/detach", json={"volume": "read"})
    node.call("POST", f"/v1/sandboxes/{first}/resume", json={})
    clean(first)
    node.call("POST", f"/v1/sandboxes/{child}/pause", json={})
    node.call("POST", f"/v1/sandboxes/{child}/resume", json={"cold": True})
    clean(child)
    protected = node.create(memory_mib=256, protect=["/etc/hostname"])
    clean(protected)
