"""The gateway as a process, behind real links: what a guest's stack gets, what an origin sees, what is written down."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm4agents import limits
from tests.barrier import gate as lab
from tests.barrier.authority import Authority
from tests.barrier.gate import Gate, Joined, Origin, ask_dns, everything, get, question, resolve
from tests.barrier.guestside import Guest, Pool
from tests.support import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root (links)")
ELSEWHERE = "203.0.113.9"


@pytest.fixture
def web() -> Iterator[Origin]:
    with Origin(lab.http) as origin:
        yield origin


def led(name: str, origin: Origin, protocol: str = "", extra: str = "") -> dict[str, object]:
    """A network that leads a name to an origin of the test's own."""
    words = " ".join(filter(None, ["allow", protocol, f"127.0.0.1:{origin.port}", extra]))
    return {"profile": "none", "rules": [words], "rewrite": [f"{name} -> 127.0.0.1:{origin.port}"]}


def both(*networks: dict[str, object]) -> dict[str, object]:
    return {
        "profile": "none",
        "rules": [rule for network in networks for rule in network["rules"]],  # type: ignore[attr-defined]
        "rewrite": [line for network in networks for line in network["rewrite"]],  # type: ignore[attr-defined]
    }


# -- DNS


def test_only_allowed_names_have_addresses(box: tuple[Joined, Guest], web: Origin) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web))
    address = resolve(guest, "web.example.com")
    assert address is not None
    assert address.startswith("198.18.")
    assert resolve(guest, "WEB.example.com") == address
    assert resolve(guest, "other.example.com") is None
    raw = ask_dns(guest, question("secret-bytes.tunnel.example.net", 16))
    assert raw[3] & 0xF == 3
    assert b"Way out" in raw
    denied = joined.audited(kind="dns", verdict="deny", name="secret-bytes.tunnel.example.net")
    assert denied["query"] == "TXT"
    assert joined.audited(kind="dns", verdict="allow", name="web.example.com")["address"] == address


def test_addresses_of_version_6_and_service_records_are_there_and_empty(
    box: tuple[Joined, Guest], web: Origin
) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web))
    for kind in (28, 64, 65, 16):
        raw = ask_dns(guest, question("web.example.com", kind, edns=False))
        assert (raw[3] & 0xF, struct.unpack_from("!H", raw, 6)[0]) == (0, 0)


def test_whoever_is_asked_it_is_the_gateway_that_answers(box: tuple[Joined, Guest], web: Origin) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web))
    raw = ask_dns(guest, question("web.example.com", edns=False), ("8.8.8.8", 53))
    assert socket.inet_ntoa(raw[-4:]) == resolve(guest, "web.example.com")
    with guest.connect("8.8.8.8", 53) as sock:
        for name in ("web.example.com", "other.example.com"):
            asked = question(name)
            sock.sendall(struct.pack("!H", len(asked)) + asked)
            (size,) = struct.unpack("!H", sock.recv(2))
            answer = sock.recv(size)
            assert len(answer) == size
            assert answer[3] & 0xF == (0 if name.startswith("web") else 3)


def test_queries_over_tcp_that_are_sent_ahead_hold_no_neighbour_up(
    pool: Pool, gate: Gate, box: tuple[Joined, Guest]
) -> None:
    _, guest = box
    asked = question("other.example.com", edns=False)
    pile = (struct.pack("!H", len(asked)) + asked) * 1_000
    with lab.guest_on(pool) as (link, neighbour), contextlib.ExitStack() as opened:
        gate.join(link, "none", "neighbour")
        took = []
        for _ in range(40):
            sock = opened.enter_context(guest.connect("198.19.255.1", 53))
            sock.sendall(pile)
        for _ in range(20):
            began = time.monotonic()
            assert resolve(neighbour, "other.example.com") is None
            took.append(time.monotonic() - began)
        assert max(took) < 1, took
        assert len(sock.recv(2)) == 2  # its own are answered too, in their turn


def test_queries_are_counted_also_where_one_socket_asks_them_all(
    box: tuple[Joined, Guest], gate: Gate
) -> None:
    """The link knows its second packet as one of a connection."""
    _, guest = box
    asked = question("other.example.com", edns=False)
    before = gate.ask("stats")["totals"]["queries"]
    with guest.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("198.19.255.1", 53))
        sock.send(asked)
        assert sock.recv(4_096)
        began = time.monotonic()
        while time.monotonic() < began + 1:
            with contextlib.suppress(OSError):  # it is refused
                sock.send(asked)
        took = time.monotonic() - began
    served = gate.ask("stats")["totals"]["queries"] - before
    assert served <= limits.LINK_QUERIES_PER_S * (1.5 + took), served


def test_an_address_tells_its_name(box: tuple[Joined, Guest], web: Origin) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web))
    address = resolve(guest, "web.example.com")
    assert address is not None
    reverse = ".".join(reversed(address.split("."))) + ".in-addr.arpa"
    assert b"\x03web\x07example\x03com" in ask_dns(guest, question(reverse, 12))
    assert ask_dns(guest, question("1.0.0.10.in-addr.arpa", 12))[3] & 0xF == 3


def test_noise_is_answered_or_not_and_harms_nobody(box: tuple[Joined, Guest], web: Origin) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web))
    with guest.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("198.19.255.1", 53))
        for size in (1, 11, 12, 40, 500, 1_400):
            for _ in range(30):
                sock.send(os.urandom(size))
    assert resolve(guest, "web.example.com") is not None


# -- HTTP and TLS


def test_http_goes_through_untouched(box: tuple[Joined, Guest], web: Origin) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web, "http"))
    address = resolve(guest, "web.example.com")
    assert address is not None
    with guest.connect(address, 80) as sock:
        answer = get(sock, "web.example.com", "/a?token=1", **{"X-Odd": "Kept  as-is"})
    assert b"GET /a?token=1 HTTP/1.1\r\nHost: web.example.com\r\n" in answer
    assert b"X-Odd: Kept  as-is" in answer
    record = joined.audited(kind="connection", verdict="allow")
    assert (record["name"], record["protocol"], record["method"], record["path"]) == (
        "web.example.com",
        "http",
        "GET",
        "/a",
    )
    assert record["bytes_in"] == len(answer)
    assert record["bytes_out"] > 50
    assert record["rule"] == f"allow http 127.0.0.1:{web.port}"
    assert record["rewritten"] == f"127.0.0.1:{web.port}"


def test_a_denied_request_is_told_why_and_the_way_out(box: tuple[Joined, Guest]) -> None:
    joined, guest = box
    with guest.connect(ELSEWHERE, 80) as sock:
        answer = get(sock, "example.com", "/x").decode()
    assert answer.startswith("HTTP/1.1 403 Forbidden\r\n")
    assert "content-type: text/plain" in answer
    assert "network policy" in answer
    assert "Way out" in answer
    assert 'Sandbox(network="public")' in answer
    assert "--net public" in answer
    record = joined.audited(kind="connection", verdict="deny")
    assert (record["address"], record["port"], record["protocol"]) == (ELSEWHERE, 80, "http")
    assert record["says"] == "example.com"


def test_tls_goes_through_with_the_origins_own_certificate(box: tuple[Joined, Guest], tmp_path: Path) -> None:
    joined, guest = box
    authority = Authority(tmp_path)
    with Origin(lab.http, authority.context(tmp_path, ["tls.example.com"])) as origin:
        joined.set(led("tls.example.com", origin, "https"))
        address = resolve(guest, "tls.example.com")
        assert address is not None
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with (
            guest.connect(address, 443) as sock,
            context.wrap_socket(sock, server_hostname="tls.example.com") as tls,
        ):
            assert b"GET /hi" in get(tls, "tls.example.com", "/hi")
        record = joined.audited(kind="connection", verdict="allow")
        assert (record["protocol"], record["name"]) == ("tls", "tls.example.com")
        for wrong in ("evil.example.net", None):
            context.check_hostname = False
            with guest.connect(address, 443) as sock, pytest.raises(ssl.SSLError, match="ACCESS_DENIED"):
                context.wrap_socket(sock, server_hostname=wrong)
        assert origin.connections == 1
        eventually(lambda: len(joined.audit(kind="connection", verdict="deny")) == 2)
        reasons = [record["reason"] for record in joined.audit(kind="connection", verdict="deny")]
        assert "evil.example.net" in reasons[0]
        assert "missing" in reasons[1]


def test_a_hello_in_crumbs_is_the_same_hello(box: tuple[Joined, Guest], tmp_path: Path) -> None:
    joined, guest = box
    authority = Authority(tmp_path)
    with Origin(lab.http, authority.context(tmp_path, ["tls.example.com"])) as origin:
        joined.set(led("tls.example.com", origin, "https"))
        address = resolve(guest, "tls.example.com")
        assert address is not None
        context = ssl.create_default_context(cafile=str(authority.certificate))
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="tls.example.com")
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        hello = outgoing.read()
        with guest.connect(address, 443) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(0, len(hello), 40):
                sock.sendall(hello[at : at + 40])
            shaken = False
            while not shaken:
                incoming.write(sock.recv(65_536))
                try:
                    tls.do_handshake()
                    shaken = True
                except ssl.SSLWantReadError:
                    sock.sendall(outgoing.read())
        eventually(lambda: origin.connections == 1)


def test_a_denied_tls_client_gets_an_alert(box: tuple[Joined, Guest]) -> None:
    joined, guest = box
    context = ssl.create_default_context()
    with guest.connect(ELSEWHERE, 443) as sock, pytest.raises(ssl.SSLError, match="ACCESS_DENIED"):
        context.wrap_socket(sock, server_hostname="example.com")
    assert joined.audited(kind="connection", verdict="deny")["says"] == "example.com"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: evil.example.net\r\n\r\n", b"403"),
        (b"GET / HTTP/1.1\r\nHost: web.example.com\r\nHost: evil.example.net\r\n\r\n", b"400"),
        (b"GET http://evil.example.net/ HTTP/1.1\r\nHost: web.example.com\r\n\r\n", b"403"),
        (b"CONNECT evil.example.net:443 HTTP/1.1\r\nHost: web.example.com\r\n\r\n", b"403"),
        (b"TRACE / HTTP/1.1\r\nHost: web.example.com\r\n\r\n", b"403"),
        (
            b"POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"400",
        ),
        (b"GET / HTTP/1.1\nHost: web.example.com\n\n", b"400"),
    ],
)
def test_requests_that_mean_two_things(
    box: tuple[Joined, Guest], web: Origin, request_: bytes, status: bytes
) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web, "http"))
    address = resolve(guest, "web.example.com")
    assert address is not None
    with guest.connect(address, 80) as sock:
        sock.sendall(request_)
        answer = everything(sock)
    assert answer.split(b" ")[1] == status
    assert web.connections == 0
    assert joined.audited(kind="connection", verdict="deny")["reason"]


def test_neither_http_nor_tls_needs_a_rule_that_says_so(box: tuple[Joined, Guest]) -> None:
    joined, guest = box
    with Origin(lab.echo) as origin:
        joined.set(led("raw.example.com", origin, "http"))
        address = resolve(guest, "raw.example.com")
        assert address is not None
        with guest.connect(address, 80) as sock:
            sock.sendall(b"\x00\x01\x02raw")
            with pytest.raises(ConnectionResetError):
                sock.recv(100)
        assert origin.connections == 0
        joined.set(led("raw.example.com", origin, "tcp"))
        with guest.connect(address, 5_432) as sock:
            sock.sendall(b"\x00\x01\x02raw")
            assert sock.recv(100) == b"\x00\x01\x02raw"


def test_a_server_that_speaks_first_is_not_waited_for(box: tuple[Joined, Guest]) -> None:
    joined, guest = box
    with Origin(lab.banner) as origin:
        joined.set(led("ssh.example.com", origin, "tcp"))
        address = resolve(guest, "ssh.example.com")
        assert address is not None
        began = time.monotonic()
        with guest.connect(address, 22) as sock:
            assert sock.recv(100) == b"hello\n"
            sock.shutdown(socket.SHUT_WR)  # half closed: the other half goes on to its end
            assert everything(sock) == b""
        assert time.monotonic() - began < 3


def test_addresses_are_judged_when_they_are_dialled(box: tuple[Joined, Guest], web: Origin) -> None:
    """A name that resolves to this host itself: the name's rule opens it no more than any private address."""
    joined, guest = box
    joined.set([f"allow localhost:{web.port}"])
    address = resolve(guest, "localhost")
    assert address is not None
    with guest.connect(address, web.port) as sock:
        assert b"loopback" in get(sock, "localhost")
    joined.set([f"allow localhost:{web.port}", f"allow 127.0.0.1:{web.port}", f"allow [::1]:{web.port}"])
    with guest.connect(address, web.port) as sock:
        assert get(sock, "localhost").startswith(b"HTTP/1.1 200")
    assert web.connections == 1
    joined.set("public")
    for literal in ("10.0.0.5", "169.254.169.254", "192.168.1.1"):
        with guest.connect(literal, 80) as sock:
            assert get(sock, literal).startswith(b"HTTP/1.1 403")
    assert web.connections == 1


def test_an_address_nobody_was_told_is_nobodys(box: tuple[Joined, Guest]) -> None:
    joined, guest = box
    joined.set("public")
    for address in ("198.18.200.1", "198.19.255.1"):
        with guest.connect(address, 80) as sock:
            assert get(sock, "example.com").startswith(b"HTTP/1.1 403")


def test_an_origin_that_is_down_is_told_of(box: tuple[Joined, Guest]) -> None:
    joined, guest = box
    with Origin(lab.echo) as origin:
        network = led("down.example.com", origin, "http")
    joined.set(network)
    address = resolve(guest, "down.example.com")
    assert address is not None
    with guest.connect(address, 80) as sock:
        answer = get(sock, "down.example.com")
    assert answer.startswith(b"HTTP/1.1 502")
    assert b"refused" in answer
    assert joined.audited(kind="connection", verdict="allow")["reason"]


# -- policy changes, bounds


def test_a_new_policy_cuts_what_it_denies_and_nothing_else(box: tuple[Joined, Guest]) -> None:
    joined, guest = box
    with Origin(lab.echo) as one, Origin(lab.echo) as two:
        first, second = led("one.example.com", one), led("two.example.com", two)
        joined.set(both(first, second))
        socks = []
        for name in ("one.example.com", "two.example.com"):
            address = resolve(guest, name)
            assert address is not None
            sock = guest.connect(address, 7_000)
            sock.sendall(b"ping")
            assert sock.recv(10) == b"ping"
            socks.append(sock)
        assert joined.set(second) == {"ok": True, "flows": 2, "cut": 1}
        with pytest.raises(ConnectionResetError):
            socks[0].recv(10)
        socks[1].sendall(b"again")
        assert socks[1].recv(10) == b"again"
        record = joined.audited(kind="connection", verdict="deny", name="one.example.com")
        assert "new policy" in record["reason"]
        assert (record["bytes_in"], record["bytes_out"]) == (4, 4)
        assert joined.audited(kind="policy", reason="changed", cut=1)["flows"] == 2
        for sock in socks:
            sock.close()


def test_a_new_policy_cuts_what_has_not_begun(box: tuple[Joined, Guest], web: Origin, gate: Gate) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web, "http"))
    address = resolve(guest, "web.example.com")
    assert address is not None
    with guest.connect(address, 80) as silent, guest.connect(address, 80) as slow:
        slow.sendall(b"GET / HT")
        eventually(lambda: gate.ask("stats")["flows"] == 2)
        assert joined.set("none")["cut"] == 2
        for sock in (silent, slow):
            with pytest.raises(ConnectionResetError):
                sock.recv(10)
    assert gate.ask("flows", sandbox="sb")["count"] == 0


def test_a_connection_that_only_knocks_is_no_denial(box: tuple[Joined, Guest], web: Origin) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web, "http"))
    address = resolve(guest, "web.example.com")
    assert address is not None
    guest.connect(address, 80).close()
    assert "before it said" in joined.audited(kind="connection")["reason"]
    assert not joined.audit(kind="connection", verdict="deny")


def test_bytes_a_rule_allows_are_counted_over_its_connections(box: tuple[Joined, Guest], gate: Gate) -> None:
    joined, guest = box
    with Origin(lab.echo) as origin:
        joined.set(led("some.example.com", origin, extra="bytes=64KiB"))
        address = resolve(guest, "some.example.com")
        assert address is not None
        seen = 0
        with guest.connect(address, 7_000) as sock, pytest.raises(ConnectionError):
            for _ in range(100):
                sock.sendall(bytes(1_000))
                seen += len(sock.recv(1_000, socket.MSG_WAITALL))
        assert 30_000 <= seen <= 32_768
        with guest.connect(address, 7_000) as sock:
            assert get(sock, "some.example.com").startswith(b"HTTP/1.1 403")
        assert "used up" in joined.audited(kind="connection", verdict="deny")["reason"]
        gate.ask("leave", sandbox=joined.id, forget=False)
        joined.join(
            led("some.example.com", origin, extra="bytes=64KiB")
        )  # as after a pause: what is used stays used
        with guest.connect(address, 7_000) as sock:
            assert get(sock, "some.example.com").startswith(b"HTTP/1.1 403")
        joined.set(led("some.example.com", origin, extra="bytes=128KiB"))
        with guest.connect(address, 7_000) as sock:
            sock.sendall(b"ping")
            assert sock.recv(10) == b"ping"


def test_a_rate_is_kept(box: tuple[Joined, Guest]) -> None:
    joined, guest = box

    def source(sock: socket.socket) -> None:
        sock.sendall(bytes(400_000))

    with Origin(source) as origin:
        joined.set(led("slow.example.com", origin, extra="rate=100KiB/s"))
        address = resolve(guest, "slow.example.com")
        assert address is not None
        began = time.monotonic()
        with guest.connect(address, 7_000) as sock:
            assert len(everything(sock)) == 400_000
        assert 2.5 < time.monotonic() - began < 15


def test_an_end_of_the_machine_ends_everything(box: tuple[Joined, Guest], gate: Gate) -> None:
    joined, guest = box
    with Origin(lab.echo) as origin:
        joined.set(led("one.example.com", origin))
        address = resolve(guest, "one.example.com")
        assert address is not None
        with guest.connect(address, 7_000) as sock:
            sock.sendall(b"ping")
            assert sock.recv(10) == b"ping"
            before = gate.ask("stats")
            assert (before["sandboxes"], before["flows"]) == (1, 1)
            joined.machine.kill()
            with pytest.raises(ConnectionResetError):
                sock.recv(10)
        after = gate.ask("stats")
        assert (after["sandboxes"], after["flows"]) == (0, 0)


def test_what_was_summed_up_is_written_when_it_is_told_to_end(box: tuple[Joined, Guest], gate: Gate) -> None:
    joined, guest = box
    count = limits.AUDIT_BURST + 500
    with guest.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("198.19.255.1", 53))
        number = 0
        while number < count:
            with contextlib.suppress(OSError):  # the link refuses what is more than it lets through a second
                sock.send(question("denied.example.com", ident=number))
                sock.recv(4_096)
                number += 1
    assert gate.worker.pid is not None
    os.kill(gate.worker.pid, signal.SIGTERM)

    def written() -> int:
        return sum(record.get("repeated", 1) for record in joined.audit(kind="dns"))

    eventually(lambda: written() == count, 10)
    eventually(lambda: gate.worker.up, 30)


def test_leave_forgets_names_and_keeps_the_audit(box: tuple[Joined, Guest], gate: Gate, web: Origin) -> None:
    joined, guest = box
    joined.set(led("web.example.com", web))
    resolve(guest, "web.example.com")
    names = gate.directory / "names" / joined.id
    assert names.read_text() == "web.example.com\n"
    gate.ask("leave", sandbox=joined.id, forget=False)
    assert names.exists()
    gate.ask("leave", sandbox=joined.id, forget=True)
    assert not names.exists()
    assert joined.audit(kind="dns")


def test_another_gateway_knows_the_names_of_the_one_before(
    box: tuple[Joined, Guest], gate: Gate, web: Origin
) -> None:
    joined, guest = box
    network = led("web.example.com", web, "http")
    joined.set(network)
    address = resolve(guest, "web.example.com")
    assert address is not None
    gate.restart()
    with guest.connect(
        address, 80
    ) as waiting:  # the planted socket outlives gateways: this one waits in its backlog
        joined.join(network)
        assert get(waiting, "web.example.com").startswith(b"HTTP/1.1 200")
    assert resolve(guest, "web.example.com") == address


def test_a_fork_knows_its_parents_names(
    pool: Pool, box: tuple[Joined, Guest], gate: Gate, web: Origin
) -> None:
    joined, guest = box
    network = led("web.example.com", web, "http")
    joined.set(network)
    address = resolve(guest, "web.example.com")
    assert address is not None
    with lab.guest_on(pool) as (link, child_guest):
        gate.join(link, network, "child", names_from=joined.id)
        with child_guest.connect(address, 80) as sock:
            assert get(sock, "web.example.com").startswith(b"HTTP/1.1 200")
        gate.ask("leave", sandbox="child", forget=True)


def test_a_name_that_is_only_said_is_not_written_down_as_one(box: tuple[Joined, Guest]) -> None:
    """Nobody reads in the audit that it was github.com, because a hello to another address says so."""
    joined, guest = box
    with guest.connect(ELSEWHERE, 80) as sock:
        assert get(sock, "github.com", "/").startswith(b"HTTP/1.1 403")
    record = joined.audited(kind="connection", verdict="deny")
    assert "name" not in record and (record["address"], record["says"]) == (ELSEWHERE, "github.com")
