"""Managed processes over HTTP, with a real microVM: they outlive who started them, and are read on from an offset."""

from __future__ import annotations

import base64
import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ..support import Node, eventually, lines, unb64

pytestmark = pytest.mark.vm


class Box:
    """A sandbox and calls on its processes."""

    def __init__(self, node: Node, sandbox: str) -> None:
        self.node, self.sandbox, self.path = node, sandbox, f"/v1/sandboxes/{sandbox}"

    def start(self, command: str, **more: Any) -> dict[str, Any]:
        return dict(self.node.call("POST", f"{self.path}/processes", json={"command": command, **more}))

    def get(self, process: str) -> dict[str, Any]:
        return dict(self.node.call("GET", f"{self.path}/processes/{process}"))

    def output(self, process: str, **query: Any) -> dict[str, Any]:
        return dict(self.node.call("GET", f"{self.path}/processes/{process}/output", params=query))

    def post(self, process: str, what: str, **body: Any) -> httpx.Response:
        return self.node.http.post(f"{self.path}/processes/{process}/{what}", json=body)

    def end(self, process: str) -> dict[str, Any]:
        return dict(self.node.call("DELETE", f"{self.path}/processes/{process}"))

    def ids(self) -> list[str]:
        return [process["id"] for process in self.node.call("GET", f"{self.path}/processes")["data"]]


@pytest.fixture(scope="module")
def box(shared_node: Node) -> Iterator[Box]:
    sandbox = shared_node.create()
    yield Box(shared_node, sandbox)
    shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def said(answer: dict[str, Any]) -> bytes:
    return b"".join(unb64(piece["data_b64"]) for piece in answer["data"])


def test_a_process_of_the_background_is_listed_read_and_told(box: Box) -> None:
    started = box.start(
        'echo up; while read x; do echo "got $x"; done; echo over >&2; exit 5', stdin=True, tag="web"
    )
    id = started["id"]
    assert (started["tag"], started["running"], started["tty"], started["user"]) == (
        "web",
        True,
        False,
        "user",
    )
    assert id.startswith("proc_") and id in box.ids()
    first = box.output(id, wait_s=20)
    assert said(first) == b"up\n" and first["running"] and first["offset"] == 3
    box.post(id, "stdin", data_b64=base64.b64encode(b"one\n").decode()).raise_for_status()
    assert said(box.output(id, **{"from": 3, "wait_s": 20})) == b"got one\n"
    box.post(id, "stdin", eof=True).raise_for_status()
    answer = box.node.http.get(f"{box.path}/processes/{id}/output", params={"follow": True, "from": 3})
    events = [json.loads(line) for line in answer.text.splitlines()]
    assert events[0]["type"] == "started" and events[0]["offset"] == 3 and events[0]["gap"] == 0
    assert b"".join(unb64(event["data_b64"]) for event in events[1:-1]) == b"got one\nover\n"
    assert [event["type"] for event in events[-2:]] == ["stderr", "exit"]
    assert (events[-1]["exit_code"], events[-1]["offset"]) == (5, 16)
    ended = box.end(id)
    assert (ended["running"], ended["exit_code"]) == (False, 5)
    assert id not in box.ids()
    assert box.node.http.get(f"{box.path}/processes/{id}").status_code == 404


def test_signals_by_name_and_number_and_an_end(box: Box) -> None:
    for name in ("TERM", "sigint", 9):
        id = box.start("exec sleep 100")["id"]
        box.post(id, "signal", signal=name).raise_for_status()
        ended = eventually(lambda id=id: (now := box.get(id)) and not now["running"] and now)
        number = name if isinstance(name, int) else getattr(signal, "SIG" + name.upper().removeprefix("SIG"))
        assert ended["signal"] == number
        assert box.post(id, "signal", signal=15).status_code == 409
        box.end(id)
    assert box.post("none", "signal", signal="NONSENSE").status_code == 400
    assert box.post("none", "signal", signal=15).status_code == 404
    id = box.start("sleep 100 & sleep 100 & wait")["id"]
    assert box.end(id)["signal"] == signal.SIGKILL
    assert box.node.exec(box.sandbox, "pgrep -x sleep || echo none")["stdout"] == "none\n"


def test_a_client_that_leaves_a_command_finds_it_again(box: Box) -> None:
    with box.node.connect() as client:
        body = {"command": "echo one; sleep 1; echo two", "stream": True, "id": "found-again", "tag": "t"}
        with client.stream("POST", f"{box.path}/exec", json=body) as answer:
            events = lines(answer)
            assert next(events)["id"] == "found-again"
            first = next(events)
            assert (first["offset"], unb64(first["data_b64"])) == (0, b"one\n")
    ended = eventually(lambda: not (now := box.get("found-again"))["running"] and now)
    assert (ended["exit_code"], ended["tag"]) == (0, "t")
    assert said(box.output("found-again", **{"from": 4})) == b"two\n"
    box.end("found-again")


def test_a_client_that_leaves_kills_when_it_has_asked_to(box: Box) -> None:
    for stream in (True, False):
        id = f"to-be-killed-{stream}"
        body = {"command": "sleep 99 & sleep 100", "stream": stream, "id": id, "on_disconnect": "kill"}
        with box.node.connect() as client:
            client.timeout = httpx.Timeout(2)
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{box.path}/exec", json=body)
        ended = eventually(lambda id=id: not (now := box.get(id))["running"] and now)
        assert ended["signal"] == signal.SIGKILL
        box.end(id)


def test_a_waited_for_command_is_forgotten_and_its_id_is_free(box: Box) -> None:
    for _ in range(3):
        assert box.node.exec(box.sandbox, "echo hi", id="again")["stdout"] == "hi\n"
    assert "again" not in box.ids()
    with (
        box.node.connect() as client,
        client.stream("POST", f"{box.path}/exec", json={"command": "true", "stream": True}) as answer,
    ):
        kinds = [event["type"] for event in lines(answer)]
    assert kinds == ["started", "exit"]
    assert box.ids() == []


def test_an_id_that_is_taken_is_a_conflict(box: Box) -> None:
    box.start("sleep 100", id="taken")
    again = box.node.http.post(f"{box.path}/processes", json={"command": "true", "id": "taken"})
    assert (again.status_code, again.json()["code"]) == (409, "conflict")
    bad = box.node.http.post(f"{box.path}/processes", json={"command": "true", "id": "no/good"})
    assert bad.status_code == 400
    wrong = box.node.http.get(f"{box.path}/processes/taken/output", params={"from": 99})
    assert wrong.status_code == 400
    box.end("taken")


def test_a_timeout_ends_the_group_while_nobody_watches(box: Box) -> None:
    id = box.start("sleep 100 & sleep 100; echo never", timeout_s=0.5)["id"]
    ended = eventually(lambda: not (now := box.get(id))["running"] and now)
    assert (ended["timed_out"], ended["signal"], ended["offset"]) == (True, signal.SIGKILL, 0)
    assert box.node.exec(box.sandbox, "pgrep -x sleep || echo none")["stdout"] == "none\n"
    box.end(id)


def test_a_child_that_keeps_stdout_open_does_not_hang_the_call(box: Box) -> None:
    done = box.node.exec(box.sandbox, "sleep 30 & echo out")
    assert (done["stdout"], done["exit_code"]) == ("out\n", 0)
    assert done["duration_ms"] < 10_000


def test_a_flood_nobody_reads_costs_the_server_nothing(box: Box) -> None:
    box.node.exec(box.sandbox, "true")
    before = box.node.rss()
    id = box.start("yes | head -c 30000000", full="drop")["id"]
    with (
        box.node.connect() as client,
        client.stream("GET", f"{box.path}/processes/{id}/output", params={"follow": True}) as answer,
    ):
        events = lines(answer)
        assert next(events)["type"] == "started"
        # This client reads no further: the process waits, and nothing piles up here or there.
        eventually(lambda: box.get(id)["attached"] == 1)
        for n in range(5):
            assert box.node.exec(box.sandbox, f"echo {n}")["stdout"] == f"{n}\n"
        assert box.get(id)["running"]
    ended = eventually(lambda: not (now := box.get(id))["running"] and now, 60)
    assert ended["offset"] == 30_000_000 and ended["offset"] - ended["start"] <= 1_048_576
    late = box.output(id, **{"from": 0})
    assert late["gap"] == ended["start"] and late["offset"] == ended["offset"]
    assert box.node.rss() - before < 48 << 20
    box.end(id)


def test_ports_are_listed_and_waited_for(box: Box) -> None:
    node = box.node
    listen = '$s = IO::Socket::INET->new(Listen=>1,LocalAddr=>"127.0.0.1:8123") or die; sleep 100'
    serve = f"sleep 0.5; exec perl -MIO::Socket::INET -e '{listen}'"
    id = box.start(serve)["id"]
    assert node.call("GET", f"{box.path}/ports/8123/wait", params={"timeout_s": 30}) == {
        "port": 8123,
        "address": "127.0.0.1",
    }
    assert {"port": 8123, "address": "127.0.0.1"} in node.call("GET", f"{box.path}/ports")["data"]
    box.end(id)
    late = node.http.get(f"{box.path}/ports/8124/wait", params={"timeout_s": 0.1})
    assert (late.status_code, late.json()["code"]) == (504, "timed_out")


def test_fifty_at_once(box: Box) -> None:
    answers: list[str] = []

    def one(n: int) -> None:
        with box.node.connect() as client:
            answer = client.post(f"{box.path}/exec", json={"command": f"echo {n}", "timeout_s": 120})
            answers.append(answer.json()["stdout"])

    threads = [threading.Thread(target=one, args=(n,)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, answers)) == list(range(50))
