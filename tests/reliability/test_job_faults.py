"""Jobs under a server that is killed at random moments: each runs once, and has its real end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support import Node, eventually, unb64

pytestmark = pytest.mark.vm

KILLS = 8


def test_a_server_killed_at_random_moments_of_jobs_runs_each_once(node: Node) -> None:
    sandbox = node.create()
    seed = int.from_bytes(os.urandom(4), "big")
    chance = random.Random(seed)
    made: list[str] = []
    path = f"/v1/sandboxes/{sandbox}/jobs"
    for number in range(KILLS):
        assert node.process is not None
        # From before the job is written down to after its end: it takes some 0.5 s.
        moment = chance.uniform(0.0, 0.7)
        server = node.process.pid
        timer = threading.Timer(moment, lambda pid=server: os.kill(pid, signal.SIGKILL))  # type: ignore[misc]
        timer.start()
        command = f"echo {number} >> ran; sleep 0.2; echo end {number}; exit {number}"
        with contextlib.suppress(httpx.TransportError):
            answer = node.http.post(path, json={"command": command})
            if answer.status_code == 201:
                made.append(answer.json()["id"])
        timer.join()
        node.kill9()
        node.start()
    jobs = node.call("GET", path)["data"]
    known = {job["id"] for job in jobs}
    assert known >= set(made), f"a job that was answered is never lost (seed {seed})"

    def settled() -> list[dict[str, Any]] | None:
        found = node.call("GET", path)["data"]
        return found if all(job["state"] == "ended" for job in found) else None

    for job in eventually(settled, 60):
        number = int(job["command"].split()[1])
        assert job["runs"] == 1
        assert job["last"]["state"] == "done", (seed, job)
        assert job["last"]["result"]["exit_code"] == number
        assert unb64(job["last"]["result"]["output_b64"]) == f"end {number}\n".encode()
    ran = node.exec(sandbox, "cat ran")["stdout"].split()
    assert sorted(ran) == sorted(job["command"].split()[1] for job in jobs), (
        f"once each, and no other (seed {seed})"
    )


def test_a_beat_missed_while_no_server_lived_is_one_run(nodes: Callable[..., Node]) -> None:
    node = nodes().start()
    sandbox = node.create()
    path = f"/v1/sandboxes/{sandbox}/jobs"
    job = node.call("POST", path, json={"command": "echo x >> beats", "every_s": 60})["id"]

    def ended(count: int) -> Any:
        runs = node.call("GET", f"{path}/{job}/runs")["data"]
        return len(runs) == count and runs[0]["state"] == "done"

    eventually(lambda: ended(1))
    node.kill9()
    # As if the server had been away for five beats: the row says so, as it would then.
    with contextlib.closing(sqlite3.connect(node.state / "store.db")) as connection, connection:
        connection.execute("UPDATE jobs SET next_at = next_at - 300")
        connection.execute(
            "UPDATE jobs SET spec = json_set(spec, '$.beat', json_extract(spec, '$.beat') - 360)"
        )
    node.start()
    eventually(lambda: ended(2))
    assert node.exec(sandbox, "wc -l < beats")["stdout"].strip() == "2"
    found = node.call("GET", f"{path}/{job}")
    assert found["state"] == "waiting" and found["runs"] == 2
