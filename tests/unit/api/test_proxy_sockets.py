"""WebSockets and raw tunnels to ports of a sandbox, against the real application and the real agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.http11 import Headers

from llm4agents.errors import SandboxDiedError
from tests.unit.api.proxied import HOST_ID, ID, Proxied, run, stalls


async def _websocket_server(bench: Proxied, handler: Any, **options: Any) -> int:
    server = await serve(handler, "127.0.0.1", 0, **options)
    bench.cleanup.callback(server.close)
    return int(next(iter(server.sockets)).getsockname()[1])


@contextlib.asynccontextmanager
async def _connect(
    bench: Proxied, port: int, path: str = "/", **options: Any
) -> AsyncIterator[ClientConnection]:
    uri = f"ws://public.example/v1/sandboxes/{ID}/ports/{port}{path}"
    async with unix_connect(str(bench.socket), uri, max_size=None, **options) as connection:
        yield connection


async def _echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


def test_text_and_bytes_of_every_size() -> None:
    async def test(bench: Proxied) -> None:
        port = await _websocket_server(bench, _echo, max_size=None)
        async with _connect(bench, port) as connection:
            for message in ("", "grüß", b"", b"\0\xff", "x" * 300_000, os.urandom(9_000_000)):
                await connection.send(message)
                assert await connection.recv() == message
            await connection.send(["a", "b", "c"])  # in fragments
            assert await connection.recv() == "abc"
            await (await connection.ping())

    run(test)


def test_what_each_side_is_told_of_the_other() -> None:
    async def test(bench: Proxied) -> None:
        seen: list[Request] = []

        def look(connection: ServerConnection, request: Request) -> None:
            seen.append(request)

        port = await _websocket_server(bench, _echo, subprotocols=["vite-hmr"], process_request=look)
        options: dict[str, Any] = {
            "subprotocols": ["other", "vite-hmr"],
            "origin": "http://public.example",
            "additional_headers": {"cookie": "a=1"},
        }
        async with _connect(bench, port, "/hmr?token=%20x", **options) as connection:
            assert connection.subprotocol == "vite-hmr"
        (request,) = seen
        assert request.path == "/hmr?token=%20x"
        assert request.headers["host"] == f"localhost:{port}"
        assert request.headers["origin"] == f"http://localhost:{port}"
        assert request.headers["cookie"] == "a=1"
        assert request.headers["x-forwarded-host"] == "public.example"
        assert request.headers.get_all("sec-websocket-key") == [request.headers["sec-websocket-key"]]
        uri = f"ws://{port}-{HOST_ID}.localhost/tcp"  # a path like any other there
        async with unix_connect(str(bench.socket), uri, subprotocols=["vite-hmr"]) as connection:
            await connection.send("x")
            assert await connection.recv() == "x"
        assert seen[1].path == "/tcp"

    run(test)


def test_close_codes_pass_both_ways() -> None:
    async def test(bench: Proxied) -> None:
        heard: asyncio.Queue[tuple[int | None, str | None]] = asyncio.Queue()

        async def handler(connection: ServerConnection) -> None:
            with contextlib.suppress(ConnectionClosed):
                if await connection.recv() == "close":
                    await connection.close(4001, "as you said")
                await connection.recv()
            heard.put_nowait((connection.close_code, connection.close_reason))

        port = await _websocket_server(bench, handler)
        async with _connect(bench, port) as connection:
            await connection.send("close")
            with pytest.raises(ConnectionClosedError):
                await connection.recv()
            assert (connection.close_code, connection.close_reason) == (4001, "as you said")
        await heard.get()
        async with _connect(bench, port) as connection:
            await connection.send("stay")
            await connection.close(4002, "mine")
        assert await heard.get() == (4002, "mine")
        async with _connect(bench, port) as connection:
            await connection.send("stay")
            connection.transport.abort()
        code, _ = await heard.get()
        assert code in (1001, 1005)

    run(test)


def test_a_guest_that_breaks_off_or_sends_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm4agents.limits.WEBSOCKET_MESSAGE_BYTES_MAX", 100_000)

    async def test(bench: Proxied) -> None:
        async def handler(connection: ServerConnection) -> None:
            if await connection.recv() == "big":
                with contextlib.suppress(ConnectionClosed):
                    await connection.send([b"x" * 60_000, b"y" * 60_000])
                    await connection.recv()
            else:
                connection.transport.abort()

        port = await _websocket_server(bench, handler)
        for message, code in (("big", 1009), ("abort", 1014)):
            async with _connect(bench, port) as connection:
                await connection.send(message)
                with pytest.raises(ConnectionClosedError):
                    await connection.recv()
                assert connection.close_code == code

    run(test)


def test_a_guests_tiny_frames_hold_up_nobody_and_pieces_are_bounded() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(connection: ServerConnection) -> None:
            asked = await connection.recv()
            with contextlib.suppress(ConnectionClosed):
                if asked == "many":
                    connection.transport.write(b"\x82\0" * 60_000)
                else:  # a message of nothing, in pieces, that never ends
                    connection.transport.write(b"\x02\0" + b"\0\0" * 40_000)
                await connection.recv()

        port = await _websocket_server(bench, handler)
        reader, writer = await bench.raw()  # a client of the library's would be busy itself
        writer.write(
            b"GET %b HTTP/1.1\r\nhost: public.example\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            % bench.path(port).encode()
        )
        await reader.readuntil(b"\r\n\r\n")
        async with stalls() as worst:
            writer.write(b"\x81\x84\0\0\0\0many")
            await reader.readexactly(120_000)
        writer.close()
        assert worst[0] < 0.1
        async with _connect(bench, port) as connection:
            await connection.send("pieces")
            with pytest.raises(ConnectionClosedError):
                await asyncio.wait_for(connection.recv(), 10)
            assert connection.close_code == 1009

    run(test)


def test_a_handshake_that_is_refused() -> None:
    async def test(bench: Proxied) -> None:
        def no(connection: ServerConnection, request: Request) -> Response:
            return Response(403, "Forbidden", Headers({"x-why": "because", "content-length": "2"}), b"no")

        port = await _websocket_server(bench, _echo, process_request=no)
        with pytest.raises(InvalidStatus) as refused:
            async with _connect(bench, port):
                pass
        answer = refused.value.response
        assert (answer.status_code, answer.body, answer.headers["x-why"]) == (403, b"no", "because")
        for target in (1, await bench.answering(b"220 hello\r\n")):
            with pytest.raises(InvalidStatus) as refused:
                async with _connect(bench, target):
                    pass
            assert refused.value.response.status_code == 502
            problem = json.loads(refused.value.response.body or b"")
            assert problem["code"] == ("port_refused" if target == 1 else "port_failed")

    run(test)


def test_the_end_of_the_sandbox_closes_with_its_reason() -> None:
    async def test(bench: Proxied) -> None:
        port = await _websocket_server(bench, _echo)
        for path in ("/", "/tcp"):
            async with _connect(bench, port, path) as connection:
                if path == "/":
                    await connection.send("x")
                    await connection.recv()
                assert bench.live.busy == 1
                bench.live.interrupt(SandboxDiedError("it was paused"))
                with pytest.raises(ConnectionClosedError):
                    await connection.recv()
                assert (connection.close_code, connection.close_reason) == (1011, "it was paused")
            bench.live.end_error = None

    run(test)


def test_a_tunnel_carries_bytes_and_half_closes() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data = await reader.read()  # until the client's half-close
            writer.write(data[::-1])
            await writer.drain()

        port = await bench.listen(handler)
        data = os.urandom(3_000_000)
        async with _connect(bench, port, "/tcp") as connection:
            for at in range(0, len(data), 100_000):
                await connection.send(data[at : at + 100_000])
            await connection.send('{"eof": true}')
            got = b""
            async for message in connection:
                if isinstance(message, str):
                    assert json.loads(message) == {"eof": True}
                    continue
                got += message
            assert got == data[::-1]
            assert connection.close_code == 1000
        assert bench.live.busy == 0

    run(test)


def test_a_tunnel_that_the_guest_ends_first() -> None:
    async def test(bench: Proxied) -> None:
        rest: asyncio.Queue[bytes] = asyncio.Queue()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"bye")
            writer.write_eof()
            rest.put_nowait(await reader.read())

        port = await bench.listen(handler)
        async with _connect(bench, port, "/tcp") as connection:
            assert await connection.recv() == b"bye"
            assert json.loads(await connection.recv()) == {"eof": True}
            await connection.send(b"one more thing")
            await connection.send('{"eof": true}')
            with pytest.raises(ConnectionClosed):
                await connection.recv()
            assert connection.close_code == 1000
        assert await rest.get() == b"one more thing"

    run(test)


def test_a_tunnel_that_breaks() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)  # sent when the tunnel is there: before, it would be one that never was
            sock = writer.get_extra_info("socket")
            sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: RST instead of FIN
            writer.transport.abort()

        port = await bench.listen(handler)
        async with _connect(bench, port, "/tcp") as connection:
            await connection.send(b"x")
            with pytest.raises(ConnectionClosedError):
                await connection.recv()
            assert connection.close_code == 1014
        with pytest.raises(InvalidStatus) as refused:
            async with _connect(bench, 1, "/tcp"):
                pass
        assert refused.value.response.status_code == 502

    run(test)


def test_what_is_open_ends_with_its_key() -> None:
    async def test(bench: Proxied) -> None:
        port = await _websocket_server(bench, _echo)
        headers = {"authorization": "Bearer l4a_default"}
        async with _connect(bench, port, additional_headers=headers) as connection:
            await connection.send("still")
            assert await connection.recv() == "still"
            bench.engine.keys.held.end()
            with pytest.raises(ConnectionClosed) as closed:
                await connection.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008

    run(test, via="tcp")
