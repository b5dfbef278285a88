"""The HTTP API over TLS and with a key, as a team's clients meet it: creates at once, many clients at work, what the
server itself costs per call, and whether its memory stays flat.

`overhead_ms`: of each exec's answer, what the server says it took from the request's head to its answer's
(`Server-Timing`) less what the engine says its part took (`duration_ms`); the network and the parsing of bytes are in
`http_ms`, which is the client's own clock less the engine's part, one client at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpcore

from llm4agents import limits
from llm4agents.config import Settings, settings
from llm4agents.sdk import _local
from tests.bench.common import finish, percentile, summary

TEMPLATE, MEMORY_MIB = "base", 256


class Client:
    """Lean: one connection of HTTP/1.1 over TLS, kept alive.

    One pool for all clients looks through all its connections at every request and answer: with 200 of them that
    alone takes the measuring process 30 ms a request, and what is measured is the queue in front of it.
    """

    def __init__(self, url: str, key: str, trust: ssl.SSLContext) -> None:
        self.url = url
        self.headers = [("x-api-key", key), ("content-type", "application/json"), ("host", "localhost")]
        self.pool = httpcore.AsyncConnectionPool(
            ssl_context=trust, max_connections=1, max_keepalive_connections=1
        )

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, dict, dict]:  # type: ignore[type-arg]
        answer = await self.pool.request(
            method,
            self.url + path,
            headers=self.headers,
            content=None if body is None else json.dumps(body).encode(),
            extensions={"timeout": {"connect": 60, "read": 900, "write": 60, "pool": None}},
        )
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return answer.status, json.loads(answer.content or b"{}"), headers

    async def exec(self, sandbox: str) -> tuple[float, float, float]:
        """(milliseconds as the client sees them, of the server, of the engine)."""
        began = time.perf_counter()
        status, body, headers = await self.call(
            "POST", f"/v1/sandboxes/{sandbox}/exec", {"argv": ["/bin/true"]}
        )
        took = (time.perf_counter() - began) * 1000
        assert status == 200, body
        server = float(re.findall(r"total;dur=([\d.]+)", headers["server-timing"])[0])
        return took, server, float(body["duration_ms"])


def start(where: Settings) -> tuple[subprocess.Popen[bytes], str, str]:
    """The server, listening: (its process, URL, a key)."""
    environment = {
        **os.environ,
        "LLM4AGENTS_LISTEN": "127.0.0.1:0",
        "LLM4AGENTS_TLS_LOCAL": "1",
    }
    where.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    _local.make_private(where.run_dir)
    with where.server_log.open("ab") as log:
        process = subprocess.Popen(_local.server_command(), env=environment, stdout=log, stderr=log, cwd="/")
    end = time.monotonic() + 60
    while (info := _local.probe(where)) is None or not info.get("listen"):
        assert process.poll() is None and time.monotonic() < end, where.server_log.read_text()[-2000:]
        time.sleep(0.1)
    made = _local._call(where, "POST", "/v1/keys", {"name": "bench"})
    return process, str(info["listen"]), str(made["key"])


def rss_mib(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def creates(clients: list[Client], count: int) -> tuple[list[str], list[float]]:
    wish = {"template": TEMPLATE, "memory_mib": MEMORY_MIB, "wait_s": 600, "timeout_s": 3_600}
    spent: list[float] = []

    async def one(at: int) -> str | None:
        began = time.perf_counter()
        status, body, _ = await clients[at % len(clients)].call("POST", "/v1/sandboxes", wish)
        spent.append((time.perf_counter() - began) * 1000)
        if status >= 300:
            print(f"create: {status} {body.get('detail')}", file=sys.stderr)
            return None
        return str(body["id"])

    made = await asyncio.gather(*(one(at) for at in range(count)))
    return [ident for ident in made if ident is not None], spent


async def measure(options: argparse.Namespace) -> None:
    where = settings()
    process, url, key = start(where)
    trust = ssl.create_default_context(cafile=where.state / "tls" / "ca.pem")
    clients = [Client(url, key, trust) for _ in range(max(options.clients, options.creates))]
    client = clients[0]
    try:
        warm, _ = await creates(clients, 1)  # the template is built
        made, spent = await creates(clients, options.creates)
        print(f"{len(made)} of {options.creates} created", file=sys.stderr)
        for ident in made:
            await client.call("DELETE", f"/v1/sandboxes/{ident}")

        # One client at a time: what the server costs per call.
        alone = [await client.exec(warm[0]) for _ in range(options.alone)][20:]
        # All clients at once, on a few sandboxes: they are kept alive and ask again as soon as they are answered.
        few, _ = await creates(clients, options.sandboxes - 1)
        few += warm
        await asyncio.gather(*(clients[at].exec(few[at % len(few)]) for at in range(options.clients)))
        crowd: list[float] = []
        before = rss_mib(process.pid)

        async def one(at: int) -> None:
            for _ in range(options.rounds):
                crowd.append((await clients[at].exec(few[at % len(few)]))[0])

        began = time.perf_counter()
        await asyncio.gather(*(one(at) for at in range(options.clients)))
        per_s = len(crowd) / (time.perf_counter() - began)
        print(f"{len(crowd)} execs by {options.clients} clients", file=sys.stderr)

        async def light(at: int) -> None:
            for _ in range(options.requests // 20):
                status, _, _ = await clients[at].call("GET", f"/v1/sandboxes/{few[at % len(few)]}")
                assert status == 200

        await asyncio.gather(*(light(at) for at in range(20)))
        after = rss_mib(process.pid)
        finish(
            {
                "creates_ok": len(made),
                "creates": options.creates,
                "create_ms": summary(spent),
                "exec_ms": summary(crowd),
                "exec_p95_over_p50": round(percentile(crowd, 95) / percentile(crowd, 50), 2),
                "exec_per_s": round(per_s, 1),
                "overhead_ms": round(percentile([server - engine for _, server, engine in alone], 50), 2),
                "http_ms": round(percentile([took - engine for took, _, engine in alone], 50), 2),
                "alone_exec_ms": summary([took for took, _, _ in alone]),
                "rss_growth_mib": round(after - before, 1),
                "rss_mib": round(after, 1),
                "requests": len(crowd) + options.requests,
                "clients": options.clients,
            }
        )
    finally:
        for one_client in clients:
            await one_client.pool.aclose()
        await asyncio.to_thread(_local.stop, where, keep=False)
        process.wait(limits.SERVER_START_TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--creates", type=int, default=100)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--sandboxes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="execs of each client")
    parser.add_argument("--alone", type=int, default=220)
    parser.add_argument("--requests", type=int, default=10_000)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
