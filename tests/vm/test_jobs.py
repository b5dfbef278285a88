"""Jobs in real sandboxes: started and left, scheduled, told, over killed servers and the ends of sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from llm4agents import (
    AsyncObserver,
    AsyncSandbox,
    ConflictError,
    NotFoundError,
    Observer,
    Sandbox,
    TimedOutError,
)
from tests.support import Node, eventually, sdk_of, unb64

pytestmark = pytest.mark.vm

Make = Callable[..., Node]


def add(node: Node, sandbox: str, **spec: Any) -> dict[str, Any]:
    what = spec if {"argv", "command", "code"} & set(spec) else {"command": "echo done", **spec}
    return dict(node.call("POST", f"/v1/sandboxes/{sandbox}/jobs", json=what))


def job_of(node: Node, job: dict[str, Any]) -> dict[str, Any]:
    return dict(node.call("GET", f"/v1/sandboxes/{job['sandbox']}/jobs/{job['id']}"))


def runs_of(node: Node, job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(node.call("GET", f"/v1/sandboxes/{job['sandbox']}/jobs/{job['id']}/runs")["data"])


def run_in(node: Node, job: dict[str, Any], *states: str, timeout_s: float = 20) -> dict[str, Any]:
    """Its newest run, once it is in one of `states`."""

    def seen() -> dict[str, Any] | None:
        found = runs_of(node, job)
        return found[0] if found and found[0]["state"] in states else None

    return dict(eventually(seen, timeout_s))


def output(node: Node, job: dict[str, Any], **query: Any) -> bytes:
    path = f"/v1/sandboxes/{job['sandbox']}/jobs/{job['id']}/output"
    return unb64(node.call("GET", path, params=query)["data_b64"])


@pytest.fixture
def hook() -> Iterator[tuple[str, list[tuple[dict[str, str], bytes]], list[int]]]:
    """A URL that answers with the statuses in the list (then 200), and what it was told."""
    heard: list[tuple[dict[str, str], bytes]] = []
    answers: list[int] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            heard.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", heard, answers
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_job_runs_and_its_result_and_output_stay(shared_node: Node) -> None:
    node, sandbox = shared_node, shared_node.create()
    job = add(
        node, sandbox, command="echo out; echo err >&2; pwd; echo $A; exit 3", env={"A": "b c"}, cwd="/tmp"
    )
    assert job["state"] in ("waiting", "running") and "webhook_secret" not in job
    run = run_in(node, job, "done")
    assert run["result"]["exit_code"] == 3 and not run["result"]["timed_out"]
    assert sorted(output(node, job).splitlines()) == [b"/tmp", b"b c", b"err", b"out"]
    assert job_of(node, job)["state"] == "ended"
    assert run["process"] == f"{job['id']}.1"
    assert run["due_at"] <= run["started_at"] <= run["ended_at"]
    processes = node.call("GET", f"/v1/sandboxes/{sandbox}/processes")["data"]
    assert [p["id"] for p in processes] == [], "a run that is recorded is forgotten by the guest"
    listed = node.call("GET", "/v1/jobs", params={"state": "ended"})["data"]
    assert job["id"] in [found["id"] for found in listed]
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_output_is_read_while_it_runs_and_the_end_of_much_is_kept(shared_node: Node) -> None:
    node, sandbox = shared_node, shared_node.create()
    job = add(node, sandbox, command="echo begun; read x < <(sleep 60); echo no")
    run_in(node, job, "running")
    assert output(node, job, wait_s=10) == b"begun\n"
    node.call("DELETE", f"/v1/sandboxes/{sandbox}/jobs/{job['id']}")
    assert run_in(node, job, "cancelled")["result"]["signal"] == 9
    assert job_of(node, job)["state"] == "cancelled"
    assert node.exec(sandbox, "pgrep -x sleep")["exit_code"] == 1
    much = add(node, sandbox, command="seq 1 50000; echo last")
    run = run_in(node, much, "done")
    whole = "".join(f"{n}\n" for n in range(1, 50001)).encode() + b"last\n"
    assert run["result"]["output_end"] == len(whole)
    assert output(node, much) == whole[-65536:]
    assert output(node, much, **{"from": len(whole) - 5}) == b"last\n"
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_ends_that_are_no_exit_codes(shared_node: Node) -> None:
    node, sandbox = shared_node, shared_node.create()
    slow = add(node, sandbox, command="sleep 60 & sleep 60", timeout_s=0.3)
    wrong = add(node, sandbox, argv=["/no/such/program"])
    nowhere = add(node, sandbox, command="true", cwd="/no/such/directory")
    assert run_in(node, slow, "done")["result"]["timed_out"]
    assert "/no/such/program" in run_in(node, wrong, "failed")["result"]["reason"]
    assert "/no/such/directory" in run_in(node, nowhere, "failed")["result"]["reason"]
    assert {job_of(node, job)["state"] for job in (slow, wrong, nowhere)} == {"ended"}
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_a_job_holds_its_sandbox_open_until_it_ends(shared_node: Node) -> None:
    node, sandbox = shared_node, shared_node.create(timeout_s=1.5)
    job = add(node, sandbox, command="sleep 4; echo whole")
    run = run_in(node, job, "done")
    assert run["result"]["exit_code"] == 0 and output(node, job) == b"whole\n"
    assert node.ended(sandbox)["reason"] == "idle_timeout"


def test_on_exit_kill_and_the_jobs_of_a_sandbox_that_has_ended(shared_node: Node) -> None:
    node, sandbox = shared_node, shared_node.create()
    later = add(node, sandbox, at=time.time() + 1000)
    job = add(node, sandbox, command="echo bye", on_exit="kill")
    assert node.ended(sandbox)["reason"] == f"{job['id']} ended"
    assert run_in(node, job, "done")["result"]["exit_code"] == 0
    assert output(node, job) == b"bye\n"
    eventually(lambda: job_of(node, later)["state"] == "ended")
    refused = node.http.post(f"/v1/sandboxes/{sandbox}/jobs", json={"command": "true"})
    assert refused.status_code == 409 and "has ended" in refused.text


def test_a_run_whose_machine_goes_is_lost(shared_node: Node) -> None:
    node, sandbox = shared_node, shared_node.create()
    job = add(node, sandbox, command="sleep 60", every_s=60)
    run_in(node, job, "running")
    os.kill(node.vmm(sandbox), signal.SIGKILL)
    run = run_in(node, job, "lost")
    assert "signal 9" in run["result"]["reason"]
    assert job_of(node, job)["state"] == "ended"


def test_schedules(shared_node: Node) -> None:
    node, sandbox = shared_node, shared_node.create()
    soon = time.time() + 1.5
    at = add(node, sandbox, at=soon)
    beat = add(node, sandbox, every_s=60)
    assert at["next_at"] == soon
    run = run_in(node, at, "done")
    assert soon <= run["started_at"] < soon + 5
    run_in(node, beat, "done")
    waiting = job_of(node, beat)
    assert waiting["state"] == "waiting" and 50 < waiting["next_at"] - time.time() <= 60
    node.call("POST", f"/v1/sandboxes/{sandbox}/jobs/{beat['id']}/run")
    eventually(lambda: [run["state"] for run in runs_of(node, beat)] == ["done", "done"])
    assert job_of(node, beat)["next_at"] == waiting["next_at"], "its rhythm stays"
    again = node.http.post(f"/v1/sandboxes/{sandbox}/jobs/{at['id']}/run")
    assert again.status_code == 409
    node.call("DELETE", f"/v1/sandboxes/{sandbox}/jobs/{beat['id']}")
    assert job_of(node, beat)["state"] == "cancelled"
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "one of argv"),
        ({"argv": ["true"], "command": "true"}, "one of argv"),
        ({"argv": []}, "nothing to run"),
        ({"command": "true", "every_s": 5}, "every_s"),
        ({"command": "true", "at": "tomorrow"}, "RFC 3339"),
        ({"command": "true", "at": 1e15}, "milliseconds"),
        ({"command": "true", "on_exit": "explode"}, "on_exit"),
        ({"command": "true", "webhook": "ftp://example.com"}, "http"),
        ({"command": "true", "webhook": "http://169.254.169.254/"}, "link-local"),
        ({"code": "x" * 70_000}, "longer"),
        ({"command": "true", "nonsense": 1}, "nonsense"),
    ],
)
def test_bad_jobs_say_why(shared_node: Node, spec: dict[str, Any], words: str) -> None:
    sandbox = next(iter(shared_node.call("GET", "/v1/sandboxes", params={"state": "running"})["data"]), None)
    ident = sandbox["id"] if sandbox else shared_node.create()
    answer = shared_node.http.post(f"/v1/sandboxes/{ident}/jobs", json=spec)
    assert answer.status_code == 400 and words in answer.text, answer.text


def test_a_webhook_is_signed_tried_again_and_recorded(node: Node, hook: Any) -> None:
    url, heard, answers = hook
    answers.append(500)
    sandbox = node.create()
    job = add(node, sandbox, command="echo result", webhook=url)
    secret = job["webhook_secret"]
    assert "webhook_secret" not in job_of(node, job) and secret not in json.dumps(job_of(node, job))
    run = run_in(node, job, "done")
    # Written down, and not only heard: else its successor would count the first again.
    eventually(lambda: runs_of(node, job)[0]["told"]["tries"] == 1)
    assert len(heard) == 1
    node.kill9()  # between two tries
    node.start()
    eventually(lambda: len(heard) == 2)
    run = eventually(lambda: (found := runs_of(node, job)[0])["told"]["answered"] and found)
    assert run["told"]["tries"] == 2 and run["told"]["next_at"] is None
    assert [("error" in entry, entry.get("status")) for entry in run["told"]["last"]] == [
        (True, None),
        (False, 200),
    ]
    for headers, body in heard:
        message = json.loads(body)
        assert message["id"] == headers["x-llm4agents-delivery"] == run["process"]
        assert message["state"] == "done" and unb64(message["result"]["output_b64"]) == b"result\n"
        at, _, digest = headers["x-llm4agents-signature"].removeprefix("t=").partition(",v1=")
        assert hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest() == digest


def test_webhooks_can_be_off(nodes: Make) -> None:
    node = nodes(LLM4AGENTS_WEBHOOKS="off").start()
    sandbox = node.create()
    answer = node.http.post(
        f"/v1/sandboxes/{sandbox}/jobs", json={"command": "true", "webhook": "http://127.0.0.1/"}
    )
    assert answer.status_code == 400 and "LLM4AGENTS_WEBHOOKS" in answer.text


def test_a_server_killed_during_a_run_and_its_successor(node: Node) -> None:
    sandbox = node.create()
    job = add(node, sandbox, command="echo $$ >> pids; sleep 5; echo real end; exit 7")
    run_in(node, job, "running")
    node.kill9()
    node.start()
    assert run_in(node, job, "running", "done")["sequence"] == 1
    run = run_in(node, job, "done")
    assert run["result"]["exit_code"] == 7 and output(node, job) == b"real end\n"
    assert node.exec(sandbox, "wc -l < pids")["stdout"].strip() == "1", "it ran once"


def test_a_run_that_ended_while_no_server_lived_has_its_real_end(node: Node) -> None:
    sandbox = node.create()
    job = add(node, sandbox, command="sleep 2; echo real end; exit 7")
    beat = add(node, sandbox, command="echo beat >> beats; sleep 1", every_s=60)
    run_in(node, job, "running")
    run_in(node, beat, "done")
    node.kill9()
    time.sleep(2.5)  # its end, in a guest that nobody can ask: no server lives
    node.start()
    run = run_in(node, job, "done")
    assert run["result"]["exit_code"] == 7 and output(node, job) == b"real end\n"
    waiting = job_of(node, beat)
    assert (waiting["state"], waiting["runs"]) == ("waiting", 1), "its time has not come"


def test_the_machine_of_a_run_goes_while_no_server_lives(node: Node) -> None:
    sandbox = node.create()
    job = add(node, sandbox, command="sleep 60")
    run_in(node, job, "running")
    vmm = node.vmm(sandbox)
    node.kill9()
    os.kill(vmm, signal.SIGKILL)
    eventually(lambda: (node.run / "vm" / sandbox / "exit").exists())
    node.start()
    assert "signal 9" in run_in(node, job, "lost")["result"]["reason"]
    assert job_of(node, job)["state"] == "ended"


def test_a_server_that_is_stopped_keeps_runs_and_schedules(node: Node) -> None:
    sandbox = node.create()
    soon = add(node, sandbox, at=time.time() + 2)
    # Some of them run, and some are only just being started or attached to.
    jobs = [add(node, sandbox, command="sleep 3; echo real end") for _ in range(6)]
    run_in(node, jobs[0], "running")
    node.stop(keep=True)
    node.start()
    for job in jobs:
        run = run_in(node, job, "done")
        assert (run["result"]["exit_code"], output(node, job)) == (0, b"real end\n"), run
    run_in(node, soon, "done")


# -- SDK and command line -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")
def test_jobs_in_the_sdk(shared_node: Node) -> None:
    with sdk_of(shared_node), Sandbox("base") as sandbox:
        job = sandbox.jobs.start("echo $WHO; sleep 0.5; exit 4", env={"WHO": "me"}, cwd="~")
        run = job.wait(timeout=30)
        assert (run.state, run.exit_code, run.text, run.ok) == ("done", 4, "me\n", False)
        assert job.output() == b"me\n" and job.last_info.state == "ended"
        beat = sandbox.jobs.start(["true"], every=60)
        assert beat.wait(timeout=30).ok and beat.info().state == "waiting"
        beat.run_now()
        assert beat.wait(timeout=30).sequence == 2
        later = sandbox.jobs.start("true", at=datetime.now(UTC) + timedelta(hours=1))
        assert [found.id for found in sandbox.jobs.list("waiting")] == [later.id, beat.id]
        with pytest.raises(TimedOutError, match="it goes on"):
            later.wait(timeout=0.2)
        assert sandbox.jobs.cancel(later.id).state == "cancelled"
        with pytest.raises(ConflictError, match="before it ran"):
            later.wait(timeout=5)
        assert [run.sequence for run in sandbox.jobs.get(beat.id).runs()] == [2, 1]
        beat.cancel()
        with pytest.raises(NotFoundError):
            sandbox.jobs.get("job_nothing")
        with Observer() as observer:
            states = [event["to"] for event in observer.events(sandbox=sandbox.id)]
            assert states == ["creating", "running"]
            assert {row["id"] for row in observer.top()["data"]} >= {sandbox.id}
            assert list(observer.usage(sandbox.id)) == []
            assert next(observer.logs(sandbox.id))["event"] == "state"
    with sdk_of(shared_node), Observer() as observer:
        (row,) = observer.usage_totals(sandbox.id)
        assert row["state"] == "running" and row["duration_ns"] > 0


@pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")
def test_jobs_in_the_async_sdk(shared_node: Node) -> None:
    async def test() -> None:
        async with AsyncSandbox("base") as sandbox:
            job = await sandbox.jobs.start("echo there")
            assert (await job.wait(timeout=30)).text == "there\n"
            async with AsyncObserver() as observer:
                assert [e["to"] async for e in observer.events(sandbox=sandbox.id)] == ["creating", "running"]

    with sdk_of(shared_node):
        asyncio.run(test())


def test_events_are_followed_by_the_sdk_over_a_killed_server(node: Node) -> None:
    with sdk_of(node), Observer() as observer:
        told = observer.events(0, follow=True)
        sandbox = node.create()
        assert [next(told)["to"] for _ in range(2)] == ["creating", "running"]
        node.kill9()
        node.start()
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")
        assert next(told)["to"] == "killed"
        told.close()


def test_jobs_on_the_command_line(node: Node) -> None:
    sandbox = node.create()

    def cli(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm4agents", *words],
            env=node.env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        return done.stdout

    job = cli("job", "start", sandbox, "--", "echo hello; exit 5").strip()
    cli("job", "wait", sandbox, job, code=5)
    assert cli("job", "output", sandbox, job) == "hello\n"
    assert job in cli("job", "ls", sandbox)
    assert json.loads(cli("job", "show", sandbox, job, "--json"))["run_list"][0]["exit_code"] == 5
    beat = json.loads(cli("job", "start", sandbox, "--every", "60", "--json", "--", "true"))["id"]
    run_in(node, {"id": beat, "sandbox": sandbox}, "done")
    cli("job", "run", sandbox, beat)
    cli("job", "cancel", sandbox, beat)
    assert "running" in cli("top", "--once")
    assert json.loads(cli("top", "--once", "--json"))["data"][0]["id"] == sandbox
    assert "new → creating" in cli("events")
    assert "state" in cli("console", sandbox)
    cli("kill", sandbox)
    assert sandbox in cli("usage")
    (row,) = json.loads(cli("usage", sandbox, "--rows", "--json"))["usage"]
    assert row["state"] == "running"
    assert cli("job", "output", sandbox, job) == "hello\n", "also when its sandbox is gone"


def test_top_is_drawn_and_left_by_q(node: Node) -> None:
    sandbox = node.create()
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "llm4agents", "top", "--interval", "0.3"],
        env={**node.env, "TERM": "xterm"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    seen = b""
    while sandbox.encode() not in seen:
        seen += os.read(leader, 65_536)
    os.write(leader, b"q")
    with contextlib.suppress(OSError):
        while os.read(leader, 65_536):
            pass
    assert process.wait(20) == 0
    os.close(leader)
