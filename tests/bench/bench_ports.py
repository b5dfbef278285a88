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
import sys
import time

import httpcore

from llm4agents import AsyncSandbox
from llm4agents.config import settings
from tests.bench.common import Bare, finish, percentile

SIZE = 64 << 20
DOWNLOADS = 5
ROUNDS = 4
REQUESTS = 500
CONNECTIONS = 8

# GET /large: SIZE bytes; anything else: 2 bytes. As little work as a server can do.
TINY = f"""
import socket, sys, threading
LARGE = b"HTTP/1.1 200 OK\\r\\ncontent-length: {SIZE}\\r\\n\\r\\n"
SMALL = b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\ncontent-type: text/plain\\r\\n\\r\\nok"
CHUNK = bytes(1 << 20)
def serve(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    left = b""
    while data := sock.recv(65536):
        left += data
        while (at := left.find(b"\\r\\n\\r\\n")) >= 0:
            head, left = left[:at], left[at + 4:]
            if head.startswith(b"GET /large"):
                sock.sendall(LARGE)
                for _ in range({SIZE} >> 20):
                    sock.sendall(CHUNK)
            else:
                sock.sendall(SMALL)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
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
PORTS = {"tiny": 8000, "http_server": 8001}


async def raw() -> dict[str, list[float]]:
    """Bytes a second of the channel alone: from the server's port, and from a file in the guest's memory."""
    bare = Bare()
    variant, snapshot = await bare.template("python")
    found: dict[str, list[float]] = {"connect": [], "read": []}
    async with bare.clone(variant, snapshot) as (agent, _, _machine):
        await bare.wake(agent, variant)
        await agent.write("/home/user/tiny.py", TINY.encode())
        fill = await agent.exec(["head", "-c", str(SIZE), "/dev/zero"], user="root")
        await fill.wait()
        made = await agent.exec(["sh", "-c", f"head -c {SIZE} /dev/zero > /dev/shm/file"], user="root")
        assert (await made.wait()).exit_code == 0
        server = await agent.exec(["python3", "/home/user/tiny.py", "8000"])
        while True:
            try:
                (await agent.connect(8000)).close()
                break
            except OSError:
                await asyncio.sleep(0.05)
        for _ in range(DOWNLOADS):
            began, seen = time.perf_counter(), 0
            async with await agent.connect(8000, first=b"GET /large HTTP/1.1\r\n\r\n") as sock:
                while seen < SIZE:
                    seen += len(await sock.read())
            found["connect"].append(SIZE / (time.perf_counter() - began))
            began, seen = time.perf_counter(), 0
            async with await agent.read("/dev/shm/file", user="root") as file:
                async for chunk in file:
                    seen += len(chunk)
            assert seen == SIZE
            found["read"].append(SIZE / (time.perf_counter() - began))
        server.cancel()
    await bare.driver.close()
    return found


async def through(sandbox: AsyncSandbox, pool: httpcore.AsyncConnectionPool, port: int, path: str) -> int:
    url = f"http://local/v1/sandboxes/{sandbox.id}/ports/{port}{path}"
    seen = 0
    async with pool.stream("GET", url) as answer:
        assert answer.status == 200
        async for chunk in answer.aiter_stream():
            seen += len(chunk)
    return seen


async def outside(path: str, wish: list[str]) -> float:
    """The client's figure from this side of the proxy."""
    command = ["-c", CLIENT, str(settings().socket_path), path, *wish]
    client = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    said, _ = await client.communicate()
    assert client.returncode == 0
    return float(said)


async def product() -> tuple[list[float], dict[str, dict[str, list[float]]]]:
    downloads: list[float] = []
    rates: dict[str, dict[str, list[float]]] = {}
    pool = httpcore.AsyncConnectionPool(uds=str(settings().socket_path))
    async with await AsyncSandbox.create("python") as sandbox, pool:
        await sandbox.files.write("client.py", CLIENT)
        for name, code in (("tiny", TINY), ("http_server", STANDARD)):
            await sandbox.files.write(f"{name}.py", code)
            await sandbox.processes.start(["python3", f"{name}.py", str(PORTS[name])])
            await sandbox.ports.wait(PORTS[name])
        for _ in range(DOWNLOADS):
            began = time.perf_counter()
            assert await through(sandbox, pool, PORTS["tiny"], "/large") == SIZE
            downloads.append(SIZE / (time.perf_counter() - began))
        print("downloads done", file=sys.stderr)
        for name, port in PORTS.items():
            for connections in (CONNECTIONS, 1):
                found: dict[str, list[float]] = {"inside": [], "proxied": []}
                rates[f"{name}_{connections}"] = found
                wish = [str(REQUESTS), str(connections)]
                for _ in range(ROUNDS):
                    done = await sandbox.exec(["python3", "client.py", str(port), "/", *wish])
                    found["inside"].append(float(done.check().stdout))
                    path = f"/v1/sandboxes/{sandbox.id}/ports/{port}/"
                    found["proxied"].append(await outside(path, wish))
    return downloads, rates


async def measure() -> None:
    channel = await raw()
    print("raw done", file=sys.stderr)
    downloads, rates = await product()
    mib = {name: round(percentile(values, 50) / 2**20, 1) for name, values in channel.items()}
    mib["proxied"] = round(percentile(downloads, 50) / 2**20, 1)
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
