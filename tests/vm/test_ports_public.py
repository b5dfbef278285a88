"""Ports and tools of a server that listens, with TLS and a domain, as its clients meet them: one server, real VMs."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult

from llm4agents import Sandbox
from llm4agents.engine.keys import Keys
from llm4agents.engine.principal import Principal
from llm4agents.engine.projects import Projects
from llm4agents.store import open_store
from tests.support import Node, eventually, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]

DOMAIN = "sbx.localhost"
PERL = """
use IO::Socket::INET;
$s = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => 8000, Listen => 9, ReuseAddr => 1);
while ($c = $s->accept) {
    next if fork; $head = '';
    while (<$c>) { $head .= $_; last if $_ eq "\\r\\n" }
    if ($head =~ m{^GET /events}) {
        print $c "HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\n\\r\\ndata: 1\\n\\n"; $c->flush; <$c>; exit
    }
    printf $c "HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\nconnection: close\\r\\n\\r\\n%s", length $head, $head; exit
}
"""


@dataclass
class Served:
    node: Node
    port: int
    key: str
    other: str
    """A key of another project."""
    box: Sandbox

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.node.state / "tls" / "ca.pem"))

    def get(self, url: str, *, h2: bool = False, **headers: str) -> httpx.Response:
        """As a browser does it that finds every name of localhost here."""
        parts = urlsplit(url)
        there = parts._replace(netloc=f"127.0.0.1:{parts.port}").geturl()
        with httpx.Client(verify=self.trust, http2=h2, timeout=60) as client:
            extensions = {"sni_hostname": parts.hostname}
            return client.get(there, headers={"host": parts.netloc, **headers}, extensions=extensions)

    def at(self, port: int = 8000, path: str = "/", ident: str | None = None) -> str:
        name = (ident or self.box.id).replace("_", "-")
        return f"https://{port}-{name}.{DOMAIN}:{self.port}{path}"


def _keys(node: Node) -> tuple[str, str]:
    """Made before there is a server."""
    node.state.mkdir(parents=True, mode=0o700)
    store = open_store(node.state / "store.db")
    projects = Projects(store)
    keys = Keys(store, projects)
    other = projects.create("other")
    operator = Principal.operator()
    made = keys.create(operator, "ours")[1], keys.create(operator, "theirs", project=other.id)[1]
    store.close()
    return made


@pytest.fixture(scope="module")
def served(shared_nodes: Callable[..., Node]) -> Iterator[Served]:
    node = shared_nodes(LLM4AGENTS_LISTEN="127.0.0.1:0", LLM4AGENTS_TLS_LOCAL="1", LLM4AGENTS_DOMAIN=DOMAIN)
    ours, theirs = _keys(node)
    node.start()
    port = int(node.call("GET", "/v1/server")["listen"].rpartition(":")[2])
    with sdk_of(node), Sandbox("base", memory_mib=256, timeout=600) as box:
        box.files.write("s.pl", PERL)
        box.exec("setsid perl s.pl >/dev/null 2>&1 </dev/null &")
        box.ports.wait(8000)
        yield Served(node, port, ours, theirs, box)


def test_a_link_opens_a_port_in_a_browser(served: Served) -> None:
    link = served.box.ports.url(8000, path="/page?x=1")
    assert link.startswith(f"{served.at()}page?x=1&l4a-expires=")
    page = {"accept": "text/html", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    first = served.get(link, **page)
    assert (first.status_code, first.headers["location"]) == (302, "/page?x=1")
    cookie = first.headers["set-cookie"].partition(";")[0]
    assert cookie.startswith("__Host-l4a-access=")
    for h2 in (False, True):
        seen = served.get(served.at(path="/page?x=1"), h2=h2, cookie=f"{cookie}; theirs=1", **page)
        assert seen.http_version == ("HTTP/2" if h2 else "HTTP/1.1")
        assert seen.text.startswith("GET /page?x=1 HTTP/1.1\r\nhost: localhost:8000\r\n")
        assert "cookie: theirs=1\r\n" in seen.text.lower()
        assert "l4a" not in seen.text
        assert f"x-forwarded-host: 8000-{served.box.id.replace('_', '-')}.{DOMAIN}" in seen.text.lower()
        assert "x-forwarded-proto: https" in seen.text.lower()
    assert served.get(served.at(path="/page?x=1")).status_code == 403
    assert served.get(served.at(8001), cookie=cookie).status_code == 403
    assert "not open to you" in served.get(served.at(), **page).text
    # A program with the link, the token, a key; by headers on the server's own name.
    token = served.box.traffic().token
    own = f"https://{DOMAIN}:{served.port}/"
    by = {"x-sandbox-id": served.box.id, "x-sandbox-port": "8000"}
    for answer in (
        served.get(link),
        served.get(served.at(), **{"x-traffic-token": token}),
        served.get(served.at(), authorization=f"Bearer {served.key}"),
        served.get(own, **{"e2b-traffic-access-token": token}, **by),
        served.get(f"{own}v1/sandboxes/{served.box.id}/ports/8000/", **{"x-api-key": served.key}),
    ):
        assert answer.status_code == 200
        assert (
            token not in answer.text
            and served.key not in answer.text
            and "x-sandbox" not in answer.text.lower()
        )
    assert served.get(served.at(), **{"x-api-key": served.other}).status_code == 502
    assert served.get(served.at(ident="sbx_" + "9" * 20)).status_code == 403


def test_events_are_not_held_back_and_end_with_the_right_to_them(served: Served) -> None:
    token = served.box.traffic().token
    parts = urlsplit(served.at(path="/events"))
    headers = {"host": parts.netloc, "x-traffic-token": token}
    with (
        httpx.Client(verify=served.trust, http2=True, timeout=60) as client,
        client.stream(
            "GET",
            f"https://127.0.0.1:{served.port}/events",
            headers=headers,
            extensions={"sni_hostname": parts.hostname},
        ) as answer,
    ):
        events = answer.iter_raw()
        assert next(events) == b"data: 1\n\n"
        fresh = served.box.traffic(rotate=True).token
        with pytest.raises(httpx.RemoteProtocolError):
            next(events)
    assert served.get(served.at(), **{"x-traffic-token": token}).status_code == 403
    assert served.get(served.at(), **{"x-traffic-token": fresh}).status_code == 200
    served.box.traffic(public=True)
    assert served.get(served.at()).status_code == 200
    assert served.box.info().traffic == {"public": True}
    served.box.traffic(public=False)
    assert served.get(served.at()).status_code == 403


def test_no_port_leads_to_the_host(served: Served) -> None:
    reached: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reached.append(self.path)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        key = {"x-api-key": served.key}
        for port in (server.server_port, served.port):
            answer = served.get(served.at(port), **key)
            assert (answer.status_code, answer.json()["code"]) == (502, "port_refused")
        page = served.get(served.at(server.server_port), accept="text/html", **key)
        assert "Nothing listens on port" in page.text
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert reached == []


def test_a_client_far_away(served: Served) -> None:
    """SDK and command line with a URL and a key: what they print is a link, a forward goes over TLS."""
    env = {
        **{name: value for name, value in served.node.env.items() if not name.startswith("LLM4AGENTS_")},
        "LLM4AGENTS_URL": f"https://127.0.0.1:{served.port}",
        "LLM4AGENTS_API_KEY": served.key,
        "LLM4AGENTS_CA_FILE": str(served.node.state / "tls" / "ca.pem"),
    }

    def cli(*words: str) -> str:
        command = [sys.executable, "-m", "llm4agents", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert served.get(cli("ports", "url", served.box.id, "8000").strip()).status_code == 200
    token = served.box.traffic().token
    assert f"X-Traffic-Token: {token}" in cli("ports", "traffic", served.box.id)
    assert "8000" in cli("ports", "ls", served.box.id)
    forward = [sys.executable, "-u", "-m", "llm4agents", "forward", served.box.id, "8000:0"]
    process = subprocess.Popen(forward, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert urllib.request.urlopen(f"{url}far", timeout=60).read().startswith(b"GET /far HTTP/1.1")
    finally:
        process.terminate()
        process.wait()


def test_pauses_and_ends(served: Served) -> None:
    key = {"x-api-key": served.key}
    served.box.pause()
    assert served.get(served.at()).status_code == 403, "a stranger wakes nobody"
    assert served.box.info().state == "paused"
    assert served.get(served.at(), **key).status_code == 200
    assert served.box.info().state == "running"
    served.box.set_timeout(auto_resume=False)
    served.box.pause()
    answer = served.get(served.at(), **key)
    assert answer.status_code == 502
    assert "was not found" in answer.json()["message"]
    assert "This sandbox is paused" in served.get(served.at(), accept="text/html", **key).text
    assert (
        served.get(
            f"https://{DOMAIN}:{served.port}/v1/sandboxes/{served.box.id}/ports/8000/", **key
        ).status_code
        == 409
    )
    served.box.resume()
    served.box.set_timeout(auto_resume=True)
    other = Sandbox("base", memory_mib=256, traffic={"public": True})
    other.kill()
    gone = served.get(served.at(ident=other.id), accept="text/html")
    assert (gone.status_code, "This sandbox has ended" in gone.text) == (502, True)


def _text(done: CallToolResult) -> str:
    said = "\n".join(block.text for block in done.content if block.type == "text")
    assert not done.is_error, said
    return said


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_tools_over_http(served: Served, mode: Any) -> None:
    async def test() -> None:
        url = f"https://127.0.0.1:{served.port}/mcp?template=base&memory_mib=256&session=one"
        async with (
            asyncio.timeout(300),
            httpx2.AsyncClient(
                headers={"authorization": f"Bearer {served.key}"}, timeout=300, verify=served.trust
            ) as http,
            Client(streamable_http_client(url, http_client=http), mode=mode) as client,
        ):
            assert _text(await client.call_tool("exec", {"command": "echo a > f; echo $((6*7))"})) == "42\n"
            assert _text(await client.call_tool("read_file", {"path": "f"})) == "a\n"
            await client.call_tool(
                "exec", {"command": "setsid perl -e 'sleep 1' >/dev/null 2>&1 </dev/null &"}
            )
            listed = _text(await client.call_tool("list_sandboxes", {}))
            (made,) = (line.split()[0] for line in listed.splitlines() if served.box.id not in line)
            await client.call_tool("write_file", {"path": "s.pl", "text": PERL})
            await client.call_tool("exec", {"command": "setsid perl s.pl >/dev/null 2>&1 </dev/null &"})
            link = _text(await client.call_tool("expose_port", {"port": 8000, "path": "/hello"}))
            answer = await asyncio.to_thread(
                eventually, lambda: (got := served.get(link)).status_code == 200 and got, 30
            )
            assert answer.text.startswith("GET /hello HTTP/1.1")
            ids.append(made)

    ids: list[str] = []
    asyncio.run(test())
    if mode == "legacy":  # the client ended its session, and its sandbox with it
        eventually(lambda: served.node.get(ids[0])["state"] == "killed", 30)
    else:
        assert served.node.get(ids[0])["state"] == "running"
        served.node.call("DELETE", f"/v1/sandboxes/{ids[0]}")


def test_nothing_that_opens_a_port_is_in_the_logs(served: Served) -> None:
    """After all of the above: keys, tokens, signatures."""
    said = served.node.log()
    with contextlib.suppress(OSError):
        said += Path(served.node.state / "server.log").read_text()
    for secret in (
        served.key,
        served.key[-40:],
        served.other[-40:],
        served.box.traffic().token,
        "l4a-signature",
        "l4at_",
    ):
        assert secret not in said
