"""Policy over a sandbox's life: changes cut what was open, forks inherit and go their own way, deaths leave it shut."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.barrier.attacks.guest import GATEWAY, INTERCEPTOR, Case, Guest
from tests.barrier.attacks.kit import KEPT, fetch, resolve, socket, tcp, time, tls_context
from tests.support import eventually

pytestmark = [pytest.mark.vm, pytest.mark.root]

NAME, OTHER, EVIL = "api.example.com", "other.example.com", "evil.example.net"


def hold(host: str, port: int, secure: bool) -> bool:
    """Opens a connection that stays, and uses it once."""
    plain = socket.create_connection((host, port), 5)
    sock = tls_context().wrap_socket(plain, server_hostname=host) if secure else plain
    sock.settimeout(5)
    KEPT[(host, port)] = sock
    if port == 22:
        return bool(sock.recv(100))
    sock.sendall(f"GET /public/1 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return b" 200 " in sock.recv(65_536)


def reuse(host: str, port: int) -> str:
    """Uses it again: "answered", or that it has ended."""
    sock = KEPT[(host, port)]
    try:
        sock.sendall(f"GET /public/2 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        time.sleep(0.05)
        got = sock.recv(65_536)
        return "answered" if b" 200 " in got or b"/public/2" in got else "ended"
    except OSError:
        return "ended"


KINDS = {
    "raw": (22, False, f"allow tcp {NAME}:22"),
    "plain": (80, False, f"allow {NAME}"),
    "tls": (443, True, f"allow {NAME}"),
    "intercepted": (443, True, f"allow GET {NAME}/public/*"),
    "intercepted, plain": (80, False, f"allow GET {NAME}/public/*"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", ["none", "public but it", "other rules", "other port"])
def test_an_old_connection_after_the_policy_changed(case: Case, kind: str, after: str) -> None:
    port, secure, rule = KINDS[kind]
    case.guest.network([rule])
    assert case.guest.run(hold, NAME, port, secure)
    assert case.guest.run(reuse, NAME, port) == "answered"
    # A change that still allows it leaves it alone.
    case.guest.network([f"allow {OTHER}", rule])
    assert case.guest.run(reuse, NAME, port) == "answered"
    case.again()
    changed: Any = {
        "none": "none",
        "public but it": {"profile": "public", "rules": [f"deny {NAME}:*"]},
        "other rules": [f"allow {OTHER}"],
        "other port": [f"allow {NAME}:8080"],
    }[after]
    assert case.guest.network(changed)["cut"] >= 1
    assert case.guest.run(reuse, NAME, port) == "ended"
    case.lab.settle()
    assert not [one for one in case.lab.arrived(case.mark) if one.method or one.body_bytes]
    case.guest.network([rule])
    assert case.guest.run(hold, NAME, port, secure)


def test_an_old_name_after_the_policy_changed(case: Case) -> None:
    """The address that a name had is still its own, and shut."""
    case.guest.network([f"allow {NAME}", f"allow {OTHER}"])
    first = case.guest.run(resolve, NAME)["addresses"][0]
    case.guest.network([f"allow {OTHER}"])
    case.again()
    assert case.guest.run(fetch, f"http://{NAME}/", connect=first)["status"] in (0, 403)
    case.nothing_arrived()
    case.guest.network([f"allow {NAME}", "allow *.example.com"])
    others = {case.guest.run(resolve, f"n{number}.example.com")["addresses"][0] for number in range(50)}
    assert first not in others and len(others) == 50
    assert case.guest.run(resolve, NAME)["addresses"] == [first]


def fork(guest: Guest) -> Guest:
    """A fork of it, with the parent's kit."""
    answer = guest.node.call("POST", f"/v1/sandboxes/{guest.id}/fork", json={"count": 1})
    child = object.__new__(Guest)
    child.node, child.lab = guest.node, guest.lab
    child.id = str((answer["data"] if "data" in answer else answer["sandboxes"])[0]["id"])
    eventually(child._answers, 30)
    return child


def test_a_fork_inherits_the_policy_and_goes_its_own_way(case: Case) -> None:
    case.guest.network([f"allow {NAME}"])
    address = case.guest.run(resolve, NAME)["addresses"]
    child = fork(case.guest)
    try:
        assert child.run(fetch, f"http://{NAME}/")["status"] == 200
        assert child.run(resolve, NAME)["addresses"] == address
        assert child.run(fetch, f"http://{EVIL}/")["status"] in (0, 403)
        # The child's wider policy is the child's alone; so is the parent's.
        child.network([f"allow {EVIL}"])
        assert child.run(fetch, f"http://{EVIL}/")["status"] == 200
        assert child.run(fetch, f"http://{NAME}/")["status"] in (0, 403)
        assert case.guest.run(fetch, f"http://{EVIL}/")["status"] in (0, 403)
        assert case.guest.run(fetch, f"http://{NAME}/")["status"] == 200
        case.guest.network("none")
        assert case.guest.run(fetch, f"http://{NAME}/")["status"] in (0, 403)
        assert child.run(fetch, f"http://{EVIL}/")["status"] == 200
        case.guest.audit(case.at, verdict="deny", name=EVIL)
        child.audit(case.at, verdict="allow", name=EVIL)
    finally:
        child.kill()


def test_a_fork_has_no_connection_of_its_parent(case: Case) -> None:
    """Its memory has the socket; its namespace has not."""
    case.guest.network([f"allow tcp {NAME}:22"])
    assert case.guest.run(hold, NAME, 22, False)
    child = fork(case.guest)
    try:
        case.again()
        assert child.run(reuse, NAME, 22) == "ended"
        case.lab.settle()
        assert not [one for one in case.lab.arrived(case.mark) if one.body_bytes]
        assert case.guest.run(reuse, NAME, 22) == "answered"
    finally:
        child.kill()


def test_a_clone_has_the_policy_it_was_created_with(case: Case) -> None:
    """And not that of another of the same template."""
    case.guest.network([f"allow {NAME}"])
    clone = Guest(case.guest.node, case.lab)
    try:
        assert clone.run(fetch, f"http://{NAME}/")["status"] in (0, 403)
        clone.audit(case.at, verdict="deny", name=NAME)
        assert case.guest.run(fetch, f"http://{NAME}/")["status"] == 200
    finally:
        clone.kill()


def test_a_pause_keeps_the_policy(case: Case) -> None:
    mine = Guest(case.guest.node, case.lab, [f"allow {NAME}"])
    try:
        address = mine.run(resolve, NAME)["addresses"]
        mine.node.call("POST", f"/v1/sandboxes/{mine.id}/pause", json={})
        mine.node.call("POST", f"/v1/sandboxes/{mine.id}/resume", json={})
        eventually(mine._answers, 30)
        case.again()
        assert mine.run(fetch, f"http://{EVIL}/")["status"] in (0, 403)
        assert mine.run(tcp, "93.184.216.66", 80, timeout=2)["outcome"] != "answered"
        case.nothing_arrived()
        assert mine.run(fetch, f"http://{NAME}/")["status"] == 200
        assert mine.run(resolve, NAME)["addresses"] == address
    finally:
        mine.kill()


@pytest.mark.parametrize("which", ["gateway", "interceptor"])
def test_a_gateway_that_dies(guest: Guest, which: str) -> None:
    """The namespace is shut while there is none, and everything is as it was when there is one again."""
    case = Case(guest)
    guest.network([f"allow {NAME}", f"allow GET {OTHER}/public/*"])
    assert guest.run(fetch, f"http://{NAME}/")["status"] == 200
    assert guest.run(fetch, f"https://{OTHER}/public/a")["status"] == 200
    address = guest.run(resolve, NAME)["addresses"]
    case.again()
    for pid in guest.lab.rss(GATEWAY if which == "gateway" else INTERCEPTOR):
        os.kill(pid, signal.SIGKILL)
    for _ in range(3):
        assert (
            guest.run(tcp, "93.184.216.66", 80, b"GET / HTTP/1.0\r\n\r\n", timeout=1, limit=12)["data"][9:12]
            != b"200"
        )
        assert guest.run(fetch, f"https://{OTHER}/admin", timeout=1, verify=False)["status"] in (0, 403, 503)
    assert not [one for one in case.lab.arrived(case.mark) if one.method]
    eventually(lambda: guest.run(fetch, f"http://{NAME}/", timeout=3)["status"] == 200, 30)
    eventually(lambda: guest.run(fetch, f"https://{OTHER}/public/a", timeout=3)["status"] == 200, 30)
    assert guest.run(resolve, NAME)["addresses"] == address
    assert guest.run(fetch, f"http://{EVIL}/")["status"] in (0, 403)
