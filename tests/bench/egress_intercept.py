"""What interception costs, beside mitmproxy as it comes: the same version, in the same run, by turns.

Bare is `mitmdump` as a reverse proxy: TLS from the client, HTTP/1.1 both ways, TLS to the origin, bodies streamed,
no addon of anybody's. Ours does the same and judges each request, puts a credential in and strikes it from the answer.
`intercept_ratio` is the worse of the two: small requests a second over kept connections, and a large body.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llm4agents.barrier.intercept import environment
from llm4agents.config import settings
from tests.barrier.interception import Lab
from tests.bench.common import percentile
from tests.support import eventually

SIZE = 192 << 20
ROUNDS = 5
REQUESTS = 1_600
CONNECTIONS = 8
NAME = "origin.example.com"

ORIGIN = f"""
import socket, ssl, sys, threading
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1])
LARGE = b"HTTP/1.1 200 OK\\r\\ncontent-length: {SIZE}\\r\\n\\r\\n"
SMALL = b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok"
CHUNK = bytes(1 << 18)
def serve(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock, left = context.wrap_socket(sock, server_side=True), b""
        while data := sock.recv(65536):
            left += data
            while (at := left.find(b"\\r\\n\\r\\n")) >= 0:
                head, left = left[:at], left[at + 4:]
                if head.startswith(b"GET /large"):
                    sock.sendall(LARGE)
                    for _ in range({SIZE} >> 18):
                        sock.sendall(CHUNK)
                else:
                    sock.sendall(SMALL)
    except OSError:
        pass
listener = socket.create_server(("127.0.0.1", 0), backlog=512)
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
BARE = "import sys; from mitmproxy.tools.main import mitmdump; mitmdump(sys.argv[1:])"


@contextlib.contextmanager
def _process(*command: str | Path, **more: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(list(map(str, command)), text=True, stderr=subprocess.DEVNULL, **more)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _request(what: str) -> bytes:
    return f"GET /{what} HTTP/1.1\r\nhost: {NAME}\r\nuser-agent: bench\r\n\r\n".encode()


def _large(connect: Callable[[], ssl.SSLSocket]) -> float:
    """Bytes a second."""
    with connect() as sock:
        buffer, seen = bytearray(1 << 18), 0
        sock.sendall(_request("large"))
        began = time.perf_counter()
        while seen < SIZE:
            got = sock.recv_into(buffer)
            assert got, "cut"
            seen += got
        return seen / (time.perf_counter() - began)


def _small(connect: Callable[[], ssl.SSLSocket]) -> float:
    """Requests a second."""
    socks = [connect() for _ in range(CONNECTIONS)]

    def run(sock: ssl.SSLSocket, count: int) -> None:
        request = _request("small")
        for _ in range(count):
            sock.sendall(request)
            data = b""
            while not data.endswith(b"ok"):
                more = sock.recv(65_536)
                assert more, data
                data += more

    def all_run(count: int) -> None:
        threads = [threading.Thread(target=run, args=(sock, count)) for sock in socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    all_run(10)
    began = time.perf_counter()
    all_run(REQUESTS // CONNECTIONS)
    passed = time.perf_counter() - began
    for sock in socks:
        sock.close()
    return REQUESTS / passed


def _cpu_s(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wrapped(sock: socket.socket, authority: str) -> ssl.SSLSocket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    context = ssl.create_default_context(cadata=authority)
    context.set_alpn_protocols(["http/1.1"])
    return context.wrap_socket(sock, server_hostname=NAME)


def intercept() -> dict[str, Any]:
    """`intercept_ratio`, and what it was made of."""
    home = Path(tempfile.mkdtemp(prefix="l4a-bench-"))
    lab = Lab(home)
    try:
        lab.start()
        pem = lab.world.issue(home, NAME, "127.0.0.1")
        python = asyncio.run(environment.ensure(settings().cache))
        with _process(sys.executable, "-c", ORIGIN, pem, stdout=subprocess.PIPE) as origin:
            assert origin.stdout is not None
            port = int(origin.stdout.readline())
            rules, rewrite = [f"allow GET 127.0.0.1:{port}/*"], [f"{NAME} -> 127.0.0.1:{port}"]
            bound = {"secret": "token", "host": NAME, "port": port, "as": "bearer"}
            lab.join("bench", lab.policy(rules, rewrite, [bound]), token="0123456789abcdef" * 2)
            with socket.create_server(("127.0.0.1", 0)) as free:
                bare_port = free.getsockname()[1]
            mode = f"reverse:https://127.0.0.1:{port}"
            options = {"confdir": home / "mitm", "stream_large_bodies": "1", "connection_strategy": "lazy",
                       "ssl_verify_upstream_trusted_ca": lab.bundle, "http2": "false"}  # fmt: skip
            sets = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
            command: list[str | Path] = [
                python,
                "-c",
                BARE,
                "-q",
                "-m",
                mode,
                "--listen-host",
                "127.0.0.1",
                "-p",
                str(bare_port),
            ]
            with _process(*command, *sets, stdout=subprocess.DEVNULL) as bare:
                ca = home / "mitm" / "mitmproxy-ca-cert.pem"

                def listens() -> bool:
                    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", bare_port)):
                        return ca.exists()
                    return False

                eventually(listens, 30)
                sides: dict[str, Callable[[], ssl.SSLSocket]] = {
                    "ours": lambda: _wrapped(lab.connect("bench", NAME, 443), lab.ca.pem),
                    "bare": lambda: _wrapped(
                        socket.create_connection(("127.0.0.1", bare_port)), ca.read_text()
                    ),
                }
                pids = {"ours": lab.worker.pid, "bare": bare.pid}
                cpu_s: dict[str, float] = dict.fromkeys(sides, 0.0)
                speed: dict[str, list[float]] = {name: [] for name in sides}
                rates: dict[str, list[float]] = {name: [] for name in sides}
                for _ in range(
                    ROUNDS
                ):  # by turns, since the machine may be busier at one time than at another
                    for name, connect in sides.items():
                        rates[name].append(_small(connect))
                        before = _cpu_s(pids[name])
                        speed[name].append(_large(connect))
                        cpu_s[name] += _cpu_s(pids[name]) - before
            used = lab.ask("stats")
    finally:
        lab.close()
        shutil.rmtree(home, ignore_errors=True)
    mib = {name: round(percentile(values, 50) / 2**20, 1) for name, values in speed.items()}
    rps = {name: round(percentile(values, 50)) for name, values in rates.items()}
    return {
        "intercept_ratio": round(min(mib["ours"] / mib["bare"], rps["ours"] / rps["bare"]), 2),
        "intercept_mib_per_s": mib,
        "intercept_rps": rps,
        "intercept_cpu_ms_per_mib": {
            name: round(1_000 * spent / (ROUNDS * (SIZE >> 20)), 2) for name, spent in cpu_s.items()
        },
        "interceptor_mib": round(used["rss_bytes"] / 2**20, 1),
        "mitmproxy": used["mitmproxy"],
    }
