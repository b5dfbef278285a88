"""A server that dies with a pool leaves no orphan, and its successor fills the pool anew."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from llm4agents.vmm.shim import DEADLINE
from tests.support import Node, eventually

pytestmark = pytest.mark.vm


def ready(node: Node) -> int:
    return int(sum(one["ready"] for one in node.call("GET", "/v1/pool")["data"]))


def test_a_killed_server_leaves_no_pooled_machine_and_loses_no_sandbox(nodes: Callable[..., Node]) -> None:
    node = nodes(LLM4AGENTS_POOL="base=2").start()
    eventually(lambda: ready(node) == 2, 60)
    box = node.create(env={"A": "b"})
    eventually(lambda: ready(node) == 2, 60)
    pooled = set(node.machines()) - {box}
    for name in pooled:  # a host without any further server ends them by itself
        assert 0 < float((node.run / "vm" / name / DEADLINE).read_text().split()[0]) - time.time() < 180
    node.kill9()
    node.start()
    assert not pooled & set(node.machines()), "the next server ends what has no row before it listens"
    assert not [name for name in pooled if (node.state / "sandboxes" / name).exists()]
    assert node.exec(box, ["printenv", "A"])["stdout"] == "b\n", "taken from the pool, and taken over"
    eventually(lambda: ready(node) == 2, 60)


def test_a_server_killed_while_it_fills_its_pool_leaves_no_orphan(nodes: Callable[..., Node]) -> None:
    node = nodes(LLM4AGENTS_POOL="base=4")
    for delay_s in (0.1, 0.25, 0.4):
        node.start()
        end = time.monotonic() + delay_s
        eventually(lambda end=end: time.monotonic() > end)
        node.kill9()
    node.env["LLM4AGENTS_POOL"] = ""
    node.start()
    assert not node.processes() and not list((node.state / "sandboxes").iterdir())
    node.create()


def test_a_server_told_to_keep_its_sandboxes_keeps_no_pool(nodes: Callable[..., Node]) -> None:
    node = nodes(LLM4AGENTS_POOL="base=1").start()
    eventually(lambda: ready(node) == 1, 60)
    box = node.create()
    node.stop(keep=True)
    assert set(node.machines()) == {box}
    node.start()
    assert node.exec(box, ["true"])["exit_code"] == 0
