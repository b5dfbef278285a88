"""Profile `packages` in a real guest: its tools are told what this host's use; the password stays on the host.

The host's pip is set up for a mirror of the test's own, on the host's loopback and with a password. That installs from
real registries work is tests/barrier's.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from llm4agents import config
from llm4agents.barrier.intercept import environment
from llm4agents.barrier.packages.index import THIS_HOST
from llm4agents.images.progress import silent
from tests.support import Node

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("pip3") is None, reason="pip is not installed here"),
]
PASSWORD = "kept-on-the-host-4711"
BASIC = "Basic " + base64.b64encode(f"ci:{PASSWORD}".encode()).decode()


class _Mirror(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.command, self.path, self.headers.get("Authorization")))
        body = (
            b'<a href="../../files/pip-1.tar.gz">pip</a>'
            if self.headers.get("Authorization") == BASIC
            else b""
        )
        self.send_response(200 if body else 401)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def interceptor() -> None:
    """Made before the node's pip is set up for a mirror that has nothing."""
    asyncio.run(environment.ensure(config.settings().cache, silent))


@pytest.fixture
def mirror() -> Iterator[ThreadingHTTPServer]:
    _Mirror.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Mirror)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_guest_uses_the_hosts_mirror_and_never_sees_its_password(
    nodes: Callable[..., Node], mirror: ThreadingHTTPServer
) -> None:
    url = f"http://ci:{PASSWORD}@127.0.0.1:{mirror.server_port}/repo/simple"
    node = nodes(PIP_INDEX_URL=url)
    node.start()
    box = node.create(network="packages")
    told = node.exec(box, "env; cat /etc/llm4agents/npmrc /etc/apt/sources.list 2>&1")["stdout"]
    assert f"PIP_INDEX_URL=http://{THIS_HOST}:{mirror.server_port}/repo/simple/\n" in told
    assert PASSWORD not in told and BASIC not in told
    assert any(path.startswith("/repo/simple/") and login == BASIC for _, path, login in _Mirror.seen)
    if shutil.which("apt-get") is not None:
        assert "\ndeb http" in told
    if shutil.which("go") is not None:
        assert "\nGOPROXY=" in told

    def ask(method: str, path: str, read: str = "cat") -> str:
        host = f"this-host.internal:{mirror.server_port}"
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host}",
            "Connection: close",
            "Content-Length: 0",
            "",
            "",
        ]
        request = "\\r\\n".join(lines)
        script = (
            f"exec 3<>/dev/tcp/this-host.internal/{mirror.server_port}; printf '{request}' >&3; {read} <&3"
        )
        answer = node.exec(box, ["bash", "-c", script])
        return str(answer["stdout"] + answer["stderr"])

    _Mirror.seen.clear()
    answer = ask("GET", "/repo/simple/six/")
    assert "200" in answer.splitlines()[0] and "pip-1.tar.gz" in answer
    assert _Mirror.seen == [("GET", "/repo/simple/six/", BASIC)]
    assert " 403 " in ask("PUT", "/repo/simple/six/", "head -n 1").splitlines()[0]
    assert " 403 " in ask("GET", "/other", "head -n 1").splitlines()[0]
    assert len(_Mirror.seen) == 1
    why = node.call("POST", f"/v1/sandboxes/{box}/network/why", json={"url": "https://example.com/"})
    assert not why["allowed"] and "`packages`" in why["reason"]


def test_a_running_sandbox_is_told_too(nodes: Callable[..., Node], mirror: ThreadingHTTPServer) -> None:
    node = nodes(PIP_INDEX_URL=f"http://ci:{PASSWORD}@127.0.0.1:{mirror.server_port}/repo/simple")
    node.start()
    box = node.create(env={"MINE": "1", "GOPROXY": "off"})
    assert "PIP_INDEX_URL" not in node.exec(box, "env")["stdout"]
    node.call("PUT", f"/v1/sandboxes/{box}/network", json={"network": "packages"})
    told = node.exec(box, "env; cat /etc/llm4agents/npmrc 2>&1")["stdout"]
    assert f"PIP_INDEX_URL=http://{THIS_HOST}:" in told and PASSWORD not in told
    assert "\nMINE=1\n" in told and "\nGOPROXY=off\n" in told
