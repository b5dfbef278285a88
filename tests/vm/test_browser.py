"""Template `browser`: Chromium is up when a sandbox begins, trusts the node's CA, and is driven from outside.

The page is served on this host's loopback and reached through the barrier, TLS ended on the way under the node's CA.
Two clones of one frozen browser draw different random values: in pages, and in the TLS of its network service.
"""

from __future__ import annotations

import http.client
import http.server
import json
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from llm4agents import Sandbox, config
from llm4agents.images import spec
from tests.barrier.authority import Authority
from tests.support import Node, eventually, sdk_of
from tests.vm import playwright, png

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning"),
]

PAGE = """<!doctype html><title>shop</title><style>body { margin: 0; background: rgb(10, 20, 200) }</style>
<button id="buy" onclick="document.body.style.background = 'rgb(20, 200, 10)'; fetch('/bought').then(
  (answer) => answer.text()).then((text) => { document.title = text })">Buy</button>"""
DRAWN = """<!doctype html><script>fetch('/drawn?' + Math.random() + '&' +
  crypto.getRandomValues(new Uint32Array(4)).join('-'))</script>"""


class Origin:
    """On loopback: a shop over TLS, and a listener that keeps the first bytes it gets and hangs up."""

    def __init__(self, home: Path) -> None:
        self.paths: list[str] = []
        self.hellos: list[bytes] = []
        authority = Authority(home)
        system = Path("/etc/ssl/certs/ca-certificates.crt")
        self.bundle = home / "bundle.pem"
        self.bundle.write_bytes(authority.certificate.read_bytes() + system.read_bytes())
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.paths.append(self.path)
                body = {"/": PAGE, "/draw": DRAWN, "/bought": "thank you"}.get(self.path, "").encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        context = authority.context(home, ["shop.example"])
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.threads = [
            threading.Thread(target=self.server.serve_forever),
            threading.Thread(target=self._raw),
        ]
        for thread in self.threads:
            thread.start()
        shop, raw = self.server.server_address[1], self.listener.getsockname()[1]
        self.network = {
            # With a method: it is looked into, under the node's CA. The other is passed on as it is.
            "rules": [f"allow GET 127.0.0.1:{shop}", f"allow 127.0.0.1:{raw}"],
            "rewrite": [f"shop.example -> 127.0.0.1:{shop}", f"raw.example -> 127.0.0.1:{raw}"],
        }

    def _raw(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(30)
                data = b""
                while len(data) < 43 and (more := connection.recv(65_536)):
                    data += more
                self.hellos.append(data)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    made = Origin(tmp_path_factory.mktemp("origin"))
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def node(shared_nodes: Callable[..., Node], origin: Origin) -> Iterator[Node]:
    made = shared_nodes(SSL_CERT_FILE=str(origin.bundle), LLM4AGENTS_LISTEN="127.0.0.1:0").start()
    with sdk_of(made):
        yield made


@contextmanager
def up(origin: Origin) -> Iterator[tuple[Sandbox, str]]:
    """A sandbox, and the address here of its DevTools."""
    with (
        Sandbox("browser", network=origin.network) as sandbox,
        sandbox.ports.forward(spec.BROWSER_PORT) as forward,
    ):
        yield sandbox, f"http://127.0.0.1:{forward.local}"


def devtools(at: str, path: str, method: str = "GET") -> Any:
    request = urllib.request.Request(f"{at}/json/{path}", method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_it_is_driven_by_playwright_from_outside(node: Node, origin: Origin, tmp_path: Path) -> None:
    tool = playwright.driver(config.settings().cache / "build")
    shot = tmp_path / "shot.png"
    with up(origin) as (sandbox, at):
        assert sandbox.info().memory_mib == 2_048  # its own, since nothing was said
        assert "Chrome/" in devtools(at, "version")["Browser"]
        whose = sandbox.exec("ps -eo user=,args= | grep [/]usr/lib/chromium/chromium-headless-shell")
        lines = whose.stdout.splitlines()
        assert lines and all(line.startswith("user ") and "no-sandbox " not in line for line in lines)
        found = playwright.run(
            tool,
            """
            const browser = await chromium.connectOverCDP(words[0], { timeout: 60000 });
            const page = await browser.contexts()[0].newPage();
            await page.setViewportSize({ width: 320, height: 200 });
            await page.goto('https://shop.example/', { timeout: 60000 });
            const before = await page.title();
            await page.click('#buy');
            await page.waitForFunction(() => document.title == 'thank you');
            await page.screenshot({ path: words[1] });
            return [before, await page.title()];
            """,
            at,
            str(shot),
        )
        assert found == ["shop", "thank you"] and "/bought" in origin.paths
        rows = png.pixels(shot.read_bytes())
        assert (len(rows[0]), len(rows)) == (320, 200) and rows[150][160] == (20, 200, 10)
        # DevTools answer whoever is on the loopback, and no page that names the port by a name of its own.
        connection = http.client.HTTPConnection(at.removeprefix("http://"), timeout=60)
        connection.request("GET", "/json/version", headers={"Host": "shop.example"})
        assert connection.getresponse().status >= 400
        connection.close()
        # Through the server, with the sandbox's token: DevTools give an address of the guest's own, whose path counts.
        listen = node.call("GET", "/v1/server")["listen"].rpartition("/")[2]
        by = {"x-sandbox-id": sandbox.id, "x-sandbox-port": str(spec.BROWSER_PORT)}
        by["x-traffic-token"] = sandbox.traffic().token
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{listen}/json/version", headers=by), timeout=60
        ) as answer:
            path = urlsplit(json.load(answer)["webSocketDebuggerUrl"]).path
        version = playwright.run(
            tool,
            "const options = { headers: JSON.parse(words[1]), timeout: 60000 };"
            "return (await chromium.connectOverCDP(words[0], options)).version();",
            f"ws://{listen}{path}",
            json.dumps(by),
        )
        assert version.split(".")[0].isdigit()


def test_clones_draw_different_values(origin: Origin) -> None:
    drawn, randoms = [], []
    for _ in range(2):
        origin.paths.clear()
        origin.hellos.clear()
        with up(origin) as (sandbox, at):
            # A create waits for no network: a page asked for before it has joined is an error page for good.
            sandbox.exec(
                "until curl -fsS -m 9 -o /dev/null https://shop.example/; do sleep 0.1; done"
            ).check()
            devtools(at, f"new?{quote('https://shop.example/draw', safe='')}", "PUT")
            eventually(lambda: [one for one in origin.paths if one.startswith("/drawn?")], 180)
            devtools(at, f"new?{quote('https://raw.example/', safe='')}", "PUT")
            hello = bytes(eventually(lambda: origin.hellos, 180)[0])
            assert hello[0] == 22 and hello[5] == 1  # a record of TLS's handshake, with a ClientHello in it
            drawn.append(next(one for one in origin.paths if one.startswith("/drawn?")))
            randoms.append(hello[11:43])
    assert drawn[0].split("&")[0] != drawn[1].split("&")[0]
    assert drawn[0].split("&")[1] != drawn[1].split("&")[1]
    assert randoms[0] != randoms[1]
