"""What crosses the gateway beside bytes: connections handed to an interceptor, tunnels of a proxy, floods."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.barrier import wire
from tests.barrier import gate as lab
from tests.barrier.authority import Authority
from tests.barrier.gate import Gate, Joined, Origin, everything, get, resolve
from tests.barrier.guestside import Guest, Pool
from tests.support import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root (links)")
READ = {"rules": ["allow GET web.example.com/public/*"]}


# -- the interceptor's side, played by the test


class Interceptor:
    def __init__(self, gate: Gate) -> None:
        self.sock, theirs = wire.pair()
        gate.ask("interceptor", (theirs.fileno(),))
        theirs.close()
        self.sock.settimeout(15)

    def take(self) -> tuple[dict[str, Any], socket.socket]:
        flow, (fd,) = wire.receive(self.sock)
        client = socket.socket(fileno=fd)
        client.settimeout(15)
        return flow, client

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def interceptor(gate: Gate) -> Iterator[Interceptor]:
    made = Interceptor(gate)
    yield made
    made.close()


def test_a_connection_is_handed_over_with_every_byte_of_it(
    box: tuple[Joined, Guest], interceptor: Interceptor, gate: Gate
) -> None:
    joined, guest = box
    joined.set(READ)
    address = resolve(guest, "web.example.com")
    assert address is not None
    request = b"GET /public/x HTTP/1.1\r\nHost: web.example.com\r\n\r\n"
    with guest.connect(address, 80) as sock:
        sock.sendall(request)
        flow, client = interceptor.take()
        with client:
            assert (flow["sandbox"], flow["name"], flow["port"], flow["tls"]) == (
                "sb",
                "web.example.com",
                80,
                False,
            )
            assert client.recv(10_000) == request
            client.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 204")
            assert gate.ask("stats")["flows"] == 1
    record = {
        "sandbox": "sb",
        "kind": "request",
        "verdict": "allow",
        "method": "GET",
        "path": "/public/x",
        "evil": 1,
    }
    wire.send(interceptor.sock, {"event": "audit", "record": record})
    wire.send(interceptor.sock, {"event": "ended", "flow": flow["flow"], "bytes_in": 27, "bytes_out": 50})
    assert "evil" not in joined.audited(kind="request", method="GET")
    ended = joined.audited(kind="connection", flow=flow["flow"])
    assert (ended["bytes_in"], ended["bytes_out"]) == (27, 50)
    assert gate.ask("stats")["flows"] == 0


def test_tls_is_looked_at_before_it_is_handed_over(
    box: tuple[Joined, Guest], interceptor: Interceptor
) -> None:
    joined, guest = box
    joined.set(READ)
    address = resolve(guest, "web.example.com")
    assert address is not None
    context = ssl.create_default_context()
    context.check_hostname = False
    with guest.connect(address, 443) as sock, pytest.raises(ssl.SSLError, match="ACCESS_DENIED"):
        context.wrap_socket(sock, server_hostname="evil.example.net")
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="web.example.com")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = outgoing.read()
    with guest.connect(address, 443) as sock:
        sock.sendall(hello)
        flow, client = interceptor.take()
        with client:
            assert flow["tls"] is True
            assert client.recv(10_000) == hello


def test_without_an_interceptor_the_guest_is_told(box: tuple[Joined, Guest], gate: Gate) -> None:
    joined, guest = box
    joined.set(READ)
    address = resolve(guest, "web.example.com")
    assert address is not None
    with guest.connect(address, 80) as sock:
        answer = get(sock, "web.example.com", "/public/x")
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"interceptor" in answer
    made = Interceptor(gate)
    with guest.connect(address, 80) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n")
        _, client = made.take()
        client.close()
        made.close()
        eventually(lambda: gate.ask("stats")["flows"] == 0)
    with guest.connect(address, 80) as sock:
        assert get(sock, "web.example.com").startswith(b"HTTP/1.1 503")


# -- a company's proxy


class Proxied:
    """A proxy for CONNECT, whose every tunnel leads to one origin."""

    def __init__(self, origin: Origin) -> None:
        self.heads: list[bytes] = []
        self._origin = origin
        self.server = Origin(self._serve)

    def _serve(self, sock: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += sock.recv(1)
        self.heads.append(head)
        if b"refused.example.com" in head:
            sock.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", self._origin.port)) as there:
            sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            there.sendall(sock.recv(65_536))
            sock.sendall(everything(there))


def test_the_hosts_proxy_is_used(pool: Pool) -> None:
    with Origin(lab.http) as origin:
        proxied = Proxied(origin)
        url = f"http://me:secret@127.0.0.1:{proxied.server.port}"
        with (
            proxied.server,
            lab.gateway(HTTP_PROXY=url, NO_PROXY="direct.example.com") as gate,
            lab.guest_on(pool) as (link, guest),
        ):
            joined = gate.join(
                link, ["allow web.example.com", "allow direct.example.com", "allow refused.example.com"]
            )
            found = {}
            for name in ("web.example.com", "refused.example.com", "direct.example.com"):
                address = resolve(guest, name)
                assert address is not None
                with guest.connect(address, 80) as sock:
                    found[name] = get(sock, name)
            assert b"GET / HTTP/1.1\r\nHost: web.example.com" in found["web.example.com"]
            assert proxied.heads[0].startswith(b"CONNECT web.example.com:80 HTTP/1.1\r\n")
            assert b"Proxy-Authorization: Basic " in proxied.heads[0]
            assert found["refused.example.com"].startswith(b"HTTP/1.1 502")
            assert b"proxy" in found["refused.example.com"]
            assert b"secret" not in found["refused.example.com"]
            assert found["direct.example.com"].startswith(
                b"HTTP/1.1 502"
            )  # (resolved here, where nobody knows it)
            assert len(proxied.heads) == 2
            assert (
                joined.audited(kind="connection", verdict="allow", name="web.example.com")["unjudged"]
                == "proxy"
            )


def test_a_proxy_that_speaks_tls_is_checked_with_the_hosts_authority(pool: Pool, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with Origin(lab.http) as origin:
        proxied = Proxied(origin)
        proxied.server._context = authority.context(tmp_path, ["localhost"])
        url = f"https://localhost:{proxied.server.port}"
        with (
            proxied.server,
            lab.gateway(ALL_PROXY=url, SSL_CERT_FILE=str(authority.certificate)) as gate,
            lab.guest_on(pool) as (link, guest),
        ):
            gate.join(link, ["allow web.example.com"])
            address = resolve(guest, "web.example.com")
            assert address is not None
            with guest.connect(address, 80) as sock:
                assert b"GET / HTTP/1.1\r\nHost: web.example.com" in get(sock, "web.example.com")


# -- floods


def flood(guest: Guest, address: str, port: int, count: int, words: bytes) -> int:
    """`count` connections that each say `words` and are left open until 200 newer ones are; how many were made."""

    def run() -> int:
        made, kept = 0, []
        for _ in range(count):
            sock = socket.socket()
            sock.settimeout(5)
            try:
                sock.connect((address, port))
                sock.sendall(words)
                made += 1
            except OSError:
                pass
            kept.append(sock)
            if len(kept) > 200:
                kept.pop(0).close()
        for sock in kept:
            sock.close()
        return made

    return guest._thread.submit(run).result(240)


def settled(gate: Gate, connections: int) -> None:
    """So many connections have come and gone."""

    def all_gone() -> bool:
        stats = gate.ask("stats")
        return stats["flows"] == 0 and stats["totals"]["connections"] >= connections

    eventually(all_gone, 40)


def test_ten_thousand_connections_leave_it_flat(box: tuple[Joined, Guest], gate: Gate) -> None:
    joined, guest = box
    with Origin(lab.http) as origin:
        network = {
            "rules": [f"allow http 127.0.0.1:{origin.port}"],
            "rewrite": [f"web.example.com -> 127.0.0.1:{origin.port}"],
        }
        joined.set(network)
        address = resolve(guest, "web.example.com")
        assert address is not None
        first = flood(guest, address, 80, 300, b"\x00")
        settled(gate, first)
        before = gate.ask("stats")
        made = first
        for port, words in (
            (80, b""),  # silent
            (80, b"G"),  # for ever on its way
            (443, b"\x16\x03\x01\x02\x00\x01"),
            (80, b"\xff" * 200),
            (22, b"SSH-2.0-x\r\n"),
        ):
            made += flood(guest, address, port, 2_000, words)
        assert made > 2_500  # (the link refuses the rest)
        settled(gate, made)
        after = gate.ask("stats")
        assert after["rss_bytes"] - before["rss_bytes"] < 16 << 20
        with guest.connect(address, 80) as sock:
            assert get(sock, "web.example.com").startswith(b"HTTP/1.1 200")
        accepted = after["totals"]["connections"]

        def written() -> int:
            found = [record for record in joined.audit(kind="connection") if record.get("method") is None]
            return sum(record.get("repeated", 1) for record in found)

        eventually(lambda: written() == accepted, 10)  # each of them, most in sums
        assert (gate.directory / "audit" / "sb.jsonl").stat().st_size < 4 << 20


def test_connections_open_at_once_are_bounded(box: tuple[Joined, Guest], gate: Gate) -> None:
    joined, guest = box
    with Origin(lab.banner) as origin:
        joined.set([f"allow tcp 127.0.0.1:{origin.port}"])
        joined.set(
            {
                "rules": [f"allow tcp 127.0.0.1:{origin.port}"],
                "rewrite": [f"raw.example.com -> 127.0.0.1:{origin.port}"],
            }
        )
        address = resolve(guest, "raw.example.com")
        assert address is not None
        with contextlib.ExitStack() as stack:
            made = refused = 0
            for _ in range(limits.FLOWS_PER_SANDBOX_MAX + 20):
                try:
                    # The reset of one too many may be there before `connect` has returned.
                    sock = stack.enter_context(guest.connect(address, 22))
                    assert sock.recv(6) == b"hello\n"
                    made += 1
                except ConnectionResetError:
                    refused += 1
            assert (made, refused) == (limits.FLOWS_PER_SANDBOX_MAX, 20)
        eventually(lambda: gate.ask("stats")["flows"] == 0)
        assert "open already" in joined.audited(kind="connection", verdict="deny")["reason"]


def test_a_first_message_in_drops_is_given_up(box: tuple[Joined, Guest], gate: Gate) -> None:
    joined, guest = box
    joined.set("public")
    with guest.connect("203.0.113.9", 80) as sock:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 30:
                sock.sendall(b"G" if time.monotonic() - began < 0.1 else b"ET / HTTP/1.1\r\nX-A: "[:1])
                sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(100):
                        break
                sock.sendall(b"E")
        assert time.monotonic() - began < limits.FIRST_BYTES_S + 5
    joined.audited(kind="connection", verdict="deny")


def test_a_reader_that_does_not_read_costs_little(box: tuple[Joined, Guest], gate: Gate) -> None:
    """Many downloads that nobody takes: what is held for them is bounded for the sandbox, not for each."""
    joined, guest = box

    def source(sock: socket.socket) -> None:
        for _ in range(64):
            sock.sendall(bytes(1 << 20))

    with Origin(source) as origin:
        joined.set(
            {
                "rules": [f"allow tcp 127.0.0.1:{origin.port}"],
                "rewrite": [f"big.example.com -> 127.0.0.1:{origin.port}"],
            }
        )
        address = resolve(guest, "big.example.com")
        assert address is not None
        before = gate.ask("stats")["rss_bytes"]
        with contextlib.ExitStack() as stack:
            for _ in range(150):
                stack.enter_context(guest.connect(address, 22)).recv(1)
            eventually(lambda: gate.ask("stats")["flows"] == 150)
            assert gate.ask("stats")["rss_bytes"] - before < 24 << 20
        eventually(lambda: gate.ask("stats")["flows"] == 0)


def test_policies_change_while_connections_come(box: tuple[Joined, Guest], gate: Gate) -> None:
    """Descriptors are closed and used again all the time: none is mistaken for another's."""
    joined, guest = box
    with Origin(lab.http) as origin:
        network = {
            "rules": [f"allow http 127.0.0.1:{origin.port}"],
            "rewrite": [f"web.example.com -> 127.0.0.1:{origin.port}"],
        }
        joined.set(network)
        address = resolve(guest, "web.example.com")
        assert address is not None
        request = b"GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n"
        begun = threading.Semaphore(0)
        floods = [guest._thread.submit(_burst, address, request, begun) for _ in range(20)]
        for number in range(40):
            joined.set("none" if number % 2 else network)
            for _ in range(30):  # the next change after so many connections of the 1,200
                assert begun.acquire(timeout=20)
        for flood in floods:
            flood.result(60)
        joined.set(network)
        eventually(lambda: gate.ask("stats")["flows"] == 0, 20)
        for _ in range(20):
            with guest.connect(address, 80) as sock:
                assert get(sock, "web.example.com").startswith(b"HTTP/1.1 200")


def _burst(address: str, request: bytes, begun: threading.Semaphore) -> None:
    socks = []
    for number in range(60):
        sock = socket.socket()
        sock.settimeout(5)
        socks.append(sock)
        with contextlib.suppress(OSError):
            sock.connect((address, 80))
            sock.sendall(request[: len(request) if number % 3 else 9])
        begun.release()
    for sock in socks:
        sock.close()
