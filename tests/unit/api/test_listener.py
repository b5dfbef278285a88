"""The listener against clients that mean no good, over HTTP/1.1 and WebSocket: each ends, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm4agents import limits
from llm4agents.api.access.crowd import Crowd
from llm4agents.api.listen.counting import Bounds
from llm4agents.engine.principal import Principal
from tests.support import eventually
from tests.unit.api.listening import Served, answer, ask, closed, serving

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
SMALL = Bounds(
    head_s=0.5,
    handshake_s=0.5,
    keep_alive_s=1,
    linger_s=0.3,
    stall_s=0.5,
    per_address=64,
    connections=96,
    bodies_bytes=4 << 20,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A listener with small bounds."""
    with serving(tmp_path_factory.mktemp("small"), SMALL) as served:
        yield served


def fine(served: Served) -> None:
    """Somebody else, from another address, is served at once."""
    with served.connect("127.0.0.9") as sock:
        sock.settimeout(5)
        assert ask(sock, GET)[0] == 200


def code_of(body: bytes) -> str:
    return str(json.loads(body)["code"])


def test_it_serves_who_has_a_key(small: Served) -> None:
    with httpx.Client(base_url=small.url) as http:
        assert http.get("/health").json()["status"] in ("ok", "degraded")
        assert http.get("/v1/sandboxes").status_code == 401
        answered = http.get("/v1/sandboxes", headers={"x-api-key": small.key})
        assert answered.status_code == 200, answered.text
        assert answered.headers["server-timing"].startswith("total;dur=")
        assert "server" not in answered.headers


def test_strangers_learn_names_and_no_more_from_health(small: Served) -> None:
    told = httpx.get(f"{small.url}/health").json()
    assert set(told) == {"status", "checks"}
    assert set(told["checks"].values()) <= {"ok", "failed"}
    assert told["checks"]["vmm"] == "failed"  # there is no QEMU in this test
    assert told["checks"]["store"] == "ok" and told["status"] == "degraded"


def test_a_head_that_does_not_end_is_answered_and_closed(small: Served) -> None:
    with small.connect() as whole, small.connect() as dripping, small.connect() as silent:
        whole.sendall(b"GET /health HT")
        dripping.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")

        def drip() -> None:
            for _ in range(60):
                try:
                    dripping.sendall(b"x-a: b\r\n")
                except OSError:
                    return
                time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        fine(small)
        assert answer(whole)[0] == 408
        assert answer(dripping)[0] in (408, 0)  # 0: what it still sent was answered by a reset
        assert closed(whole) and closed(dripping) and closed(silent)
        thread.join()
    eventually(lambda: small.figures()["listener_connections"] == 0, 5)


def test_a_second_head_on_a_kept_connection_has_no_longer(small: Served) -> None:
    with small.connect() as sock:
        assert ask(sock, GET)[0] == 200
        sock.sendall(b"GET /hea")
        assert answer(sock)[0] == 408
    with small.connect() as idle:
        assert ask(idle, GET)[0] == 200
        assert closed(idle)  # after the time that an idle connection is kept


@pytest.mark.parametrize("length", [b"content-length: 100", b"transfer-encoding: chunked"])
def test_a_body_that_does_not_come_is_answered_and_closed(small: Served, length: bytes) -> None:
    key = small.key.encode()
    head = b"POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\nx-api-key: " + key + b"\r\n" + length + b"\r\n"
    with small.connect() as sock:
        sock.sendall(head + b"content-type: application/json\r\n\r\n")
        fine(small)
        status, _, body = answer(sock)
        assert (status, code_of(body)) == (408, "slow_request")
        assert closed(sock)


def test_a_body_that_drips_is_ended_too(tmp_path: Path) -> None:
    key_head = (
        "POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\nx-api-key: {}\r\ncontent-length: 90000\r\n\r\n"
    )
    with serving(tmp_path, Bounds(stall_s=0.5, linger_s=0.2)) as served, served.connect() as sock:
        sock.sendall(key_head.format(served.key).encode())
        sock.settimeout(0.05)
        began, data = time.monotonic(), b""
        while b"408" not in data and time.monotonic() - began < 10:
            sock.sendall(b" ")  # each in less than the time that nothing may come
            try:
                data += sock.recv(4_096)
            except TimeoutError:
                continue
        assert b"408" in data


def test_who_is_refused_may_not_go_on_sending_for_ever(small: Served) -> None:
    with small.connect() as sock:
        status, _, body = ask(
            sock, b"POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000000\r\n\r\nx"
        )
        assert (status, code_of(body)) == (413, "too_large")
        with pytest.raises(OSError):
            for _ in range(4_000):  # 256 MiB
                sock.sendall(b"x" * 65_536)
    with small.connect() as sock:  # without a key nothing of a body is read
        status, _, body = ask(
            sock, b"POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90000\r\n\r\nx"
        )
        assert status == 401
        assert closed(sock)


def test_bodies_are_bounded_one_and_all(small: Served) -> None:
    def head(path: str, length: int) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {small.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        ).encode()

    with small.connect() as sock:
        assert ask(sock, head("/v1/sandboxes", (32 << 20) + 1))[0] == 413
    with small.connect() as sock:
        assert ask(sock, head("/v1/register", 16_385))[0] == 413
    with small.connect() as sock:  # without a length it is counted
        sock.sendall(
            b"POST /v1/register HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
            b"content-type: application/json\r\n\r\n"
        )
        for _ in range(20):
            sock.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert answer(sock)[0] in (404, 413)  # 404: this server takes no registrations
    with small.connect() as first, small.connect() as second:  # 4 MiB for all together
        for sock in (first, second):
            sock.sendall(head("/v1/sandboxes", 3 << 20))
            sock.settimeout(5)
        first.sendall(b" " * ((3 << 20) - 1))
        second.sendall(b" " * ((3 << 20) - 1))
        found = {answer(first)[0], answer(second)[0]}
        assert 503 in found
    eventually(lambda: small.figures()["listener_held_bytesbody"] == 0, 5)


def test_calls_of_one_address_do_not_take_all_there_are(tmp_path: Path) -> None:
    slow = (
        b"POST /v1/register HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    with serving(tmp_path, Bounds(requests=8, crowded=2)) as served, contextlib.ExitStack() as held:
        for _ in range(4):  # strangers, who only have to be slow
            held.enter_context(served.connect()).sendall(slow)
        eventually(lambda: served.context.active == 4, 5)
        with served.connect() as sock:
            assert (found := ask(sock, GET))[0] == 503 and b"much to do" in found[2]
        fine(served)
    assert Crowd(8, 2).under_way == 0


def test_calls_of_one_project_do_not_take_all_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LISTEN_REQUESTS_MAX", 4)
    monkeypatch.setattr(limits, "LISTEN_REQUESTS_CROWDED", 1)
    with serving(tmp_path) as served, contextlib.ExitStack() as held:
        engine, operator = served.context.engine, Principal.operator()

        async def key() -> str:
            project = engine.projects.create("another").id
            return engine.keys.create(operator, "of another", project=project)[1]

        other = served.do(key())

        def head(path: str, key: str) -> bytes:
            return f"GET {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\n\r\n".encode()

        for source in ("127.0.0.2", "127.0.0.3"):
            sock = held.enter_context(served.connect(source))
            sock.sendall(head("/v1/events?follow=true", served.key))
        eventually(lambda: served.context.active == 2, 5)
        for used, status in ((served.key, 503), (other, 200)):
            with served.connect("127.0.0.4") as sock:
                assert ask(sock, head("/v1/whoami", used))[0] == status


def test_a_request_of_two_lengths_ends_its_connection(small: Served) -> None:
    with small.connect() as sock:
        sock.sendall(
            b"POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\ncontent-length: 6\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET
        )
        sock.settimeout(5)
        said = b""
        while piece := sock.recv(65_536):
            said += piece
    assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1 ") == 1 and b"two ways" in said


def test_heads_are_bounded(small: Served) -> None:
    for request, expected in (
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: b\r\n" * 100 + b"\r\n", 200),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS where there is none
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a : b\r\n\r\n", 400),
    ):
        with small.connect() as sock:
            status, head, body = ask(sock, request)
            assert status == expected, (request[:60], head)
            if status >= 400:
                assert b"application/problem+json" in head and code_of(body)
    fine(small)


def test_only_our_names_are_served(tmp_path: Path) -> None:
    with serving(tmp_path, DOMAIN="sbx.test", PUBLIC_URL="https://sandboxes.example.org/base") as served:

        def status(host: bytes, more: bytes = b"", target: bytes = b"/health") -> int:
            with served.connect() as sock:
                return ask(sock, b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\n" + more + b"\r\n")[
                    0
                ]

        for ours in (
            b"localhost",
            b"LOCALHOST:99",
            b"localhost.",
            b"127.0.0.1:7400",
            b"sbx.test",
            b"api.sbx.test",
            b"sandboxes.example.org",
            b"x.localhost",
        ):
            assert status(ours) == 200, ours
        for other in (
            b"evil.example",
            b"sbx.test.evil.example",
            b"xsbx.test",
            b"10.0.0.1",
            b"localhost.evil.example",
            b"[::2]",
        ):
            assert status(other) == 421, other
        for broken in (
            b"",
            b"a b",
            b"localhost@evil.example",
            b"localhost:x",
            b"localhost/..",
            b"%6cocalhost",
        ):
            assert status(broken) == 400, broken
        assert status(b"localhost", b"host: localhost\r\n") == 400
        # Nobody but a trusted proxy says another host than the connection's.
        assert status(b"evil.example", b"x-forwarded-host: localhost\r\n") == 421
        assert status(b"localhost", b"x-forwarded-host: evil.example\r\n") == 200
        for target in (b"http://localhost/health", b"http://evil.example/health", b"*", b"localhost:443"):
            assert status(b"localhost", target=target) == 400, target


def test_only_a_trusted_proxy_says_whom_it_speaks_for(tmp_path: Path) -> None:
    with serving(tmp_path, TRUSTED_PROXIES="127.0.0.7", PUBLIC_URL="https://sandboxes.example.org") as served:
        forwarded = (
            b"x-forwarded-for: 198.51.100.1, 203.0.113.7\r\nx-forwarded-host: sandboxes.example.org\r\n"
        )
        key = f"x-api-key: {served.key}\r\n".encode()
        origins = []
        for source in ("127.0.0.7", "127.0.0.8"):
            with served.connect(source) as sock:
                head = (
                    b"POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n"
                    + key
                    + forwarded
                )
                assert ask(sock, head + b"\r\n")[0] == 400
            with served.connect() as sock:
                body = ask(sock, b"GET /v1/audit HTTP/1.1\r\nhost: localhost\r\n" + key + b"\r\n")[2]
                origins.append({row["origin"] for row in json.loads(body)["data"]})
        assert origins == [{"203.0.113.7"}, {"203.0.113.7", "127.0.0.8"}]


def test_connections_of_one_address_are_bounded_and_others_have_theirs(small: Served) -> None:
    mine = [small.connect() for _ in range(80)]
    try:
        eventually(lambda: small.figures()["listener_refusedaddress"] >= 16, 5)
        fine(small)
        # Of all together: who has waited longest without a request makes room.
        more = [small.connect(f"127.0.0.{2 + at % 3}") for at in range(60)]
        fine(small)
        assert small.figures()["listener_connections"] <= 96
        assert small.figures()["listener_refusedevicted"] > 0
        for sock in more:
            sock.close()
    finally:
        for sock in mine:
            sock.close()
    eventually(lambda: small.figures()["listener_connections"] == 0, 5)


def test_a_thousand_idle_connections_cost_little_and_hold_up_nobody(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8_192)), hard))
    with serving(tmp_path) as served:
        fine(served)
        before = _rss()
        # Half of them have begun to say something; 250 from each of four addresses.
        socks = [served.connect(f"127.0.0.{2 + at % 4}") for at in range(1_000)]
        try:
            for sock in socks[::2]:
                sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
            eventually(lambda: served.figures()["listener_connections"] == 1_000, 10)
            fine(served)
            assert _rss() - before < 64 << 20
        finally:
            for sock in socks:
                sock.close()
        eventually(lambda: served.figures()["listener_connections"] == 0, 10)


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pipelined_requests_are_answered_in_their_order(small: Served) -> None:
    with small.connect() as sock:
        sock.sendall(GET * 20)
        data = b""
        while data.count(b'"status":') < 20:
            piece = sock.recv(65_536)
            assert piece
            data += piece
        assert data.count(b"HTTP/1.1 200") == 20


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """A WebSocket that gives back lengths; `/hold` does not read."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})
        return
    await receive()
    await send({"type": "websocket.accept"})
    if scope["path"] == "/hold":
        await asyncio.sleep(20)
        return
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": str(len(message.get("bytes") or message["text"]))})


UPGRADE = (
    b"GET %s HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
)


def frame(payload: bytes, opcode: int = 2, *, fin: bool = True) -> bytes:
    size = len(payload)
    head = bytes([(0x80 if fin else 0) | opcode])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 65_536:
        head += bytes([0x80 | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([0x80 | 127]) + size.to_bytes(8, "big")
    return head + b"\0\0\0\0" + payload


def opened(served: Served, path: bytes = b"/") -> socket.socket:
    sock = served.connect()
    assert ask(sock, UPGRADE % path)[0] == 101
    return sock


def close_code(sock: socket.socket) -> int:
    """The code of the close frame that the server ends it with; 0 when it just ends it."""
    data = b""
    while True:
        try:
            piece = sock.recv(65_536)
        except OSError:
            piece = b""
        if not piece:
            break
        data += piece
    at = data.rfind(b"\x88")
    return int.from_bytes(data[at + 2 : at + 4], "big") if at >= 0 else 0


def test_websockets_are_bounded_in_messages_pieces_and_noise(tmp_path: Path) -> None:
    bounds = Bounds(bodies_bytes=24 << 20, control=(200, 100), messages=(50, 100), linger_s=0.3, gone_s=0.2)
    with serving(tmp_path, bounds, _echo) as served:
        with opened(served) as sock:  # an ordinary one
            sock.sendall(frame(b"x" * 70_000))
            assert b"70000" in sock.recv(100)
        with opened(served) as sock:  # one message larger than any may be
            sock.sendall(b"\x82\xff" + (17 << 20).to_bytes(8, "big") + b"\0\0\0\0")
            assert close_code(sock) == 1009
        with opened(served) as sock:  # one in a million pieces
            sock.sendall(frame(b"x", fin=False))
            piece = frame(b"x", 0, fin=False) * 1_000
            with pytest.raises(OSError):
                for _ in range(100):
                    sock.sendall(piece)
                    time.sleep(0.001)
            assert close_code(sock) in (0, 1009)
        with opened(served) as sock:  # pieces with nothing in them
            sock.sendall(frame(b"x", fin=False) + frame(b"", 0, fin=False) * 500)
            assert close_code(sock) == 1008
        with opened(served) as sock:  # pings
            sock.sendall(frame(b"", 9) * 500)
            assert close_code(sock) == 1008
        with opened(served) as sock:  # more messages a second than one may send: they wait, and all come
            began = time.monotonic()
            sock.sendall(frame(b"x") * 100)
            data = b""
            while data.count(b"\x81\x011") < 100:
                data += sock.recv(4_096)
            assert time.monotonic() - began > 0.4
        holding = [opened(served, b"/hold") for _ in range(4)]  # nobody reads: all together have a bound
        try:
            threads = [threading.Thread(target=_push, args=(sock,)) for sock in holding]
            for thread in threads:
                thread.start()
            for _ in range(20):
                assert (
                    served.figures()["listener_held_bytesmessage"]
                    <= (24 << 20) + 4 * limits.LISTEN_SHARE_BYTES
                )
                time.sleep(0.02)
            fine(served)
            for thread in threads:
                thread.join()
        finally:
            for sock in holding:  # a reset: an end in order would wait behind what nobody reads
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
        eventually(lambda: served.figures()["listener_held_bytesmessage"] == 0, 5)


def _push(sock: socket.socket) -> None:
    """One message of 15 MiB and whatever may come after it."""
    sock.settimeout(2)
    try:
        sock.sendall(frame(b"x" * (15 << 20)) * 2)
    except OSError:
        return


def test_pongs_that_nobody_fetches_do_not_pile_up(tmp_path: Path) -> None:
    with serving(tmp_path, Bounds(control=(10**9, 10**9)), _echo) as served:
        before = _rss()
        with opened(served) as sock:
            sock.settimeout(2)
            with pytest.raises(TimeoutError):  # the server stops reading
                for _ in range(4_000):
                    sock.sendall(frame(b"x" * 125, 9) * 500)
        assert _rss() - before < 48 << 20


def test_what_a_drain_leaves(tmp_path: Path) -> None:
    """Idle connections end, a call under way is answered and then ends, nobody new is let in."""
    began = threading.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        await asyncio.sleep(0.4)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})

    with serving(tmp_path, None, slow) as served, served.connect() as idle, served.connect() as busy:
        busy.sendall(GET)
        assert began.wait(5)
        served.do(served.listener.leave())
        assert closed(idle)
        with pytest.raises(OSError):
            served.connect()
        assert answer(busy)[2] == b"done"
        assert closed(busy)
