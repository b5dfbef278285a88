"""HTTP/2 from the client, HTTP/1.1 to the guest: through the real listener, the real application and the real agent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidStatus

from llm4agents.api.access.gate import guarded
from llm4agents.api.app import create_app
from llm4agents.api.listen.counting import Bounds
from llm4agents.api.listen.opening import Opened
from tests.unit.api.proxied import HOST_ID, Proxied, proxied

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def run(test: Callable[[Proxied, httpx.AsyncClient], Awaitable[None]], bounds: Bounds | None = None) -> None:
    async def whole() -> None:
        async with asyncio.timeout(40), proxied("tcp") as bench:
            bench.engine.set_traffic(public=True)
            opened = Opened(replace(bench.context.settings, listen="127.0.0.1:0"), bounds)
            listener = opened.listener(
                guarded(create_app(bench.context), bench.context, via="tcp"), bench.context
            )
            listener.start()
            url = f"http://127.0.0.1:{listener.address.port}"
            try:
                async with httpx.AsyncClient(http1=False, http2=True, base_url=url, timeout=20) as client:
                    await test(bench, client)
            finally:
                await listener.close()
                opened.close()

    asyncio.run(whole())


def _at(port: int) -> list[tuple[str, str]]:
    return [("host", f"{port}-{HOST_ID}.localhost")]


def test_heads_and_bodies() -> None:
    async def test(bench: Proxied, client: httpx.AsyncClient) -> None:
        seen: list[tuple[bytes, bytes]] = []

        async def handler(reader: Reader, writer: Writer) -> None:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = b""
                if b"transfer-encoding: chunked" in head:
                    while size := int(await reader.readline(), 16):
                        body += await reader.readexactly(size)
                        await reader.readline()
                    await reader.readline()
                elif b"content-length: " in head:
                    body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                seen.append((head, body))
                writer.write(
                    b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
                    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\nconnection: keep-alive\r\n\r\n"
                    b"2\r\nok\r\n0\r\nx-sum: 1\r\n\r\n"
                )

        port = await bench.listen(handler)
        cookies = [("cookie", "a=1"), ("cookie", "l4a-access=mine"), ("cookie", "b=2"), ("te", "trailers")]
        answer = await client.get("/x?y=1", headers=[*_at(port), *cookies])
        assert (answer.http_version, answer.status_code, answer.text) == ("HTTP/2", 200, "ok")
        for gone in ("connection", "transfer-encoding", "trailer"):
            assert gone not in answer.headers
        head, _ = seen[0]
        assert head.startswith(b"get /x?y=1 http/1.1\r\n")
        assert b"cookie: a=1; b=2\r\n" in head and b"mine" not in head
        for none in (b"content-length", b"transfer-encoding", b"te:"):
            assert none not in head

        async def pieces() -> AsyncIterator[bytes]:
            yield b"one,"
            yield b"two"

        assert (await client.post("/", headers=_at(port))).text == "ok"
        assert b"content-length: 0" in seen[-1][0]
        assert (await client.post("/", headers=_at(port), content=b"known")).text == "ok"
        assert (b"content-length: 5" in seen[-1][0], seen[-1][1]) == (True, b"known")
        assert (await client.put("/", headers=_at(port), content=pieces())).text == "ok"
        assert (b"transfer-encoding: chunked" in seen[-1][0], seen[-1][1]) == (True, b"one,two")
        assert (await client.head("/", headers=_at(port + 1))).status_code == 502
        assert (
            await client.get("/", headers=[*_at(port), ("x-forwarded-host", "evil.example")])
        ).text == "ok"
        assert b"evil.example" not in seen[-1][0]

    run(test)


def test_large_bodies_both_ways_at_once_and_streams_that_do_not_hold_each_other_up() -> None:
    async def test(bench: Proxied, client: httpx.AsyncClient) -> None:
        async def echo(reader: Reader, writer: Writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while size := int(await reader.readline(), 16):
                writer.write(b"%x\r\n%b\r\n" % (size, await reader.readexactly(size)))
                await writer.drain()
                await reader.readline()
            writer.write(b"0\r\n\r\n")

        async def stuck(reader: Reader, writer: Writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await over.wait()

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(64):
                yield b"x" * 131_072

        async def never() -> AsyncIterator[bytes]:
            for _ in range(200):  # more than anybody holds for it
                yield b"x" * 131_072

        over = asyncio.Event()
        port, other = await bench.listen(echo), await bench.listen(stuck)
        waiting = asyncio.create_task(client.post("/", headers=_at(other), content=never()))
        while not bench.connections:
            await asyncio.sleep(0.005)
        size = 0
        async with client.stream("POST", "/", headers=_at(port), content=pieces()) as answer:
            async for piece in answer.aiter_raw():
                size += len(piece)
        assert size == 64 * 131_072
        assert not waiting.done()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting

    run(test)


def test_events_come_as_they_are_sent_and_a_broken_answer_is_seen_broken() -> None:
    async def test(bench: Proxied, client: httpx.AsyncClient) -> None:
        more = asyncio.Event()

        async def handler(reader: Reader, writer: Writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            writer.write(b"9\r\ndata: 1\n\n\r\n")
            await more.wait()
            writer.write(b"9\r\ndata: 2\n\n\r\n")

        port = await bench.listen(handler)
        async with client.stream("GET", "/", headers=_at(port)) as answer:
            parts = answer.aiter_raw()
            assert await anext(parts) == b"data: 1\n\n"
            more.set()
            assert await anext(parts) == b"data: 2\n\n"
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(parts)

    run(test)


def test_a_client_that_goes_away_ends_the_guests_side() -> None:
    async def test(bench: Proxied, client: httpx.AsyncClient) -> None:
        ended = asyncio.Event()

        async def handler(reader: Reader, writer: Writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            ended.set()

        port = await bench.listen(handler)
        async with client.stream("GET", "/", headers=_at(port)) as answer:
            await anext(answer.aiter_raw())
            await client.aclose()
        await ended.wait()
        while bench.live.busy:  # until the test's time is up
            await asyncio.sleep(0.005)

    run(test)


def test_a_body_that_stops_coming_is_nobodys_to_wait_for() -> None:
    async def test(bench: Proxied, client: httpx.AsyncClient) -> None:
        left = asyncio.Event()

        async def handler(reader: Reader, writer: Writer) -> None:
            with contextlib.suppress(ConnectionError):
                await reader.readuntil(b"\r\n\r\n")
                await reader.read()
            left.set()

        port = await bench.listen(handler)
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = f"POST / HTTP/1.1\r\nhost: {_at(port)[0][1]}\r\ncontent-length: 100\r\n\r\nhalf"
        writer.write(head.encode())
        said = await reader.readuntil(b"\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 408 ")
        await left.wait()
        writer.close()

    run(test, Bounds(stall_s=0.3))


def test_a_websocket_through_the_listener() -> None:
    async def test(bench: Proxied, client: httpx.AsyncClient) -> None:
        async def echo(connection: ServerConnection) -> None:
            async for message in connection:
                await connection.send(message)

        server = await serve(echo, "127.0.0.1", 0)
        bench.cleanup.callback(server.close)
        port = int(next(iter(server.sockets)).getsockname()[1])
        there = {"host": client.base_url.host, "port": client.base_url.port, "proxy": None}
        async with connect(f"ws://{_at(port)[0][1]}/", **there) as socket:
            for message in ("hello", b"x" * 300_000):
                await socket.send(message)
                assert await socket.recv() == message
        bench.engine.set_traffic(public=False)
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://{_at(port)[0][1]}/", **there)
        assert refused.value.response.status_code == 403

    run(test)


def test_interim_answers_without_end_are_an_error() -> None:
    async def test(bench: Proxied, client: httpx.AsyncClient) -> None:
        async def handler(reader: Reader, writer: Writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 100)
                    await writer.drain()

        port = await bench.listen(handler)
        answer: Any = await client.get("/", headers=_at(port))
        assert (answer.status_code, answer.json()["code"]) == (502, "port_failed")

    run(test)
