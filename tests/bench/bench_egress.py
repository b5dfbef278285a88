"""What leaving a sandbox costs: the gateway beside a bare asyncio relay, many sandboxes on one gateway, create.

A guest here is a network namespace behind the real rules and planted sockets, joined by a veth pair instead of a tap
and a machine: so the relay is what is measured, and not an emulated CPU. `splice_ratio`: large bodies through the
gateway / through a bare asyncio relay of streams that listens on the same kind of socket and asks nobody, by turns in
one run. `splice_rps`: small requests a second over kept connections through the gateway (`rps.bare`: through that
relay). `create_ratio`: on-demand create with network `public` / on another server without any barrier
(`LLM4AGENTS_BARRIER=off`), medians of creates by turns; `guest_mib_per_s`: what a real guest reads from an origin on
this host through its NIC and the gateway. `mib_per_sandbox`: the gateway's whole memory / 200 sandboxes that each have
a name, a request behind them and a kept connection. `intercept_ratio`: `egress_intercept`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.barrier.ca import Authority
from llm4agents.barrier.link import build, nft
from llm4agents.barrier.link.links import Link, Planted
from llm4agents.config import settings
from tests.barrier import gate as lab
from tests.barrier.gate import Gate, Joined
from tests.barrier.guestside import Guest
from tests.bench import egress_intercept
from tests.bench.common import finish, percentile, tiny_server

SIZE = 256 << 20
ROUNDS = 5
REQUESTS = 6_000
CONNECTIONS = 8
SANDBOXES = 200
CREATES_EACH = 15
GUEST_SIZE = 16 << 20
NAME = "origin.example.com"

ORIGIN = tiny_server(SIZE)
RELAY = """
import asyncio, socket, sys
port = int(sys.argv[2])
async def pump(reader, writer):
    try:
        while data := await reader.read(262144):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()
async def serve(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
    writer.close(); there[1].close()
async def main():
    server = await asyncio.start_server(serve, sock=socket.socket(fileno=int(sys.argv[1])))
    await server.serve_forever()
asyncio.run(main())
"""
# client.py ADDRESS large SIZE | ADDRESS small REQUESTS CONNECTIONS: bytes or requests a second.
CLIENT = """
import selectors, socket, sys, time
where, what, count = (sys.argv[1], 80), sys.argv[2], int(sys.argv[3])
request = f"GET /{what} HTTP/1.1\\r\\nhost: NAME\\r\\n\\r\\n".encode()
def connect():
    sock = socket.create_connection(where)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
if what == "large":
    sock, buffer, seen = connect(), bytearray(1 << 20), 0
    sock.sendall(request)
    began = time.perf_counter()
    while seen < count:
        got = sock.recv_into(buffer)
        assert got, "cut"
        seen += got
    print(seen / (time.perf_counter() - began))
    sys.exit()
selector, socks = selectors.DefaultSelector(), [connect() for _ in range(int(sys.argv[4]))]
for sock in socks:
    selector.register(sock, selectors.EVENT_READ)
def run(count):
    sent = done = 0
    for sock in socks:
        sock.sendall(request)
        sent += 1
    while done < count:
        for key, _ in selector.select():
            data = key.fileobj.recv(65536)
            assert data.endswith(b"ok"), data
            done += 1
            if sent < count:
                key.fileobj.sendall(request)
                sent += 1
run(200)
began = time.perf_counter()
run(count)
print(count / (time.perf_counter() - began))
""".replace("NAME", NAME)

# Creates and ends one sandbox for each line it reads; prints the milliseconds of the create.
CREATES = """
import asyncio, json, sys, time
from llm4agents import AsyncSandbox
async def main():
    template, network = sys.argv[1], json.loads(sys.argv[2])
    more = {"network": network} if network else {}
    warm = await AsyncSandbox.create(template, memory_mib=256, **more)
    await warm.kill()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        began = time.perf_counter()
        sandbox = await AsyncSandbox.create(template, memory_mib=256, **more)
        took = (time.perf_counter() - began) * 1000
        if line[0] == "read":
            took = await read(sandbox, *line[1:])
        await sandbox.kill()
        print(took, flush=True)
async def read(sandbox, name, size):
    # Bytes a second of one answer's body, as bash and cat read it.
    await sandbox.update_network(json.loads(sys.argv[3]))
    request = f"GET /large HTTP/1.1\\r\\nhost: {name}\\r\\n\\r\\n"
    code = f"exec 3<>/dev/tcp/{name}/80; printf '{request}' >&3; head -c {size} <&3 | wc -c"
    began = time.perf_counter()
    done = await sandbox.exec(["bash", "-c", code], timeout=300)
    assert done.check().stdout.strip() == size, (done.stdout, done.stderr)
    return int(size) / (time.perf_counter() - began)
asyncio.run(main())
"""


def sh(*argv: str, **more: Any) -> str:
    return str(subprocess.run(argv, check=True, capture_output=True, text=True, **more).stdout)


class Veth:
    """A guest's namespace and a sandbox's, with the link's own rules and sockets, and a veth pair between them."""

    def __init__(self, name: str) -> None:
        self.guest, self.box = f"l4a-{os.getpid()}-{name}g", f"l4a-{os.getpid()}-{name}b"
        for namespace in (self.guest, self.box):
            sh("ip", "netns", "add", namespace)
        pair = ["link", "add", "eth0", "netns", self.guest, "address", limits.GUEST_MAC, "type", "veth"]
        sh("ip", *pair, "peer", "name", nft.TAP, "netns", self.box, "address", limits.GATEWAY_MAC)
        for namespace, device, address in (
            (self.guest, "eth0", limits.GUEST_ADDRESS),
            (self.box, nft.TAP, limits.GATEWAY_ADDRESS),
        ):
            sh("ip", "-n", namespace, "addr", "add", f"{address}/{limits.LINK_PREFIX}", "dev", device)
            sh("ip", "-n", namespace, "link", "set", device, "up")
        sh("ip", "-n", self.guest, "route", "add", "default", "via", limits.GATEWAY_ADDRESS)
        sh("ip", "netns", "exec", self.box, "nft", "-f", "-", input=nft.ruleset())
        self.planted = self._within(self._plant)

    def _plant(self) -> Planted:
        return Planted(*build._planted(), build._packets(), os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    def _within(self, make: Any) -> Any:
        found: list[Any] = []

        def run() -> None:
            with Path("/run/netns", self.box).open() as handle:
                assert build._libc.setns(handle.fileno(), 0x4000_0000) == 0
            found.append(make())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found[0]

    def client(self, *arguments: str) -> float:
        return float(sh("ip", "netns", "exec", self.guest, sys.executable, "-c", CLIENT, *arguments))

    def close(self) -> None:
        self.planted.close()
        for namespace in (self.guest, self.box):
            sh("ip", "netns", "del", namespace)


@contextlib.contextmanager
def origin() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", ORIGIN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def network(port: int) -> dict[str, Any]:
    return {"rules": [f"allow http 127.0.0.1:{port}"], "rewrite": [f"{NAME} -> 127.0.0.1:{port}"]}


def splice(gate: Gate, port: int) -> dict[str, Any]:
    speed: dict[str, list[float]] = {"gateway": [], "bare": []}
    rates: dict[str, list[float]] = {"gateway": [], "bare": [], "gateway_1": [], "bare_1": []}
    ours, bare = Veth("a"), Veth("b")
    try:
        gate.join(Link(-1, ours.planted), network(port), "bench")
        gate.ask("flows", sandbox="bench")
        raw = lab.question(NAME, edns=False)
        ask = "import socket,sys; s=socket.socket(2,2); s.connect((sys.argv[1],53)); s.send(bytes.fromhex(sys.argv[2]))"
        ask += "; print(socket.inet_ntoa(s.recv(512)[-4:]))"
        address = sh(
            "ip", "netns", "exec", ours.guest, sys.executable, "-c", ask, limits.GATEWAY_ADDRESS, raw.hex()
        ).strip()
        os.set_inheritable(bare.planted.tcp, True)
        command = [sys.executable, "-c", RELAY, str(bare.planted.tcp), str(port)]
        with subprocess.Popen(command, pass_fds=[bare.planted.tcp]) as relay:
            try:
                for _ in range(
                    ROUNDS
                ):  # by turns, since the machine may be busier at one time than at another
                    for name, side in (("gateway", ours), ("bare", bare)):
                        speed[name].append(side.client(address, "large", str(SIZE)))
                        rates[name].append(side.client(address, "small", str(REQUESTS), str(CONNECTIONS)))
                        rates[f"{name}_1"].append(side.client(address, "small", str(REQUESTS // 4), "1"))
            finally:
                relay.kill()
    finally:
        ours.close()
        bare.close()
    mib = {name: round(percentile(values, 50) / 2**20, 1) for name, values in speed.items()}
    rps = {name: round(percentile(values, 50)) for name, values in rates.items()}
    return {
        "splice_ratio": round(mib["gateway"] / mib["bare"], 2),
        "splice_rps": rps["gateway"],
        "mib_per_s": mib,
        "rps": rps,
    }


class Creator:
    """A server of its own and a client of it, in a state directory of their own."""

    def __init__(self, home: Path, port: int, template: str, network_wanted: Any, **env: str) -> None:
        for name in ("s", "r"):
            (home / name).mkdir(parents=True)
        # The authority's certificate is part of a template: one for all, and for the next run, is one to build.
        kept = settings().cache / "build" / "bench-ca"
        kept.mkdir(parents=True, exist_ok=True)
        Authority.open(kept / "ca")
        shutil.copytree(kept / "ca", home / "s" / "ca")
        self.env = {
            **os.environ, "LLM4AGENTS_STATE": str(home / "s"), "LLM4AGENTS_RUN": str(home / "r"),
            "LLM4AGENTS_SERVER_IDLE_EXIT_S": "3600", **env,
        }  # fmt: skip
        command = [
            sys.executable,
            "-c",
            CREATES,
            template,
            json.dumps(network_wanted),
            json.dumps(network(port)),
        ]
        self.process = subprocess.Popen(
            command, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == "ready"

    def go(self, what: str = "create") -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        subprocess.run([sys.executable, "-m", "llm4agents", "server", "stop"], env=self.env, check=False)


def create(port: int, template: str) -> dict[str, Any]:
    took: dict[str, list[float]] = {"network": [], "none": [], "off": []}
    with tempfile.TemporaryDirectory(prefix="l4a-b") as scratch, contextlib.ExitStack() as stack:
        sides = {}
        for name, wanted, env in (
            ("network", "public", {}),
            ("none", "none", {}),
            ("off", None, {"LLM4AGENTS_BARRIER": "off"}),
        ):
            sides[name] = Creator(Path(scratch, name), port, template, wanted, **env)
            stack.callback(sides[name].close)
        for _ in range(CREATES_EACH):
            for name, side in sides.items():
                took[name].append(side.go())
        speed = [sides["network"].go(f"read {NAME} {GUEST_SIZE}") for _ in range(3)]
    p50 = {name: round(percentile(values, 50), 1) for name, values in took.items()}
    return {
        "create_ratio": round(p50["network"] / p50["off"], 2),
        "create_ms": p50,
        "guest_mib_per_s": round(percentile(speed, 50) / 2**20, 1),
        "template": template,
    }


def many(port: int) -> dict[str, Any]:
    """Memory of a gateway with SANDBOXES sandboxes."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(lab.pool())
        gate = stack.enter_context(lab.gateway())
        empty = memory(gate.worker.pid)
        links = []
        for number in range(SANDBOXES):
            link = pool.take()
            stack.callback(link.close)
            joined = Joined(gate, link, f"sb{number}")
            gate.joined.append(joined)
            joined.join({**network(port), "profile": "public"})
            link.planted.close()  # the gateway has its own; here there is room for few descriptors (select)
            links.append(link)
            if number % 50 == 49:
                print(f"  {number + 1} sandboxes", file=sys.stderr)
        idle = memory(gate.worker.pid)
        for link in links:
            use(link)
        busy = memory(gate.worker.pid)
        flows = gate.ask("stats")["flows"]
        assert flows == SANDBOXES, flows
    return {
        "mib_per_sandbox": round(busy / SANDBOXES, 3),
        "mib": {"empty": round(empty, 1), "joined": round(idle, 1), "used": round(busy, 1)},
        "sandboxes": SANDBOXES,
    }


def use(link: Link) -> None:
    """A name asked for and a request made over a connection that stays: the guest is gone before it could end it."""
    guest = Guest(link)
    try:
        address = lab.resolve(guest, NAME)
        assert address is not None
        sock = guest.connect(address, 80)
        sock.sendall(f"GET /small HTTP/1.1\r\nhost: {NAME}\r\n\r\n".encode())
        assert sock.recv(4_096).endswith(b"ok")
    finally:
        guest.close()
    sock.close()


def memory(pid: int | None) -> float:
    """MiB that are this process's alone or its share of what others have too (Pss)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Pss")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["splice", "many", "create", "intercept"])
    parser.add_argument("--template", default="base")
    options = parser.parse_args()
    only = options.only
    result: dict[str, Any] = {}
    with origin() as port:
        if only in (None, "splice"):
            with lab.gateway() as gate:
                result |= splice(gate, port)
        if only in (None, "many"):
            result |= many(port)
        if only in (None, "create"):
            result |= create(port, options.template)
    if only in (None, "intercept"):
        result |= egress_intercept.intercept()
    finish(result)


if __name__ == "__main__":
    main()
