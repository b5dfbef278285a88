"""The interceptor in its own process and environment: what passes, what does not, and what becomes of secrets."""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import json
import os
import re
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from llm4agents.barrier.workers import WorkerRefused
from tests.barrier.interception import Asked, Ca, Lab, Origin, lab, ok
from tests.support import eventually

SECRET = "s3cr3t/canary+value=="


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("i")) as made:
        yield made


class Site:
    """A sandbox of its own and an origin it may reach as `api.example.com:443`."""

    def __init__(
        self, node: Lab, name: str, origin: Origin, rules: list[str], credentials: list[Any], **secrets: Any
    ):
        self.node, self.name, self.origin = node, name, origin
        self.rules, self.credentials = rules, credentials
        node.join(name, self.policy(rules, credentials), **secrets)

    def policy(self, rules: list[str], credentials: list[Any] | None = None) -> dict[str, Any]:
        return self.policy_for(self.node, self.origin.port, rules, credentials)

    @staticmethod
    def policy_for(
        node: Lab, port: int, rules: list[str], credentials: list[Any] | None = None
    ) -> dict[str, Any]:
        return node.policy(
            [rule.replace("HOST", f"127.0.0.1:{port}") for rule in rules],
            [f"api.example.com -> 127.0.0.1:{port}"],
            [{"port": port, "host": "api.example.com", **one} for one in credentials or []],
        )

    def client(self, **more: Any) -> Any:
        return self.node.client(self.name, "api.example.com", **more)

    def records(self) -> list[dict[str, Any]]:
        return [record for record in self.node.records if record["sandbox"] == self.name]

    def record(self, at: int = -1) -> dict[str, Any]:
        eventually(lambda: len(self.records()) > (at if at >= 0 else 0))
        return self.records()[at]


@pytest.fixture
def site(node: Lab, request: pytest.FixtureRequest) -> Any:
    made: list[Site] = []

    def make(
        handler: Any = lambda asked, conn: ok(),
        rules: tuple[str, ...] = ("allow HOST/*",),
        credentials: Any = (),
        **secrets: Any,
    ) -> Site:
        origin = node.origin("api.example.com", handler=handler)
        site = Site(
            node, f"{request.node.name[:40]}-{len(made)}", origin, list(rules), list(credentials), **secrets
        )
        made.append(site)
        return site

    yield make
    for one in made:
        node.ask("leave", sandbox=one.name)


def test_a_request_goes_through_and_is_written_down(site: Any) -> None:
    here = site(lambda asked, conn: ok(b"hello"))
    with here.client() as client:
        answer = client.get("/some/path?secret=query", "api.example.com", "Accept-Encoding: gzip")
        assert (answer.status, answer.read()) == (200, b"hello")
        assert client.sock.selected_alpn_protocol() == "http/1.1"
        assert client.sock.version() in ("TLSv1.2", "TLSv1.3")
    asked = here.origin.asked[0]
    assert (asked.method, asked.target) == ("GET", "/some/path?secret=query")
    assert [value for name, value in asked.headers if name.lower() == "host"] == [
        f"api.example.com:{here.origin.port}"
    ]
    record = here.record()
    assert record["verdict"] == "allow" and record["path"] == "/some/path" and record["status"] == 200
    assert (
        record["name"] == "api.example.com" and record["address"] == "127.0.0.1" and record["method"] == "GET"
    )
    assert record["bytes_out"] > 50 and record["bytes_in"] > 50 and "credentials" not in record


def test_a_bearer_is_put_in_and_struck_out(site: Any) -> None:
    def echo(asked: Asked, conn: Any) -> bytes:
        said = asked.get("Authorization") or ""
        return ok(said.encode(), f"X-Echo: {said}")

    here = site(echo, credentials=[{"secret": "token", "as": "bearer"}], token=SECRET)
    with here.client() as client:
        answer = client.get(
            "/", "api.example.com", "Authorization: Bearer dummy", "authorization: Bearer twice"
        )
        body = answer.read()
    asked = here.origin.asked[0]
    assert [v for n, v in asked.headers if n.lower() == "authorization"] == [f"Bearer {SECRET}"]
    assert asked.get("Accept-Encoding") == "identity"
    assert SECRET.encode() not in body and body == b"Bearer " + b"*" * len(SECRET)
    assert answer.headers["X-Echo"] == "Bearer " + "*" * len(SECRET)
    assert here.record()["credentials"] == ["token"]


def test_a_denied_request_is_told_why(site: Any) -> None:
    here = site(rules=("allow GET HOST/allowed/*",))
    with here.client() as client:
        assert client.get("/allowed/x", "api.example.com").read() == b"ok"
        answer = client.get("/other", "api.example.com")
        text = answer.read().decode()
        assert answer.status == 403 and "network policy" in text and "rule:" in text
        assert client.get("/allowed/y", "api.example.com").read() == b"ok"  # the connection goes on
        answer = client.get("/allowed/x", "api.example.com", method="POST", body=b"x" * 100_000)
        assert answer.status == 403 and answer.headers["connection"] == "close" and answer.read()
    assert [asked.target for asked in here.origin.asked] == ["/allowed/x", "/allowed/y"]
    eventually(lambda: len(here.records()) == 4)
    denied = [record for record in here.records() if record["verdict"] == "deny"]
    assert [record["status"] for record in denied] == [403, 403]


def test_a_denied_request_ends_the_connection_when_asked_to(site: Any) -> None:
    here = site(rules=("allow GET HOST/open*",))
    for head in ("HTTP/1.1\r\nConnection: close", "HTTP/1.0"):
        with here.client() as client:
            client.send(f"GET /closed {head}\r\nHost: api.example.com\r\n\r\n")
            answer = client.rest()
            assert answer.startswith(b"HTTP/1.1 403") and b"connection: close" in answer


def test_a_method_in_disguise_is_judged_too(site: Any) -> None:
    here = site(rules=("allow GET,POST HOST",))
    for name in ("X-HTTP-Method-Override", "x-http-method", "X-Method-Override"):
        with here.client() as client:
            ask = "POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 0\r\nConnection: close\r\n"
            client.send(f"{ask}{name}: delete\r\n\r\n")
            assert client.rest().startswith(b"HTTP/1.1 403")
        with here.client() as client:
            client.send(f"{ask}{name}: GET\r\n\r\n")
            assert client.rest().startswith(b"HTTP/1.1 200")
    assert len(here.origin.asked) == 3


def test_basic(site: Any) -> None:
    here = site(credentials=[{"secret": "token", "as": "basic", "username": "git"}], token=SECRET)
    with here.client() as client:
        assert client.get("/", "api.example.com").status == 200
    assert (
        here.origin.asked[0].get("authorization")
        == "Basic " + base64.b64encode(f"git:{SECRET}".encode()).decode()
    )


def upto(client: Any, done: Any, data: bytes) -> bytes:
    """Read on until `done`; fails when the connection ends before."""
    while not done(data):
        more = client.sock.recv(65_536)
        assert more, data
        data += more
    return data


# -- where a request goes ---------------------------------------------------------------------------------


def test_another_sni_is_refused(node: Lab, site: Any) -> None:
    here = site()
    for sni in ("other.example.com", None):
        sock = node.connect(here.name, "api.example.com", 443)
        context = ssl.create_default_context(cadata=node.ca.pem)
        context.check_hostname = False
        with pytest.raises((ssl.SSLError, ConnectionError)) as error:
            context.wrap_socket(sock, server_hostname=sni)
        assert "UNRECOGNIZED_NAME" in str(error.value).upper().replace(" ", "_") or isinstance(
            error.value, OSError
        )
        sock.close()
    eventually(lambda: len([r for r in here.records() if r["rule"] == "SNI"]) == 2)
    assert not here.origin.asked


@pytest.mark.parametrize(
    "host",
    [
        "other.example.com",
        "api.example.com:8443",
        "api.example.com.evil",
        "127.0.0.1",
        "API.example.com@other.example.com",
    ],
)
def test_another_host_is_misdirected(site: Any, host: str) -> None:
    here = site()
    with here.client() as client:
        answer = client.get("/", host)
        assert answer.status in (400, 421) and answer.headers["connection"] == "close"
        assert answer.read() and client.rest() == b""
    assert not here.origin.asked
    assert here.record()["verdict"] == "deny"


def test_the_same_host_in_other_words_is_the_same(site: Any) -> None:
    here = site()
    with here.client() as client:
        for host in ("API.Example.Com", "api.example.com.", "api.example.com:443"):
            assert client.get("/", host).read() == b"ok"
    assert {asked.get("Host") for asked in here.origin.asked} == {f"api.example.com:{here.origin.port}"}


def test_absolute_form_must_be_equal(site: Any) -> None:
    here = site()
    with here.client() as client:
        assert client.get("https://api.example.com/x?y", "api.example.com").read() == b"ok"
    assert here.origin.asked[0].target == "/x?y"
    for target in (
        "https://other.example.com/",
        "http://api.example.com/",
        "https://api.example.com:1/",
        "https://x@api.example.com/",
        "ftp://api.example.com/",
    ):
        with here.client() as client:
            assert client.get(target, "api.example.com").status in (400, 421)
            assert client.rest() is not None
    assert len(here.origin.asked) == 1


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "TRACK", "connect"])
def test_methods_that_are_never_let_through(site: Any, method: str) -> None:
    here = site()
    with here.client() as client:
        target = "api.example.com:443" if method.lower() == "connect" else "/"
        client.send(
            f"{method} {target} HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
            "GET /hidden HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
        )
        data = client.rest()
        assert data.startswith(b"HTTP/1.1 405") and data.count(b"HTTP/1.1 ") == 1
    assert not here.origin.asked


POST, GET = (f"{method} / HTTP/1.1\r\nHost: api.example.com\r\n" for method in ("POST", "GET"))
SMUGGLED = "GET /hidden HTTP/1.1\r\nHost: api.example.com\r\n\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        f"{GET}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{SMUGGLED}",
        f"{POST}Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\n{SMUGGLED}",
        f"{POST}Content-Length: 0\r\nContent-Length: 44\r\n\r\n{SMUGGLED}",
        f"{POST}Transfer-Encoding: xchunked\r\n\r\n{SMUGGLED}",
        f"{POST}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{SMUGGLED}",
        f"{POST}X: y\r\n Transfer-Encoding: chunked\r\n\r\n{SMUGGLED}",
        f"GET / HTTP/1.1\nHost: api.example.com\n\n{SMUGGLED}",
        f"{GET}X: a\nY: b\r\n\r\n{SMUGGLED}",
        f"{GET}X: a\rY: b\r\n\r\n{SMUGGLED}",
        f"{GET}Host: other.example.com\r\n\r\n{SMUGGLED}",
        f"{GET}Host: api.example.com\r\n\r\n{SMUGGLED}",
        f"GET /a HTTP/1.1\r\nX: 1\r\n\r\n{SMUGGLED}",
        f"GET /\x0b HTTP/1.1\r\nHost: api.example.com\r\n\r\n{SMUGGLED}",
        f"GET / HTTP/1.1 \r\nHost: api.example.com\r\n\r\n{SMUGGLED}",
    ],
)
def test_what_has_two_readings_is_refused(site: Any, request_: str) -> None:
    here = site()
    with here.client() as client:
        client.send(request_.encode("latin-1"))
        data = client.rest()
        assert data.startswith(b"HTTP/1.1 400") and data.count(b"HTTP/1.1 ") == 1
    assert not here.origin.asked
    assert here.record()["rule"] == "framing"


@pytest.mark.parametrize(
    "chunks", ["5\r\nhelloXX0\r\n\r\n", "5\nhello\r\n0\r\n\r\n", "-5\r\nhello\r\n", "5;\nhello\r\n0\r\n\r\n"]
)
def test_a_bad_chunk_is_refused(site: Any, chunks: str) -> None:
    here = site()
    with here.client() as client:
        client.send(
            f"POST / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}{SMUGGLED}"
        )
        data = client.rest()
        assert data.startswith(b"HTTP/1.1 400") and data.count(b"HTTP/1.1 ") == 1
    assert "/hidden" not in [asked.target for asked in here.origin.asked]


def test_chunks_are_made_anew(site: Any) -> None:
    here = site()
    with here.client() as client:
        client.send(
            "POST /p HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\n"
            "5;ext=1\r\nhello\r\n1\r\n!\r\n0\r\nX-Trailer: smuggled\r\n\r\n"
        )
        assert client.answer().read() == b"ok"
        assert client.get("/next", "api.example.com").read() == b"ok"
    assert here.origin.asked[0].body == b"hello!" and not here.origin.asked[0].get("X-Trailer")


def test_requests_sent_ahead_are_judged_one_by_one(site: Any) -> None:
    here = site(rules=("allow GET HOST/a/*",))
    with here.client() as client:
        client.send(
            "".join(
                f"GET {path} HTTP/1.1\r\nHost: api.example.com\r\n\r\n" for path in ("/a/1", "/b", "/a/2")
            )
        )
        assert [client.answer().status for _ in range(0)] == []
        data = b""
        data = upto(client, lambda data: data.count(b"HTTP/1.1 ") == 3, data)
        assert [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]] == [200, 403, 200]
    assert [asked.target for asked in here.origin.asked] == ["/a/1", "/a/2"]


def test_dot_segments_do_not_lead_out_of_a_path(site: Any) -> None:
    here = site(rules=("allow GET HOST/a/*",))
    for path in (
        "/a/../b",
        "/a/%2e%2e/b",
        "/a/..%2fb",
        "/a/%252e%252e/b/../../b",
        "//a/../b",
        "/a/..;/b",
        "/a\\..\\b",
    ):
        with here.client() as client:
            answer = client.get(path, "api.example.com")
            seen = [asked.target for asked in here.origin.asked]
            assert answer.status in (400, 403) or (
                seen[-1] == path and ".." not in path.replace("%252e", "")
            ), path


def test_an_upgrade_to_http2_is_not_passed_on(site: Any) -> None:
    here = site()
    with here.client() as client:
        answer = client.get(
            "/",
            "api.example.com",
            "Connection: Upgrade, HTTP2-Settings",
            "Upgrade: h2c",
            "HTTP2-Settings: AAA",
        )
        assert answer.status == 200
    asked = here.origin.asked[0]
    assert not asked.get("Upgrade") and not asked.get("HTTP2-Settings") and not asked.get("Connection")


def test_a_guest_that_sends_ahead_without_end_is_cut(site: Any) -> None:
    release = threading.Event()

    def slow(asked: Asked, conn: Any) -> bytes:
        release.wait(10)
        return ok()

    here = site(slow)
    with here.client() as client:
        with pytest.raises((ConnectionError, ssl.SSLError)):
            for _ in range(1_000):
                client.send(("GET / HTTP/1.1\r\nHost: api.example.com\r\nX: " + "a" * 8_000 + "\r\n\r\n") * 4)
        release.set()


# -- the origin -------------------------------------------------------------------------------------------


def test_an_untrusted_origin_gets_nothing(node: Lab, site: Any) -> None:
    for ca, names in ((Ca("stranger"), ["api.example.com"]), (node.world, ["other.example.com"])):
        here = site(credentials=[{"secret": "token", "as": "bearer"}], token=SECRET)
        other = node.origin(*names, ca=ca)
        node.join(here.name, Site.policy_for(node, other.port, here.rules, here.credentials), token=SECRET)
        with here.client() as client:
            answer = client.get("/", "api.example.com")
            assert answer.status == 502 and b"certificate is not trusted" in answer.read()
        eventually(lambda other=other: other.handshakes_failed == 1)
        assert not other.asked


def test_an_origin_that_is_not_there(node: Lab, site: Any) -> None:
    here = site()
    here.origin.close()
    with here.client() as client:
        answer = client.get("/", "api.example.com")
        assert answer.status == 502 and b"no answer" in answer.read()
    assert here.record()["status"] == 502


def test_an_address_that_no_rule_opens_is_not_dialled(node: Lab, site: Any) -> None:
    here = site()
    node.join(here.name, node.policy(["allow localhost"]))
    with node.client(here.name, "localhost") as client:
        answer = client.get("/", "localhost")
        assert answer.status == 403 and b"loopback" in answer.read()
    assert not here.origin.connections


def test_interim_answers_are_read_over(site: Any) -> None:
    here = site(
        lambda asked, conn: (
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + ok(b"end")
        )
    )
    with here.client() as client:
        assert client.get("/", "api.example.com").read() == b"end"
        assert client.get("/", "api.example.com").read() == b"end"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: a\rb\r\nContent-Length: 0\r\n\r\n",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 60_000,
    ],
)
def test_answers_that_are_none(site: Any, answer: bytes) -> None:
    here = site(lambda asked, conn: answer)
    with here.client() as client:
        found = client.get("/", "api.example.com")
        assert found.status == 502 and b"garbage" not in found.read()


def test_plain_http(node: Lab) -> None:
    origin = node.origin(plain=True)
    rewrite = [f"api.example.com -> 127.0.0.1:{origin.port}"]
    bound = {"port": origin.port, "host": "api.example.com", "as": "bearer"}
    rules = [f"allow 127.0.0.1:{origin.port}/*"]
    node.join("plain", node.policy(rules, rewrite, [{"secret": "token", **bound}]), token=SECRET)
    with node.client("plain", "api.example.com", 80, tls=False) as client:
        assert client.get("/x", "api.example.com").read() == b"ok"
    assert origin.asked[0].get("authorization") is None  # bound to https
    bound = {"port": origin.port, "host": "127.0.0.1", "as": "bearer", "scheme": "http"}
    node.join("plain", node.policy(rules, rewrite, [{"secret": "token", **bound}]), token=SECRET)
    with node.client("plain", "api.example.com", 80, tls=False) as client:
        assert client.get("/x", "api.example.com").read() == b"ok"
        client.send("garbage\r\n\r\n")
        assert client.rest().startswith(b"HTTP/1.1 400")
    assert origin.asked[1].get("authorization") == f"Bearer {SECRET}"
    node.ask("leave", sandbox="plain")


# -- bodies -----------------------------------------------------------------------------------------------


def test_large_bodies_are_streamed_both_ways(node: Lab, site: Any) -> None:
    size, chunk = 192 * 1_048_576, b"0123456789abcdef" * 65_536
    seen = [0]

    def sink(asked: Asked, conn: Any) -> bytes | None:
        if asked.method == "POST":
            return ok(str(len(asked.body)).encode())
        conn.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
        for _ in range(size // len(chunk)):
            conn.sendall(chunk)
        return b""

    here = site(sink, credentials=[{"secret": "token", "as": "bearer"}], token=SECRET)
    with here.client() as client:
        client.get("/warm", "api.example.com", method="POST", body=chunk).read()
        before = node.ask("stats")["rss_bytes"]
        answer = client.get("/", "api.example.com")
        while data := answer.read(1_048_576):
            seen[0] += len(data)
        assert seen[0] == size
        most = node.ask("stats")["rss_bytes"]
        client.send(f"POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: {64 * len(chunk)}\r\n\r\n")
        for _ in range(64):
            client.send(chunk)
        assert client.answer().read() == str(64 * len(chunk)).encode()
        most = max(most, node.ask("stats")["rss_bytes"])
    assert most - before < 24 * 1_048_576


def test_a_guest_that_does_not_read_fills_no_memory(node: Lab, site: Any) -> None:
    sent = [0]

    def flood(asked: Asked, conn: Any) -> bytes | None:
        conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
        conn.settimeout(1.0)
        while True:
            try:
                sent[0] += conn.send(b"x" * 65_536)
            except OSError:
                return None

    here = site(flood)
    before = node.ask("stats")["rss_bytes"]
    with here.client() as client:
        client.send("GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
        eventually(lambda: sent[0] > 100_000)
        eventually(lambda: not here.origin.alive())
        assert node.ask("stats")["rss_bytes"] - before < 24 * 1_048_576
        assert sent[0] < 64 * 1_048_576


def test_events_come_as_they_are_sent(site: Any) -> None:
    go = threading.Event()

    def events(asked: Asked, conn: Any) -> bytes | None:
        conn.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for number in range(3):
            text = f"data: {number} {SECRET}\n\n".encode()
            half = len(text) // 2
            for part in (text[:half], text[half:]):
                conn.sendall(b"%x\r\n%s\r\n" % (len(part), part))
            assert go.wait(10)
            go.clear()
        conn.sendall(b"0\r\n\r\n")
        return b""

    here = site(events, credentials=[{"secret": "token", "as": "bearer"}], token=SECRET)
    with here.client() as client:
        answer = client.get("/", "api.example.com")
        for number in range(3):  # the next is not sent before this one has come
            assert answer.readline() == f"data: {number} {'*' * len(SECRET)}\n".encode()
            assert answer.readline() == b"\n"
            go.set()
        assert answer.read() == b""


def test_expect_continue(site: Any) -> None:
    here = site(rules=("allow POST HOST/yes",))
    for path, status in (("/yes", b"100"), ("/no", b"403")):
        with here.client() as client:
            client.send(
                f"POST {path} HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
            )
            assert client.sock.recv(12).split()[1] == status
            if status == b"100":
                client.send("hello")
                assert b"200 OK" in client.sock.recv(65_536) + client.sock.recv(65_536)
    assert [asked.body for asked in here.origin.asked] == [b"hello"]


# -- policy while it runs ---------------------------------------------------------------------------------


def test_a_new_policy_holds_for_what_is_open(node: Lab, site: Any) -> None:
    here = site(rules=("allow HOST/*",))
    with here.client() as client, here.client() as other:
        assert client.get("/a", "api.example.com").read() == b"ok"
        assert other.get("/a", "api.example.com").read() == b"ok"
        answer = node.ask("policy", sandbox=here.name, policy=here.policy(["allow GET HOST/b"]))
        assert answer["cut"] == 0  # nothing is under way, and its host may still be reached
        assert client.get("/a", "api.example.com").status == 403
        answer = node.ask("policy", sandbox=here.name, policy=here.policy(["deny HOST"]))
        assert answer["cut"] == 2 == answer["flows"]
        assert other.rest() == b""
    assert [asked.target for asked in here.origin.asked] == ["/a", "/a"]


def test_a_request_under_way_is_cut(node: Lab, site: Any) -> None:
    def slow(asked: Asked, conn: Any) -> bytes | None:
        conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegin")
        return None if conn.recv(1) else b""

    here = site(slow)
    with here.client() as client:
        answer = client.get("/long", "api.example.com")
        assert answer.read(5) == b"begin"
        assert node.ask("policy", sandbox=here.name, policy=here.policy(["allow GET HOST/short"]))["cut"] == 1
        with pytest.raises((ConnectionError, ssl.SSLError, IncompleteRead)):
            answer.read()
    assert "cut by a new policy" in here.record()["reason"]


def test_bytes_and_rate_of_a_rule(site: Any) -> None:
    body = b"x" * 300_000
    here = site(lambda asked, conn: ok(body), rules=("allow HOST/* bytes=1MiB",))
    with here.client() as client, pytest.raises((ConnectionError, ssl.SSLError, IncompleteRead)):
        for _ in range(10):
            client.get("/", "api.example.com").read()
    with here.client() as client:
        answer = client.get("/", "api.example.com")
        assert answer.status == 403 and b"1048576 bytes" in answer.read()
    here = site(lambda asked, conn: ok(body), rules=("allow HOST/* rate=200KiB/s",))
    with here.client() as client:
        began = time.monotonic()
        for _ in range(3):
            assert client.get("/", "api.example.com").read() == body
        assert time.monotonic() - began > 2.0


def test_leaving_ends_connections(node: Lab, site: Any) -> None:
    here = site()
    with here.client() as client:
        assert client.get("/", "api.example.com").read() == b"ok"
        node.ask("leave", sandbox=here.name)
        assert client.rest() == b""
        with pytest.raises((ConnectionError, ssl.SSLError)):
            here.client()


# -- WebSockets -------------------------------------------------------------------------------------------

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    f"Sec-WebSocket-Key: {KEY}",
)


def accept(key: str) -> str:
    return base64.b64encode(
        hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
    ).decode()


def frame(payload: bytes, *, opcode: int = 1, fin: bool = True, mask: bool = False) -> bytes:
    head = bytes([(0x80 if fin else 0) | opcode])
    size = len(payload)
    bit = 0x80 if mask else 0
    head += bytes([bit | size]) if size < 126 else bytes([bit | 126]) + size.to_bytes(2, "big")
    if not mask:
        return head + payload
    return head + b"abcd" + bytes(byte ^ b"abcd"[at % 4] for at, byte in enumerate(payload))


def switch(asked: Asked, conn: Any) -> bytes | None:
    """A server that echoes every message, and what it was authorised with."""
    said = (
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept(asked.get('Sec-WebSocket-Key') or '')}\r\n\r\n"
    )
    conn.sendall(said.encode())
    token = (asked.get("Authorization") or "").encode()
    conn.sendall(frame(token[:12], fin=False) + frame(token[12:], opcode=0) + frame(token[:100], opcode=9))
    while data := conn.recv(65_536):
        size = data[1] & 0x7F
        mask, payload = data[2:6], data[6 : 6 + size]
        conn.sendall(
            frame(bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload)), opcode=data[0] & 15)
        )
    return None


def test_websockets_are_relayed_and_struck(site: Any) -> None:
    here = site(switch, credentials=[{"secret": "token", "as": "bearer"}], token=SECRET)
    with here.client() as client:
        client.send("\r\n".join(["GET /ws HTTP/1.1", "Host: api.example.com", *UPGRADE,
                                 "Sec-WebSocket-Extensions: permessage-deflate", "", ""]))  # fmt: skip
        data = b""
        data = upto(client, lambda data: data.count(b"*") == 2 * len(SECRET), data)
        assert b"101 Switching" in data and SECRET.encode() not in data and b"Extensions" not in data
        client.send(frame(b"hello", mask=True))
        data = upto(client, lambda data: b"hello" in data, data)
    assert not here.origin.asked[0].get("Sec-WebSocket-Extensions")
    assert here.record()["status"] == 101


def test_a_websocket_must_be_allowed(site: Any) -> None:
    here = site(switch, rules=("allow GET HOST/ok",))
    with here.client() as client:
        assert client.get("/ws", "api.example.com", *UPGRADE).status == 403
    assert not here.origin.asked


def test_an_upgrade_that_is_refused_hides_no_requests(site: Any) -> None:
    here = site(lambda asked, conn: ok(), rules=("allow GET HOST/ws",))
    with here.client() as client:
        client.send(
            "\r\n".join(["GET /ws HTTP/1.1", "Host: api.example.com", *UPGRADE, "", ""])
            + "GET /hidden HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
        )
        data = b""
        data = upto(client, lambda data: data.count(b"HTTP/1.1 ") == 2, data)
        assert [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]] == [200, 403]
    assert [asked.target for asked in here.origin.asked] == ["/ws"]


@pytest.mark.parametrize(
    ("asks", "lines"),
    [
        ((), ["Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {accept(KEY)}"]),
        (UPGRADE, ["Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {accept('other')}"]),
        (UPGRADE, ["Upgrade: raw", "Connection: Upgrade", f"Sec-WebSocket-Accept: {accept(KEY)}"]),
        (UPGRADE, ["Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {accept(KEY)}",
                   "Sec-WebSocket-Extensions: permessage-deflate"]),
        (("Connection: Upgrade", "Upgrade: raw"), ["Upgrade: raw", "Connection: Upgrade"]),
    ],
)  # fmt: skip
def test_only_a_real_websocket_switches(site: Any, asks: tuple[str, ...], lines: list[str]) -> None:
    here = site(
        lambda asked, conn: "\r\n".join(
            ["HTTP/1.1 101 Switching Protocols", *lines, "", "raw bytes"]
        ).encode()
    )
    with here.client() as client:
        answer = client.get("/", "api.example.com", *asks)
        assert answer.status == 502 and b"not asked for" in answer.read()
        assert b"raw bytes" not in client.rest()


def test_a_message_without_end_is_bounded(node: Lab, site: Any) -> None:
    def endless(asked: Asked, conn: Any) -> bytes | None:
        conn.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            + f"Sec-WebSocket-Accept: {accept(KEY)}\r\n\r\n".encode()
        )
        part = frame(b"x" * 60_000, fin=False)
        while True:
            conn.sendall(part)
            part = frame(b"x" * 60_000, opcode=0, fin=False)

    here = site(endless)
    before = node.ask("stats")["rss_bytes"]
    with here.client() as client:
        answer = client.get("/", "api.example.com", *UPGRADE)
        assert answer.status == 101
        assert len(client.rest()) < 1_000
    assert node.ask("stats")["rss_bytes"] - before < 80 * 1_048_576


# -- credentials ------------------------------------------------------------------------------------------


def test_query(site: Any) -> None:
    here = site(
        lambda asked, conn: ok(asked.target.encode()),
        credentials=[{"secret": "token", "as": "query", "parameter": "key"}],
        token=SECRET,
    )
    with here.client() as client:
        body = client.get("/p?key=mine&a=1", "api.example.com").read()
    assert here.origin.asked[0].target == f"/p?a=1&key={quote(SECRET, safe='')}"
    assert b"canary" not in body and body.startswith(b"/p?a=1&key=***")
    assert here.record()["path"] == "/p"


WORD = "PLACEHOLDER_1"


def test_placeholders(site: Any) -> None:
    here = site(
        lambda asked, conn: ok(asked.body),
        credentials=[{"secret": "token", "as": "placeholder", "placeholder": WORD}],
        token=SECRET,
    )
    with here.client() as client:
        client.get(f"/a/{WORD}?x=%50LACEHOLDER%5F1", "api.example.com", f"X-Key: {WORD}").read()
        body = b'{"key": "' + WORD.encode() + b'"}'
        kind = "Content-Type: application/json"
        head = f"POST / HTTP/1.1\r\nHost: api.example.com\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        client.send(head)
        for at in range(len(body)):  # split over writes
            client.send(body[at : at + 1])
        answer = client.answer().read()
        big = b"x" * 1_048_577 + WORD.encode()
        assert (
            client.get("/", "api.example.com", method="POST", body=big).read() == big
        )  # too long: left as it is
        client.send(
            f"POST / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n{WORD}\r\n0\r\n\r\n"
        )
        assert client.answer().read() == WORD.encode()
    asked = here.origin.asked
    assert (
        asked[0].target == f"/a/{quote(SECRET, safe='')}?x={quote(SECRET, safe='')}"
        and asked[0].get("X-Key") == SECRET
    )
    assert json.loads(asked[1].body) == {"key": SECRET} and SECRET.encode() not in answer
    eventually(lambda: len(here.records()) == 4)
    assert [record.get("credentials") for record in here.records()] == [["token"], ["token"], None, None]
    assert WORD in here.records()[0]["path"]


def test_a_placeholder_that_is_not_bound_there_is_left_and_noted(site: Any) -> None:
    here = site(
        credentials=[{"secret": "token", "as": "placeholder", "placeholder": WORD, "path": "/only/*"}],
        token=SECRET,
    )
    with here.client() as client:
        client.get(f"/{WORD}", "api.example.com").read()
    assert here.origin.asked[0].target == f"/{WORD}" and "placeholder of token" in here.record()["reason"]


def test_bound_to_method_and_path(site: Any) -> None:
    here = site(
        credentials=[{"secret": "token", "as": "bearer", "methods": ["GET"], "path": "/repos/*"}],
        token=SECRET,
    )
    with here.client() as client:
        for method, path in (
            ("GET", "/repos/x"),
            ("POST", "/repos/x"),
            ("GET", "/other"),
            ("GET", "/repos/../other"),
        ):
            client.get(
                path,
                "api.example.com",
                "Authorization: own",
                method=method,
                body=b"" if method == "POST" else None,
            ).read()
    said = [asked.get("authorization") for asked in here.origin.asked]
    assert said == [f"Bearer {SECRET}", "own", "own", "own"]


def test_a_redirect_is_the_guests_to_follow_without_the_credential(node: Lab, site: Any) -> None:
    other = node.origin("other.example.com")
    here = site(
        lambda asked, conn: ok(b"", "Location: https://other.example.com/taken", status="302 Found"),
        credentials=[{"secret": "token", "as": "bearer"}], token=SECRET,
    )  # fmt: skip
    network = here.policy(here.rules, here.credentials)
    network["network"]["rules"] = [*network["network"]["rules"], f"allow GET 127.0.0.1:{other.port}/taken"]
    network["network"]["rewrite"] = [
        *network["network"]["rewrite"],
        f"other.example.com -> 127.0.0.1:{other.port}",
    ]
    node.ask("policy", sandbox=here.name, policy=network)
    with here.client() as client:
        assert client.get("/", "api.example.com").headers["Location"] == "https://other.example.com/taken"
    with node.client(here.name, "other.example.com") as client:
        assert client.get("/taken", "other.example.com").read() == b"ok"
        assert client.get("/other", "other.example.com").status == 403
    assert here.origin.asked[0].get("authorization") and not other.asked[0].get("authorization")


def test_a_new_value_holds_at_once(node: Lab, site: Any) -> None:
    here = site(credentials=[{"secret": "token", "as": "bearer"}])
    with here.client() as client:
        answer = client.get("/", "api.example.com")
        assert answer.status == 502 and b"the secret token has no value" in answer.read()
        for value in ("first-value", "second-value"):
            node.ask("secrets", sandbox=here.name, secrets={"token": value})
            client.get("/", "api.example.com").read()
    assert [asked.get("authorization") for asked in here.origin.asked] == [
        "Bearer first-value",
        "Bearer second-value",
    ]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "x-gzip", "raw-deflate"])
def test_compressed_echoes_are_struck(site: Any, coding: str) -> None:
    def echo(asked: Asked, conn: Any) -> bytes:
        text = b"before " + (asked.get("Authorization") or "").encode() * 100 + b" after"
        if "gzip" in coding:
            body = gzip.compress(text)
        else:
            wrap = zlib.compressobj(wbits=-15 if coding == "raw-deflate" else 15)
            body = wrap.compress(text) + wrap.flush()
        return ok(body, f"Content-Encoding: {coding.removeprefix('raw-')}")

    here = site(echo, credentials=[{"secret": "token", "as": "bearer"}], token=SECRET)
    with here.client() as client:
        answer = client.get("/", "api.example.com")
        assert answer.headers["Content-Encoding"] is None
        assert answer.read() == b"before " + (b"Bearer " + b"*" * len(SECRET)) * 100 + b" after"
        assert client.get("/", "api.example.com").status == 200


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "gzip, br", "unheard-of"])
def test_what_cannot_be_read_is_refused(site: Any, coding: str) -> None:
    here = site(
        lambda asked, conn: ok(b"x" * 500_000, f"Content-Encoding: {coding}"),
        credentials=[{"secret": "token", "as": "bearer"}],
        token=SECRET,
    )
    with here.client() as client:
        answer = client.get("/", "api.example.com")
        assert answer.status == 502 and b"could not be struck out" in answer.read()
        assert client.rest() == b""
    plain = site(lambda asked, conn: ok(b"x", f"Content-Encoding: {coding}"))
    with plain.client() as client:
        assert (
            client.get("/", "api.example.com").read() == b"x"
        )  # nothing was put in, so it is nobody's business


def test_a_bomb_is_broken_off(node: Lab, site: Any) -> None:
    bomb = gzip.compress(b"\0" * 67_108_864, 9)
    here = site(
        lambda asked, conn: ok(bomb, "Content-Encoding: gzip"),
        credentials=[{"secret": "token", "as": "bearer"}],
        token=SECRET,
    )
    before = node.ask("stats")["rss_bytes"]
    with here.client() as client, pytest.raises((ConnectionError, ssl.SSLError, IncompleteRead)):
        answer = client.get("/", "api.example.com")
        while answer.read(1_048_576):
            pass
    assert node.ask("stats")["rss_bytes"] - before < 100 * 1_048_576


def test_echoes_split_over_chunks_and_in_other_forms(site: Any) -> None:
    forms = [SECRET, quote(SECRET, safe=""), base64.b64encode(SECRET.encode()).decode(), json.dumps(SECRET)]
    text = " | ".join(forms).encode()

    def echo(asked: Asked, conn: Any) -> bytes:
        parts = b"".join(b"1\r\n%c\r\n" % byte for byte in text)
        return (
            b"HTTP/1.1 200 "
            + SECRET.encode()
            + b"\r\nTransfer-Encoding: chunked\r\nX: "
            + text
            + b"\r\n\r\n"
            + parts
            + b"0\r\n\r\n"
        )

    here = site(echo, credentials=[{"secret": "token", "as": "bearer"}], token=SECRET)
    with here.client() as client:
        answer = client.get("/", "api.example.com")
        body = answer.read()
        for place in (body.decode(), answer.reason, answer.headers["X"]):
            assert len(place) and not any(form in place for form in forms)
        assert len(body) == len(text)


def test_the_connection_stays_struck(site: Any) -> None:
    last = [""]

    def late(asked: Asked, conn: Any) -> bytes:
        said, last[0] = last[0], asked.get("Authorization") or last[0]
        return ok(said.encode())

    here = site(late, credentials=[{"secret": "token", "as": "bearer", "path": "/with"}], token=SECRET)
    with here.client() as client:
        client.get("/with", "api.example.com").read()
        assert client.get("/without", "api.example.com").read() == b"Bearer " + b"*" * len(SECRET)


KEYS = {
    "access_key_id": "AKIDEXAMPLE",
    "secret_access_key": "wJalr/secret+canary",
    "session_token": "tok/en+canary==",
}


def signed_by(keys: dict[str, str], asked: Asked) -> bool:
    """Whether the request, as it arrived, is signed with these keys: worked out by hand from the documentation."""
    match = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, "
        r"SignedHeaders=([^,]+), Signature=(\w+)",
        asked.get("Authorization") or "",
    )
    assert match, asked.get("Authorization")
    key_id, day, region, service, names, signature = match.groups()
    path, _, query = asked.target.partition("?")
    stamp = asked.get("X-Amz-Date") or ""
    pairs = sorted(tuple(part.partition("=")[::2]) for part in query.split("&") if part)
    payload = asked.get("X-Amz-Content-SHA256") or hashlib.sha256(asked.body).hexdigest()
    lines = [asked.method, path, "&".join(f"{k}={v}" for k, v in pairs)]
    lines += [f"{name}:{asked.get(name)}" for name in names.split(";")] + ["", names, payload]
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{day}/{region}/{service}/aws4_request\n"
    text += hashlib.sha256("\n".join(lines).encode()).hexdigest()
    key = f"AWS4{keys['secret_access_key']}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key_id == keys["access_key_id"] and hmac.digest(key, text.encode(), "sha256").hex() == signature


DUMMY = (
    "AWS4-HMAC-SHA256 Credential=DUMMY/20260101/eu-x-1/{}/aws4_request, "
    "SignedHeaders=content-type;host;x-own, Signature=abc"
)


def test_sigv4_is_signed_anew(site: Any) -> None:
    here = site(
        lambda asked, conn: ok(f"{asked.get('Authorization')} {asked.get('X-Amz-Security-Token')}".encode()),
        credentials=[{"secret": "role", "as": "sigv4"}], role=KEYS,
    )  # fmt: skip
    whole = hashlib.sha256(b"hello").hexdigest()
    with here.client() as client:
        common = (
            "X-Own: 1",
            "Content-Type: text/plain",
            "X-Amz-Date: 20200101T000000Z",
            "X-Amz-Security-Token: dummy",
        )
        for service, headers, body in (
            ("s3", (f"X-Amz-Content-SHA256: {whole}",), b"hello"),
            ("s3", ("X-Amz-Content-SHA256: UNSIGNED-PAYLOAD",), b"x" * 200_000),
            ("s3", ("X-Amz-Content-SHA256: STREAMING-UNSIGNED-PAYLOAD-TRAILER",), b"5\r\nhello\r\n0\r\n\r\n"),
            ("sts", (), b"Action=GetCallerIdentity"),
            ("dynamodb", ("X-Amz-Target: DynamoDB.List",), b"{}" * 40_000),
        ):
            answer = client.get(
                "/bucket/key?b=2&a=1",
                "api.example.com",
                f"Authorization: {DUMMY.format(service)}",
                *common,
                *headers,
                method="POST",
                body=body,
            )
            text = answer.read().decode()
            asked = here.origin.asked[-1]
            assert answer.status == 200 and signed_by(KEYS, asked), service
            assert asked.body == body and asked.get("X-Amz-Security-Token") == KEYS["session_token"]
            assert f"/eu-x-1/{service}/" in (asked.get("Authorization") or "") and "x-own" in (
                asked.get("Authorization") or ""
            )
            assert KEYS["session_token"] not in text and (asked.get("Authorization") or "")[-64:] not in text
        assert [name.lower() for name, _ in asked.headers].count("authorization") == 1
    eventually(lambda: len(here.records()) == 5)
    assert all(record["credentials"] == ["role"] for record in here.records())


def test_what_cannot_be_signed_is_said(site: Any) -> None:
    here = site(credentials=[{"secret": "role", "as": "sigv4"}], role=KEYS)
    for status, words, headers in (
        (502, b"not signed with version 4", ("X: y",)),
        (
            501,
            b"piece by piece",
            (
                f"Authorization: {DUMMY.format('s3')}",
                "X-Amz-Content-SHA256: STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
            ),
        ),
    ):
        with here.client() as client:
            answer = client.get("/", "api.example.com", *headers, method="PUT", body=b"5;chunk-signature=x")
            assert answer.status == status and words in answer.read()
    with here.client() as client:
        client.send(
            "POST / HTTP/1.1\r\nHost: api.example.com\r\n"
            f"Authorization: {DUMMY.format('sts')}\r\nContent-Length: 99999999\r\n\r\n"
        )
        assert client.answer().status == 413
    assert not here.origin.asked


# -- the process ------------------------------------------------------------------------------------------


def test_it_knows_and_tells_little(node: Lab, site: Any) -> None:
    here = site(credentials=[{"secret": "token", "as": "bearer"}], token=SECRET)
    with here.client() as client:
        client.get("/", "api.example.com").read()
    pid = node.worker.pid
    assert pid
    status = Path(f"/proc/{pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status and ("CapEff:\t0000000000000000" in status or os.geteuid())
    assert Path(f"/proc/{pid}/maps").stat().st_uid == 0 or os.geteuid()  # not dumpable: its /proc is root's
    for place in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{pid}/{place}").read_bytes()
    key = node.ca.key_pem.splitlines()[1]
    assert SECRET not in node.log() and key not in node.log() and "api.example.com" not in node.log()
    assert SECRET not in json.dumps(node.records)
    for path in (node.home / "s").rglob("*"):
        assert not path.is_file() or not {SECRET.encode(), key.encode()} & {path.read_bytes()}
    listening = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=False).stdout
    assert f"pid={pid}," not in listening


def test_ops_refuse_what_they_cannot_read(node: Lab) -> None:
    with pytest.raises(WorkerRefused, match="policy cannot be read"):
        node.ask("join", sandbox="x", policy={"no": "policy"}, secrets={})
    with pytest.raises(WorkerRefused, match="join it first"):
        node.ask("policy", sandbox="nobody", policy=node.policy([]))
    with pytest.raises(WorkerRefused, match="CA cannot be used") as error:
        node.ask("ca", certificate=node.ca.pem, key=Ca("other").key_pem)
    assert "BEGIN" not in str(error.value)
    assert node.ask("hello", version="1")["pid"] == node.worker.pid


def test_nothing_was_broken(node: Lab) -> None:
    """Runs last: no request of the above was an error of ours."""
    assert '"broken"' not in node.log().replace('"RemoteProtocolError"', ""), node.log()[-2_000:]
