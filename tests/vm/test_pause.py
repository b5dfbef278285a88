"""Pause, resume, fork and snapshot of real sandboxes: nothing is lost, nothing is repeated, nothing is shared."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.barrier.needles import in_files
from tests.support import Node, eventually, lines, unb64

pytestmark = pytest.mark.vm


def post(node: Node, sandbox: str, act: str, **body: Any) -> dict[str, Any]:
    return dict(node.call("POST", f"/v1/sandboxes/{sandbox}/{act}", json=body))


def pause(node: Node, sandbox: str) -> dict[str, Any]:
    answer = post(node, sandbox, "pause")
    assert answer["state"] == "paused"
    return answer


def out(node: Node, sandbox: str, command: str, **more: Any) -> str:
    answer = node.exec(sandbox, command, **more)
    assert answer["exit_code"] == 0, answer
    return str(answer["stdout"]).strip()


def kill(node: Node, *sandboxes: str) -> None:
    for sandbox in sandboxes:
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")


@pytest.fixture
def sandbox(shared_node: Node) -> Any:
    made = shared_node.create("base")
    yield made
    kill(shared_node, made)


def test_twenty_cycles_lose_nothing_and_do_not_grow(shared_node: Node, sandbox: str) -> None:
    node = shared_node
    # In memory (tmpfs) and on disk, 8 MiB of random bytes each, and a process that counts.
    sums = out(
        node,
        sandbox,
        "head -c 8388608 /dev/urandom > /tmp/../dev/shm/memory; head -c 8388608 /dev/urandom > disk; "
        "sha256sum /dev/shm/memory disk; cd /; "
        "(while :; do echo $((i=i+1)) > /dev/shm/count; sleep 0.05; done) >/dev/null 2>&1 &",
    )
    sizes, counts = [], []
    for turn in range(20):
        sizes.append(pause(node, sandbox)["pause"]["pages_bytes"])
        # The next call resumes it.
        assert out(node, sandbox, "sha256sum /dev/shm/memory disk") == sums, turn
        # Empty while it is being written.
        counts.append(int(out(node, sandbox, "until c=$(cat /dev/shm/count); [ $c ]; do :; done; echo $c")))
    assert counts == sorted(counts) and counts[-1] > counts[0] > 0
    assert sizes[-1] < 2 * sizes[1], sizes
    assert [state["to_state"] for state in node.call("GET", f"/v1/sandboxes/{sandbox}/events")["data"]].count(
        "paused"
    ) == 20


def test_processes_files_cwd_interpreter_and_clock_come_back(shared_node: Node) -> None:
    node = shared_node
    sandbox = node.create("python", env={"TOLD": "at create"})
    assert (
        node.code(
            sandbox, "import os; os.chdir('/tmp'); f = open('open-file', 'w+'); f.write('before'); x = 41"
        )["error"]
        is None
    )
    pause(node, sandbox)
    assert sandbox not in node.machines()
    answer = node.code(
        sandbox,
        "x += 1; f.write(' after'); f.flush(); f.seek(0); print(os.getcwd(), x, f.read(), os.environ['TOLD'])",
    )
    assert answer["stdout"] == "/tmp 42 before after at create\n"
    assert out(node, sandbox, "echo $TOLD") == "at create"
    before = time.time()
    guest = float(node.code(sandbox, "import time; print(time.time())")["stdout"])
    assert before - 0.1 <= guest <= time.time() + 0.1
    kill(node, sandbox)


def test_a_flood_that_nobody_reads_and_random_numbers_are_neither_lost_nor_repeated(
    shared_node: Node, sandbox: str
) -> None:
    node = shared_node
    flood = node.call(
        "POST",
        f"/v1/sandboxes/{sandbox}/processes",
        json={
            "command": "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); echo line $i of a flood that nobody reads; done",
            "full": "block",
        },
    )["id"]
    draws = node.call(
        "POST",
        f"/v1/sandboxes/{sandbox}/processes",
        json={"command": "while :; do od -An -N8 -tx8 /dev/urandom; done", "keep_bytes": 4 << 20},
    )["id"]
    offset, text = 0, b""
    for _ in range(3):
        with node.http.stream(
            "GET",
            f"/v1/sandboxes/{sandbox}/processes/{flood}/output",
            params={"from": offset, "follow": True},
        ) as answer:
            for event in lines(answer):
                if event["type"] == "stdout":
                    assert event["offset"] == offset
                    data = unb64(event["data_b64"])
                    offset, text = offset + len(data), text + data
                if offset > len(text) or len(text) > 50_000 * (_ + 1):
                    break
        pause(node, sandbox)
        children = post(node, sandbox, "fork", count=2)["data"]
        post(node, sandbox, "resume")
        everyone = (sandbox, *(child["id"] for child in children))
        before = node.call("GET", f"/v1/sandboxes/{sandbox}/processes/{draws}")["start"]
        said = [_draws(node, each, draws, before) for each in everyone]
        kill(node, *everyone[1:])
        # What they drew when they were one is the same, what each drew since is its own.
        common = set.intersection(*said)
        own = [each - common for each in said]
        assert all(len(each) > 3 for each in own)
        assert sum(len(each) for each in own) == len(set.union(*own))
    while True:
        rest = _pieces(node, sandbox, flood, offset)
        for at, data in rest["pieces"]:
            assert at == offset
            offset, text = offset + len(data), text + data
        if not rest["running"] and not rest["pieces"]:
            break
    assert text == b"".join(b"line %d of a flood that nobody reads\n" % i for i in range(1, 30001))


def _pieces(node: Node, sandbox: str, process: str, offset: int) -> dict[str, Any]:
    answer = node.call(
        "GET", f"/v1/sandboxes/{sandbox}/processes/{process}/output", params={"from": offset, "wait_s": 1}
    )
    return {
        "running": answer["running"],
        "pieces": [(piece["offset"], unb64(piece["data_b64"])) for piece in answer["data"]],
    }


def _draws(node: Node, sandbox: str, process: str, offset: int) -> set[bytes]:
    """All that it has drawn, and at least ten draws more than when asked first."""
    text, at_first = b"", None
    while at_first is None or text.count(b"\n") < at_first + 10:
        for at, data in _pieces(node, sandbox, process, offset)["pieces"]:
            offset, text = at + len(data), text + data
        if at_first is None:
            at_first = text.count(b"\n")
    return set(text.rpartition(b"\n")[0].split())


def test_forks_of_a_running_one_are_machines_of_their_own(shared_node: Node) -> None:
    node = shared_node
    parent = node.create("base", metadata={"who": "me"}, env={"TOLD": "parent"})
    out(node, parent, "echo common > file; echo mem > /dev/shm/mem")
    children = [child["id"] for child in post(node, parent, "fork", count=3, metadata={"n": "1"})["data"]]
    assert len(set(children)) == 3
    everyone = [parent, *children]
    for each in everyone:
        out(node, each, f"echo {each} >> file; echo {each} > /dev/shm/own")
    for each in everyone:
        assert out(node, each, "cat file /dev/shm/own /dev/shm/mem; echo $TOLD; hostname") == (
            f"common\n{each}\n{each}\nmem\nparent\n{each.replace('_', '-')}"
        )
    info = node.get(children[0])
    assert info["parent"] == parent and info["metadata"] == {"who": "me", "n": "1"}
    draws = {
        out(node, each, "od -An -N16 -tx8 /dev/urandom; cat /proc/sys/kernel/random/uuid")
        for each in everyone
    }
    assert len(draws) == 4
    # Whoever goes, the others keep what they lie on; a fork of a fork too; and at the end no layer is left.
    kill(node, parent)
    grandchild = post(node, children[0], "fork")["data"][0]["id"]
    kill(node, children[0])
    pause(node, children[1])
    assert out(node, grandchild, "head -1 file; tail -1 file") == f"common\n{children[0]}"
    assert out(node, children[1], "head -1 file") == "common"
    kill(node, *children[1:], grandchild)
    assert not list((node.state / "layers").glob("*"))


def test_chains_are_compacted_and_read_the_same(shared_node: Node, sandbox: str) -> None:
    node = shared_node
    for turn in range(10):
        out(node, sandbox, f"echo {turn} >> log; head -c 100000 /dev/urandom > file-{turn}")
        kill(node, post(node, sandbox, "fork")["data"][0]["id"])
    sums = out(node, sandbox, "cat log file-* | sha256sum")
    pause(node, sandbox)
    eventually(lambda: not list((node.state / "layers").glob("*")))
    assert out(node, sandbox, "cat log file-* | sha256sum") == sums
    assert out(node, sandbox, "cat log").split() == [str(turn) for turn in range(10)]


def test_a_snapshot_is_a_template_without_the_environment(shared_node: Node) -> None:
    node = shared_node
    secret = "s3cret-" + hashlib.sha256(str(time.time()).encode()).hexdigest()
    shape = {"memory_mib": 256, "vcpus": 1}
    maker = node.create("base", env={"TOKEN": secret}, metadata={"a": "b"}, **shape)
    out(node, maker, "echo warmed > file; echo in memory > /dev/shm/mem; test -n $TOKEN")
    template = post(node, maker, "snapshot", name="mine-warm", description="warmed")
    try:
        assert template["name"] == "mine-warm"
        refused = node.http.post(f"/v1/sandboxes/{maker}/snapshot", json={"name": "mine-warm"})
        assert refused.status_code == 409
        assert node.http.post(f"/v1/sandboxes/{maker}/snapshot", json={"name": "python"}).status_code == 409
        kill(node, maker)
        made = node.create("mine-warm", **shape)
        assert out(node, made, "cat file /dev/shm/mem; echo [$TOKEN]") == "warmed\nin memory\n[]"
        assert node.get(made)["metadata"] == {}
        # It is used: it is not removed under those who lie on it.
        refused = node.http.delete("/v1/templates/mine-warm")
        assert refused.status_code == 409 and made in refused.text
        child = post(node, made, "fork")["data"][0]["id"]
        pause(node, made)
        assert out(node, child, "cat file") == out(node, made, "cat file") == "warmed"
        kill(node, made, child)
        assert not in_files(node.cache / "templates" / "mine-warm", {"secret": secret.encode()})
    finally:
        node.call("DELETE", "/v1/templates/mine-warm")


def test_its_time_pauses_it_and_a_call_brings_it_back(shared_node: Node) -> None:
    node = shared_node
    sandbox = node.create("base", timeout_s=1, on_timeout="pause")
    out(node, sandbox, "echo kept > /dev/shm/mem")
    began = time.monotonic()
    eventually(lambda: node.get(sandbox)["state"] == "paused")
    assert time.monotonic() - began >= 0.9
    assert node.get(sandbox)["reason"] == "idle_timeout"
    assert out(node, sandbox, "cat /dev/shm/mem") == "kept"
    node.call("POST", f"/v1/sandboxes/{sandbox}/timeout", json={"auto_resume": False})
    eventually(lambda: node.get(sandbox)["state"] == "paused")
    refused = node.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["true"]})
    assert refused.status_code == 409 and "resume" in refused.text
    node.call("POST", f"/v1/sandboxes/{sandbox}/timeout", json={"keep_s": 0.5})
    assert "kept paused" in node.ended(sandbox)["reason"]


def test_cold_resume_keeps_files(shared_node: Node) -> None:
    node = shared_node
    sandbox = node.create("python", env={"TOLD": "x"})
    out(node, sandbox, "echo on disk > file; echo gone > /dev/shm/mem")
    pause(node, sandbox)
    pages = node.state / "sandboxes" / sandbox / "pause" / "pages"
    with pages.open("r+b") as file:  # a bit flips
        file.seek(pages.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    refused = node.http.post(f"/v1/sandboxes/{sandbox}/resume", json={})
    assert refused.status_code == 409, refused.text
    assert refused.json()["code"] == "corrupt_snapshot" and "--cold" in refused.json()["hint"]
    assert node.get(sandbox)["state"] == "paused"
    assert sandbox not in node.machines()
    assert post(node, sandbox, "resume", cold=True)["state"] == "running"
    again = node.http.post(f"/v1/sandboxes/{sandbox}/resume", json={"cold": True})
    assert again.status_code == 409 and "pause it first" in again.text
    assert out(node, sandbox, "cat file; echo $TOLD; ls /dev/shm") == "on disk\nx"
    assert node.code(sandbox, "print(6*7)")["stdout"] == "42\n"
    pause(node, sandbox)  # and it can be paused and resumed again
    assert out(node, sandbox, "cat file") == "on disk"
    kill(node, sandbox)


GOES_ON = "cd; echo first; until [ -e go ]; do sleep 0.1; done; echo second"


def test_calls_under_way_end_with_the_pause_and_their_process_goes_on(
    shared_node: Node, sandbox: str
) -> None:
    node = shared_node
    with node.http.stream(
        "POST",
        f"/v1/sandboxes/{sandbox}/exec",
        json={"command": GOES_ON, "stream": True, "timeout_s": 60},
    ) as answer:
        events = lines(answer)
        started = next(events)
        assert unb64(next(events)["data_b64"]) == b"first\n"
        with node.connect() as other:
            assert other.post(f"/v1/sandboxes/{sandbox}/pause", json={}).status_code == 200
        error = next(events)
    assert error["code"] == "sandbox_paused" and error["outcome"] == "unknown"
    assert error["details"]["process"] == started["id"] and error["details"]["offset"] == 6
    out(node, sandbox, "touch go")
    with node.http.stream(
        "GET",
        f"/v1/sandboxes/{sandbox}/processes/{started['id']}/output",
        params={"from": error["details"]["offset"], "follow": True},
    ) as answer:
        rest = list(lines(answer))
    assert b"".join(unb64(e["data_b64"]) for e in rest if e["type"] == "stdout") == b"second\n"
    assert rest[-1]["type"] == "exit" and rest[-1]["exit_code"] == 0


def test_fifty_callers_of_a_paused_sandbox_resume_it_once(shared_node: Node, sandbox: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    node = shared_node
    pause(node, sandbox)
    with node.connect() as client, ThreadPoolExecutor(50) as pool:

        def call(i: int) -> str:
            answer = client.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": f"echo {i}"})
            return str(answer.json()["stdout"])

        assert list(pool.map(call, range(50))) == [f"{i}\n" for i in range(50)]
    states = [event["to_state"] for event in node.call("GET", f"/v1/sandboxes/{sandbox}/events")["data"]]
    assert states.count("resuming") == 1


Make = Callable[..., Node]


def test_a_stopped_server_pauses_those_that_want_it(nodes: Make) -> None:
    node = nodes().start()
    sandbox = node.create("base", on_timeout="pause")
    out(node, sandbox, "echo kept > /dev/shm/mem")
    # Not its project's wish: what is above its quota is on disk all the same.
    node.call("PATCH", "/v1/projects/default", json={"quotas": {"disk_mib": 0}})
    node.stop()
    assert not node.processes()
    node.start()
    assert node.get(sandbox)["state"] == "paused"
    assert out(node, sandbox, "cat /dev/shm/mem") == "kept"
    kill(node, sandbox)


def test_a_disk_whose_header_its_monitor_has_changed_is_read_by_nobody(shared_node: Node) -> None:
    """It says that its data is in another file: qemu-img, as the server, would read whatever file is named there."""
    node = shared_node
    sandbox = node.create("base", memory_mib=256, vcpus=1)
    if node.get(sandbox)["vmm"] != "qemu":
        kill(node, sandbox)
        pytest.skip("says nothing of Firecracker, whose disks have no header")
    pause(node, sandbox)
    (top,) = (node.state / "sandboxes" / sandbox).glob("*.qcow2")
    with top.open("r+b") as file:
        file.seek(79)
        features = file.read(1)[0]
        file.seek(79)
        file.write(bytes([features | 4]))
    refused = node.http.post(f"/v1/sandboxes/{sandbox}/snapshot", json={"name": "mine-poisoned"})
    assert (refused.status_code, refused.json()["code"]) == (409, "corrupt_snapshot"), refused.text
    refused = node.http.post(f"/v1/sandboxes/{sandbox}/resume", json={})
    assert (refused.status_code, "header" in refused.text) == (400, True), refused.text
    assert node.get(sandbox)["state"] == "paused"
    kill(node, sandbox)
