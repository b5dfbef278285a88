"""A real gateway with real links for tests without an engine: guests are network stacks, not machines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from llm4agents.barrier import workers
from llm4agents.barrier.link.links import Link
from llm4agents.barrier.network import Network
from llm4agents.barrier.policy import Floor, Policy
from llm4agents.barrier.workers import Spec, User, Worker
from llm4agents.vmm import uids
from tests.barrier import guestside
from tests.barrier.guestside import Guest, Pool
from tests.support import eventually

T = TypeVar("T")
SPEC = Spec("gateway", "llm4agents.barrier.gateway", dials=True)


def policy(network: Any, floor: str = "") -> dict[str, Any]:
    return Policy.compile(Network.from_json(network), floor=Floor.load(floor)).to_json()


def lease(key: str) -> User:
    found = uids.lease(key)
    return User(found.uid, found.uid, found.fd)


class Gate:
    """A gateway process of the test's own, as the server has it."""

    def __init__(self, **env: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="l4a-gate-")
        self.home = Path(self._home.name)
        self.events: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.env = env
        self.worker = self.call(self._start())
        self.joined: list[Joined] = []

    async def _start(self) -> Worker:
        spec = Spec(SPEC.name, SPEC.module, env=self.env)
        worker = Worker(
            spec,
            run=self.home,
            state=self.home,
            version="test",
            user=lease if os.geteuid() == 0 else None,
            on_event=lambda event, fds: self.events.append(event),
        )
        await worker.start()
        return worker

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def ask(self, op: str, fds: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
        answer, given = self.call(self.worker.request({"op": op, **more}, fds))
        assert not given
        return answer

    @property
    def directory(self) -> Path:
        return self.home / "barrier" / "gateway"

    def log(self) -> str:
        return (self.home / "barrier" / "gateway.log").read_text()

    def join(self, link: Link, network: Any, ident: str = "sb", names_from: str | None = None) -> Joined:
        joined = Joined(self, link, ident)
        self.joined.append(joined)
        joined.join(network, names_from)
        return joined

    def restart(self) -> None:
        """As after a crash: another process, nothing told to it yet."""
        pid = self.worker.pid
        assert pid is not None
        os.kill(pid, 9)
        eventually(lambda: self.worker.up and self.worker.pid != pid, 30)

    def close(self) -> None:
        log = self.log()
        self.call(self.worker.close(keep=False))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for joined in self.joined:
            joined.close()
        assert not workers.running(self.home)
        self._home.cleanup()
        assert '"failed"' not in log, log[-3_000:]


class Joined:
    """A sandbox of the gateway: its link, a process that stands for its machine."""

    def __init__(self, gate: Gate, link: Link, ident: str) -> None:
        self.gate, self.link, self.id = gate, link, ident
        self.machine = subprocess.Popen(["sleep", "600"])
        self.pidfd = os.pidfd_open(self.machine.pid)

    def join(self, network: Any, names_from: str | None = None) -> None:
        planted = self.link.planted
        fds = (planted.tcp, planted.udp, planted.packets, self.pidfd)
        self.gate.ask("join", fds, sandbox=self.id, policy=policy(network), names_from=names_from)

    def set(self, network: Any, floor: str = "") -> dict[str, Any]:
        return self.gate.ask("policy", sandbox=self.id, policy=policy(network, floor))

    def audit(self, **like: Any) -> list[dict[str, Any]]:
        """Its records that have all of `like`."""
        found = []
        for name in (f"{self.id}.1.jsonl", f"{self.id}.jsonl"):
            with contextlib.suppress(FileNotFoundError):
                for line in (self.gate.directory / "audit" / name).read_text().splitlines():
                    record = json.loads(line)
                    if all(record.get(key) == value for key, value in like.items()):
                        found.append(record)
        return found

    def audited(self, **like: Any) -> dict[str, Any]:
        """The last such record, once there is one."""
        eventually(lambda: bool(self.audit(**like)), 15)
        return self.audit(**like)[-1]

    def close(self) -> None:
        self.machine.kill()
        self.machine.wait()
        os.close(self.pidfd)


@contextlib.contextmanager
def gateway(**env: str) -> Iterator[Gate]:
    gate = Gate(**env)
    try:
        yield gate
    finally:
        gate.close()


@contextlib.contextmanager
def guest_on(pool: Pool) -> Iterator[tuple[Link, Guest]]:
    link = pool.take()
    try:
        guest = Guest(link)
        try:
            yield link, guest
        finally:
            guest.close()
    finally:
        link.close()


pool = guestside.pool


# -- what a guest does


def question(name: str, kind: int = 1, *, ident: int = 77, edns: bool = True) -> bytes:
    head = struct.pack("!6H", ident, 0x0100, 1, 0, 0, 1 if edns else 0)
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"
    opt = b"\0" + struct.pack("!HHIH", 41, 1232, 0, 0) if edns else b""
    return head + labels + struct.pack("!2H", kind, 1) + opt


def ask_dns(guest: Guest, raw: bytes, to: tuple[str, int] = ("198.19.255.1", 53)) -> bytes:
    with guest.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(to)
        sock.send(raw)
        return sock.recv(4_096)


def resolve(guest: Guest, name: str) -> str | None:
    """The address the guest is told; None: NXDOMAIN."""
    raw = ask_dns(guest, question(name, edns=False))
    code = raw[3] & 0xF
    if code == 3:
        return None
    assert code == 0, code
    assert struct.unpack_from("!H", raw, 6)[0] == 1
    return socket.inet_ntoa(raw[-4:])


def everything(sock: socket.socket) -> bytes:
    """Until the other end has had its say; a RST after its last words is an end too."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65_536):
            found += data
    return found


def get(sock: socket.socket, host: str, path: str = "/", **headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    sock.sendall("\r\n".join([*lines, "", ""]).encode())
    return everything(sock)


# -- origins


class Origin:
    """A server on loopback: `serve(sock)` for each connection, in a thread."""

    def __init__(self, serve: Callable[[socket.socket], None], context: ssl.SSLContext | None = None) -> None:
        self.connections = 0
        self._serve, self._context = serve, context
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.add(sock)
            thread = threading.Thread(target=self._one, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _one(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                if self._context is not None:
                    with self._context.wrap_socket(sock, server_side=True) as tls:
                        self._serve(tls)
                else:
                    self._serve(sock)
        finally:
            self._open.discard(sock)
            sock.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Origin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def http(sock: socket.socket) -> None:
    """Answers each request with its own head."""
    left = b""
    while data := sock.recv(65_536):
        left += data
        while (end := left.find(b"\r\n\r\n")) >= 0:
            head, left = left[: end + 4], left[end + 4 :]
            sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(head) + head)
            if b"connection: close" in head.lower():
                return


def echo(sock: socket.socket) -> None:
    while data := sock.recv(65_536):
        sock.sendall(data)


def banner(sock: socket.socket) -> None:
    """Speaks first."""
    sock.sendall(b"hello\n")
    echo(sock)
