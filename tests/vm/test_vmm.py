"""Which VMM a sandbox is on, and the nested profile, through HTTP with real machines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import Node

pytestmark = pytest.mark.vm


def virtual(node: Node, sandbox: str) -> bool:
    """Whether the guest's processor offers virtualisation."""
    done = node.exec(sandbox, "grep -qwE 'svm|vmx' /proc/cpuinfo")
    return bool(done["exit_code"] == 0)


def test_nested_is_asked_for_and_nobody_elses(shared_node: Node) -> None:
    node = shared_node
    here = node.call("GET", "/v1/server")
    nested = node.create("base", memory_mib=256, nested=True)
    plain = node.create("base", memory_mib=256, vmm=here["vmm"])
    row = node.get(nested)
    assert row["nested"] and not node.get(plain)["nested"]
    assert {row["vmm"], node.get(plain)["vmm"]} == {here["vmm"]}
    assert virtual(node, nested) and not virtual(node, plain)
    assert node.exec(nested, "test -c /dev/kvm", user="root")["exit_code"] == 0
    assert node.exec(plain, "test -e /dev/kvm", user="root")["exit_code"] == 1
    variants = [
        one
        for one in node.call("GET", "/v1/templates")["data"]
        if one["name"] == "base" and one.get("memory_mib") == 256
    ]
    assert {(one["vmm"], one["nested"]) for one in variants} >= {(here["vmm"], True), (here["vmm"], False)}
    # What is made of it is nested too, and says so.
    node.call("POST", f"/v1/sandboxes/{nested}/pause", json={})
    assert node.get(nested)["nested"] and virtual(node, nested)
    [child] = node.call("POST", f"/v1/sandboxes/{nested}/fork", json={})["data"]
    assert child["nested"] and virtual(node, child["id"])
    node.call("POST", f"/v1/sandboxes/{nested}/snapshot", json={"name": "nested-one"})
    try:
        refused = node.http.post("/v1/sandboxes", json={"template": "nested-one", "memory_mib": 256})
        assert refused.status_code == 400 and "nested=True" in refused.json()["hint"]
        again = node.create("nested-one", memory_mib=256, nested=True)
        assert virtual(node, again)
        for sandbox in (again, child["id"], nested, plain):
            node.call("DELETE", f"/v1/sandboxes/{sandbox}")
            assert node.get(sandbox)["vmm"] == here["vmm"], "told of what has ended too"
    finally:
        node.call("DELETE", "/v1/templates/nested-one")


def test_what_cannot_be_had_says_why(shared_node: Node) -> None:
    node = shared_node
    for body, status, words in (
        ({"vmm": "bochs"}, 400, "no VMM 'bochs'"),
        ({"nested": "yes"}, 422, "nested"),
    ):
        answer = node.http.post("/v1/sandboxes", json={"template": "base", **body})
        assert answer.status_code in (status, 400) and words in answer.text, answer.text
    report = node.call("GET", "/v1/doctor")
    chosen = [one["name"] for one in report["vmms"] if "ordinary" in one["chosen_for"]]
    assert chosen == [report["vmm"]]
    for vmm in report["vmms"]:
        assert vmm["detail"] and vmm["usable"] == (vmm["version"] is not None)
        if not vmm["usable"]:
            answer = node.http.post("/v1/sandboxes", json={"template": "base", "vmm": vmm["name"]})
            assert answer.status_code >= 400 and vmm["detail"] in answer.json()["detail"]


def test_the_operators_floor_holds_for_those_made_before_it(nodes: Callable[..., Node]) -> None:
    node = nodes().start()
    nested = node.create("base", memory_mib=256, nested=True)
    node.call("POST", f"/v1/sandboxes/{nested}/pause", json={})
    node.stop(keep=True)
    node.env["LLM4AGENTS_NESTED"] = "refuse"
    node.start()
    of = f"/v1/sandboxes/{nested}"
    for path, body in (
        ("/v1/sandboxes", {"template": "base", "nested": True}),
        ("/v1/templates/base/build", {"nested": True}),
        (f"{of}/resume", {}),
        (f"{of}/resume", {"cold": True}),
        (f"{of}/exec", {"command": "true"}),
        (f"{of}/fork", {}),
    ):
        answer = node.http.post(path, json=body)
        assert "LLM4AGENTS_NESTED=refuse" in answer.text and answer.status_code >= 400, (path, answer.text)
    assert node.get(nested)["state"] == "paused" and not node.machines()
    del node.env["LLM4AGENTS_NESTED"]
    node.stop(keep=True)
    node.start()
    assert node.exec(nested, "echo on")["stdout"] == "on\n", "none the worse"
    node.call("DELETE", of)
