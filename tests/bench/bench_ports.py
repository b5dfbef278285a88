"""A server in a sandbox, through the proxy: a large download beside the raw channel, requests beside a client inside.

`throughput_ratio`: 64 MiB from a port by HTTP through the server / the same bytes from the same program over a
`connect` stream of a bare clone's agent, with nothing else between (`mib_per_s.read`: what the agent's file read does,
for comparison). `rps_ratio`: small GETs a second that Python's own `http.server` in the guest serves through the proxy
/ to a client inside the guest, by turns in the same run; the client is the same program in both places, with 8
connections. `rps_ratios` has it for one connection too, which measures the way's length and not its width, and for
`tiny`, a loop that does next to nothing and so shows the cost of the way alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

from llm4agents import AsyncSandbox
from llm4agents.config import settings
from llm4agents.guest.verbs import Agent
from tests.bench.common import Bare, finish, percentile, tiny_server

SIZE = 64 << 20
DOWNLOADS = 5
ROUNDS = 4
REQUESTS = 500
CONNECTIONS = 8

TINY = tiny_server(SIZE, "content-type: text/plain\r\n")
STANDARD = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536
    def log_message(self, *args): pass
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"ok")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Requests a second: `client.py PORT|SOCKET PATH REQUESTS CONNECTIONS`. As lean as a client can be, inside and outside.
CLIENT = """
import selectors, socket, sys, time
where, path, requests, connections = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
request = f"GET {path} HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n".encode()
def connect():
    if not where.isdigit():
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(where)
        return sock
    sock = socket.create_connection(("127.0.0.1", int(where)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
selector = selectors.DefaultSelector()
got = {}
for _ in range(connections):
    sock = connect()
    got[sock] = b""
    selector.register(sock, selectors.EVENT_READ)
def run(count):
    sent = done = 0
    for sock in got:
        sock.sendall(request)
        sent += 1
    while done < count:
        for key, _ in selector.select():
            sock = key.fileobj
            data = got[sock] = got[sock] + sock.recv(65536)
            assert data, "closed"
            if data.endswith(b"\\r\\n\\r\\nok"):
                assert b" 200 " in data[:16], data
                got[sock] = b""
                done += 1
                if sent < count:
                    sock.sendall(request)
                    sent += 1
run(connections * 5)
began = time.perf_counter()
run(requests)
print(requests / (time.perf_counter() - began))
"""
# Bytes a second of one answer's body.
DOWNLOAD = """
import socket, sys, time
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
buffer = bytearray(1 << 20)
began = time.perf_counter()
sock.sendall(f"GET {sys.argv[2]} HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n".encode())
head = b""
while b"\\r\\n\\r\\n" not in head:
    head += sock.recv(65536)
size = int(sys.argv[3])
seen = len(head) - head.index(b"\\r\\n\\r\\n") - 4
while seen < size:
    count = sock.recv_into(buffer)
    assert count, "cut"
    seen += count
assert seen == size
print(size / (time.perf_counter() - began))
"""
PORTS = {"tiny": 8000, "http_server": 8001}


@contextlib.asynccontextmanager
async def channel(bare: Bare) -> AsyncIterator[Agent]:
    """A bare clone with the server on 8000 and a file in its memory."""
    variant, snapshot = await bare.template("python")
    async with bare.clone(variant, snapshot) as (agent, _, _machine):
        await bare.wake(agent, variant)
        await agent.write("/home/user/tiny.py", TINY.encode())
        made = await agent.exec(["sh", "-c", f"head -c {SIZE} /dev/zero > /dev/shm/file"], user="root")
        assert (await made.wait()).exit_code == 0
        async with await agent.exec(["python3", "/home/user/tiny.py", "8000"]):
            while True:
                try:
                    (await agent.connect(8000)).close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
            yield agent


async def connected(agent: Agent) -> float:
    """Bytes a second from the server's port over the channel alone."""
    began, seen = time.perf_counter(), 0
    async with await agent.connect(8000, first=b"GET /large HTTP/1.1\r\n\r\n") as sock:
        while seen < SIZE:
            seen += len(await sock.read())
    return SIZE / (time.perf_counter() - began)


async def read(agent: Agent) -> float:
    began, seen = time.perf_counter(), 0
    async with await agent.read("/dev/shm/file", user="root") as file:
        async for chunk in file:
            seen += len(chunk)
    assert seen == SIZE
    return SIZE / (time.perf_counter() - began)


async def client(code: str, *arguments: str) -> float:
    """What a client on this side of the proxy prints."""
    command = ["-c", code, str(settings().socket_path), *arguments]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return float(said)


async def measure() -> None:
    bare = Bare()
    speed: dict[str, list[float]] = {"connect": [], "read": [], "proxied": []}
    rates: dict[str, dict[str, list[float]]] = {}
    async with channel(bare) as agent, await AsyncSandbox.create("python") as sandbox:
        await sandbox.files.write("client.py", CLIENT)
        for name, code in (("tiny", TINY), ("http_server", STANDARD)):
            await sandbox.files.write(f"{name}.py", code)
            await sandbox.processes.start(["python3", f"{name}.py", str(PORTS[name])])
            await sandbox.ports.wait(PORTS[name])
        prefix = f"/v1/sandboxes/{sandbox.id}/ports"
        for _ in range(DOWNLOADS):  # by turns, since the machine may be busier at one time than at another
            speed["connect"].append(await connected(agent))
            speed["proxied"].append(await client(DOWNLOAD, f"{prefix}/{PORTS['tiny']}/large", str(SIZE)))
            speed["read"].append(await read(agent))
        print("downloads done", file=sys.stderr)
        for name, port in PORTS.items():
            for connections in (CONNECTIONS, 1):
                found: dict[str, list[float]] = {"inside": [], "proxied": []}
                rates[f"{name}_{connections}"] = found
                wish = [str(REQUESTS), str(connections)]
                for _ in range(ROUNDS):
                    done = await sandbox.exec(["python3", "client.py", str(port), "/", *wish])
                    found["inside"].append(float(done.check().stdout))
                    found["proxied"].append(await client(CLIENT, f"{prefix}/{port}/", *wish))
    await bare.driver.close()
    report(speed, rates)


def report(speed: dict[str, list[float]], rates: dict[str, dict[str, list[float]]]) -> None:
    mib = {name: round(percentile(values, 50) / 2**20, 1) for name, values in speed.items()}
    rps = {
        name: {where: round(percentile(values, 50), 1) for where, values in found.items()}
        for name, found in rates.items()
    }
    ratio = {name: round(found["proxied"] / found["inside"], 2) for name, found in rps.items()}
    finish(
        {
            "throughput_ratio": round(mib["proxied"] / mib["connect"], 2),
            "rps_ratio": ratio[f"http_server_{CONNECTIONS}"],
            "rps_ratios": ratio,
            "mib_per_s": mib,
            "rps": rps,
            "bytes": SIZE,
            "n": ROUNDS,
        }
    )


if __name__ == "__main__":
    asyncio.run(measure())
