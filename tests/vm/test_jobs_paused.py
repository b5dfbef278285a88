"""Jobs and usage of sandboxes that are paused and resumed."""

from __future__ import annotations

import contextlib
import sqlite3
import time

import pytest

from tests.support import Node, eventually
from tests.vm.test_jobs import add, job_of, output, run_in, runs_of
from tests.vm.test_observe import life_ns, rows

pytestmark = pytest.mark.vm


def pause(node: Node, sandbox: str) -> None:
    assert node.call("POST", f"/v1/sandboxes/{sandbox}/pause", json={})["state"] == "paused"


def resume(node: Node, sandbox: str) -> None:
    assert node.call("POST", f"/v1/sandboxes/{sandbox}/resume", json={})["state"] == "running"


def test_a_run_sleeps_with_its_sandbox_and_goes_on(node: Node) -> None:
    sandbox = node.create()
    job = add(node, sandbox, command="echo begun >> ran; echo one; sleep 3; echo two; exit 6")
    run_in(node, job, "running")
    assert output(node, job, wait_s=10) == b"one\n"
    pause(node, sandbox)
    assert run_in(node, job, "running")["sequence"] == 1
    time.sleep(3.5)  # longer than the command would have taken: that nothing happens is what is seen
    assert node.get(sandbox)["state"] == "paused", "a running job wakes nobody"
    node.kill9()
    node.start()
    assert run_in(node, job, "running")
    resume(node, sandbox)
    assert run_in(node, job, "done")["result"]["exit_code"] == 6
    assert output(node, job) == b"one\ntwo\n"
    assert node.exec(sandbox, "cat ran")["stdout"] == "begun\n"


def test_a_schedule_wakes_its_sandbox_also_over_a_killed_server(node: Node) -> None:
    sandbox = node.create()
    job = add(node, sandbox, command="echo awake", at=time.time() + 4)
    done = add(node, sandbox, command="echo kept")
    run_in(node, done, "done")
    pause(node, sandbox)
    assert output(node, done) == b"kept\n", "of a run that has ended the output is in the store"
    assert node.get(sandbox)["state"] == "paused"
    node.kill9()
    node.start()
    run = run_in(node, job, "done")
    assert run["started_at"] >= job["next_at"] and output(node, job) == b"awake\n"
    assert node.get(sandbox)["state"] == "running"


def test_on_exit_pause(node: Node) -> None:
    sandbox = node.create()
    job = add(node, sandbox, command="echo done", on_exit="pause", every_s=60)
    run_in(node, job, "done")
    assert node.get(sandbox)["state"] == "paused" and node.get(sandbox)["reason"] == f"{job['id']} ended"
    assert job_of(node, job)["state"] == "waiting"
    node.call("POST", f"/v1/sandboxes/{sandbox}/jobs/{job['id']}/run")
    eventually(lambda: [run["state"] for run in runs_of(node, job)] == ["done", "done"], 30)
    assert node.get(sandbox)["state"] == "paused"
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    eventually(lambda: job_of(node, job)["state"] == "ended")


def test_a_run_of_a_paused_sandbox_is_cancelled_when_it_is_resumed(node: Node) -> None:
    sandbox = node.create()
    job = add(node, sandbox, command="sleep 5; echo never > never")
    run_in(node, job, "running")
    pause(node, sandbox)
    node.call("DELETE", f"/v1/sandboxes/{sandbox}/jobs/{job['id']}")
    assert job_of(node, job)["state"] == "cancelled"
    resume(node, sandbox)
    run_in(node, job, "cancelled")
    assert node.exec(sandbox, "pgrep -x sleep; ls")["stdout"] == ""


def test_a_sandbox_that_may_not_be_woken(node: Node) -> None:
    sandbox = node.create(auto_resume=False)
    job = add(node, sandbox, command="true", at=time.time() + 1.5)
    pause(node, sandbox)
    assert "is not resumed by itself" in run_in(node, job, "failed")["result"]["reason"]
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_usage_of_pauses_is_their_length_to_the_nanosecond(node: Node) -> None:
    sandbox = node.create()
    for _ in range(2):
        pause(node, sandbox)
        time.sleep(0.3)  # a pause of some length, which is what is measured
        resume(node, sandbox)
        node.kill9()
        node.start()
    pause(node, sandbox)
    node.kill9()
    node.start()
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    used: dict[str, int] = {}
    for row in rows(node, sandbox):
        used[row["state"]] = used.get(row["state"], 0) + row["duration_ns"]
    assert used == {state: life_ns(node, sandbox, state) for state in ("running", "paused")}
    assert used["paused"] > 0.6e9
    assert all(row["disk_bytes"] > 0 for row in rows(node, sandbox))
    text = node.http.get("/metrics").text
    assert "llm4agents_sandboxes" in text


def test_an_end_of_a_paused_sandbox_that_a_dead_server_has_begun_is_finished(node: Node) -> None:
    sandbox = node.create()
    job = add(node, sandbox, command="true", at=time.time() + 1000)
    pause(node, sandbox)
    node.kill9()
    # What the server writes before it removes anything.
    with contextlib.closing(sqlite3.connect(node.state / "store.db")) as connection, connection:
        connection.execute("UPDATE sandboxes SET ending = 'killed by request'")
    node.start()
    row = node.get(sandbox)
    assert (row["state"], row["reason"]) == ("killed", "killed by request")
    assert job_of(node, job)["state"] == "ended"
    assert not (node.state / "sandboxes" / sandbox).exists()
