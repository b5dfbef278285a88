"""Many callers, and guests that use all they have: every call ends, with an answer that is right."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.reliability.whole import SHAPE, kill, no_orphans, out, post
from tests.support import Node, eventually

pytestmark = pytest.mark.vm

CLIENTS, TURNS = 50, 4


def test_fifty_clients_of_a_sandbox_that_is_paused_under_them(node: Node) -> None:
    """Execs, files and cells: each is answered or ends as `sandbox_paused`; what was answered happened once."""
    sandbox = node.create("python")
    path = f"/v1/sandboxes/{sandbox}"
    outcomes: Counter[str] = Counter()
    answered: dict[str, bool] = {}  # lines that were sent: whether it was said that they are there
    files: dict[str, bytes] = {}
    finished = threading.Event()

    def judge(answer: httpx.Response) -> bool:
        if answer.status_code < 300:
            outcomes["done"] += 1
            return True
        told = answer.json()
        # "unknown" says that it may have happened; nothing else may be said of a call that had begun.
        assert (told["code"], told["outcome"]) == ("sandbox_paused", "unknown"), told
        outcomes["paused"] += 1
        return False

    def client(number: int) -> None:
        with node.connect() as http:
            for turn in range(TURNS):
                word = f"{number}.{turn}"
                command = {"command": f"echo {word} >> /dev/shm/lines; echo said {word}"}
                answer = http.post(f"{path}/exec", json=command)
                if answered.setdefault(word, judge(answer)):
                    assert answer.json()["stdout"] == f"said {word}\n"
                body = os.urandom(10_000)
                where = {"path": f"/tmp/file-{number}"}
                if judge(http.put(f"{path}/files", params=where, content=body)):
                    files[where["path"]] = body
                    read = http.get(f"{path}/files", params=where)
                    if judge(read):
                        assert read.content == body
                else:
                    files.pop(where["path"], None)
                if number % 10 == 0:  # cells of one context wait for each other
                    cell = http.post(f"{path}/code", json={"code": f"print('cell {word}')"})
                    if judge(cell):
                        assert cell.json()["stdout"] == f"cell {word}\n", cell.json()

    def pauses() -> int:
        count = 0
        with node.connect() as http:
            while not finished.wait(1.0):
                answer = http.post(f"{path}/pause", json={})
                assert answer.status_code == 200, answer.text
                count += 1
        return count

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        pausing = pool.submit(pauses)
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            for each in clients:
                each.result(180)
        finally:
            finished.set()
        assert pausing.result(60) >= 2, "it was over before it was paused twice"
    lines = Counter(out(node, sandbox, "cat /dev/shm/lines").split())
    assert set(lines) <= set(answered)
    assert {word for word, said in answered.items() if said} <= set(lines)
    assert max(lines.values()) == 1, "nothing was done twice"
    for where, body in files.items():
        assert out(node, sandbox, f"sha256sum < {where}").split()[0] == hashlib.sha256(body).hexdigest()
    assert outcomes["done"] > CLIENTS * TURNS
    kill(node, sandbox)
    no_orphans(node)


def start(node: Node, sandbox: str, command: str, **more: object) -> str:
    path = f"/v1/sandboxes/{sandbox}/processes"
    return str(node.call("POST", path, json={"command": command, **more})["id"])


def test_a_guest_with_no_processor_and_no_memory_left_answers_and_is_paused(node: Node) -> None:
    sandbox = node.create("base", **SHAPE)
    for _ in range(3 * SHAPE["vcpus"]):
        start(node, sandbox, "while :; do :; done")
    # More than there is: whoever takes it is ended for it, again and again.
    start(node, sandbox, "while :; do head -c 400000000 /dev/zero | tail -c 399999999 > /dev/null; done")
    out(node, sandbox, "echo kept > /dev/shm/file")
    for _ in range(3):
        began = time.monotonic()
        assert out(node, sandbox, "cat /dev/shm/file", timeout_s=60) == "kept"
        assert time.monotonic() - began < 20
        began = time.monotonic()
        assert post(node, sandbox, "pause")["state"] == "paused"
        assert time.monotonic() - began < 30
        no_orphans(node)
    kill(node, sandbox)


def test_a_file_is_whole_and_in_time_while_the_guest_floods_its_output(node: Node) -> None:
    sandbox = node.create("base", **SHAPE)
    digest = out(node, sandbox, "head -c 8000000 /dev/urandom > /tmp/big; sha256sum < /tmp/big").split()[0]
    stop, seen = threading.Event(), [0]

    def read_flood() -> None:
        body = {"command": "yes a flood of lines", "stream": True, "timeout_s": 120, "on_disconnect": "kill"}
        with (
            node.connect() as http,
            http.stream("POST", f"/v1/sandboxes/{sandbox}/exec", json=body) as answer,
        ):
            for piece in answer.iter_raw():
                seen[0] += len(piece)
                if stop.is_set():
                    return

    flood = threading.Thread(target=read_flood)
    flood.start()
    try:
        eventually(lambda: seen[0] > 1_000_000, 60)
        began, before = time.monotonic(), seen[0]
        answer = node.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "/tmp/big"})
        assert hashlib.sha256(answer.content).hexdigest() == digest
        assert time.monotonic() - began < 60
        assert seen[0] > before, "and the flood was not held up for it"
    finally:
        stop.set()
        flood.join(60)
    eventually(lambda: node.exec(sandbox, "pgrep yes")["exit_code"] == 1)
    kill(node, sandbox)
