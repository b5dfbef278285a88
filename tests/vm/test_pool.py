"""Machines kept ready: what a create gets from them, when they are made anew, what they are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm4agents import Sandbox
from llm4agents.sdk._sync.client import Client
from tests.support import Node, eventually, sdk_of

pytestmark = pytest.mark.vm


def keep(node: Node, wanted: int, template: str = "base", **more: Any) -> None:
    node.call("PUT", "/v1/pool", json={"data": [{"template": template, "wanted": wanted, **more}]})


def shelf(node: Node) -> dict[str, Any]:
    found = node.call("GET", "/v1/pool")["data"]
    return dict(found[0]) if found else {}


def filled(node: Node, wanted: int) -> set[str]:
    """The ids of the machines that wait, once they all do."""
    eventually(lambda: shelf(node).get("ready") == wanted, 240)
    return set(node.machines())


def test_a_create_gets_one_that_waits_with_all_it_asked_for(node: Node) -> None:
    keep(node, 2)
    waiting = filled(node, 2)
    assert node.call("GET", "/v1/server")["sandboxes"] == 0, "they are no sandboxes"
    assert node.call("GET", "/v1/sandboxes")["data"] == []
    box = node.create(env={"WHO": "me"}, metadata={"a": "b"}, timeout_s=77, life_s=99)
    assert box in waiting
    row = node.get(box)
    assert row["metadata"] == {"a": "b"} and row["idle_timeout_s"] == 77 and row["state"] == "running"
    assert row["ends_at"] - row["created_at"] == pytest.approx(99)
    before = time.time()
    said = node.exec(box, "echo $WHO $HOME; hostname; cat /run/llm4agents/boot-id; date +%s")[
        "stdout"
    ].split()
    assert said[:3] == ["me", "/home/user", box.replace("_", "-")]
    assert said[3].replace("-", "") == row["boot_id"]
    assert before - 2 < int(said[4]) < time.time() + 1
    events = node.call("GET", f"/v1/sandboxes/{box}/events")["data"]
    assert [event["to_state"] for event in events] == ["running"]
    assert filled(node, 2) - waiting, "another one has been made in its place"
    node.call("DELETE", f"/v1/sandboxes/{box}")
    assert node.ended(box)["state"] == "killed"
    keep(node, 0)
    eventually(lambda: not node.machines())
    assert shelf(node) == {}


def test_two_that_waited_share_no_number_no_name_and_no_file(node: Node) -> None:
    keep(node, 2)
    waiting = filled(node, 2)
    boxes = [node.create() for _ in range(2)]
    assert set(boxes) <= waiting
    look = "head -c 16 /dev/urandom | od -An -tx1; cat /etc/machine-id; hostname; ls -A ~ | wc -l"
    said = [node.exec(box, look)["stdout"].splitlines() for box in boxes]
    for mine, other in zip(said[0][:3], said[1][:3], strict=True):
        assert mine != other
    assert said[0][3] == said[1][3]


def test_an_environment_is_there_for_the_very_first_command(node: Node) -> None:
    keep(node, 3)
    filled(node, 3)
    for number in range(3):
        box = node.create(env={"N": str(number)})
        assert node.exec(box, ["printenv", "N"])["stdout"] == f"{number}\n"


def test_what_waits_is_of_the_template_as_it_is_now(nodes: Callable[..., Node], own_cache: Path) -> None:
    node = nodes(cache=own_cache, LLM4AGENTS_POOL="base=1").start()
    old = filled(node, 1)
    # The same template built anew, as another build in the same place.
    node.http.post("/v1/templates/base/build", json={"force": True})
    eventually(lambda: not (old & set(node.machines())), 30)
    assert filled(node, 1)
    node.call("DELETE", "/v1/templates/base")
    eventually(lambda: not node.machines(), 30)
    assert shelf(node)["ready"] == 0, "nobody builds again what somebody has removed"
    box = node.create()  # but one who asks for it does, and then the pool has it again
    assert box not in old
    filled(node, 1)


def test_one_that_dies_is_replaced_and_never_handed_out(node: Node) -> None:
    keep(node, 1)
    (name,) = filled(node, 1)
    os.kill(node.vmm(name), signal.SIGKILL)
    eventually(lambda: name not in node.machines() and shelf(node)["ready"] == 1, 60)
    box = node.create()
    assert box != name and node.exec(box, ["true"])["exit_code"] == 0


def test_a_pool_gives_way_to_who_asks_for_a_sandbox_and_keeps_no_server_alive(
    nodes: Callable[..., Node],
) -> None:
    # Room for two machines at most: 1.0 × (1024 + 128) + 40 MiB each.
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) // 1024
    node = nodes(
        LLM4AGENTS_POOL="base=2",
        LLM4AGENTS_MEMORY_COMMIT="1",
        LLM4AGENTS_MEMORY_RESERVE_MIB=str(total - 2800),
        LLM4AGENTS_SERVER_IDLE_EXIT_S="3",
    ).start()
    filled(node, 2)
    boxes = [node.create(memory_mib=1024), node.create(memory_mib=1024)]
    refused = node.http.post("/v1/sandboxes", json={"template": "base"})
    assert refused.status_code == 503 and refused.json()["code"] == "capacity"
    assert "full" in refused.json()["detail"] and refused.json()["details"]["free_bytes"] >= 0
    assert node.call("GET", "/v1/pool")["capacity"]["free_bytes"] < 1 << 30
    node.call("DELETE", f"/v1/sandboxes/{boxes.pop()}")
    boxes.append(node.create(wait_s=20))
    waited = node.http.post("/v1/sandboxes", json={"template": "base", "wait_s": 0.2})
    assert waited.status_code == 503 and "waited 0.2 s" in waited.json()["detail"]
    for box in boxes:
        node.call("DELETE", f"/v1/sandboxes/{box}")
    process = node.process
    assert process is not None
    eventually(lambda: process.poll() is not None, 30)  # idle: the pool ends with it
    assert not node.processes()


def test_the_sdk_and_the_command_line_keep_one_too(node: Node) -> None:
    with sdk_of(node):
        client = Client()
        assert client.set_pool("base", 1)["data"][0]["wanted"] == 1
        (name,) = filled(node, 1)
        with Sandbox("base", disk_mib=100, pids=60, output_rate=1_000_000, wait=5) as box:
            assert box.id == name
            assert box.info().limits == {"disk_mib": 100, "pids": 60, "output_bytes_per_s": 1_000_000}
            assert box.exec("echo here").stdout == "here\n"
        command = [str(Path(sys.executable).with_name("llm4agents")), "pool", "base", "0", "--json"]
        said = subprocess.run(command, env=node.env, check=True, capture_output=True, text=True).stdout
        assert json.loads(said)["data"][0]["wanted"] == 0
    eventually(lambda: not node.machines())


def test_what_cannot_be_kept_is_refused(node: Node) -> None:
    for one, status in (
        ({"template": "nope", "wanted": 1}, 404),
        ({"template": "base", "wanted": 1, "memory_mib": 100}, 400),
        ({"template": "base", "wanted": 257}, 400),
        ({"template": "base", "wanted": -1}, 400),
    ):
        answer = node.http.put("/v1/pool", json={"data": [one]})
        assert answer.status_code == status, answer.text
    assert node.call("GET", "/v1/pool")["data"] == []


def test_a_first_cell_in_a_pooled_interpreter_is_like_any_first_cell(node: Node) -> None:
    keep(node, 1, "python")
    (name,) = filled(node, 1)
    box = node.create("python", env={"WHO": "me"})
    assert box == name
    first = node.code(
        box, "import os; print(os.environ['WHO']); _ = [n for n in dir() if n[0] != '_']; sorted(_)"
    )
    assert first["stdout"] == "me\n" and first["execution_count"] == 1
    assert "print" not in str(first["results"])


def test_a_pooled_clone_of_a_snapshot_has_all_that_was_in_it(node: Node) -> None:
    maker = node.create("python")
    node.code(maker, "x = 41")
    node.call("POST", f"/v1/sandboxes/{maker}/snapshot", json={"name": "pool-mine"})
    try:
        node.call("DELETE", f"/v1/sandboxes/{maker}")
        keep(node, 1, "pool-mine")
        (name,) = filled(node, 1)
        box = node.create("pool-mine")
        assert box == name
        said = node.code(box, "x + 1")
        assert said["results"][0]["data"]["text/plain"] == "42" and said["execution_count"] == 2
        node.call("DELETE", f"/v1/sandboxes/{box}")
        keep(node, 0, "pool-mine")
    finally:
        node.call("DELETE", "/v1/templates/pool-mine")
