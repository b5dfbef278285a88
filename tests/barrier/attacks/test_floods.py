"""Much of everything: connections, slowness, bytes. The gateway stays up, flat in memory, and serves the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llm4agents import limits
from tests.barrier.attacks.guest import GATEWAY, INTERCEPTOR, Case, Guest
from tests.barrier.attacks.kit import (
    client_hello,
    contextlib,
    dns_query,
    fetch,
    records,
    resolve,
    socket,
    ssl,
    threading,
    time,
    tls_context,
)
from tests.support import eventually

pytestmark = [pytest.mark.vm, pytest.mark.root]

NAME, EVIL, OTHER, READ = "api.example.com", "evil.example.net", "other.example.com", "files.example.com"
OTHER_ADDRESS = "93.184.216.35"
MIB = 1_048_576
FLAT_BYTES_MAX = 24 * MIB
"""What a process may hold more during a flood than before it."""


@pytest.fixture(scope="module")
def neighbour(guest: Guest) -> Any:
    """Another sandbox, that is served all the while."""
    other = Guest(guest.node, guest.lab, [f"allow {OTHER}"])
    yield other
    other.kill()


def watched(
    case: Case, module: str, attack: Callable[[], Any], neighbour: Guest | None = None
) -> tuple[Any, int]:
    """What the attack came to, and by how many bytes the module's processes grew at most meanwhile; a neighbour is
    served during it."""
    before = sum(case.lab.rss(module).values())
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(attack()))
    thread.start()
    most, served = before, 0
    pause = threading.Event()
    while thread.is_alive():
        most = max(most, sum(case.lab.rss(module).values()))
        if neighbour is not None:
            assert neighbour.run(fetch, f"http://{OTHER}/", timeout=8)["status"] == 200
            served += 1
        pause.wait(0.1)
    thread.join()
    assert found, "the attack itself failed"
    assert neighbour is None or served
    return found[0], most - before


def connect_many(address: str, port: int, count: int, keep: int, data: bytes) -> dict[str, int]:
    """So many connections as fast as they go, `keep` of them open at a time."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (keep + 200, keep + 200))
    outcomes: dict[str, int] = {}
    held: list[socket.socket] = []
    for _ in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        code = sock.connect_ex((address, port))
        name = "started" if code in (0, 115) else f"errno {code}"
        outcomes[name] = outcomes.get(name, 0) + 1
        held.append(sock)
        if len(held) >= keep:
            oldest = held.pop(0)
            with contextlib.suppress(OSError):
                oldest.send(data)
            oldest.close()
    for sock in held:
        sock.close()
    return outcomes


@pytest.mark.parametrize("what", ["denied", "allowed", "silent"])
def test_ten_thousand_connections(case: Case, neighbour: Guest, what: str) -> None:
    """To a denied address, to an allowed one, and to an allowed one without ever a byte."""
    case.guest.network([f"allow {NAME}", f"allow tcp {NAME}:22"])
    address = "93.184.216.66" if what == "denied" else case.guest.run(resolve, NAME)["addresses"][0]
    data = b"" if what == "silent" else b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
    outcomes, growth = watched(
        case,
        GATEWAY,
        lambda: case.guest.run(connect_many, address, 80, 10_000, 900, data),
        neighbour,
    )
    assert outcomes["started"] >= 9_000, outcomes
    assert growth < FLAT_BYTES_MAX, f"{growth / MIB:.1f} MiB more"
    eventually(lambda: case.guest.run(fetch, f"http://{NAME}/", timeout=4)["status"] == 200, 40)
    if what == "denied":
        assert not case.lab.arrived(case.mark, address=address)
        counted = [one for one in case.guest.records(case.at) if one.get("address") == address]
        assert counted and any(one.get("repeated", 0) > 10 for one in counted), counted[:5]


def ask_many(count: int, seconds: float) -> int:
    """So many names, as fast as answers come (the link refuses what is more a second); how many got an address."""
    answered, number, start = set(), 0, time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("198.19.255.1", 53))
        sock.settimeout(0.2)
        while number < count and time.monotonic() - start < seconds:
            with contextlib.suppress(OSError):  # and then the same are asked again
                for each in range(number, number + 16):
                    sock.send(dns_query(f"n{each}.example.com"))
                for _ in range(16):
                    found = sock.recv(1_000)
                    if found[6:8] == b"\0\1":
                        answered.add(found[12 : found.index(b"\0", 12)])
                number += 16
    return len(answered)


def test_more_names_than_a_sandbox_can_have(case: Case, neighbour: Guest) -> None:
    """Names are remembered as long as a sandbox lives, so it may have so many and no more; nobody else's are fewer."""
    mine = Guest(case.guest.node, case.lab, ["allow *.example.com"])
    try:
        first = mine.run(resolve, NAME)["addresses"]
        count = limits.SYNTHETIC_NAMES_MAX
        answered, growth = watched(case, GATEWAY, lambda: mine.run(ask_many, count + 2_000, 60.0), neighbour)
        assert growth < FLAT_BYTES_MAX, f"{growth / MIB:.1f} MiB more"
        assert count * 0.9 < answered < count, "all that there are, and no more"
        assert mine.run(resolve, NAME)["addresses"] == first
        assert mine.run(fetch, f"http://{NAME}/")["status"] == 200
    finally:
        mine.kill()


def slow_loris(where: dict[str, tuple[str, str, int]], seconds: float) -> dict[str, tuple[int, int]]:
    """A byte at a time of what never ends: a "head", a head within "tls", or what follows a "hello". `where`: kind to
    address, name and how many. Of each kind, how many were opened and how many are open at the end."""
    held: list[tuple[str, Any]] = []
    for kind, (address, name, count) in where.items():
        for _ in range(count):
            with contextlib.suppress(OSError):
                sock: Any = socket.create_connection((address, 80 if kind == "head" else 443), 3)
                sock.settimeout(10)
                if kind == "tls":
                    sock = tls_context().wrap_socket(sock, server_hostname=name)
                if kind == "hello":
                    sock.sendall(records(client_hello(name)))
                    sock.recv(1)  # the server's
                    sock.sendall(b"\x17\x03\x03\x40\0")
                else:
                    sock.sendall(b"GET /")
                held.append((kind, sock))
    opened = [kind for kind, _ in held]
    end = time.monotonic() + seconds
    while held and time.monotonic() < end:
        time.sleep(1)  # a byte a second is the attack
        for one in list(held):
            try:
                one[1].sendall(b"a")
            except OSError:
                held.remove(one)
    left = [kind for kind, _ in held]
    return {kind: (opened.count(kind), left.count(kind)) for kind in where}


def test_slow_loris(case: Case, neighbour: Guest) -> None:
    """Before the gateway, which looks at what is spliced, and before the interceptor, that reads requests."""
    case.guest.network([f"allow {NAME}", f"allow GET {READ}/*"])
    assert case.guest.run(fetch, f"https://{READ}/")["status"] == 200
    address, read = (case.guest.run(resolve, name)["addresses"][0] for name in (NAME, READ))
    where = {"tls": (read, READ, 20), "hello": (read, READ, 20), "head": (address, NAME, 300)}
    seconds = max(limits.FIRST_BYTES_S, limits.INTERCEPT_HEAD_TIMEOUT_S) + 4
    case.again()
    found, growth = watched(case, GATEWAY, lambda: case.guest.run(slow_loris, where, seconds), neighbour)
    assert found == {kind: (count, 0) for kind, (_, _, count) in where.items()}, "opened, and still open"
    assert growth < FLAT_BYTES_MAX, f"{growth / MIB:.1f} MiB more"
    assert not [one for one in case.lab.arrived(case.mark) if one.method and one.address != OTHER_ADDRESS]
    case.denied(kind="connection", name=NAME, port=80)
    for reason in ("the request's head took too long", "the TLS handshake took too long"):
        case.denied(kind="connection", name=READ, rule="framing", reason=reason)
    assert case.guest.run(fetch, f"http://{NAME}/")["status"] == 200
    assert case.guest.run(fetch, f"https://{READ}/")["status"] == 200


def transfer(url_host: str, port: int, secure: bool, down: int, up: int) -> tuple[int, int, float]:
    """Bytes down and up on connections of their own; what arrived here, what was taken there, seconds."""
    start = time.monotonic()

    def connect() -> Any:
        plain = socket.create_connection((url_host, port), 10)
        sock = tls_context().wrap_socket(plain, server_hostname=url_host) if secure else plain
        sock.settimeout(30)
        return sock

    got = sent = 0
    if down:
        with connect() as sock:
            sock.sendall(f"GET /big?bytes={down} HTTP/1.1\r\nHost: {url_host}\r\n\r\n".encode())
            buffer = bytearray(1 << 18)
            with contextlib.suppress(OSError, ssl.SSLError):
                while got < down and (size := sock.recv_into(buffer)):
                    got += size
    if up:
        with connect() as sock:
            sock.sendall(f"POST /sink HTTP/1.1\r\nHost: {url_host}\r\nContent-Length: {up}\r\n\r\n".encode())
            block = bytes(1 << 18)
            while sent < up:
                sock.sendall(block[: min(len(block), up - sent)])
                sent += min(len(block), up - sent)
            assert b" 200 " in sock.recv(4_096)
    return got, sent, time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "down", "up"),
    [("splice", 1024 * MIB, 256 * MIB), ("tls", 64 * MIB, 32 * MIB), ("intercept", 96 * MIB, 32 * MIB)],
)
def test_bodies_without_end(case: Case, how: str, down: int, up: int) -> None:
    """Bodies are never held: a gigabyte through the gateway leaves its memory as it was, and so would a hundred.

    (The guest is emulated: a hundred would take hours. What is proven is that memory does not follow the bytes.)
    """
    case.guest.network([f"allow GET,POST {NAME}/*"] if how == "intercept" else [f"allow {NAME}"])
    secure = how != "splice"
    module = INTERCEPTOR if how == "intercept" else GATEWAY
    (got, sent, _), growth = watched(
        case, module, lambda: case.guest.run(transfer, NAME, 443 if secure else 80, secure, down, up)
    )
    assert got >= down and sent == up
    assert growth < FLAT_BYTES_MAX, f"{growth / MIB:.1f} MiB more"
    taken = [one.body_bytes for one in case.lab.arrived(case.mark) if one.method == "POST"]
    assert taken == [up]


def test_a_reader_that_does_not_read(case: Case) -> None:
    """Back-pressure reaches the origin: what the guest leaves unread is not kept here."""
    case.guest.network([f"allow {NAME}"])

    def unread(host: str, count: int, seconds: float) -> int:
        held = []
        for _ in range(count):
            sock = socket.create_connection((host, 80), 5)
            sock.sendall(f"GET /big?bytes=100000000000 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            held.append(sock)
        time.sleep(seconds)  # that nobody reads for so long is the attack
        return len(held)

    held, growth = watched(case, GATEWAY, lambda: case.guest.run(unread, NAME, 20, 3.0))
    assert held == 20 and growth < FLAT_BYTES_MAX, f"{growth / MIB:.1f} MiB more"
    assert case.guest.run(fetch, f"http://{NAME}/")["status"] == 200


def test_bounds_of_rules(case: Case) -> None:
    """A rule's bytes end its connections; its rate holds them back."""
    case.guest.network([f"allow {NAME} bytes=1MiB"])
    got, _, _ = case.guest.run(transfer, NAME, 80, False, 8 * MIB, 0)
    assert 65_536 < got <= 1 * MIB + 65_536
    assert case.guest.run(fetch, f"http://{NAME}/")["status"] in (0, 403)
    case.denied(kind="connection", name=NAME, reason="the bytes this rule allows are used up")
    case.guest.network([f"allow {NAME} rate=1MiB/s"])
    got, _, seconds = case.guest.run(transfer, NAME, 80, False, 3 * MIB, 0)
    assert got >= 3 * MIB and seconds > 1.2
