"""An interceptor as its own process, driven as server and gateway drive it, and origins of TLS on loopback."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llm4agents.barrier import wire
from llm4agents.barrier.intercept import environment
from llm4agents.barrier.network import Network
from llm4agents.barrier.policy import Policy
from llm4agents.barrier.workers import Spec, User, Worker
from llm4agents.config import settings
from llm4agents.vmm import uids

T = TypeVar("T")
TIMEOUT_S = 20


class Ca:
    """A certificate authority, in memory."""

    def __init__(self, name: str) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(
            self.name, self.key.public_key(), x509.BasicConstraints(True, None), None
        )

    def _sign(
        self, subject: x509.Name, key: Any, constraints: x509.BasicConstraints, names: Any
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(constraints, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )
        if names is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def key_pem(self) -> str:
        return pem_of(self.key)

    def issue(self, directory: Path, *names: str) -> Path:
        """A file with a certificate for these names, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        found: list[x509.GeneralName] = []
        for name in names:
            try:
                found.append(x509.IPAddress(ipaddress.ip_address(name)))
            except ValueError:
                found.append(x509.DNSName(name))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        certificate = self._sign(subject, key.public_key(), x509.BasicConstraints(False, None), found)
        path = directory / f"{names[0]}-{os.urandom(4).hex()}.pem"
        path.write_text(certificate.public_bytes(serialization.Encoding.PEM).decode() + pem_of(key))
        return path


def pem_of(key: Any) -> str:
    return str(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
    )


@dataclass
class Asked:
    """A request as an origin saw it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    raw: bytes

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


Handler = Callable[[Asked, Any], bytes | None]
"""(request, connection) to the bytes of the answer; None: it has answered by itself and the connection is over."""


def ok(body: bytes = b"ok", *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Origin:
    """A server of HTTP/1.1 with TLS (or without: `pem` None); notes everything it is asked."""

    def __init__(self, pem: Path | None, handler: Handler = lambda asked, conn: ok()) -> None:
        self.handler = handler
        self.asked: list[Asked] = []
        self.connections = 0
        self.handshakes_failed = self._serving = 0
        self._context: ssl.SSLContext | None = None
        if pem is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(pem)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def alive(self) -> bool:
        """Whether a connection is being served."""
        return self._serving > 0

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for conn in self._open:
            conn.close()

    def _accept(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(conn,), daemon=True).start()

    def _serve(self, conn: socket.socket) -> None:
        conn.settimeout(TIMEOUT_S)
        self._serving += 1
        shaken = False
        try:
            if self._context is not None:
                conn = self._context.wrap_socket(conn, server_side=True)
            shaken = True
            self._open.append(conn)
            data = b""
            while True:
                asked, data = read_request(conn, data)
                if asked is None:
                    return
                self.asked.append(asked)
                answer = self.handler(asked, conn)
                if answer is None:
                    return
                conn.sendall(answer)
        except (OSError, ssl.SSLError):
            self.handshakes_failed += not shaken
        finally:
            self._serving -= 1
            conn.close()


def read_request(conn: Any, data: bytes) -> tuple[Asked | None, bytes]:
    while b"\r\n\r\n" not in data:
        more = conn.recv(65_536)
        if not more:
            return None, b""
        data += more
    head, _, data = data.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = line.split(" ", 2)
    headers = [(name, value.strip()) for name, _, value in (text.partition(":") for text in lines)]
    known = {name.lower(): value for name, value in headers}
    body = b""
    if "content-length" in known:
        size = int(known["content-length"])
        whole = bytearray(data)
        while len(whole) < size:
            more = conn.recv(262_144)
            if not more:
                return None, b""
            whole += more
        body, data = bytes(whole[:size]), bytes(whole[size:])
    elif known.get("transfer-encoding") == "chunked":
        while True:
            while b"\r\n" not in data:
                data += conn.recv(65_536) or b"0\r\n\r\n"
            size_text, _, data = data.partition(b"\r\n")
            size = int(size_text, 16)
            while len(data) < size + 2:
                data += conn.recv(65_536)
            body += data[:size]
            data = data[size + 2 :]
            if size == 0:
                break
    return Asked(method, target, headers, body, head), data


class Client:
    """A guest's connection: raw bytes over TLS (or plain)."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock

    def send(self, data: bytes | str) -> None:
        self.sock.sendall(data.encode() if isinstance(data, str) else data)

    def get(
        self, path: str, host: str, *headers: str, method: str = "GET", body: bytes | None = None
    ) -> HTTPResponse:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        self.send("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        return self.answer(method)

    def answer(self, method: str = "GET") -> HTTPResponse:
        """The next answer's head; `.read()` its body."""
        found = HTTPResponse(self.sock, method=method)
        found.begin()
        return found

    def rest(self) -> bytes:
        """Everything until the connection ends, in whichever way."""
        data = b""
        try:
            while more := self.sock.recv(65_536):
                data += more
        except (ConnectionError, ssl.SSLError):
            pass
        return data

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Lab:
    """The interceptor and what surrounds it. `ca`: the node's; `world`: whom the host trusts."""

    home: Path
    ca: Ca = field(default_factory=lambda: Ca("node"))
    world: Ca = field(default_factory=lambda: Ca("world"))

    def __post_init__(self) -> None:
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.records: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []
        self.origins: list[Origin] = []
        self.clients: list[Client] = []
        self._flow = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.bundle = self.home / "world.pem"
        self.bundle.write_text(self.world.pem)

    def run(self, act: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(60)

    def start(self) -> None:
        python = asyncio.run(environment.ensure(settings().cache))
        for name in ("r", "s"):
            (self.home / name).mkdir(exist_ok=True)

        def user(key: str) -> User:
            lease = uids.lease(key)
            return User(lease.uid, lease.uid, lease.fd)

        spec = Spec("intercept", "llm4agents.barrier.intercept", python=str(python), dials=True)
        os.environ["SSL_CERT_FILE"], before = str(self.bundle), os.environ.get("SSL_CERT_FILE")
        directory, os.environ["SSL_CERT_DIR"] = os.environ.get("SSL_CERT_DIR"), ""
        try:
            self.worker = Worker(
                spec,
                run=self.home / "r",
                state=self.home / "s",
                version="1",
                user=user if os.geteuid() == 0 else None,
            )

            async def up() -> None:
                await self.worker.start()

            self.run(up())
        finally:
            for name, value in (("SSL_CERT_FILE", before), ("SSL_CERT_DIR", directory)):
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        self.ask("ca", certificate=self.ca.pem, key=self.ca.key_pem)
        self.gateway, theirs = wire.pair()
        self.ask("accept", fds=[theirs.fileno()])
        theirs.close()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message, fds = wire.receive(self.gateway)
            except wire.WireError:
                return
            wire.close(fds)
            if message.get("event") == "audit":
                self.records.append(message["record"])
            elif message.get("event") == "ended":
                self.ended.append(message)

    def log(self) -> str:
        return (self.home / "s" / "barrier" / "intercept.log").read_text()

    def ask(self, op: str, *, fds: list[int] | None = None, **more: Any) -> dict[str, Any]:
        answer, given = self.run(self.worker.request({"op": op, **more}, fds or []))
        wire.close(given)
        return answer

    def origin(
        self,
        *names: str,
        handler: Handler = lambda asked, conn: ok(),
        ca: Ca | None = None,
        plain: bool = False,
    ) -> Origin:
        pem = None if plain else (ca or self.world).issue(self.home, *names)
        found = Origin(pem, handler)
        self.origins.append(found)
        return found

    def policy(
        self, rules: list[str], rewrite: list[str] | None = None, credentials: list[Any] | None = None
    ) -> dict[str, Any]:
        network = {
            "profile": "none",
            "rules": rules,
            "rewrite": rewrite or [],
            "credentials": credentials or [],
        }
        return Policy.compile(Network.from_json(network)).to_json()

    def join(self, sandbox: str, policy: dict[str, Any], **secrets: Any) -> None:
        self.ask("join", sandbox=sandbox, policy=policy, secrets=secrets)

    def connect(
        self, sandbox: str, name: str | None, port: int, *, tls: bool = True, address: str = "198.18.0.7"
    ) -> socket.socket:
        """A connection handed over as the gateway does, nothing said on it yet."""
        listener = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        listener.close()
        ours.settimeout(TIMEOUT_S)
        self._flow += 1
        message = {
            "flow": f"f{self._flow}",
            "sandbox": sandbox,
            "name": name,
            "address": address,
            "port": port,
            "tls": tls,
        }
        wire.send(self.gateway, message, [theirs.fileno()])
        theirs.close()
        return ours

    def client(
        self, sandbox: str, name: str, port: int = 443, *, tls: bool = True, sni: str | None = None
    ) -> Client:
        sock = self.connect(sandbox, name, port, tls=tls)
        if tls:
            context = ssl.create_default_context(cadata=self.ca.pem)
            context.set_alpn_protocols(["h2", "http/1.1"])
            wrapped: Any = context.wrap_socket(sock, server_hostname=sni or name)
        else:
            wrapped = sock
        found = Client(wrapped)
        self.clients.append(found)
        return found

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for origin in self.origins:
            origin.close()

        async def down() -> None:
            await self.worker.close(keep=False)

        self.run(down())
        self.gateway.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def lab(home: Path) -> Iterator[Lab]:
    made = Lab(home)
    try:
        made.start()
        yield made
    finally:
        made.close()
