"""What a guest tried on the interceptor and once got: secrets read back later, time and memory of others.

Each case is an attack that worked when it was written. The fixtures are test_intercept's.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llm4agents import limits
from tests.barrier.interception import Asked, Lab, ok
from tests.barrier.test_intercept import (
    DUMMY,
    KEYS,
    SECRET,
    UPGRADE,
    accept,
    frame,
    node,
    site,
    upto,
)
from tests.support import eventually

__all__ = ["node", "site"]


class Shelf:
    """An honest origin: what is put at a path is what is got from it, whole or a range of it."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def __call__(self, asked: Asked, conn: Any) -> bytes:
        path = asked.target.partition("?")[0]
        if asked.method == "PUT":
            self.kept[path] = asked.body or (asked.get("X-Note") or "").encode()
            return ok(b"kept")
        kept = self.kept.get(path, b"")
        wanted = asked.get("Range")
        if wanted is None:
            return ok(kept)
        first, _, last = wanted.partition("=")[2].partition("-")
        part = kept[int(first) : int(last) + 1]
        return ok(part, f"Content-Range: bytes {first}-{last}/{len(kept)}", status="206 Partial Content")


PLACEHOLDER = {"secret": "token", "as": "placeholder", "placeholder": "PLACEHOLDER"}


@pytest.mark.parametrize("put", ["body", "header"])
def test_what_was_put_there_is_struck_when_it_is_got_on_another_connection(site: Any, put: str) -> None:
    here = site(Shelf(), credentials=[PLACEHOLDER], token=SECRET)
    with here.client() as client:
        more = ("X-Note: PLACEHOLDER",) if put == "header" else ()
        body = b"" if put == "header" else b"PLACEHOLDER"
        assert client.get("/shelf", "api.example.com", *more, method="PUT", body=body).read() == b"kept"
    assert SECRET.encode() in here.origin.handler.kept["/shelf"]
    with here.client() as client:
        assert client.get("/shelf", "api.example.com").read() == b"*" * len(SECRET)


def test_what_was_put_there_is_struck_where_nothing_is_put_in(site: Any) -> None:
    here = site(
        Shelf(),
        credentials=[{"secret": "token", "as": "header", "header": "X-Note", "path": "/in/*", "methods": ["PUT"]}],
        token=SECRET,
    )  # fmt: skip
    with here.client() as client:
        assert client.get("/in/x", "api.example.com", method="PUT", body=b"").status == 200
    assert here.origin.handler.kept["/in/x"] == SECRET.encode()
    with here.client() as client:
        assert client.get("/in/x", "api.example.com").read() == b"*" * len(SECRET)


def test_it_is_not_to_be_had_in_ranges(site: Any) -> None:
    here = site(Shelf(), credentials=[PLACEHOLDER], token=SECRET)
    found = b""
    with here.client() as client:
        client.get("/shelf", "api.example.com", method="PUT", body=b"PLACEHOLDER").read()
        for at in range(0, len(SECRET), 4):
            answer = client.get("/shelf", "api.example.com", f"Range: bytes={at}-{at + 3}")
            found += answer.read()
    assert SECRET.encode() not in found and SECRET[:8].encode() not in found, found


def test_signatures_of_long_ago_cost_nothing(node: Lab, site: Any) -> None:
    """One connection, many signed requests: each costs the interceptor as much processor time as the first."""
    here = site(credentials=[{"secret": "role", "as": "sigv4"}], role=KEYS)
    took = []

    def used_ns() -> int:
        # Of all its threads: nanoseconds on a processor.
        tasks = Path(f"/proc/{node.worker.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)

    with here.client() as client:
        for _ in range(12):
            before = used_ns()
            for at in range(100):
                answer = client.get(
                    f"/{at}", "api.example.com", f"Authorization: {DUMMY.format('s3')}",
                    "X-Amz-Content-SHA256: UNSIGNED-PAYLOAD",
                )  # fmt: skip
                assert answer.read() == b"ok"
            took.append(used_ns() - before)
    assert min(took[:3]) > 0
    assert min(took[-3:]) < 2 * min(took[:3]), took


def swallow(asked: Asked, conn: Any) -> bytes | None:
    """A WebSocket server that says nothing."""
    conn.sendall(
        (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept(asked.get('Sec-WebSocket-Key') or '')}\r\n\r\n"
        ).encode()
    )
    while conn.recv(65_536):
        pass
    return None


def switched(client: Any) -> None:
    client.send("\r\n".join(["GET /ws HTTP/1.1", "Host: api.example.com", *UPGRADE, "", ""]))
    upto(client, lambda data: data.endswith(b"\r\n\r\n"), b"")


def test_messages_that_never_end_fill_no_memory_on_however_many_connections(site: Any) -> None:
    """Each of them within its own bound: on a thousand connections that was 16 GiB."""
    here = site(swallow)
    piece = frame(b"x" * 60_000, opcode=0, fin=False, mask=True)
    many = 15 * 1_048_576 // 60_000
    with contextlib.ExitStack() as opened:
        refused = 0
        for _ in range(limits.INTERCEPT_WAITING_BYTES_MAX // (many * 60_000) + 2):
            client = opened.enter_context(here.client())
            switched(client)
            client.send(frame(b"x", fin=False, mask=True))
            try:
                for _ in range(many):
                    client.send(piece)
            except OSError:
                refused += 1
        assert refused >= 1
    eventually(lambda: not here.node.ask("stats")["flows"])
    with here.client() as client:  # what has ended counts no more
        switched(client)
        client.send(frame(b"x", fin=False, mask=True) + piece * many + frame(b"", opcode=0, mask=True))
        client.send(frame(b"", opcode=9, mask=True))
        client.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.sock.recv(1)


def test_frames_of_nothing_fill_no_memory(site: Any) -> None:
    here = site(swallow)
    with here.client() as client:
        switched(client)
        client.send(frame(b"x", fin=False, mask=True))
        empty = frame(b"", opcode=0, fin=False, mask=True) * 10_000
        began, sent = time.monotonic(), 0
        try:
            while time.monotonic() - began < 8:
                client.send(empty)
                sent += 10_000
        except OSError:
            pass
        assert sent < 1_000_000, "nobody stopped it"


def test_a_body_in_crumbs_holds_nobody_up(site: Any) -> None:
    here = site()
    neighbour = site(lambda asked, conn: ok(b"served"))
    with here.client() as client, neighbour.client() as other:
        assert other.get("/", "api.example.com").read() == b"served"
        client.send("POST / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\n")
        crumbs = b"1\r\nA\r\n" * 20_000
        began = time.monotonic()
        for _ in range(3):
            client.send(crumbs)
        assert other.get("/", "api.example.com").read() == b"served"
        client.send("0\r\n\r\n")
        assert client.answer().read() == b"ok"
        whole = time.monotonic() - began
        assert whole < 2.5


PILES = {
    "refused requests": b"GET /no HTTP/1.1\r\nHost: api.example.com\r\n\r\n" * 1_600,
    "empty lines": b"\r\n" * 32_768,
    "pings": frame(b"", opcode=9, mask=True) * 10_900,
    "small frames": (frame(b"", fin=False, mask=True) + frame(b"", opcode=0, fin=False, mask=True) * 10_000
                     + frame(b"", opcode=0, mask=True)),
}  # fmt: skip


@pytest.mark.parametrize("what", PILES)
def test_what_one_guest_sends_ahead_holds_its_neighbour_up_for_moments(site: Any, what: str) -> None:
    """Ten connections, each with as much work as fits into one read: their neighbour waited for 15 s and more."""

    here = site(swallow, rules=("allow GET HOST/ws",))
    neighbour = site(lambda asked, conn: ok(b"served"))
    clients = [here.client() for _ in range(10)]
    if what in ("pings", "small frames"):
        for client in clients:
            switched(client)

    def push(client: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            while not over.is_set():
                client.send(PILES[what])

    over = threading.Event()
    threads = [threading.Thread(target=push, args=(client,)) for client in clients]
    with neighbour.client() as other:
        assert other.get("/", "api.example.com").read() == b"served"
        for thread in threads:
            thread.start()
        took = []
        try:
            for _ in range(20):
                began = time.monotonic()
                assert other.get("/", "api.example.com").read() == b"served"
                took.append(time.monotonic() - began)
        finally:
            over.set()
            for client in clients:
                with contextlib.suppress(OSError):  # it was ended already
                    client.sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
    assert max(took) < 3, took


@pytest.mark.parametrize(
    ("path", "line"),
    [("/", "X-HTTP-Method-Override: DELETE"), ("/?.method=DELETE", "X: y"), ("/", "X.HTTP.Method: delete")],
)
def test_a_credential_of_one_method_is_not_had_for_another_in_disguise(
    site: Any, path: str, line: str
) -> None:
    """Every method is allowed there, and only POST with the token."""
    here = site(credentials=[{"secret": "token", "as": "bearer", "methods": ["POST"]}], token=SECRET)
    with here.client() as client:
        assert client.get("/", "api.example.com", method="POST", body=b"").read() == b"ok"
        assert client.get(path, "api.example.com", line, method="POST", body=b"").read() == b"ok"
    assert [asked.get("Authorization") for asked in here.origin.asked] == [f"Bearer {SECRET}", None]


@pytest.mark.parametrize(
    "line",
    [
        "X_HTTP_Method_Override: DELETE",
        "X-HTTP_Method-Override: DELETE",
        "X-Original-URL: /admin",
        "X-Rewrite-URL: /admin",
        "X_Original_URL: /admin",
        "X-Forwarded-Host: other.example.com",
        "X_Forwarded-Host: other.example.com",
        "Forwarded: host=other.example.com",
        "Content_Length: 5",
        "Transfer_Encoding: chunked",
    ],
)
def test_headers_that_some_servers_take_for_the_request_line(site: Any, line: str) -> None:
    here = site(rules=("allow GET,POST HOST/ok*",))
    name = line.partition(":")[0].lower()
    with here.client() as client:
        answer = client.get("/ok", "api.example.com", line, "Connection: close", method="POST", body=b"")
        answer.read()
    reached = [asked for asked in here.origin.asked if name in {key.lower() for key, _ in asked.headers}]
    assert not reached, (answer.status, reached)


def test_an_address_that_is_no_longer_allowed_is_not_spoken_with(node: Any) -> None:
    """The name is allowed before and after, and what it leads to is not."""
    origin = node.origin("localhost")
    name, there = f"allow localhost:{origin.port}/*", f"allow 127.0.0.1:{origin.port}"
    node.join("addressed", node.policy([name, there]))
    try:
        with node.client("addressed", "localhost", origin.port) as client:
            host = f"localhost:{origin.port}"
            assert client.get("/", host).read() == b"ok"
            assert node.ask("policy", sandbox="addressed", policy=node.policy([there, name]))["cut"] == 0
            assert client.get("/", host).read() == b"ok"
            assert node.ask("policy", sandbox="addressed", policy=node.policy([name]))["cut"] == 1
            assert client.rest() == b""
        assert len(origin.asked) == 2
    finally:
        node.ask("leave", sandbox="addressed")


def test_a_credential_that_was_taken_away_while_a_body_came_is_not_put_in(site: Any) -> None:
    elsewhere = {**PLACEHOLDER, "host": "b.example.com", "port": 443}
    here = site(Shelf(), credentials=[PLACEHOLDER], token=SECRET)
    with here.client() as client:
        client.send("PUT /x HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 11\r\n\r\nPLACE")
        eventually(lambda: here.node.ask("stats")["flows"])
        policy = here.policy([*here.rules, "allow b.example.com"], [elsewhere])
        assert here.node.ask("policy", sandbox=here.name, policy=policy)["cut"] == 0
        client.send("HOLDER")
        assert client.answer().status in (503, 200)  # (200: it was too quick for the head)
    assert SECRET.encode() not in b"".join(asked.body for asked in here.origin.asked)


@pytest.mark.parametrize(
    "path", ["/geh\u00e4lter/1", "/geh%C3%A4lter/1", "/geh%c3%a4lter/../geh\u00e4lter/x"]
)
def test_bytes_that_are_not_escaped_are_read_as_the_server_reads_them(site: Any, path: str) -> None:
    here = site(rules=("deny HOST/geh\u00e4lter/*", "allow HOST/*"))
    with here.client() as client:
        denied = client.get(path, "api.example.com")
        assert denied.status == 403 and denied.read()
        assert client.get("/geh\u00fchren", "api.example.com").read() == b"ok"
        client.send(b"GET /\xff HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
        assert client.answer().status == 403  # nobody can say what that is


def test_what_was_put_there_is_struck_when_the_secret_has_another_value(site: Any) -> None:
    here = site(Shelf(), credentials=[PLACEHOLDER], token=SECRET)
    with here.client() as client:
        client.get("/shelf", "api.example.com", method="PUT", body=b"PLACEHOLDER").read()
    here.node.ask("secrets", sandbox=here.name, secrets={"token": "another-value-by-now"})
    with here.client() as client:
        answer = client.get("/shelf", "api.example.com")
        assert SECRET.encode() not in answer.read()
    assert here.origin.asked[-1].method == "GET"
