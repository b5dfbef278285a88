"""HTTP to ports of a sandbox, against the real application and the real agent."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from tests.unit.api.proxied import HOST_ID, ID, Proxied, run, stalls

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def _until(check: object) -> None:
    while not check():  # type: ignore[operator]
        await asyncio.sleep(0.005)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_what_the_guest_gets_and_what_the_client_gets() -> None:
    async def test(bench: Proxied) -> None:
        heads: list[bytes] = []

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(
                b"HTTP/1.1 201 Made\r\nContent-Length: 5\r\nConnection: x-hop, keep-alive\r\nX-Hop: 1\r\n"
                b"Keep-Alive: timeout=5\r\nSet-Cookie: a=1; Path=/\r\nSet-Cookie: b=2\r\nX-It: yes\r\n"
                b"Date: x\r\nStrict-Transport-Security: max-age=9\r\n\r\nhello"
            )

        port = await bench.listen(handler)
        sent = {
            "origin": "http://public.example",
            "connection": "x-mine",
            "x-mine": "1",
            "te": "trailers",
            "cookie": "c=1",
        }
        answer = await bench.http.get(bench.path(port, "/a%20b/%2e?q=1&r=%2F"), headers=sent)
        assert (answer.status_code, answer.text) == (201, "hello")
        assert answer.headers.get_list("set-cookie") == [f"a=1; Path=/v1/sandboxes/{ID}/ports/{port}/", "b=2"]
        assert answer.headers["x-it"] == "yes"
        for gone in ("x-hop", "keep-alive", "strict-transport-security"):
            assert gone not in answer.headers
        assert len(answer.headers.get_list("date")) == 1
        line, *fields = heads[0].decode().rstrip().split("\r\n")
        assert line == "GET /a%20b/%2e?q=1&r=%2F HTTP/1.1"
        got = dict(field.split(": ", 1) for field in fields)
        assert got["host"] == f"localhost:{port}"
        assert got["origin"] == f"http://localhost:{port}"
        assert got["x-forwarded-host"] == "public.example"
        assert got["x-forwarded-prefix"] == f"/v1/sandboxes/{ID}/ports/{port}"
        assert got["x-forwarded-proto"] == "http"
        assert got["cookie"] == "c=1"
        assert not {"x-mine", "te", "connection"} & set(got)

    run(test)


def test_the_host_name_can_say_the_port() -> None:
    async def test(bench: Proxied) -> None:
        port = await bench.answering(
            b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:PORT/in\r\ncontent-length: 0\r\n\r\n".replace(
                b"PORT", b"1"
            ),
            OK,
        )
        headers = {"host": f"{port}-{HOST_ID}.localhost"}
        answer = await bench.http.get("/v1/server", headers=headers)  # any path is the guest's
        assert answer.headers["location"] == "http://127.0.0.1:1/in"  # another port is another origin
        assert (await bench.http.get("/", headers=headers)).text == "ok"

    run(test)


def test_keep_alive_and_pooling() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(OK)

        port = await bench.listen(handler)
        for _ in range(5):
            assert (await bench.http.get(bench.path(port))).text == "ok"
        assert len(bench.connections) == 1
        assert bench.live.busy == 0, "an idle connection holds nothing open"
        await asyncio.gather(*(bench.http.get(bench.path(port)) for _ in range(8)))
        assert 1 < len(bench.connections) <= 9

    run(test)


def test_a_kept_connection_that_the_guest_has_closed_is_not_used() -> None:
    async def test(bench: Proxied) -> None:
        port = await bench.answering(OK, b"", OK, b"", OK)
        for _ in range(3):
            assert (await bench.http.get(bench.path(port))).text == "ok"
        assert len(bench.connections) == 3

    run(test)


def test_a_kept_connection_that_ends_under_a_request_is_tried_anew() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
            await reader.readuntil(b"\r\n\r\n")  # and hangs up on the second

        port = await bench.listen(handler)
        for _ in range(3):
            assert (await bench.http.get(bench.path(port))).text == "ok"
        # What may not be done twice has a connection of its own.
        assert (await bench.http.post(bench.path(port), content=b"")).text == "ok"
        assert len(bench.connections) >= 3

    run(test)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_both_ways_is_never_held(chunked: bool) -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert (b"transfer-encoding: chunked" in head) == chunked
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            seen = 0
            if chunked:
                while size := int(await reader.readline(), 16):
                    seen += len(await reader.readexactly(size))
                    await reader.readline()
            else:
                seen = len(await reader.readexactly(8 << 20))
            for _ in range(seen >> 16):
                writer.write(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\ntrailer: 1\r\n\r\n")
            await writer.drain()

        async def pieces():  # type: ignore[no-untyped-def]
            for _ in range(128):
                yield b"y" * 65_536

        port = await bench.listen(handler)
        content = pieces() if chunked else b"y" * (8 << 20)
        answer = await bench.http.post(bench.path(port), content=content)
        assert answer.content == b"x" * (8 << 20)

    run(test)


def test_a_client_that_does_not_read_holds_up_the_guest() -> None:
    async def test(bench: Proxied) -> None:
        written = 0

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b"x" * 65_536)
                await writer.drain()
                written += 65_536

        port = await bench.listen(handler)
        reader, writer = await bench.raw()
        writer.write(f"GET {bench.path(port)} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(0.3)
        assert written < 24 << 20, "bounded by windows and socket buffers"
        assert bench.live.busy == 1, "held open while it is under way"
        writer.close()
        await _until(lambda: bench.live.busy == 0)

    run(test)


def test_events_come_as_they_are_sent() -> None:
    async def test(bench: Proxied) -> None:
        more = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            for name in (b"one", b"two"):
                writer.write(b"data: %b\n\n" % name)
                await more.wait()
                more.clear()

        port = await bench.listen(handler)
        async with bench.http.stream("GET", bench.path(port)) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            events = answer.aiter_raw()
            for name in (b"one", b"two"):
                assert await anext(events) == b"data: %b\n\n" % name
                more.set()

    run(test)


def test_an_answer_in_tiny_pieces_holds_up_nobody_else() -> None:
    async def test(bench: Proxied) -> None:
        count = 100_000

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"1\r\nx\r\n" * count + b"0\r\n\r\n")
            await writer.drain()

        port = await bench.listen(handler)
        async with stalls() as worst:
            answer = await bench.http.get(bench.path(port))
        assert answer.content == b"x" * count
        assert worst[0] < 0.1

    run(test)


@pytest.mark.parametrize(
    "framing", [b"content-length: 100\r\n\r\n12345", b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n"]
)
def test_a_body_that_breaks_off_is_seen_to_have_broken_off(framing: bytes) -> None:
    async def test(bench: Proxied) -> None:
        port = await bench.answering(b"HTTP/1.1 200 OK\r\n" + framing)
        with pytest.raises(httpx.RemoteProtocolError):
            await bench.http.get(bench.path(port))

    run(test)


def test_head_and_bodiless_answers() -> None:
    async def test(bench: Proxied) -> None:
        port = await bench.answering(
            b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\n\r\n",
            b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\n",
            b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
        )
        answer = await bench.http.head(bench.path(port))
        assert (answer.headers["content-length"], answer.content) == ("1000", b"")
        assert (await bench.http.get(bench.path(port))).status_code == 204
        assert (await bench.http.get(bench.path(port))).headers["etag"] == "x"
        assert len(bench.connections) == 1
        assert (await bench.http.get(bench.path(port))).text == "until the end"

    run(test)


def test_expectations_and_early_hints() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/no" in head:
                writer.write(b"HTTP/1.1 417 No\r\ncontent-length: 0\r\n\r\n")
                assert await reader.read() == b"", "the body was not asked for"
                return
            writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
            assert await reader.readexactly(4) == b"body"
            writer.write(OK)

        port = await bench.listen(handler)
        reader, writer = await bench.raw()
        head = "POST {} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
        writer.write(head.format(bench.path(port)).encode())
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"body")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        reader, writer = await bench.raw()
        writer.write(head.format(bench.path(port, "/no")).encode())
        assert b" 417 " in await reader.readuntil(b"\r\n\r\n")

    run(test)


def test_an_answer_before_the_whole_request_has_come() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig")

        port = await bench.listen(handler)
        answer = await bench.http.post(bench.path(port), content=b"x" * (4 << 20))
        assert (answer.status_code, answer.text) == (413, "big")
        assert (await bench.http.get("/v1/nothing")).status_code == 404, "the server is well"

    run(test)


def test_a_client_that_leaves_ends_the_guests_side() -> None:
    async def test(bench: Proxied) -> None:
        ended = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            try:
                await reader.read()
            finally:
                ended.set()  # by an end or a reset

        port = await bench.listen(handler)
        _, writer = await bench.raw()
        writer.write(f"GET {bench.path(port)} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await _until(lambda: bench.connections)
        writer.close()
        await ended.wait()
        await _until(lambda: bench.live.busy == 0)

    run(test)


def test_connection_close_is_obeyed() -> None:
    async def test(bench: Proxied) -> None:
        port = await bench.answering(OK)
        reader, writer = await bench.raw()
        writer.write(f"GET {bench.path(port)} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
        assert b"connection: close" in answer.lower()
        assert answer.endswith(b"ok")

    run(test)


def test_what_goes_wrong_is_a_problem_with_a_hint() -> None:
    async def test(bench: Proxied) -> None:
        answer = await bench.http.get(bench.path(_free_port()))
        assert (answer.status_code, answer.json()["code"]) == (502, "port_refused")
        assert "listens" in answer.json()["hint"]
        assert answer.json()["outcome"] == "not_started"
        for bytes_ in (b"220 mail.example ESMTP\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000, b""):
            port = await bench.answering(bytes_)
            answer = await bench.http.get(bench.path(port))
            assert (answer.status_code, answer.json()["code"]) == (502, "port_failed"), bytes_
        for port_text in ("0", "65536", "99999999"):
            answer = await bench.http.get(f"/v1/sandboxes/{ID}/ports/{port_text}/")
            assert answer.json()["code"] == "invalid_request"
        answer = await bench.http.get(bench.path(8000, "") + "?a=1")
        assert (answer.status_code, answer.headers["location"]) == (308, bench.path(8000, "/?a=1"))

    run(test)


def test_a_server_on_the_other_loopback_address() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)

        try:
            port = await bench.listen(handler, "::1")
        except OSError:
            pytest.skip("no IPv6 here")
        assert (await bench.http.get(bench.path(port))).text == "ok"

    run(test)


def test_the_end_of_the_sandbox_is_told() -> None:
    async def test(bench: Proxied) -> None:
        from llm4agents.errors import SandboxDiedError

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        port = await bench.listen(handler)
        call = asyncio.create_task(bench.http.get(bench.path(port)))
        await _until(lambda: bench.live.busy)
        bench.live.interrupt(SandboxDiedError("killed by request"))
        answer = await call
        assert (answer.status_code, answer.json()["code"]) == (410, "sandbox_died")

    run(test)
