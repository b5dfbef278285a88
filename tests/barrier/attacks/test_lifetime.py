"""Policy over a sandbox's life: changes cut what was open, forks inherit and go their own way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.barrier.attacks.guest import Case, Guest, source_of
from tests.barrier.attacks.kit import KEPT, fetch, resolve, socket, tcp, threading, time, tls_context
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
        return sock.recv(100) == b"lab ready\n"
    return bool(_use(sock, host, port, b"hello from"))


def _use(sock: Any, host: str, port: int, answer: bytes) -> bool:
    got = b""
    try:
        sock.sendall(f"GET /public/a HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        while answer not in got and (piece := sock.recv(65_536)):
            got += piece
    except OSError:
        pass
    return answer in got


def reuse(host: str, port: int) -> bool:
    """Whether the kept connection still leads to the origin."""
    return _use(KEPT[(host, port)], host, port, b"/public/a" if port == 22 else b"hello from")


def _hold(guest: Guest, port: int, secure: bool) -> bool:
    return bool(guest.run_source(source_of(_use, hold), "hold", NAME, port, secure))


def _reuse(guest: Guest, port: int) -> bool:
    return bool(guest.run_source(source_of(_use, reuse), "reuse", NAME, port))


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
    assert _hold(case.guest, port, secure)
    assert _reuse(case.guest, port)
    # A change that still allows it leaves it alone.
    case.guest.network([f"allow {OTHER}", rule])
    assert _reuse(case.guest, port)
    case.again()
    changed: Any = {
        "none": "none",
        "public but it": {"profile": "public", "rules": [f"deny {NAME}:*"]},
        "other rules": [f"allow {OTHER}"],
        "other port": [f"allow {NAME}:8080"],
    }[after]
    assert case.guest.network(changed)["cut"] >= 1
    assert not _reuse(case.guest, port)
    case.lab.settle()
    assert not [one for one in case.lab.arrived(case.mark) if one.method or one.body_bytes]
    assert "cut by a new policy" in case.denied(kind="connection", name=NAME, port=port)["reason"]
    case.guest.network([rule])
    assert _hold(case.guest, port, secure)


def storm(address: str, host: str, secure: bool, seconds: float) -> dict[str, int]:
    """Connections and requests without a pause, from four threads."""
    outcomes: dict[str, int] = {}
    end = time.monotonic() + seconds

    def one() -> None:
        while time.monotonic() < end:
            try:
                with socket.create_connection((address, 443 if secure else 80), 2) as plain:
                    sock = (
                        tls_context(verify=False).wrap_socket(plain, server_hostname=host)
                        if secure
                        else plain
                    )
                    sock.settimeout(2)
                    for _ in range(3):
                        sock.sendall(f"GET /public/a HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                        word = sock.recv(65_536)[9:12].decode() or "closed"
                        outcomes[word] = outcomes.get(word, 0) + 1
            except OSError as error:
                outcomes[type(error).__name__] = outcomes.get(type(error).__name__, 0) + 1

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("kind", ["plain", "tls", "intercepted", "intercepted, plain"])
def test_a_policy_holds_from_when_it_was_answered(case: Case, kind: str) -> None:
    """Connections are opened all the time: none that was on its way when policy changed gets through afterwards."""
    port, secure, rule = KINDS[kind]
    case.guest.network([rule])
    address = case.guest.run(resolve, NAME)["addresses"][0]
    found: list[dict[str, int]] = []
    source = source_of(storm)
    thread = threading.Thread(
        target=lambda: found.append(case.guest.run_source(source, "storm", address, NAME, secure, 5.0))
    )
    thread.start()
    shut = 0
    try:
        while thread.is_alive():
            case.guest.network("none")
            case.lab.settle()
            threading.Event().wait(0.1)  # for the origin to have read what it had been sent
            case.again()
            shut += 1
            threading.Event().wait(0.15)
            case.lab.settle()
            packets = [one for one in case.lab.left(case.mark) if one.port == port]
            requests = [one for one in case.lab.arrived(case.mark) if one.method]
            assert not packets and not requests, (packets[:3], requests[:3])
            case.guest.network([rule])
            threading.Event().wait(0.3)
    finally:
        thread.join()
    assert shut >= 5 and found[0].get("200", 0) > 3, found


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
    assert _hold(case.guest, 22, False)
    child = fork(case.guest)
    try:
        case.again()
        assert not _reuse(child, 22)
        case.lab.settle()
        assert not [one for one in case.lab.arrived(case.mark) if one.body_bytes]
        assert _reuse(case.guest, 22)
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
