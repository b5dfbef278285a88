"""Ports as strangers and those with a right see them, against the real application, its gate and the real agent."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.utils import accept_key

from llm4agents.engine import clock
from llm4agents.errors import ConflictError, SandboxDiedError
from tests.unit.api.proxied import HOST_ID, ID, Proxied, run
from tests.unit.api.test_proxy import OK

_OF_EACH = ("date", "x-request-id")
PAGE = {"accept": "text/html,*/*;q=0.8"}
OTHER = "sbx-99999999999999999999"


async def _heard(bench: Proxied, body: bytes = OK) -> tuple[int, list[bytes]]:
    """A port that answers, and the heads of the requests that came to it."""
    heads: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(body)

    return await bench.listen(handler), heads


def _host(port: int, ident: str = HOST_ID) -> dict[str, str]:
    return {"host": f"{port}-{ident}.localhost"}


def _signed(bench: Proxied, port: int, seconds: int = 60) -> dict[str, str]:
    row, expires = bench.live.row, int(clock.wall_s()) + seconds
    generation = (row.traffic or {}).get("generation", 0)
    stamp = bench.context.signer.stamp("url", ID, port, expires, generation)
    return {"l4a-expires": str(expires), "l4a-signature": stamp}


def test_a_stranger_gets_one_answer_whether_there_is_one_or_not() -> None:
    async def test(bench: Proxied) -> None:
        port, heads = await _heard(bench)

        async def answers(headers: dict[str, str], path: str = "/") -> list[Any]:
            found = []
            for ident in (HOST_ID, OTHER):
                by_path = f"/v1/sandboxes/{ident.replace('-', '_')}/ports/{port}/"
                by_headers = {"x-sandbox-id": ident, "x-sandbox-port": str(port)}
                for where, more in (("/", _host(port, ident)), ("/", by_headers), (by_path, {})):
                    answer = await bench.http.get(where, headers={**headers, **more})
                    text = answer.text.replace(ident, "ID").replace(ident.replace("-", "_"), "ID")
                    fields = sorted(
                        field for field in answer.headers.items() if field[0] not in ("date", "x-request-id")
                    )
                    found.append((answer.status_code, fields, text))
            assert found[:3] == found[3:]
            return [status for status, _, _ in found[:3]]

        for headers in (
            {},
            {"x-traffic-token": "l4at_wrong"},
            {"authorization": "Bearer l4a_wrong"},
            {"x-api-key": "l4a_wrong"},
            {"cookie": "l4a-access=99999999999.x"},
            {"authorization": "Bearer of the guest's own"},
        ):
            assert await answers(headers) == [403, 403, 401]
            assert await answers({**headers, **PAGE}) == [403, 403, 401]
        assert {(entry.action, entry.actor, entry.status) for entry in bench.engine.audited} == {
            ("GET a port", "nobody", 401),
            ("GET a port", "nobody", 403),
        }
        assert await answers({"x-api-key": "l4a_other"}) == [502, 502, 404]
        assert heads == []
        assert bench.live.busy == 0

    run(test, "tcp")


def test_key_token_and_public_let_in_and_the_guest_sees_none_of_it() -> None:
    async def test(bench: Proxied) -> None:
        port, heads = await _heard(bench)
        token = bench.context.signer.token(ID, 0)
        rights = (
            {"x-api-key": "l4a_default"},
            {"authorization": "Bearer l4a_default"},
            {"x-traffic-token": token},
            {"e2b-traffic-access-token": token},
        )
        ways = (
            ("/x", _host(port)),
            ("/x", {"x-sandbox-id": ID, "x-sandbox-port": str(port)}),
            ("/x", {"e2b-sandbox-id": ID, "e2b-sandbox-port": str(port)}),
            (bench.path(port, "/x"), {}),
        )
        for right in rights:
            for path, way in ways:
                answer = await bench.http.get(path, headers={**right, **way, "x-mine": "1", "cookie": "a=1"})
                assert (answer.status_code, answer.text) == (200, "ok"), (right, way)
        for head in heads:
            said = head.lower()
            assert b"x-mine: 1" in said and b"cookie: a=1" in said
            for ours in (b"l4a", token.encode(), b"x-sandbox", b"e2b-", b"x-api-key", b"authorization"):
                assert ours not in said
                assert "x-api-key" in answer.headers["vary"], "no cache gives it to another"
                assert ("x-sandbox-id" in answer.headers["vary"]) == (
                    "x-sandbox-id" in way or "e2b-sandbox-id" in way
                )
        heads.clear()
        bench.engine.set_traffic(public=True)
        sent = {**_host(port), "authorization": "Bearer their-own", "x-api-key": "theirs"}
        answer = await bench.http.get("/", headers=sent)
        assert (answer.text, "vary" in answer.headers) == ("ok", False)
        assert b"bearer their-own" in heads[0].lower() and b"x-api-key: theirs" in heads[0].lower()
        # A key that is not good, or another project's, takes nothing away.
        for key in ("l4a_wrong", "l4a_other"):
            assert (await bench.http.get("/", headers={**_host(port), "x-api-key": key})).text == "ok"

    run(test, "tcp")


def test_a_signed_url_becomes_a_cookie_of_its_host() -> None:
    async def test(bench: Proxied) -> None:
        port, heads = await _heard(bench)
        query = {"q": "a b", **_signed(bench, port)}
        answer = await bench.http.get("/page", params=query, headers={**_host(port), **PAGE})
        assert (answer.status_code, answer.headers["location"]) == (302, "/page?q=a+b")
        assert answer.headers["referrer-policy"] == "no-referrer"
        made = answer.headers["set-cookie"]
        bench.http.cookies.clear()
        assert made.startswith("l4a-access=") and "HttpOnly" in made and "SameSite=Lax" in made
        assert "domain" not in made.lower()
        assert heads == []
        cookie = {"cookie": f"theirs=1; {made.partition(';')[0]}"}
        assert (await bench.http.get("/page", headers={**_host(port), **cookie})).text == "ok"
        assert b"cookie: theirs=1\r\n" in heads[0].lower()
        # Not for another port or sandbox, not by path or headers, not for a sibling's page.
        by_headers = {"x-sandbox-id": ID, "x-sandbox-port": str(port)}
        for headers in (
            _host(port + 1),
            _host(port, OTHER),
            by_headers,
            {**_host(port), "origin": "http://evil.example"},
        ):
            assert (await bench.http.get("/", headers={**headers, **cookie})).status_code == 403
        assert (await bench.http.get(bench.path(port), headers=cookie)).status_code == 401
        # A program has its answer at once; by path too, where there is no cookie.
        heads.clear()
        signed = _signed(bench, port)
        assert (await bench.http.get("/", params=signed, headers=_host(port))).text == "ok"
        by_path = await bench.http.get(
            bench.path(port),
            params=signed,
            headers={**PAGE, "referer": f"http://h/?l4a-signature={signed['l4a-signature']}"},
        )
        assert (by_path.text, by_path.headers.get("set-cookie")) == ("ok", None)
        assert all(b"l4a" not in head for head in heads)
        # Whatever the path looks like, it leads to no other host.
        for path, where in (
            ("//evil.example/x", "/.//evil.example/x"),
            ("/\\evil.example", "/%5Cevil.example"),
        ):
            raw = httpx.URL(f"http://{_host(port)['host']}").copy_with(
                raw_path=path.encode() + b"?" + str(httpx.QueryParams(signed)).encode()
            )
            answer = await bench.http.send(bench.http.build_request("GET", raw, headers=PAGE))
            assert (answer.status_code, answer.headers["location"]) == (302, where)
        bench.http.cookies.clear()
        expired = _signed(bench, port, -1)
        answer = await bench.http.get("/", params=expired, headers={**_host(port), **PAGE})
        assert answer.status_code == 403
        assert "This link has expired" in answer.text

    run(test, "tcp")


def test_a_new_generation_ends_everything_also_what_is_under_way() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            await reader.read()

        port = await bench.listen(handler)
        signed, token = _signed(bench, port), {"x-traffic-token": bench.context.signer.token(ID, 0)}
        key = {"x-api-key": "l4a_default"}
        ended: list[str] = []

        async def follow(name: str, headers: dict[str, str], params: dict[str, str]) -> None:
            async with bench.http.stream(
                "GET", "/", headers={**_host(port), **headers}, params=params
            ) as answer:
                assert answer.status_code == 200
                try:
                    async for _ in answer.aiter_raw():
                        begun.add(name)
                except httpx.RemoteProtocolError:
                    ended.append(name)

        begun: set[str] = set()
        following = [
            asyncio.create_task(follow(*one))
            for one in (("token", token, {}), ("url", {}, signed), ("key", key, {}))
        ]
        while len(begun) < 3:
            await asyncio.sleep(0.005)
        bench.engine.set_traffic(rotate=True)
        bench.context.visitors.show_out(ID, ("token", "url", "cookie"))
        await asyncio.gather(*following[:2])
        assert sorted(ended) == ["token", "url"]
        assert not following[2].done(), "whoever has the project's key is not concerned"
        following[2].cancel()
        await asyncio.gather(*following, return_exceptions=True)
        assert (await bench.http.get("/", headers={**_host(port), **token})).status_code == 403
        assert (await bench.http.get("/", headers=_host(port), params=signed)).status_code == 403

    run(test, "tcp")


def test_websockets_are_let_in_alike() -> None:
    async def test(bench: Proxied) -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                key = next(
                    line[19:]
                    for line in heads[-1].decode().split("\r\n")
                    if line.lower().startswith("sec-websocket-key: ")
                )
                writer.write(
                    b"HTTP/1.1 101 S\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
                    b"sec-websocket-accept: " + accept_key(key).encode() + b"\r\n\r\n"
                )

        heads: list[bytes] = []
        port = await bench.listen(handler)
        uri = f"ws://{_host(port)['host']}/socket"
        for headers in (
            {},
            {"x-traffic-token": "l4at_x"},
            {"origin": "http://evil.example", "cookie": "l4a-access=1.x"},
        ):
            with pytest.raises(InvalidStatus) as refused:
                async with unix_connect(str(bench.socket), uri, additional_headers=headers):
                    pass
            assert refused.value.response.status_code == 403
        assert heads == []
        token = bench.context.signer.token(ID, 0)
        async with unix_connect(str(bench.socket), uri, additional_headers={"x-traffic-token": token}) as one:
            assert token.encode() not in heads[0]
            bench.context.visitors.show_out(ID, ("token",))
            with pytest.raises(ConnectionClosed) as closed:
                await one.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        query = "&".join(f"{name}={value}" for name, value in _signed(bench, port).items())
        async with unix_connect(str(bench.socket), f"{uri}?{query}&room=1"):
            assert heads[-1].startswith(b"GET /socket?room=1 HTTP/1.1")

    run(test, "tcp")


def test_what_is_wrong_with_the_sandbox_is_the_gateways_for_a_name_and_the_apis_for_a_path() -> None:
    async def test(bench: Proxied) -> None:
        key = {"x-api-key": "l4a_default"}
        paused = ConflictError(f"{ID} is paused and is not resumed by itself", hint="resume it")
        died = SandboxDiedError(f"{ID} has ended: <script>alert(1)</script>")
        for trouble, status, title in (
            (paused, 409, "This sandbox is paused"),
            (died, 410, "This sandbox has ended"),
        ):
            bench.engine.trouble = trouble
            answer = await bench.http.get("/", headers={**_host(1), **key})
            body = answer.json()
            assert (answer.status_code, body["status"], body["code"]) == (502, 502, trouble.code)
            assert "was not found" in body["message"]
            assert body["sandboxId"] == ID
            assert (await bench.http.get(bench.path(1), headers=key)).status_code == status
            page = await bench.http.get("/", headers={**_host(1), **key, **PAGE})
            assert page.headers["content-type"].startswith("text/html")
            assert title in page.text and "<script" not in page.text
            assert page.headers["content-security-policy"].startswith("default-src 'none'")
        bench.engine.trouble = None
        answer = await bench.http.get("/", headers={**_host(1), **key})
        assert answer.status_code == 502
        assert answer.json()["message"] == "The sandbox is running but port is not open"
        assert answer.json()["code"] == "port_refused"
        assert "log" not in answer.text
        page = await bench.http.get("/", headers={**_host(1), **key, **PAGE})
        assert (page.status_code, page.headers["retry-after"]) == (502, "2")
        assert "Nothing listens on port 1 yet" in page.text and 'http-equiv="refresh"' in page.text
        answer = await bench.http.get("/", headers={**_host(1, OTHER), **key})
        assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")
        # A page is for people who go there: what a page's own scripts fetch is a program's.
        fetched = await bench.http.get("/", headers={**_host(1), **key, **PAGE, "sec-fetch-mode": "cors"})
        assert fetched.headers["content-type"] == "application/problem+json"
        posted = await bench.http.post("/", headers={**_host(1), **key, **PAGE})
        assert posted.headers["content-type"] == "application/problem+json"

    run(test, "tcp")


def test_cookies_of_a_guest_are_its_hosts_alone() -> None:
    async def test(bench: Proxied) -> None:
        body = (
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nset-cookie: a=1; Domain=localhost; Path=/x\r\n"
            b"set-cookie: l4a-access=forged\r\nset-cookie: __Host-l4a-access=forged; Secure; Path=/\r\n\r\n"
        )
        port, _ = await _heard(bench, body)
        answer = await bench.http.get("/", headers={**_host(port), "x-api-key": "l4a_default"})
        assert answer.headers.get_list("set-cookie") == ["a=1; Path=/x"]

    run(test, "tcp")


def test_redirects_of_a_guest_are_the_clients_to_follow() -> None:
    """A guest that answers with an address of the host's own gets nobody there by this server's hand."""

    async def test(bench: Proxied) -> None:
        reached: list[int] = []

        async def secret(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reached.append(1)

        inside = await asyncio.start_server(secret, "127.0.0.1", 0)
        bench.cleanup.callback(inside.close)
        where = f"http://127.0.0.1:{inside.sockets[0].getsockname()[1]}/"
        body = f"HTTP/1.1 302 Found\r\nlocation: {where}\r\ncontent-length: 0\r\n\r\n".encode()
        port, _ = await _heard(bench, body)
        answer = await bench.http.get("/", headers={**_host(port), "x-api-key": "l4a_default"})
        assert (answer.status_code, answer.headers["location"]) == (302, where)
        assert reached == []

    run(test, "tcp")
