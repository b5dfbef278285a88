"""The client of VMMs' REST APIs against a server that speaks HTTP, or does not."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from llm4agents.errors import ConnectionLostError, VmmError
from llm4agents.vmm import unixhttp
from llm4agents.vmm.unixhttp import UnixHttp

Answer = Callable[[str, bytes], bytes | None]
"""From the first line and the body of a request to what is sent; None: the connection is closed."""


def answer(status: int, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} ", "Server: here", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def play(
    path: Path, answers: Answer, test: Callable[[UnixHttp], Awaitable[None]], piece: int = 1 << 20
) -> None:
    """`test` with a client of a server at `path` that answers in pieces of that many bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().splitlines()
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                said = answers(lines[0], body)
                if said is None:
                    break
                for at in range(0, len(said), piece):
                    writer.write(said[at : at + piece])
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        # Bound by its short name: the path that the client gets may be as long as it likes.
        server = await asyncio.start_unix_server(serve, path.name)
        async with server:
            client = UnixHttp(unixhttp.connect(path), "the VMM")
            try:
                async with asyncio.timeout(10):
                    await test(client)
            finally:
                client.close()

    asyncio.run(main())


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / ("long" * 40)
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory / "api.sock"


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_answers_find_their_requests(path: Path, piece: int) -> None:
    seen: list[tuple[str, Any]] = []

    def answers(first: str, body: bytes) -> bytes:
        seen.append((first, json.loads(body) if body else None))
        if first.startswith("PUT"):
            return answer(204)
        return b"HTTP/1.1 100 Continue\r\n\r\n" + answer(200, json.dumps({"of": first.split()[1]}).encode())

    async def test(client: UnixHttp) -> None:
        assert await client.request("PUT", "/x", {"a": "ü"}) is None
        ahead = [client.send("GET", f"/{number}") for number in range(20)]
        assert [await each for each in ahead] == [{"of": f"/{number}"} for number in range(20)]
        big = "x" * 300_000
        await client.request("PUT", "/big", big)
        assert seen[-1] == ("PUT /big HTTP/1.1", big)

    play(path, answers, test, piece)
    assert seen[0] == ("PUT /x HTTP/1.1", {"a": "ü"})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"fault_message":"no such\\u001b drive"}', "no such drive"),
        (b'["Error from API","The VM could not boot","why"]', "Error from API: The VM could not boot: why"),
        (b"just words\n", "just words"),
        (b"", "400"),
        (b"\xff\xfe", "��"),
        (b"[" * 100_000, "[[["),
        (b'{"fault_message":' + b'"' + b"x" * 9000 + b'"}', "x" * 2000),
    ],
)
def test_a_refusal_is_told_in_the_vmms_words_and_the_connection_stays(
    path: Path, body: bytes, words: str
) -> None:
    def answers(first: str, _: bytes) -> bytes:
        return answer(400, body) if "/bad" in first else answer(200, b"1")

    async def test(client: UnixHttp) -> None:
        with pytest.raises(VmmError) as caught:
            await client.request("PUT", "/bad", {})
        said = str(caught.value)
        assert said.startswith("the VMM refused PUT /bad: ") and words in said and len(said) < 2100
        assert await client.request("GET", "/") == 1

    play(path, answers, test)


@pytest.mark.parametrize(
    "said",
    [
        b"\0\0\0\0\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 999 x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        answer(200, b"not json"),
        answer(200, b"[" * 200_000),
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000,
        answer(200, b"1") + answer(200, b"2"),
        None,
    ],
)
def test_what_is_no_answer_ends_the_connection_and_nothing_hangs(path: Path, said: bytes | None) -> None:
    async def test(client: UnixHttp) -> None:
        try:
            first = await client.request("GET", "/", timeout=60)
        except ConnectionLostError:
            first = None
        assert first in (None, 1)
        with pytest.raises(ConnectionLostError):
            await client.request("GET", "/", timeout=60)
        assert client.closed
        with pytest.raises(ConnectionLostError):
            await client.request("GET", "/again")

    play(path, lambda first, body: said, test)


def test_an_answer_that_does_not_come_is_waited_for_no_longer(path: Path) -> None:
    async def test(client: UnixHttp) -> None:
        with pytest.raises(ConnectionLostError, match=r"did not answer GET /never in 0\.05 s"):
            await client.request("GET", "/never", timeout=0.05)
        assert client.closed

    play(path, lambda first, body: b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n1", test)


def test_only_a_socket_in_its_own_place_is_connected_to(path: Path) -> None:
    async def main() -> None:
        server = await asyncio.start_unix_server(lambda reader, writer: writer.close(), path.name)
        async with server:
            link = path.with_name("link.sock")
            link.symlink_to(path)
            with pytest.raises(OSError):
                unixhttp.connect(link)
            path.with_name("file").touch()
            with pytest.raises(OSError):
                unixhttp.connect(path.with_name("file"))
            with pytest.raises(OSError):
                unixhttp.connect(path.with_name("none"))
            unixhttp.connect(path).close()

    asyncio.run(main())
