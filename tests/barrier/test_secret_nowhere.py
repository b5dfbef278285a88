"""The secret is nowhere: every form of credential is used from a guest, and then looked for in all that is left behind.

Places: the memory of the guest's machine (every page of its process) and of the gateway, link and shim; its disk; a
pause; the capture; the audit; logs; the store and a backup of it. In each the same search finds a canary that was put
there. The interceptor's memory has the values, and is the one place that may; the server's, which passes them to it, is
not promised (SECURITY.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm4agents.store.opening import backup
from tests.barrier import needles
from tests.barrier.lab import Lab
from tests.barrier.services import AWS, AWS_PORT, GIT, GIT_PORT, Services, prepare
from tests.support import Node, eventually

pytestmark = [pytest.mark.vm, pytest.mark.root]

API = "api.example.com"
VALUES = {
    "BEARER": "bearer/4c81+77=ae9 nowhere",
    "HEADER": "header/b20d+15=c3f nowhere",
    "BASIC": "basic/9e64+02=81b nowhere",
    "QUERY": "query/77aa+d1=0c9 nowhere",
    "PLACEHOLDER": "placeholder/31f7+e8=52d nowhere",
    "GIT": "git/60c5+9b=d74 nowhere",
}
AWS_KEYS = {
    "access_key_id": "AKIANOWHEREATALL",
    "secret_access_key": "aws/2a9f+48=07e-nowhere",
    "session_token": "session/c19b+63=f02-nowhere",
}
SOUGHT = {**VALUES, "AWS": AWS_KEYS["secret_access_key"], "AWS token": AWS_KEYS["session_token"]}
CANARY = "canary/e5d3+0f=a86 planted"
NAME_CANARY = "planted-canary-5c20e7b1.example.com"
ALL = needles.needles(SOUGHT)
PLANTED = needles.needles({"canary": CANARY})
PLAIN = {"canary, plain": CANARY.encode()}
NETWORK = {
    "rules": [
        *(f"allow {name}" for name in (API, f"{GIT}:{GIT_PORT}", f"{AWS}:{AWS_PORT}")),
        *("allow other.example.com", f"allow {NAME_CANARY}"),
    ],
    "credentials": [
        {"secret": "BEARER", "host": API, "path": "/echo/bearer*", "as": "bearer"},
        {"secret": "HEADER", "host": API, "path": "/echo/header*", "as": "header", "header": "X-Api-Key"},
        {"secret": "BASIC", "host": API, "path": "/echo/basic*", "as": "basic", "username": "robot"},
        {"secret": "QUERY", "host": API, "path": "/echo/query*", "as": "query", "parameter": "key"},
        {
            "secret": "PLACEHOLDER",
            "host": API,
            "path": "/echo/place*",
            "as": "placeholder",
            "placeholder": "PUT-IT-HERE",
        },
        {"secret": "GIT", "host": GIT, "port": GIT_PORT, "as": "basic", "username": "x-access-token"},
        {"secret": "AWS", "host": AWS, "port": AWS_PORT, "as": "sigv4"},
    ],
}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    prepare(("base", 256))
    keys = {AWS_KEYS["access_key_id"]: (AWS_KEYS["secret_access_key"], AWS_KEYS["session_token"])}
    with (
        Lab(tmp_path_factory.mktemp("lab")) as lab,
        Services(lab, users={"x-access-token": VALUES["GIT"]}, keys=keys) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def node(services: Services, shared_nodes: Callable[..., Node]) -> Node:
    lab = services.lab
    return shared_nodes(within=lab.enter(), **lab.environment).start()


@pytest.fixture(scope="module")
def used(node: Node, services: Services) -> Iterator[str]:
    """A sandbox from which every form has been used (the services have seen the values), with canaries planted."""
    for name, value in {**VALUES, "AWS": AWS_KEYS}.items():
        node.call("PUT", f"/v1/secrets/{name}", json={"value": value})
    lab = services.lab
    lab.names[NAME_CANARY] = lab.names["other.example.com"]
    ident = node.create("base", memory_mib=256, network=NETWORK, metadata={"canary": CANARY})
    node.call("POST", f"/v1/sandboxes/{ident}/network/capture", json={"bytes_max": 67_108_864})

    def sh(command: str, **more: Any) -> str:
        done = node.exec(ident, command, timeout_s=120, **more)
        assert done["exit_code"] == 0, done
        return str(done["stdout"])

    mark = lab.mark()
    for _ in range(3):
        for path in ("bearer", "header", "basic", "query?key=x", "place/PUT-IT-HERE?k=PUT-IT-HERE"):
            sh(
                f"curl -sS -m 60 -o /dev/null -D /dev/null -H 'X-Put: PUT-IT-HERE' 'https://{API}/echo/{path}'"
            )
        for path in ("echo-header", "echo-gzip", "echo-base64", "echo-percent", "echo-split"):
            sh(f"curl -sS -m 60 -H 'X-Put: PUT-IT-HERE' 'https://{API}/{path}' > ~/{path} || true")
    sh(f"git clone -q https://{GIT}:{GIT_PORT}/repo.git ~/repo && cd ~/repo && git fetch -q")
    sh(
        "curl -sS -m 60 --aws-sigv4 aws:amz:eu-west-1:s3 -u AKIADUMMY:dummy -H 'x-amz-content-sha256: UNSIGNED-PAYLOAD'"
        f" -X PUT -d body https://{AWS}:{AWS_PORT}/bucket/key"
    )
    arrived = lab.arrived(mark, kind="https")
    seen = needles.search([a.raw for a in arrived], ALL)
    assert {name.partition(",")[0] for name in seen} == set(VALUES) - {"GIT"}, "a form was not used at all"
    assert any(one.accepted and one.target.startswith("/repo.git") for one in services.seen)
    assert any(one.accepted and one.target == "/bucket/key" for one in services.seen)

    # The canary in every one of its forms, in the guest's memory, on its disk, its console and in a capture.
    ways = " ".join(f"'{form.decode()}'" for form in PLANTED.values())
    node.call(
        "POST",
        f"/v1/sandboxes/{ident}/processes",
        json={
            "argv": ["sleep", "100000"],
            "env": {f"C{n}": f.decode() for n, f in enumerate(PLANTED.values())},
        },
    )
    sh(f"printf '%s\\n' {ways} > ~/planted; sync")
    sh(f"printf '%s\\n' '{CANARY}' > /dev/console", user="root")
    sh(f"curl -sS -m 60 -H 'X-Planted: {CANARY}' 'http://other.example.com/planted-in-audit'")
    sh(f"curl -sS -m 60 'http://{NAME_CANARY}/'")
    yield ident
    node.call("DELETE", f"/v1/sandboxes/{ident}")


def worker(lab: Lab, module: str) -> int:
    (pid,) = [pid for pid, command in lab.processes().items() if module in command]
    return pid


def test_not_in_the_guests_memory(node: Node, used: str) -> None:
    pid = node.vmm(used)
    found, looked = needles.in_memory(pid, {**ALL, **PLANTED})
    assert looked > 256 << 20, "not all of its memory was looked at"
    assert found == set(PLANTED)


def test_not_in_the_memory_of_what_is_between(node: Node, services: Services, used: str) -> None:
    name = {"name": NAME_CANARY.encode()}
    found, _ = needles.in_memory(worker(services.lab, "llm4agents.barrier.gateway"), {**ALL, **name})
    assert found == {"name"}
    for pid, command in services.lab.processes().items():
        others = ("llm4agents.barrier.link", "llm4agents.barrier.capture", "llm4agents-shim")
        if any(name in command for name in others):
            assert needles.in_memory(pid, ALL)[0] == set(), command


def test_in_the_interceptors_memory_it_is(services: Services, used: str) -> None:
    """It has to be: and so the search of memory finds these very values where they are."""
    found, _ = needles.in_memory(worker(services.lab, "llm4agents.barrier.intercept"), ALL)
    assert {name.partition(",")[0] for name in found} == set(SOUGHT)


def test_not_in_any_file_of_the_node(node: Node, used: str) -> None:
    node.http.get(f"/v1/sandboxes/{used}/network/capture")  # has what has arrived written
    audit = node.state / "barrier" / "gateway" / "audit" / f"{used}.jsonl"
    eventually(lambda: b"planted-in-audit" in audit.read_bytes())
    copy = backup(node.state / "store.db", "test")
    found = needles.in_files(node.home, ALL)
    assert found == {}
    # Where the canary was put by those who wrote these files themselves:
    planted = needles.in_files(node.home, PLANTED)
    kinds = {
        "disk": f"s/sandboxes/{used}/upper.qcow2",
        "store": "s/store.db-wal",
        "backup": str(copy.relative_to(node.home)),
        "console": f"r/vm/{used}/serial.log",
    }
    assert {name: kinds[name] in planted for name in kinds} == dict.fromkeys(kinds, True), planted
    assert planted[kinds["disk"]] == set(PLANTED)
    assert any("/capture" in path and "canary, plain" in names for path, names in planted.items()), planted
    # And in what never repeats what a caller says, by hand:
    for pattern in ("stderr", f"s/logs/{used}.jsonl", f"s/barrier/gateway/audit/{used}.jsonl", "s/vault.key"):
        path = node.home / pattern
        assert path.exists(), f"{pattern} is not there: this test looks in the wrong place"
        was = path.read_bytes()
        path.write_bytes(was + CANARY.encode() + b"\n")
        assert pattern in needles.in_files(node.home, PLAIN), pattern
        path.write_bytes(was)


def test_not_in_a_capture(node: Node, used: str) -> None:
    answer = node.http.get(f"/v1/sandboxes/{used}/network/capture")
    assert answer.status_code == 200, answer.text
    found = needles.search([answer.content], {**ALL, **PLANTED})
    assert "canary, plain" in found and not found & set(ALL)


def test_not_in_what_the_api_tells(node: Node, used: str) -> None:
    network = f"/v1/sandboxes/{used}/network"
    paths = ("/v1/secrets", f"/v1/sandboxes/{used}", f"/v1/events?sandbox={used}", network, f"{network}/log")
    answers = [node.http.get(path).content for path in paths]
    why = node.call("POST", f"{network}/why", json={"url": f"https://{API}/echo/bearer"})
    answers.append(json.dumps(why).encode())
    assert needles.search(answers, ALL) == set()
    assert "canary, plain" in needles.search(answers, PLANTED)


def test_not_in_a_pause_nor_after_a_resume(node: Node, used: str) -> None:
    node.call("POST", f"/v1/sandboxes/{used}/pause", json={})
    found = needles.in_files(node.state / "sandboxes" / used, {**ALL, **PLANTED})
    pages = {path: names for path, names in found.items() if "upper" not in path}
    assert pages and set().union(*pages.values()) >= set(PLANTED), "a pause without the canary: wrong place?"
    assert not {name for names in found.values() for name in names} & set(ALL)
    node.call("POST", f"/v1/sandboxes/{used}/resume", json={})
    status = node.exec(
        used, f"curl -sS -m 60 -o /dev/null -w '%{{http_code}}' https://{API}/echo/bearer", timeout_s=90
    )
    assert status["stdout"] == "200"
    assert needles.in_memory(node.vmm(used), {**ALL, **PLANTED})[0] == set(PLANTED)
