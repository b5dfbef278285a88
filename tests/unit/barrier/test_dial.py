"""Dialling from the host: what is judged is what is dialled, proxies are honoured, nothing takes for ever."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from llm4agents import limits
from llm4agents.barrier import dial
from llm4agents.barrier.dial import DialError, Dialled, Dialler, parse_proxy
from tests.barrier.authority import Authority


@dataclass
class Say:
    allowed: bool
    rule: str = "the rule"
    reason: str = "the reason"


def yes(address: str) -> Say:
    return Say(True)


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object], tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1_000):
        writer.write(data)
    writer.close()


async def said(there: Dialled, words: bytes = b"hello") -> bytes:
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(there.socket, words)
        return await loop.sock_recv(there.socket, 1_000)
    finally:
        there.socket.close()


class ProxyServer:
    """CONNECT to anything leads to an echo, after `greeting`; `heads` are the requests it got."""

    def __init__(self, answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n", greeting: bytes = b"") -> None:
        self.heads: list[str] = []
        self.answer, self.greeting = answer, greeting

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(self.answer + self.greeting)
        await echo(reader, writer)


def test_the_address_dialled_is_one_that_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        dialler = Dialler({})
        seen: list[str] = []
        monkeypatch.setattr(dial, "_lookup", lambda name: ("10.0.0.1", "::1", "127.0.0.1"))

        def judge(address: str) -> Say:
            seen.append(address)
            return Say(address == "127.0.0.1")

        async with listening(echo) as port:
            there = await dialler.dial("some.example", port, judge=judge)
            assert there.address == "127.0.0.1"
            assert there.unjudged is None
            assert await said(there) == b"hello"
            assert seen == ["10.0.0.1", "::1", "127.0.0.1"]
            with pytest.raises(DialError) as caught:
                await dialler.dial("some.example", port, judge=lambda address: Say(False))
            assert (caught.value.kind, caught.value.rule, caught.value.reason) == (
                "denied",
                "the rule",
                "the reason",
            )
            with pytest.raises(DialError, match="the reason"):
                await dialler.dial("127.0.0.1", port, judge=lambda address: Say(False))
        dialler.close()

    asyncio.run(go())


def test_an_address_that_fails_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        dialler = Dialler({})
        monkeypatch.setattr(dial, "_lookup", lambda name: ("127.0.0.2", "::1", "127.0.0.1"))
        async with listening(echo) as port:
            assert (await dialler.dial("some.example", port, judge=yes)).address == "127.0.0.1"
        with pytest.raises(DialError) as caught:
            await dialler.dial("some.example", port, judge=yes)
        assert caught.value.kind == "refused"
        dialler.close()

    asyncio.run(go())


def test_names_are_looked_up_once_in_a_while_and_failures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        dialler = Dialler({})
        asked: list[str] = []

        def lookup(name: str) -> tuple[str, ...]:
            asked.append(name)
            if name.startswith("no."):
                raise socket.gaierror(socket.EAI_NONAME, "no such name")
            return ("127.0.0.1",)

        monkeypatch.setattr(dial, "_lookup", lookup)
        assert (
            await asyncio.gather(*(dialler.resolve("a.example") for _ in range(20))) == [("127.0.0.1",)] * 20
        )
        for _ in range(3):
            with pytest.raises(DialError, match=r"no\.example"):
                await dialler.resolve("no.example")
        assert asked == ["a.example.", "no.example."]  # (with a dot: no search domain makes others of them)
        dialler.close()

    asyncio.run(go())


def test_one_sandbox_does_not_use_up_the_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        import threading

        dialler = Dialler({})
        free = threading.Event()

        def lookup(name: str) -> tuple[str, ...]:
            if name.startswith("slow"):
                free.wait(20)
            return ("127.0.0.1",)

        monkeypatch.setattr(dial, "_lookup", lookup)
        slow = [asyncio.create_task(dialler.resolve(f"slow{n}.example", owner="bad")) for n in range(50)]
        assert await dialler.resolve("good.example", owner="good") == ("127.0.0.1",)
        free.set()
        found = await asyncio.gather(*slow, return_exceptions=True)
        refused = [error for error in found if isinstance(error, DialError)]
        assert len(refused) == 50 - limits.RESOLVING_PER_SANDBOX_MAX
        dialler.close()

    asyncio.run(go())


def test_sandboxes_that_conspire_do_not_use_up_the_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        import threading

        dialler = Dialler({})
        free = threading.Event()

        def lookup(name: str) -> tuple[str, ...]:
            if name.startswith("slow"):
                free.wait(20)
            return ("127.0.0.1",)

        monkeypatch.setattr(dial, "_lookup", lookup)
        slow = [
            asyncio.create_task(dialler.resolve(f"slow{n}.{who}.example", owner=f"bad{who}"))
            for n in range(16)
            for who in range(16)
        ]
        await asyncio.sleep(0)
        assert await dialler.resolve("good.example", owner="good") == ("127.0.0.1",)
        free.set()
        await asyncio.gather(*slow, return_exceptions=True)
        dialler.close()

    asyncio.run(go())


def test_through_a_proxy_with_a_password() -> None:
    async def go() -> None:
        proxy = ProxyServer(greeting=b"banner ")
        async with listening(proxy) as port:
            dialler = Dialler({"HTTPS_PROXY": f"http://me:p%40ss@127.0.0.1:{port}"})
            there = await dialler.dial("some.example", 443, judge=lambda address: Say(False))
            assert (there.address, there.unjudged) == (None, "proxy")
            assert (await said(there)).startswith(b"banner ")
            dialler.close()
        (head,) = proxy.heads
        assert head.startswith("CONNECT some.example:443 HTTP/1.1\r\nHost: some.example:443\r\n")
        assert f"Proxy-Authorization: Basic {base64.b64encode(b'me:p@ss').decode()}\r\n" in head

    asyncio.run(go())


def test_through_a_proxy_that_speaks_tls(tmp_path: Path) -> None:
    async def go() -> None:
        authority = Authority(tmp_path)
        proxy = ProxyServer()
        async with listening(proxy, authority.context(tmp_path, ["localhost"])) as port:
            env = {"https_proxy": f"https://localhost:{port}", "SSL_CERT_FILE": str(authority.certificate)}
            dialler = Dialler(env)
            there = await dialler.dial("some.example", 443, judge=yes)
            assert await said(there) == b"hello"
            dialler.close()
            unknown = Dialler({"https_proxy": f"https://localhost:{port}"})
            with pytest.raises(DialError, match="certificate verify failed"):
                await unknown.dial("some.example", 443, judge=yes)
            unknown.close()

    asyncio.run(go())


def test_a_proxy_that_refuses_is_named_and_its_password_is_not() -> None:
    async def go() -> None:
        async with listening(ProxyServer(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")) as port:
            dialler = Dialler({"all_proxy": f"http://me:hidden@127.0.0.1:{port}"})
            with pytest.raises(DialError) as caught:
                await dialler.dial("some.example", 22, judge=yes)
            dialler.close()
        assert caught.value.kind == "proxy"
        assert "407" in caught.value.reason
        assert "hidden" not in caught.value.reason

    asyncio.run(go())


@pytest.mark.parametrize(
    ("env", "host", "port", "plain", "expected"),
    [
        ({"HTTPS_PROXY": "http://p:1"}, "a.example", 443, False, "p"),
        ({"HTTPS_PROXY": "http://p:1"}, "a.example", 80, True, None),
        ({"HTTP_PROXY": "http://h:1", "HTTPS_PROXY": "http://p:1"}, "a.example", 80, True, "h"),
        ({"https_proxy": "low:1", "HTTPS_PROXY": "http://up:1"}, "a.example", 443, False, "low"),
        ({"ALL_PROXY": "p:1"}, "a.example", 22, False, "p"),
        ({"ALL_PROXY": "p:1", "NO_PROXY": "*"}, "a.example", 443, False, None),
        ({"ALL_PROXY": "p:1", "NO_PROXY": "b.example,a.example"}, "a.example", 443, False, None),
        ({"ALL_PROXY": "p:1", "no_proxy": ".example"}, "a.example", 443, False, None),
        ({"ALL_PROXY": "p:1", "no_proxy": "example"}, "a.example", 443, False, None),
        ({"ALL_PROXY": "p:1", "no_proxy": "*.example"}, "a.example", 443, False, None),
        ({"ALL_PROXY": "p:1", "no_proxy": "xample"}, "a.example", 443, False, "p"),
        ({"ALL_PROXY": "p:1", "no_proxy": "a.example:8443"}, "a.example", 443, False, "p"),
        ({"ALL_PROXY": "p:1", "no_proxy": "a.example:443"}, "a.example", 443, False, None),
        ({"ALL_PROXY": "p:1", "no_proxy": "10.0.0.0/8"}, "10.1.2.3", 443, False, None),
        ({"ALL_PROXY": "p:1"}, "10.1.2.3", 443, False, "p"),
        ({"ALL_PROXY": "p:1"}, "127.0.0.1", 443, False, None),
    ],
)
def test_which_proxy(env: dict[str, str], host: str, port: int, plain: bool, expected: str | None) -> None:
    found = Dialler(env).proxy(host, port, plain=plain)
    assert (None if found is None else found.host) == expected


@pytest.mark.parametrize("url", ["socks5://p:1", "http://", "http://p:port", "ftp://p"])
def test_what_is_no_http_proxy(url: str) -> None:
    with pytest.raises(DialError, match="HTTPS_PROXY"):
        parse_proxy(url)


def test_this_hosts_own_addresses() -> None:
    own = {str(address) for address in Dialler({}).own_addresses()}
    assert "127.0.0.1" in own
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return  # no route anywhere: nothing else to find
        assert sock.getsockname()[0] in own


SHORT = """
import asyncio, socket, struct, threading
from llm4agents.barrier.dial import DialError, Dialler

asked = []
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))

def serve():
    while True:
        packet, client = server.recvfrom(4096)
        labels, at = [], 12
        while packet[at]:
            labels.append(packet[at + 1 : at + 1 + packet[at]].decode())
            at += 1 + packet[at]
        (kind,), name = struct.unpack_from("!H", packet, at + 1), ".".join(labels)
        asked.append(name)
        known = name == "wiki.corp.example"
        found = struct.pack("!HHHIH", 0xC00C, 1, 1, 60, 4) + bytes((203, 0, 113, 9)) if known and kind == 1 else b""
        head = packet[:2] + struct.pack("!5H", 0x8180 if known else 0x8183, 1, bool(found), 0, 0)
        server.sendto(head + packet[12 : at + 5] + found, client)

threading.Thread(target=serve, daemon=True).start()

async def go():
    dialler = Dialler({})
    assert await dialler.resolve("wiki.corp.example") == ("203.0.113.9",)
    for name in ("wiki", "wiki.corp"):
        try:
            raise SystemExit(f"{name} is {await dialler.resolve(name)}")
        except DialError as error:
            assert error.kind == "resolve", error
    assert set(asked) == {"wiki.corp.example", "wiki", "wiki.corp"}, asked
    assert await dialler.resolve("wiki", short=True) == ("203.0.113.9",)
    assert await dialler.resolve("named") == ("203.0.113.10",)  # as /etc/hosts has it
    dialler.close()

asyncio.run(go())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (a namespace with a resolver of its own)")
def test_no_search_domain_makes_a_name_another_hosts(tmp_path: Path) -> None:
    """Else `wiki` would reach what a rule or the floor denies as `wiki.corp.example`."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\nsearch corp.example example\n")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n203.0.113.10 other.example Named  # a comment\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    mounts = " && ".join(
        f"{{ [ ! -e /etc/{name} ] || mount --bind {tmp_path / name} /etc/{name}; }}"
        for name in ("resolv.conf", "hosts", "nsswitch.conf")
    )
    script = f'ip link set lo up && {mounts} && exec "$@"'
    command = ["unshare", "--net", "--mount", "sh", "-ec", script, "sh", sys.executable, "-c", SHORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
