"""Webhooks: which URLs are called, what is sent, what counts as told. Over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest

from llm4agents import limits
from llm4agents.engine import webhooks
from llm4agents.errors import InvalidRequestError


class Receiver(BaseHTTPRequestHandler):
    heard: ClassVar[list[tuple[dict[str, str], bytes]]]
    status: ClassVar[int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.heard.append(({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(self.status)
        if self.status == 302:
            self.send_header("location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[tuple[str, type[Receiver]]]:
    handler = type("Own", (Receiver,), {"heard": [], "status": 200})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook?x=1", handler
    server.shutdown()
    server.server_close()
    thread.join()


def deliver(url: str) -> int:
    return asyncio.run(webhooks.deliver(url, {"id": "job_x.1", "state": "done"}, "secret", 1234))


def test_a_message_is_signed_and_says_what_it_is(receiver: tuple[str, type[Receiver]]) -> None:
    url, handler = receiver
    assert deliver(url) == 200
    ((headers, body),) = handler.heard
    assert json.loads(body) == {"id": "job_x.1", "state": "done"}
    assert headers["x-llm4agents-delivery"] == "job_x.1"
    digest = hmac.new(b"secret", b"1234." + body, hashlib.sha256).hexdigest()
    assert headers["x-llm4agents-signature"] == f"t=1234,v1={digest}"


@pytest.mark.parametrize("status", [302, 400, 500])
def test_only_2xx_is_told_and_redirects_are_not_followed(
    receiver: tuple[str, type[Receiver]], status: int
) -> None:
    url, handler = receiver
    handler.status = status
    with pytest.raises(webhooks.WebhookError, match=str(status)):
        deliver(url)
    assert len(handler.heard) == 1


def test_nobody_there() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(webhooks.WebhookError, match="Connect"):
            deliver(f"http://127.0.0.1:{sock.getsockname()[1]}/")


def test_an_answer_that_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WEBHOOK_TIMEOUT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(webhooks.WebhookError, match="no answer"),
    ):
        deliver(f"http://127.0.0.1:{server.getsockname()[1]}/")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/",
        "file:///etc/passwd",
        "http:///x",
        "example.com",
        "http://a b/",
        "http://user:pass@example.com/",
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1]/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fd00:ec2::254]/",
        "http://0.0.0.0/",
        "http://224.0.0.1/",
        "http://[::1/",
        "http://" + "a..b/",
        "http://.../",
        "http://" + "a" * 64 + ".example/",
        "http://example.com:99999/",
        "http://example.com/" + "x" * 3000,
    ],
)
def test_urls_that_are_never_called(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="webhook"):
        webhooks.check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/x",
        "https://example.com",
        "http://localhost/",
        "http://10.0.0.1/",
        "http://[::1]:8/",
    ],
)
def test_urls_that_may_be_called(url: str) -> None:
    webhooks.check_url(url)


def test_what_no_resolver_can_read_is_a_try_that_failed() -> None:
    for url in (
        "http://" + "a..b/",
        "http://[::1%25lo]/",
    ):  # of jobs that were stored before such were refused
        with pytest.raises(webhooks.WebhookError):
            deliver(url)


def test_a_name_that_turns_out_to_be_link_local_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lying(*_: Any, **__: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 1)),
        ]

    async def test() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lying)
        with pytest.raises(webhooks.WebhookError, match="link-local"):
            await webhooks.deliver("http://example.com/", {"id": "x"}, "secret", 1)

    asyncio.run(test())


def test_an_address_that_does_not_answer_is_followed_by_the_next(
    receiver: tuple[str, type[Receiver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WEBHOOK_CONNECT_TIMEOUT_S", 0.2)
    url, handler = receiver
    port = int(url.split(":")[2].split("/")[0])

    async def two(*_: Any, **__: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")
        ]

    async def test() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two)
        with socket.create_server(("127.0.0.2", port), backlog=0), contextlib.ExitStack() as waiting:
            for _ in range(2):  # nobody accepts: a third one hears nothing
                sock = waiting.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.2", port))
            assert await webhooks.deliver(f"http://two.example:{port}/", {"id": "x"}, "secret", 1) == 200
        assert handler.heard[0][0]["host"] == f"two.example:{port}"

    asyncio.run(test())


def test_numbers_written_otherwise_are_judged_as_what_they_are() -> None:
    # 0xA9FEA9FE and 2852039166 are 169.254.169.254 to getaddrinfo.
    for host in ("0xA9FEA9FE", "2852039166"):
        with pytest.raises(webhooks.WebhookError, match=r"link-local|resolved"):
            deliver(f"http://{host}/")


def test_every_kind_of_address() -> None:
    assert webhooks.refused(ipaddress.ip_address("127.0.0.1")) is None
    assert webhooks.refused(ipaddress.ip_address("192.168.1.1")) is None
    assert webhooks.refused(ipaddress.ip_address("8.8.8.8")) is None
    assert webhooks.refused(ipaddress.ip_address("::")) is not None
