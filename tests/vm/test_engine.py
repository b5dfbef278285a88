"""The server side through HTTP on its unix socket, with real microVMs: what each call does when all is well."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ..support import Node, eventually, lines, unb64

pytestmark = pytest.mark.vm

MIB = 1 << 20


@pytest.fixture(scope="module")
def box(shared_node: Node) -> Iterator[tuple[Node, str]]:
    sandbox = shared_node.create(env={"COLOUR": "blue"}, metadata={"who": "test_engine"})
    yield shared_node, sandbox
    assert shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")["state"] == "killed"


Box = tuple[Node, str]


def test_a_sandbox_says_what_it_is(box: Box) -> None:
    node, sandbox = box
    row = node.get(sandbox)
    assert row["state"] == "running" and row["template"] == "base" and row["reason"] is None
    assert row["started_at"] - row["created_at"] < 10
    assert abs(row["ends_at"] - row["created_at"] - 86_400) < 1
    assert row["vcpus"] == 1 and row["memory_mib"] == 1024 and row["disk_gib"] == 5
    before = time.time()
    guest = node.exec(
        sandbox, "cat /run/llm4agents/boot-id; hostname; cat /etc/machine-id; date +%s; nproc; whoami; pwd"
    )
    boot_id, hostname, machine_id, now, cores, user, home = guest["stdout"].split()
    assert (
        boot_id.replace("-", "") == row["boot_id"]
        and hostname == sandbox.replace("_", "-")
        and len(machine_id) == 32
    )
    assert before - 2 < int(now) < time.time() + 1
    assert (cores, user, home) == ("1", "user", "/home/user")


def test_events_tell_its_life(box: Box) -> None:
    node, sandbox = box
    events = node.call("GET", f"/v1/sandboxes/{sandbox}/events")["data"]
    assert [(e["sequence"], e["from_state"], e["to_state"]) for e in events] == [
        (1, None, "creating"),
        (2, "creating", "running"),
    ]
    assert events[1]["monotonic_ns"] > events[0]["monotonic_ns"] > 0
    assert events[1]["boot_id"] == node.get(sandbox)["boot_id"]


def test_exec_has_separate_streams_code_and_environment(box: Box) -> None:
    node, sandbox = box
    done = node.exec(
        sandbox, "echo $COLOUR $SHAPE; echo oops >&2; exit 3", env={"SHAPE": "round"}, cwd="/tmp"
    )
    assert (done["stdout"], done["stderr"], done["exit_code"]) == ("blue round\n", "oops\n", 3)
    assert node.exec(sandbox, ["cat"], stdin="aGVsbG8=")["stdout"] == "hello"
    assert node.exec(sandbox, ["id", "-u"], user="root")["stdout"] == "0\n"
    killed = node.exec(sandbox, "kill -9 $$")
    assert killed["exit_code"] is None and killed["signal"] == 9


def test_output_that_is_no_text_arrives_whole(box: Box) -> None:
    node, sandbox = box
    done = node.exec(sandbox, r"printf '\377\000\376ok'")
    assert unb64(done["stdout_b64"]) == b"\xff\x00\xfeok" and "ok" in done["stdout"]


def test_a_command_that_is_not_there_says_so(box: Box) -> None:
    node, sandbox = box
    answer = node.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"argv": ["/no/such"]})
    assert answer.status_code in (400, 404, 422) and "/no/such" in answer.json()["detail"]


def test_exec_times_out_and_leaves_nothing(box: Box) -> None:
    node, sandbox = box
    done = node.exec(sandbox, "sleep 4711 & sleep 4711", timeout_s=0.5)
    assert done["timed_out"] and done["signal"] == 9
    assert node.exec(sandbox, "pgrep -fx 'sleep 4711' | wc -l")["stdout"].strip() == "0"


def test_streamed_exec_comes_as_it_happens(box: Box) -> None:
    node, sandbox = box
    body = {"command": "echo one; read x < /tmp/go; echo two >&2", "stream": True}
    node.exec(sandbox, "mkfifo /tmp/go")
    with node.http.stream("POST", f"/v1/sandboxes/{sandbox}/exec", json=body) as answer:
        events = lines(answer)
        assert next(events)["type"] == "started"
        assert unb64(next(events)["data_b64"]) == b"one\n"
        node.exec(sandbox, "echo > /tmp/go; rm /tmp/go")
        second = next(events)
        assert (second["type"], unb64(second["data_b64"])) == ("stderr", b"two\n")
        last = next(events)
        assert last["type"] == "exit" and last["exit_code"] == 0
        assert list(events) == []


def test_a_client_that_leaves_takes_its_command_with_it_if_it_has_asked_to(box: Box) -> None:
    node, sandbox = box
    body = {"argv": ["sleep", "4712"], "timeout_s": 0, "on_disconnect": "kill"}
    running = "pgrep -fx 'sleep 4712' | wc -l"
    for stream in (True, False):
        client = node.connect()
        request = client.build_request(
            "POST", f"/v1/sandboxes/{sandbox}/exec", json={**body, "stream": stream}
        )
        if stream:
            answer = client.send(request, stream=True)
            assert next(lines(answer))["type"] == "started"
            answer.close()
        else:
            request.extensions["timeout"] = {"read": 1.0, "connect": 5, "write": 5, "pool": 5}
            with pytest.raises(httpx.ReadTimeout):
                client.send(request)
        client.close()
        eventually(lambda: node.exec(sandbox, running)["stdout"].strip() == "0")


def test_files_go_in_and_out_whole(box: Box) -> None:
    node, sandbox = box
    data = os.urandom(20 * MIB + 7)
    where = f"/v1/sandboxes/{sandbox}/files"
    put = node.call(
        "PUT", where, params={"path": "deep/er/blob", "mode": 0o600}, content=iter([data[:MIB], data[MIB:]])
    )
    assert put == {"path": "/home/user/deep/er/blob", "size": len(data)}
    got = node.http.get(where, params={"path": "/home/user/deep/er/blob"})
    assert got.content == data
    assert got.headers["x-file-size"] == str(len(data)) and int(got.headers["x-file-mode"]) & 0o777 == 0o600
    part = node.http.get(where, params={"path": "deep/er/blob", "offset": 5, "length": 10})
    assert part.content == data[5:15]
    stat = node.call("GET", f"{where}/stat", params={"path": "deep/er/blob"})
    assert stat["kind"] == "file" and stat["size"] == len(data) and stat["user"] == "user"
    node.call("POST", f"{where}/move", json={"from": "deep/er/blob", "to": "moved"})
    names = {e["name"] for e in node.call("GET", f"{where}/list", params={"path": "/home/user"})["entries"]}
    assert {"moved", "deep"} <= names
    node.call("POST", f"{where}/remove", json={"path": "/home/user/deep", "recursive": True})
    node.call("POST", f"{where}/mkdir", json={"path": "/home/user/new/dir"})
    assert node.exec(sandbox, "ls -d new/dir; rm -r new moved")["exit_code"] == 0


def test_names_need_not_be_text(box: Box) -> None:
    node, sandbox = box
    where = f"/v1/sandboxes/{sandbox}/files"
    put = node.http.put(f"{where}?path=/tmp/odd/%FFname", content=b"x")
    assert put.status_code == 200
    listed = node.call("GET", f"{where}/list", params={"path": "/tmp/odd"})["entries"]
    assert os.fsencode(listed[0]["name"]) == b"\xffname"
    assert node.http.get(f"{where}?path=/tmp/odd/%FFname").content == b"x"


@pytest.mark.parametrize(
    ("method", "tail", "code"),
    [
        ("GET", "?path=/etc", "is_directory"),
        ("PUT", "?path=/etc&user=root", "is_directory"),
        ("PUT", "?path=/etc/passwd", "permission"),
        ("PUT", "?path=/etc/passwd/x", "exists"),
    ],
)
def test_files_that_cannot_be_say_why(box: Box, method: str, tail: str, code: str) -> None:
    node, sandbox = box
    answer = node.http.request(
        method, f"/v1/sandboxes/{sandbox}/files{tail}", content=b"x" if method == "PUT" else None
    )
    assert 400 <= answer.status_code < 500
    assert answer.json()["details"]["code"] == code, answer.text


def test_a_missing_file_is_a_404(box: Box) -> None:
    node, sandbox = box
    answer = node.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "/nothing/here"})
    assert (answer.status_code, answer.json()["code"]) == (404, "path_not_found")


def test_an_upload_that_is_cut_off_leaves_nothing(box: Box) -> None:
    node, sandbox = box

    def cut() -> Iterator[bytes]:
        yield b"x" * MIB
        raise OSError("the client dies")

    with pytest.raises(OSError, match="the client dies"):
        node.http.put(f"/v1/sandboxes/{sandbox}/files", params={"path": "/home/user/cut"}, content=cut())
    eventually(lambda: node.exec(sandbox, "ls -A /home/user | grep -c cut")["stdout"].strip() == "0")


def test_metrics_are_of_the_guest(box: Box) -> None:
    node, sandbox = box
    seen = node.call("GET", f"/v1/sandboxes/{sandbox}/metrics")
    assert 800 * MIB < seen["mem_total"] <= 1024 * MIB and seen["processes"] >= 0
    assert 4 << 30 < seen["disk_total"] <= 5 << 30


def test_there_is_one_nic_and_ipv6_only_on_loopback(box: Box) -> None:
    node, sandbox = box
    assert sorted(node.exec(sandbox, "ls /sys/class/net")["stdout"].split()) == ["eth0", "lo"]
    assert node.exec(sandbox, "cat /proc/net/if_inet6")["stdout"].split()[-1:] == ["lo"]


def test_listing_filters_and_pages(shared_node: Node) -> None:
    made = [shared_node.create(metadata={"page": str(n)}) for n in range(2)]
    found = shared_node.call("GET", "/v1/sandboxes", params={"metadata.page": "1", "state": "running"})
    assert [row["id"] for row in found["data"]] == [made[1]]
    first = shared_node.call("GET", "/v1/sandboxes", params={"limit": 1})
    second = shared_node.call("GET", "/v1/sandboxes", params={"limit": 1, "after": first["next"]})
    assert [first["data"][0]["id"], second["data"][0]["id"]] == [made[1], made[0]]
    for sandbox in made:
        shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")
        again = shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")
        assert again["state"] == "killed" and again["reason"] == "killed by request"
    answer = shared_node.http.post(f"/v1/sandboxes/{made[0]}/exec", json={"command": "true"})
    assert (answer.status_code, answer.json()["code"]) == (410, "sandbox_died")
    assert "killed by request" in answer.json()["detail"]


def test_many_at_once(shared_node: Node) -> None:
    def one(number: int) -> str:
        sandbox = shared_node.create()
        said = shared_node.exec(sandbox, f"echo {number}; head -c 16 /dev/urandom | od -An -tx1")["stdout"]
        shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")
        return str(said)

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(one, range(8)))
    assert [text.split()[0] for text in said] == [str(n) for n in range(8)]
    assert len({text.partition("\n")[2] for text in said}) == 8, "two clones drew the same numbers"


def test_create_can_be_watched(shared_node: Node) -> None:
    headers = {"accept": "application/x-ndjson"}
    with shared_node.http.stream(
        "POST", "/v1/sandboxes", json={"template": "base"}, headers=headers
    ) as answer:
        seen = list(lines(answer))
    assert seen[-1]["type"] == "sandbox" and seen[-1]["state"] == "running"
    shared_node.call("DELETE", f"/v1/sandboxes/{seen[-1]['id']}")


def test_code_keeps_its_state_and_streams(shared_node: Node) -> None:
    sandbox = shared_node.create("python")
    first = shared_node.code(sandbox, "x = 6\nprint('hi')\nx * 7")
    assert (first["status"], first["stdout"], first["error"]) == ("ok", "hi\n", None)
    assert first["results"][0]["data"]["text/plain"] == "42"
    failed = shared_node.code(sandbox, "x / 0")
    assert failed["status"] == "error" and failed["error"]["name"] == "ZeroDivisionError"
    assert shared_node.code(sandbox, "import time; time.sleep(60)", timeout_s=0.5)["status"] == "timed_out"
    body = {"code": "print(x)\nimport time\nwhile True: time.sleep(1)", "timeout_s": 0, "stream": True}
    with shared_node.http.stream("POST", f"/v1/sandboxes/{sandbox}/code", json=body) as answer:
        events = lines(answer)
        assert next(events)["text"] == "6\n"
        shared_node.call("POST", f"/v1/sandboxes/{sandbox}/code/interrupt", json={})
        last = list(events)[-1]
        assert (last["type"], last["status"]) == ("end", "interrupted")
    died = shared_node.code(sandbox, "import os; os._exit(3)")
    assert died["status"] == "died"
    assert shared_node.code(sandbox, "'x' in globals()")["results"][0]["data"]["text/plain"] == "False"
    shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def test_other_shapes_are_variants_and_concurrent_creates_share_one_build(shared_node: Node) -> None:
    """512 MiB of `base`: built on demand if this cache has it not, once for both who ask."""
    seen: list[list[dict[str, object]]] = []
    began = time.time()

    def create() -> None:
        headers = {"accept": "application/x-ndjson"}
        body = {"template": "base", "memory_mib": 512}
        with shared_node.http.stream("POST", "/v1/sandboxes", json=body, headers=headers) as answer:
            seen.append(list(lines(answer)))

    threads = [threading.Thread(target=create) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for told in seen:
        assert told[-1]["type"] == "sandbox", told[-1]
        guest = shared_node.exec(str(told[-1]["id"]), "grep MemTotal /proc/meminfo")["stdout"]
        assert 350_000 < int(guest.split()[1]) < 524_288
        shared_node.call("DELETE", f"/v1/sandboxes/{told[-1]['id']}")
    built = [
        t for t in shared_node.call("GET", "/v1/templates")["data"] if t["name"] == "base" and t["built"]
    ]
    # (Nodes with a CA of their own have variants of their own in this cache.)
    assert {t["memory_mib"] for t in built if t["memory_mib"] in (512, 1024)} == {512, 1024}
    assert len([t for t in built if t["memory_mib"] == 512 and t["created_at"] >= began]) <= 1


def test_the_node_describes_itself(shared_node: Node) -> None:
    server = shared_node.call("GET", "/v1/server")
    assert server["api"] == 1 and server["accelerator"] in ("kvm", "tcg")
    assert (server["why_not_kvm"] is None) == (server["accelerator"] == "kvm")
    assert shared_node.call("GET", "/v1/doctor")["ok"] is True
    used = shared_node.call("GET", "/v1/du")
    assert used["total_bytes"] == sum(part["bytes"] for part in used["data"]) > 0
    assert json.loads(shared_node.http.get("/openapi.json").text)["paths"]["/v1/sandboxes"]
