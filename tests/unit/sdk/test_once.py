"""A call whose connection breaks is sent again with its idempotency key, and done once: the SDK, a real server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm4agents import config
from llm4agents.errors import ConnectionLostError
from llm4agents.sdk import _wire
from llm4agents.sdk._sync.transport import Transport
from tests.unit.api.served import Served, serving

ONE = "sbx_" + "9" * 20


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as here:
        yield here


class Breaking:
    """A relay to the server that drops the answer of the first POST, after it has been given."""

    def __init__(self, port: int) -> None:
        self.port, self.posts = port, 0
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self.sock.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.port))
            for act in (self._ask, self._answer):
                threading.Thread(target=act, args=(client, server), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while request := client.recv(65_536):
                self.posts += request.startswith(b"POST")
                server.sendall(request)
            server.shutdown(socket.SHUT_WR)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, contextlib.suppress(OSError):
            while answer := server.recv(65_536):
                if self.posts == 1:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(answer)

    def close(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.thread.join(10)


def test_a_broken_connection_does_nothing_twice(served: Served) -> None:
    served.sandbox(ONE, "default")
    breaking = Breaking(served.port)
    url = f"http://127.0.0.1:{breaking.sock.getsockname()[1]}"
    settings = config.load({"LLM4AGENTS_URL": url, "LLM4AGENTS_API_KEY": served.key()})
    try:
        with Transport(settings) as way:
            made = way.json(
                "POST", f"/v1/sandboxes/{ONE}/jobs", {"command": "true", "at": time.time() + 3_600}
            )
            assert breaking.posts == 2
            jobs = way.json("GET", f"/v1/sandboxes/{ONE}/jobs")["data"]
            assert [one["id"] for one in jobs] == [made["id"]]
            breaking.posts = 0
            with pytest.raises(ConnectionLostError):  # of a call that has no key nobody knows
                way.json("POST", f"/v1/sandboxes/{ONE}/timeout", {"timeout_s": 100})
            assert breaking.posts == 1
    finally:
        breaking.close()


def test_what_makes_something_is_done_once() -> None:
    for path in ("/v1/sandboxes", f"/v1/sandboxes/{ONE}/fork", f"/v1/sandboxes/{ONE}/jobs", "/v1/volumes"):
        [(name, value)] = _wire.once("POST", path)
        assert name == "idempotency-key" and len(value) == 32
    for method, path in (
        ("GET", "/v1/sandboxes"),
        ("POST", f"/v1/sandboxes/{ONE}/exec"),
        ("POST", "/v1/keys"),
    ):
        assert _wire.once(method, path) == []
