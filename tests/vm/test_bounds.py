"""What a create may bound: the disk (by the host too), processes, the rate of output. Pooled clones alike."""

from __future__ import annotations

import time
from typing import Any

import pytest

from llm4agents.engine.bounds import file_bytes_max
from tests.support import Node, eventually

pytestmark = pytest.mark.vm
DISK_MIB = 96


@pytest.fixture(params=["on demand", "pooled"])
def make(request: pytest.FixtureRequest, shared_node: Node) -> Any:
    """Creates a sandbox with bounds, from a pool or not; it is ended afterwards."""
    made: list[str] = []

    def create(**wish: Any) -> str:
        waiting = set()
        if request.param == "pooled":
            shared_node.call("PUT", "/v1/pool", json={"data": [{"template": "base", "wanted": 1}]})
            eventually(lambda: shared_node.call("GET", "/v1/pool")["data"][0]["ready"] == 1, 60)
            waiting = set(shared_node.machines())
        made.append(shared_node.create(**wish))
        assert not waiting or made[-1] in waiting
        return made[-1]

    yield create
    for box in made:
        shared_node.call("DELETE", f"/v1/sandboxes/{box}")
    shared_node.call("PUT", "/v1/pool", json={"data": [{"template": "base", "wanted": 0}]})


def test_a_full_disk_is_an_error_and_room_that_was_freed_can_be_used(make: Any, shared_node: Node) -> None:
    box = make(disk_mib=DISK_MIB)
    assert shared_node.get(box)["limits"] == {"disk_mib": DISK_MIB}
    for _ in range(4):  # more than the host's bound altogether: what is removed is given back
        full = shared_node.exec(box, "dd if=/dev/zero of=big bs=1M count=200; rm big; sync")
        assert "No space left" in full["stderr"]
        assert int(full["stderr"].split("records out")[0].split("+")[-2].split()[-1]) >= DISK_MIB * 0.9
    assert shared_node.exec(box, "echo fine > file && cat file")["stdout"] == "fine\n"


def test_a_guest_that_lifts_its_own_bound_meets_the_hosts_and_nothing_stops(
    make: Any, shared_node: Node
) -> None:
    box = make(disk_mib=DISK_MIB)
    lift = "echo 4096 > /sys/fs/ext4/vdb/reserved_clusters; "
    write = "dd if=/dev/urandom of=/home/user/big bs=1M count=400 conv=fsync"
    said = shared_node.exec(box, lift + write, user="root", timeout_s=120)
    # As what comes first to the guest's notice: the write that failed, or the journal that was ended for it.
    assert said["exit_code"] != 0 and ("rror" in said["stderr"] or "Read-only" in said["stderr"]), said
    overlay = shared_node.state / "sandboxes" / box / "upper.qcow2"
    assert DISK_MIB << 20 < overlay.stat().st_size <= file_bytes_max(DISK_MIB)
    assert shared_node.exec(box, ["echo", "alive"])["stdout"] == "alive\n", "it stands not still"
    assert shared_node.get(box)["state"] == "running"


def test_processes_are_bounded(make: Any, shared_node: Node) -> None:
    box = make(pids=24)
    many = shared_node.exec(box, "for i in $(seq 60); do sleep 30 & done; wait", timeout_s=4)
    assert "fork" in many["stderr"].lower() or "resource" in many["stderr"].lower()
    assert shared_node.exec(box, ["echo", "alive"])["stdout"] == "alive\n"


def test_output_is_slowed_down_and_not_cut(make: Any, shared_node: Node) -> None:
    box = make(output_bytes_per_s=100_000)
    began = time.monotonic()
    said = shared_node.exec(box, "head -c 300000 /dev/zero | tr '\\0' x")
    assert len(said["stdout"]) == 300_000 and time.monotonic() - began > 1.5


def test_bounds_that_cannot_be_are_refused(shared_node: Node) -> None:
    for wish in ({"disk_mib": 10}, {"disk_mib": 6000}, {"pids": 1}, {"output_bytes_per_s": 1}):
        answer = shared_node.http.post("/v1/sandboxes", json={"template": "base", **wish})
        assert answer.status_code == 400, answer.text
