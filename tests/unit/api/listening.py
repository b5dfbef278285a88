"""The real listener around the real application and its gate, in a thread, on a port of loopback; no VM.

`edge=False` puts an application of a test's own behind it, where what a protocol does is the point.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llm4agents import config
from llm4agents.api.access.gate import guarded
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.api.listen.counting import Bounds
from llm4agents.api.listen.listener import Listener
from llm4agents.api.listen.opening import Opened
from llm4agents.engine.engine import Engine
from llm4agents.engine.principal import Principal

T = TypeVar("T")


@dataclass
class Served:
    loop: asyncio.AbstractEventLoop
    context: Context
    listener: Listener
    opened: Opened
    port: int
    key: str

    @property
    def url(self) -> str:
        return f"{'https' if self.opened.certificates else 'http'}://127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path:
        return self.context.settings.state / "tls" / "ca.pem"

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it where the listener runs."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def figures(self) -> dict[str, float]:
        return {gauge.name + "".join(gauge.labels.values()): gauge.value for gauge in self.listener.gauges()}

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        sock = socket.socket()
        sock.settimeout(20)
        sock.bind((source, 0))
        sock.connect(("127.0.0.1", self.port))
        return sock

    def secure(self, *protocols: str, name: str = "localhost", ca: Path | None = None) -> ssl.SSLSocket:
        tls = ssl.create_default_context(cafile=ca or self.ca)
        if protocols:
            tls.set_alpn_protocols(list(protocols))
        return tls.wrap_socket(self.connect(), server_hostname=name)


@contextlib.contextmanager
def serving(home: Path, bounds: Bounds | None = None, app: Any = None, **env: str) -> Iterator[Served]:
    """`env`: settings. `app`: instead of the gate and what is behind it."""
    where = {"STATE": home / "s", "CACHE": home / "c", "RUN": home / "r", "QEMU": "/nonexistent/q"}
    (home / "s").mkdir(exist_ok=True)
    listen = {"LISTEN": "127.0.0.1:0", **env}
    settings = config.load({f"LLM4AGENTS_{name}": str(value) for name, value in {**where, **listen}.items()})
    ready: list[Served] = []
    up = threading.Event()
    stop: list[Callable[[], Any]] = []
    failed: list[BaseException] = []

    async def main() -> None:
        opened = Opened(settings, bounds)
        engine = Engine.open(settings)
        try:
            context = Context(settings, engine)
            _, key = engine.keys.create(Principal.operator(), "of a test")
            inside = app or guarded(create_app(context), context, via="tcp")
            listener = opened.listener(inside, context)
            listener.start()
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            ready.append(Served(loop, context, listener, opened, listener.address.port, key))
            up.set()
            await ended.wait()
            await listener.close()
            assert not len(listener._shared.connections)
        finally:
            engine.store.close()
            opened.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=run)
    thread.start()
    up.wait()
    try:
        if ready:
            yield ready[0]
    finally:
        for end in stop:
            end()
        thread.join()
        if failed:
            raise failed[0]


def ask(sock: socket.socket, request: bytes) -> tuple[int, bytes, bytes]:
    """(status, head, body) of the answer to raw bytes; the connection may be closed after it."""
    sock.sendall(request)
    return answer(sock)


def answer(sock: socket.socket) -> tuple[int, bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65_536)
        if not piece:
            return 0, data, b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    while len(body) < length:
        piece = sock.recv(65_536)
        assert piece, "cut"
        body += piece
    return int(head.split()[1]), head, body


def closed(sock: socket.socket) -> bool:
    """Whether the other side has ended it; waits as long as the socket's timeout."""
    try:
        while sock.recv(65_536):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True
