"""Ports of a real sandbox: by URL through the server, and by local forwards, as browsers and tools use them."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import websockets
from websockets.sync.client import unix_connect

from llm4agents import AsyncSandbox, Sandbox
from llm4agents.errors import ConflictError, LLM4AgentsError
from tests.support import Node, eventually, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]

PAGES = """
import http.server, os, sys
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body[::-1])
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
CHAT = """
import asyncio, sys
from websockets.asyncio.server import serve
async def echo(connection):
    async for message in connection:
        await connection.send(message)
async def main():
    async with serve(echo, "127.0.0.1", int(sys.argv[1]), max_size=None):
        await asyncio.get_running_loop().create_future()
asyncio.run(main())
"""
# Serves a page that reloads itself when the directory changes: the mechanism of every dev server with hot reload.
RELOAD = """
import http.server, os, sys, time
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def do_GET(self):
        if self.path != "/__reload":
            return super().do_GET()
        self.send_response(200); self.send_header("content-type", "text/event-stream"); self.end_headers()
        self.wfile.write(b"data: hello\\n\\n"); seen = os.stat("page.html").st_mtime_ns
        while True:
            time.sleep(0.05)
            if os.stat("page.html").st_mtime_ns != seen:
                seen = os.stat("page.html").st_mtime_ns
                self.wfile.write(b"data: reload\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def box(shared_node: Node) -> Iterator[Sandbox]:
    """A sandbox with a server of files on 8000, a WebSocket echo on 8001, a page that reloads on 8002."""
    with sdk_of(shared_node), Sandbox("python", timeout=600) as sandbox:
        sandbox.files.upload(Path(websockets.__file__).parent, "lib/websockets")
        for name, code, port in (("pages", PAGES, 8000), ("chat", CHAT, 8001), ("reload", RELOAD, 8002)):
            sandbox.files.write(f"{name}.py", code)
            sandbox.exec(
                f"mkdir -p site; cd site; PYTHONPATH=~/lib setsid python3 ../{name}.py {port} "
                f"> ../{name}.log 2>&1 < /dev/null &"
            )
        sandbox.files.write("site/page.html", "<p>one")
        sandbox.exec("head -c 5000000 /dev/urandom > site/large")
        for port in (8000, 8001, 8002):
            check = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
            eventually(lambda check=check: sandbox.exec(["python3", "-c", check]).exit_code == 0, 60)  # type: ignore[misc]
        yield sandbox


def _path(sandbox: Sandbox, port: int, path: str = "/") -> str:
    return f"/v1/sandboxes/{sandbox.id}/ports/{port}{path}"


def test_http_by_path_and_by_host(shared_node: Node, box: Sandbox) -> None:
    assert shared_node.http.get(_path(box, 8000, "/page.html")).text == "<p>one"
    host = {"host": f"8000-{box.id.replace('_', '-')}.localhost"}
    assert shared_node.http.get("/page.html", headers=host).text == "<p>one"
    large = shared_node.http.get(_path(box, 8000, "/large")).content
    digest = box.exec("sha256sum site/large").stdout.split()[0]
    assert hashlib.sha256(large).hexdigest() == digest
    body = os.urandom(3_000_000)
    assert shared_node.http.post(_path(box, 8000), content=body).content == body[::-1]
    # A directory without its slash: http.server sends the browser on, which must stay below the prefix.
    box.files.mkdir("site/sub")
    answer = shared_node.http.get(_path(box, 8000, "/sub"))
    assert (answer.status_code, answer.headers["location"]) == (301, _path(box, 8000, "/sub/"))


def test_websocket_by_path_and_by_host(shared_node: Node, box: Sandbox) -> None:
    socket = str(shared_node.run / "server.sock")
    host = f"8001-{box.id.replace('_', '-')}.localhost"
    for uri in (f"ws://localhost{_path(box, 8001)}", f"ws://{host}/"):
        with unix_connect(socket, uri, max_size=None) as connection:
            for message in ("hello", os.urandom(1_000_000)):
                connection.send(message)
                assert connection.recv() == message


def test_a_port_nobody_listens_on(shared_node: Node, box: Sandbox) -> None:
    answer = shared_node.http.get(_path(box, 9))
    assert (answer.status_code, answer.json()["code"]) == (502, "port_refused")
    errors: list[LLM4AgentsError] = []
    refusals = (ConnectionError, urllib.error.URLError, http.client.HTTPException)
    with box.ports.forward(9, on_error=errors.append) as forward, pytest.raises(refusals):
        urllib.request.urlopen(forward.url, timeout=30)
    assert [error.code for error in errors] == ["port_refused"]
    with pytest.raises(ConflictError, match="unix socket"):
        box.ports.url(8000)


def test_a_forward_for_tools_of_this_machine(box: Sandbox) -> None:
    with box.ports.forward(8000) as forward:
        with pytest.raises(ConflictError):
            box.ports.forward(8000, forward.local)
        connection = http.client.HTTPConnection("127.0.0.1", forward.local, timeout=60)
        for _ in range(3):  # one connection, kept alive to the guest
            connection.request("GET", "/page.html")
            assert connection.getresponse().read() == b"<p>one"
        connection.close()

        def fetch(got: list[bytes]) -> None:
            got.append(urllib.request.urlopen(f"{forward.url}large", timeout=60).read())

        got: list[bytes] = []
        threads = [threading.Thread(target=fetch, args=(got,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 4
        assert len({hashlib.sha256(data).digest() for data in got}) == 1
    with pytest.raises(OSError):
        urllib.request.urlopen(forward.url, timeout=5)


def test_a_forward_of_the_asynchronous_client(shared_node: Node, box: Sandbox) -> None:
    async def test() -> None:
        sandbox = await AsyncSandbox.connect(box.id)
        async with await sandbox.ports.forward(8001) as forward:
            uri = f"ws://127.0.0.1:{forward.local}/"
            async with websockets.connect(uri, proxy=None) as connection:
                await connection.send("through")
                assert await connection.recv() == "through"
        await sandbox.close()

    asyncio.run(test())


def test_a_page_reloads_when_its_file_is_edited(shared_node: Node, box: Sandbox) -> None:
    """Through the forward and through the host name, at once."""
    headers = {"host": f"8002-{box.id.replace('_', '-')}.localhost"}
    with (
        box.ports.forward(8002) as forward,
        httpx.Client(base_url=forward.url, timeout=60) as browser,
        browser.stream("GET", "/__reload") as one,
        shared_node.http.stream("GET", "/__reload", headers=headers) as two,
    ):
        streams = [one.iter_lines(), two.iter_lines()]
        for stream in streams:
            assert next(stream) == "data: hello"
            assert next(stream) == ""
        box.files.write("site/page.html", "<p>two")
        for stream in streams:
            assert next(stream) == "data: reload"
        assert browser.get("/page.html").text == "<p>two"
        assert shared_node.http.get("/page.html", headers=headers).text == "<p>two"
        box.files.write("site/page.html", "<p>one")


def test_the_forward_command(shared_node: Node, box: Sandbox) -> None:
    command = [sys.executable, "-m", "llm4agents", "forward", box.id[4:16], "8000:0", "8001:0", "--json"]
    env = {name: value for name, value in shared_node.env.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = ""
        while "\n}" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        first, second = json.loads(said)["forwards"]
        assert (first["port"], second["port"]) == (8000, 8001)
        assert urllib.request.urlopen(f"{first['url']}page.html", timeout=60).read() == b"<p>one"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()


def test_a_connection_holds_the_sandbox_open_and_an_idle_one_does_not(shared_node: Node) -> None:
    id = shared_node.create("base", timeout_s=4)
    script = 'perl -MIO::Socket::INET -e \'$s=IO::Socket::INET->new(LocalPort=>80,LocalAddr=>"127.0.0.1",Listen=>5);'
    script += 'while($c=$s->accept){<$c>;print $c "HTTP/1.1 200 OK\\r\\n\\r\\n";$c->flush;sleep 6;close $c}\''
    shared_node.exec(id, f"setsid {script} >/dev/null 2>&1 </dev/null &", user="root")

    def answers() -> bool:
        code = shared_node.http.head(f"/v1/sandboxes/{id}/ports/80/").status_code
        return code != 502

    eventually(answers, 30)
    with shared_node.http.stream("GET", f"/v1/sandboxes/{id}/ports/80/") as answer:
        for _ in answer.iter_raw():
            pass
    assert shared_node.get(id)["state"] == "running", "six seconds of one answer, with an idle time of four"
    assert shared_node.ended(id, 30)["reason"] == "idle_timeout"
    assert shared_node.http.get(f"/v1/sandboxes/{id}/ports/80/").status_code == 410


def test_killing_the_sandbox_ends_what_goes_through_it(shared_node: Node) -> None:
    id = shared_node.create("base")
    shared_node.exec(
        id,
        "setsid perl -MIO::Socket::INET -e '$s=IO::Socket::INET->new(LocalPort=>8080,Listen=>5);"
        "while($c=$s->accept){push @c,$c}' >/dev/null 2>&1 </dev/null &",
    )
    answers: list[httpx.Response] = []

    def ask() -> None:
        with shared_node.connect() as client:
            while not answers or answers[-1].json()["code"] == "port_refused":
                answers.append(client.get(f"/v1/sandboxes/{id}/ports/8080/"))

    thread = threading.Thread(target=ask)
    thread.start()
    # The request is under way when the guest has a connection.
    eventually(lambda: ":1F90" in shared_node.exec(id, "grep ' 01 ' /proc/net/tcp")["stdout"], 30)
    shared_node.call("DELETE", f"/v1/sandboxes/{id}")
    thread.join(30)
    assert answers[-1].status_code == 410
    assert answers[-1].json()["code"] == "sandbox_died"


def test_a_pause_ends_connections_and_the_next_request_resumes(shared_node: Node) -> None:
    id = shared_node.create("base")
    perl = (
        "use IO::Socket::INET; $s=IO::Socket::INET->new(LocalAddr=>'127.0.0.1',LocalPort=>8000,Listen=>5);"
        "while($c=$s->accept){$r=<$c>;if($r=~/slow/){push @c,$c;next}"
        'print $c "HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok";push @c,$c}'
    )
    shared_node.http.put(f"/v1/sandboxes/{id}/files", params={"path": "s.pl"}, content=perl.encode())
    shared_node.exec(id, "setsid perl s.pl >/dev/null 2>&1 </dev/null &")
    url = f"/v1/sandboxes/{id}/ports/8000/"
    eventually(lambda: shared_node.http.get(url).status_code == 200, 30)
    answers: list[httpx.Response] = []

    def ask() -> None:
        with shared_node.connect() as client:
            answers.append(client.get(f"{url}slow"))

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: " 01 " in shared_node.exec(id, "grep :1F40 /proc/net/tcp")["stdout"], 30)
    shared_node.call("POST", f"/v1/sandboxes/{id}/pause", json={})
    thread.join(30)
    assert answers[0].status_code == 409
    assert answers[0].json()["code"] == "sandbox_paused"
    # A kept connection to the guest that was is not tried; the same server still listens.
    assert shared_node.http.get(url).text == "ok"
    assert shared_node.get(id)["state"] == "running"
    shared_node.call("DELETE", f"/v1/sandboxes/{id}")
