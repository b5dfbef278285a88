"""Networks of real sandboxes, through the server: asked for, obeyed, changed live, kept over pauses and deaths."""

from __future__ import annotations

import http.server
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents import InvalidRequestError, Sandbox, limits
from tests.support import Node, eventually, sdk_of

pytestmark = pytest.mark.vm

SMALL = {"memory_mib": 256, "timeout_s": 300}
NONE = {"profile": "none", "rules": [], "rewrite": [], "credentials": []}
SOMEWHERE = "203.0.113.77"
"""An address for documentation: nobody's, and an ordinary one to a policy."""


class Origin:
    """A web server of the test's own: `/slow` sends a line now and then until it is closed."""

    def __init__(self) -> None:
        origin = self
        self.closing = threading.Event()
        self.asked: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                origin.asked.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"origin says hello to {self.headers['host']}\n".encode())
                while self.path == "/slow" and not origin.closing.wait(0.05):
                    try:
                        self.wfile.write(b"still here\n")
                        self.wfile.flush()
                    except OSError:
                        return

            def log_message(self, *_: Any) -> None:
                pass

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def network(self) -> dict[str, Any]:
        """What lets a sandbox reach it, as app.example."""
        return {
            "rules": [f"allow 127.0.0.1:{self.port}"],
            "rewrite": [f"app.example -> 127.0.0.1:{self.port}"],
        }

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def origin() -> Iterator[Origin]:
    made = Origin()
    yield made
    made.close()


def curl(node: Node, sandbox: str, url: str, *more: str) -> dict[str, Any]:
    done = node.exec(sandbox, ["curl", "-sS", "-m", "30", "-w", "\n%{http_code}", *more, url], timeout_s=60)
    body, _, status = str(done["stdout"]).rpartition("\n")
    return {"exit": done["exit_code"], "status": status, "body": body, "error": str(done["stderr"])}


def reaches(node: Node, sandbox: str, host: str = "app.example") -> bool:
    return "origin says hello" in curl(node, sandbox, f"http://{host}/")["body"]


def address_of(node: Node, sandbox: str, name: str) -> str:
    words = str(node.exec(sandbox, ["getent", "ahostsv4", name])["stdout"]).split()
    return words[0] if words else ""


def put(node: Node, sandbox: str, network: Any) -> dict[str, Any]:
    return dict(node.call("PUT", f"/v1/sandboxes/{sandbox}/network", json={"network": network}))


def gateway(node: Node) -> int:
    return int(eventually(lambda: node.workers().get("gateway"), 30))


def test_nothing_can_be_reached_by_default_and_it_says_so(node: Node) -> None:
    sandbox = node.create(**SMALL)
    assert node.get(sandbox)["network"] == NONE
    began = time.monotonic()
    denied = curl(node, sandbox, f"http://{SOMEWHERE}/x")
    assert denied["status"] == "403", denied
    assert "none" in denied["body"] and "network" in denied["body"]
    unknown = curl(node, sandbox, "http://app.example/")
    assert unknown["exit"] == 6, unknown  # the name is not resolved
    tls = curl(node, sandbox, f"https://{SOMEWHERE}/")
    assert tls["exit"] not in (0, 28), tls  # refused, not timed out
    raw = node.exec(sandbox, f"timeout 20 bash -c 'exec 3<>/dev/tcp/{SOMEWHERE}/5432; read -t 15 -u 3'")
    assert raw["exit_code"] not in (0, 124), raw
    ping = node.exec(sandbox, "timeout 10 bash -c 'echo x > /dev/udp/203.0.113.77/9'")
    assert ping["exit_code"] != 124
    assert time.monotonic() - began < 30
    told = node.call("GET", f"/v1/sandboxes/{sandbox}/network")
    assert (told["network"], told["link"], told["problem"]) == (NONE, True, None)


def test_one_host_and_live_changes_both_ways(node: Node, origin: Origin) -> None:
    sandbox = node.create(**SMALL, network=origin.network)
    assert node.get(sandbox)["network"]["rules"] == origin.network["rules"]
    assert reaches(node, sandbox)
    assert curl(node, sandbox, "http://other.example/")["exit"] == 6
    said = node.call("POST", f"/v1/sandboxes/{sandbox}/network/why", json={"url": "http://app.example/"})
    assert said["allowed"] and said["rule"] == origin.network["rules"][0]
    said = node.call("POST", f"/v1/sandboxes/{sandbox}/network/why", json={"url": "https://other.example/"})
    assert not said["allowed"] and said["rule"] == "default"

    node.call(
        "POST",
        f"/v1/sandboxes/{sandbox}/processes",
        json={"argv": ["curl", "-sSN", "http://app.example/slow"], "id": "slow"},
    )
    eventually(lambda: "/slow" in origin.asked, 30)
    told = put(node, sandbox, "none")
    assert told["cut"] == 1 and told["network"] == NONE
    ended = eventually(lambda: _ended(node, sandbox, "slow"), 30)
    assert ended["exit_code"] != 0
    assert not reaches(node, sandbox)
    assert put(node, sandbox, origin.network)["cut"] == 0
    assert reaches(node, sandbox)


def _ended(node: Node, sandbox: str, process: str) -> dict[str, Any] | None:
    found = node.call("GET", f"/v1/sandboxes/{sandbox}/processes")["data"]
    one = next(p for p in found if p["id"] == process)
    return None if one["running"] else dict(one)


def names_kept(node: Node) -> list[str]:
    return [path.name for path in (node.state / "barrier" / "gateway" / "names").iterdir()]


def test_policy_and_names_are_kept_over_pause_resume_and_fork(node: Node, origin: Origin) -> None:
    sandbox = node.create(**SMALL, network=origin.network)
    address = eventually(lambda: address_of(node, sandbox, "app.example"), 30)
    assert address.startswith("198.18.")
    node.call("POST", f"/v1/sandboxes/{sandbox}/pause", json={})
    assert node.get(sandbox)["network"]["rules"] == origin.network["rules"]
    node.call("POST", f"/v1/sandboxes/{sandbox}/resume", json={})
    assert reaches(node, sandbox)
    assert address_of(node, sandbox, "app.example") == address
    child = node.call("POST", f"/v1/sandboxes/{sandbox}/fork", json={"count": 1})["data"][0]
    assert child["network"] == node.get(sandbox)["network"]
    assert reaches(node, child["id"], address), "it knows the names its parent knew before it asks for one"
    assert address_of(node, child["id"], "app.example") == address
    put(node, sandbox, "none")
    assert not reaches(node, sandbox)
    assert reaches(node, child["id"]), "each has its own from then on"
    # Changed while it is paused.
    node.call("POST", f"/v1/sandboxes/{sandbox}/pause", json={})
    put(node, sandbox, origin.network)
    assert reaches(node, sandbox)
    # Names go with their sandbox, also with one that ends paused.
    node.call("POST", f"/v1/sandboxes/{sandbox}/pause", json={})
    assert names_kept(node)
    for ident in (sandbox, child["id"]):
        node.call("DELETE", f"/v1/sandboxes/{ident}")
    eventually(lambda: not names_kept(node))


def test_a_cold_resume_has_its_network(node: Node, origin: Origin) -> None:
    sandbox = node.create(**SMALL, network=origin.network)
    node.call("POST", f"/v1/sandboxes/{sandbox}/pause", json={})
    node.call("POST", f"/v1/sandboxes/{sandbox}/resume", json={"cold": True})
    assert reaches(node, sandbox)


def test_a_killed_gateway_is_replaced_and_no_sandbox_ends(node: Node, origin: Origin) -> None:
    sandbox = node.create(**SMALL, network=origin.network)
    other = node.create(**SMALL)
    address = eventually(lambda: address_of(node, sandbox, "app.example"), 30)
    first = gateway(node)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: node.workers().get("gateway") not in (None, first), 30)
    assert reaches(node, sandbox)
    assert address_of(node, sandbox, "app.example") == address
    assert not reaches(node, other)
    # A change that comes while it is gone is obeyed all the same.
    os.kill(gateway(node), signal.SIGKILL)
    put(node, sandbox, "none")
    assert not reaches(node, sandbox)
    assert node.get(sandbox)["state"] == node.get(other)["state"] == "running"
    # The one that makes links keeps none: those that are there live on, and new ones are made.
    os.kill(node.workers()["link"], signal.SIGKILL)
    for _ in range(limits.LINKS_READY + 1):
        made = node.create(**SMALL, network=origin.network)
        assert reaches(node, made)
        node.call("DELETE", f"/v1/sandboxes/{made}")
    put(node, sandbox, origin.network)
    assert reaches(node, sandbox)


def test_the_network_outlives_its_server(node: Node, origin: Origin) -> None:
    sandbox = node.create(**SMALL, network=origin.network)
    node.call(
        "POST",
        f"/v1/sandboxes/{sandbox}/processes",
        json={"argv": ["curl", "-sSN", "http://app.example/slow"], "id": "slow"},
    )
    eventually(lambda: "/slow" in origin.asked, 30)
    poll = "for i in $(seq 600); do curl -sS -m 5 http://app.example/poll/$i; sleep 0.1; done"
    node.call("POST", f"/v1/sandboxes/{sandbox}/processes", json={"command": poll, "id": "poll"})
    eventually(lambda: any(path.startswith("/poll") for path in origin.asked), 30)
    serving = gateway(node)
    node.kill9()
    before = len(origin.asked)
    eventually(lambda: len(origin.asked) > before + 3, 30)
    node.start()
    assert gateway(node) == serving, "it is taken over, not replaced"
    assert reaches(node, sandbox)
    assert _ended(node, sandbox, "slow") is None, "connections go on"
    assert put(node, sandbox, "none")["cut"] >= 1
    assert not reaches(node, sandbox)


def test_workers_end_with_their_server_and_stay_with_sandboxes(
    nodes: Callable[..., Node], origin: Origin
) -> None:
    node = nodes().start()
    sandbox = node.create(**SMALL, network=origin.network)
    serving = gateway(node)
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    node.process.wait(60)
    node.process = None
    assert node.workers() == {"gateway": serving}
    node.http.close()
    node.http = node.connect()
    node.start()
    assert reaches(node, sandbox)
    node.stop()
    assert not node.workers()
    idle = nodes(LLM4AGENTS_SERVER_IDLE_EXIT_S="1").start()
    idle.call("DELETE", f"/v1/sandboxes/{idle.create(**SMALL)}")
    assert idle.process is not None
    idle.process.wait(60)
    assert not idle.workers()


def test_a_pooled_machine_gets_its_network_when_it_is_taken(node: Node, origin: Origin) -> None:
    shelf = {"template": "base", "vcpus": 1, "memory_mib": 256, "wanted": 1}
    node.call("PUT", "/v1/pool", json={"data": [shelf]})
    eventually(lambda: node.call("GET", "/v1/pool")["data"][0]["ready"], 120)
    sandbox = node.create(**SMALL, network=origin.network)
    assert reaches(node, sandbox)


def test_what_is_wrong_with_a_network_is_said_and_nothing_is_made(node: Node) -> None:
    for network, words in (
        (["allow exa mple"], "rule 1"),
        (["allow example.com", "permit x"], "rule 2"),
        ("everything", "profile"),
        ({"rule": []}, "unknown key"),
        ({"credentials": ["X=bearer@example.com"]}, "no rule allows"),
        ({"rules": ["allow example.com"], "credentials": ["X=bearer@example.com"]}, "no secret"),
    ):
        answer = node.http.post("/v1/sandboxes", json={"template": "base", **SMALL, "network": network})
        assert answer.status_code == 400 and words in answer.json()["detail"], answer.text
    assert node.call("GET", "/v1/sandboxes")["data"] == []


def test_a_host_without_links_runs_sandboxes_without_network_only(nodes: Callable[..., Node]) -> None:
    node = nodes(LLM4AGENTS_BARRIER="off").start()
    sandbox = node.create(**SMALL)
    began = time.monotonic()
    assert curl(node, sandbox, f"http://{SOMEWHERE}/")["exit"] == 7  # at once: there is no way
    assert time.monotonic() - began < 10
    refused = node.http.post("/v1/sandboxes", json={"template": "base", **SMALL, "network": "public"})
    assert refused.status_code == 503 and "LLM4AGENTS_BARRIER=off" in refused.text
    assert node.http.put(f"/v1/sandboxes/{sandbox}/network", json={"network": "public"}).status_code == 503
    told = node.call("GET", f"/v1/sandboxes/{sandbox}/network")
    assert told["link"] is False and "off" in told["problem"]
    assert not node.workers()


def test_the_servers_default_and_floor(nodes: Callable[..., Node], origin: Origin, tmp_path: Path) -> None:
    floor = tmp_path / "floor"
    floor.write_text("deny *.example\n")
    node = nodes(LLM4AGENTS_NETWORK="public", LLM4AGENTS_NETWORK_FLOOR=str(floor)).start()
    sandbox = node.create(**SMALL)
    assert node.get(sandbox)["network"]["profile"] == "public"
    said = node.call("POST", f"/v1/sandboxes/{sandbox}/network/why", json={"url": "https://a.example/"})
    assert not said["allowed"] and said["rule"].startswith("floor")
    said = node.call("POST", f"/v1/sandboxes/{sandbox}/network/why", json={"url": f"https://{SOMEWHERE}/"})
    assert said["allowed"]
    broken = nodes(LLM4AGENTS_NETWORK_FLOOR=str(tmp_path / "nowhere")).start()
    refused = broken.http.post("/v1/sandboxes", json={"template": "base", **SMALL, "network": "public"})
    assert refused.status_code == 503 and "NETWORK_FLOOR" in refused.text


def test_profile_packages_furnishes_the_guest_with_this_hosts_registries(node: Node) -> None:
    sandbox = node.create(**SMALL, network="packages")
    found = node.exec(sandbox, "cat /etc/apt/sources.list; env")["stdout"]
    assert "deb http" in found
    said = node.call("GET", f"/v1/sandboxes/{sandbox}/network")
    assert said["network"]["profile"] == "packages"
    bare = node.create(**SMALL)
    variable = next(line for line in found.splitlines() if line.startswith(("PIP_", "GOPROXY", "npm_")))
    assert variable not in node.exec(bare, "env")["stdout"]


def test_what_must_be_looked_into_goes_through_an_interceptor_that_is_replaced_too(
    node: Node, origin: Origin
) -> None:
    looked = {**origin.network, "rules": [f"allow GET 127.0.0.1:{origin.port}/ok*"]}
    plain = node.create(**SMALL, network=origin.network)
    assert reaches(node, plain) and "intercept" not in node.workers(), "only when it is needed"
    sandbox = node.create(**SMALL, network=looked)

    def obeyed() -> None:
        assert "origin says hello" in curl(node, sandbox, "http://app.example/ok/1")["body"]
        assert curl(node, sandbox, "http://app.example/secret")["status"] == "403"
        assert curl(node, sandbox, "http://app.example/ok", "-X", "POST", "-d", "x")["status"] == "403"

    obeyed()
    first = node.workers()["intercept"]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: node.workers().get("intercept") not in (None, first), 60)
    eventually(lambda: "origin says hello" in curl(node, sandbox, "http://app.example/ok/1")["body"], 60)
    obeyed()
    os.kill(gateway(node), signal.SIGKILL)
    eventually(lambda: "origin says hello" in curl(node, sandbox, "http://app.example/ok/1")["body"], 60)
    obeyed()
    assert put(node, plain, looked)["network"]["rules"] == looked["rules"]
    assert curl(node, plain, "http://app.example/secret")["status"] == "403"
    node.kill9()
    node.start()
    assert put(node, sandbox, "none")["network"] == NONE
    assert not reaches(node, sandbox)


def test_sdk_and_command_line_say_the_same(node: Node, origin: Origin) -> None:
    def l4a(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "llm4agents", *words]
        return subprocess.run(command, env=node.env, capture_output=True, text=True, timeout=120)

    rule, rewrite = origin.network["rules"][0], origin.network["rewrite"][0]
    with sdk_of(node), Sandbox("base", memory_mib=256, network=origin.network) as sandbox:
        assert sandbox.info().network == {**NONE, "rules": [rule], "rewrite": [rewrite]}
        assert "origin says" in sandbox.exec("curl -sS http://app.example/").check().stdout
        assert sandbox.network.why("http://app.example/")["allowed"]
        info = sandbox.update_network("none")
        assert (info.network, info.link, info.problem) == (NONE, True, None)
        assert sandbox.network.get().network == NONE
        with pytest.raises(InvalidRequestError, match="rule 1"):
            sandbox.update_network(["allow"])

        denied = l4a("net", "why", sandbox.id, "http://app.example/")
        assert denied.returncode == 1 and "denied by default" in denied.stdout, denied
        done = l4a("net", "set", sandbox.id, rule, "--rewrite", rewrite)
        assert done.returncode == 0 and rule in done.stdout, done
        allowed = l4a("net", "why", sandbox.id, "http://app.example/")
        assert allowed.returncode == 0 and f"allowed by {rule}" in allowed.stdout, allowed
        assert "profile none" in l4a("net", "show", sandbox.id).stdout
        # What is wider than meant is said; what leads nowhere too, although it is allowed.
        wide = l4a("net", "set", sandbox.id, "allow *.example")
        assert wide.returncode == 0 and "note: `allow *.example`: everything under" in wide.stderr, wide
        assert len(sandbox.network.get().warnings) == 1
        nowhere = l4a("net", "why", sandbox.id, "https://nobody.example/")
        assert nowhere.returncode == 0 and "knows no address of nobody.example" in nowhere.stdout, nowhere
        failed = sandbox.exec("curl -sS http://nobody.example/")
        assert "no connection could be made" in failed.stdout, failed
        eventually(lambda: "knows no address" in l4a("net", "log", sandbox.id).stdout, 20)
        wrong = l4a("create", "--template", "base", "--net", "none", "--net", "public")
        assert wrong.returncode == 2 and "only one profile" in wrong.stderr
        made = l4a(
            *("create", "-t", "base", "--memory-mib", "256"), "--net", rule, "--rewrite", rewrite, "--json"
        )
        assert made.returncode == 0 and rule in made.stdout, made


def test_a_gateway_that_cannot_start_is_a_problem_that_is_told_and_mended(
    nodes: Callable[..., Node], origin: Origin
) -> None:
    node = nodes()
    (node.state / "barrier").mkdir(parents=True, mode=0o700)
    in_the_way = node.state / "barrier" / "gateway"
    in_the_way.write_text("")
    node.start()
    sandbox = node.create(**SMALL, network=origin.network)

    def told() -> str | None:
        problem = node.call("GET", f"/v1/sandboxes/{sandbox}/network")["problem"]
        return None if problem is None else str(problem)

    assert "gateway" in eventually(told, 30)
    assert node.exec(sandbox, "echo here")["stdout"] == "here\n"
    in_the_way.unlink()
    eventually(lambda: told() is None, 60)
    assert reaches(node, sandbox)
