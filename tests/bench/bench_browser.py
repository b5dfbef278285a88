"""A browser that is up: from asking for a sandbox of `browser` to an answer of its DevTools, beside a cold launch.

The cold launch is of the same Chromium with the same options, in a sandbox of the same template in the same run, with
a profile and a port of its own, from `exec` to its first answer. Milliseconds; wanted: `ratio` at most 0.25.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import socket
import sys
import time
from collections import defaultdict

from llm4agents import AsyncSandbox
from llm4agents.images import spec
from tests.bench.common import finish, percentile, summary

COLD_PORT = 9_333


async def answered(sandbox: AsyncSandbox, port: int) -> str:
    """The browser's name, as soon as its DevTools say it: asked again and again, as whoever waits for one does."""
    async with await sandbox.ports.forward(port) as forward:
        while True:
            try:
                return await asyncio.to_thread(_version, forward.local)
            except (OSError, http.client.HTTPException, ValueError):
                await asyncio.sleep(0.02)


def _version(local: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", local, timeout=60)
    try:
        connection.request("GET", "/json/version")
        return str(json.loads(connection.getresponse().read())["Browser"])
    finally:
        connection.close()


async def warm(into: dict[str, list[float]]) -> AsyncSandbox:
    began = time.perf_counter()
    sandbox = await AsyncSandbox.create("browser")
    into["create_ms"].append((time.perf_counter() - began) * 1000)
    name = await answered(sandbox, spec.BROWSER_PORT)
    into["devtools_ms"].append((time.perf_counter() - began) * 1000)
    assert "Chrome" in name, name
    return sandbox


async def cold(sandbox: AsyncSandbox, into: dict[str, list[float]]) -> None:
    """In a sandbox whose own browser has been stopped: it would share the processor."""
    stop = f"pkill -TERM -f '^/bin/bash {spec.BROWSER_SCRIPT}'; while pgrep -f ^/usr/lib/chromium/; do sleep 0.1; done"
    await sandbox.exec(["/bin/bash", "-c", stop], timeout=60)
    began = time.perf_counter()
    await sandbox.processes.start([spec.BROWSER_SCRIPT, str(COLD_PORT), "/tmp/cold"])
    await answered(sandbox, COLD_PORT)
    into["cold_ms"].append((time.perf_counter() - began) * 1000)


async def measure(rounds: int) -> None:
    socket.setdefaulttimeout(120)
    into: dict[str, list[float]] = defaultdict(list)
    await (await warm(defaultdict(list))).kill()  # starts the server, loads the template there
    for number in range(rounds):
        sandbox = await warm(into)
        try:
            await cold(sandbox, into)
        finally:
            await sandbox.kill()
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    result: dict[str, object] = {name: summary(values) for name, values in into.items()}
    middle = {name: percentile(values, 50) for name, values in into.items()}
    result["ratio"] = round(middle["devtools_ms"] / middle["cold_ms"], 3)
    result["load_before"] = round(os.getloadavg()[2], 1)
    finish(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
