"""The gateway's process: started by `workers`, serves until it is told to stop or has nothing to do."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  (asyncio and ssl import on first use, which may be too late: see `harden`)
import gc
import os
import signal
import ssl  # noqa: F401
import traceback  # noqa: F401
from typing import Any

from llm4agents.barrier.addresses import parse
from llm4agents.barrier.dial import Dialler
from llm4agents.barrier.gateway.gateway import Gateway
from llm4agents.barrier.network import Network
from llm4agents.barrier.policy import Policy, Target
from llm4agents.barrier.worker_side import DIRECTORY, Side, harden


def warm() -> None:
    """Judge once, so that what judging reads from the package is read while it can be."""
    policy = Policy.compile(Network.from_json({"profile": "public", "rules": ["deny example.com/x"]}))
    policy.resolve("example.com")
    policy.connect(Target(None, parse("192.0.2.1"), 443))
    policy.address(Target("example.com", None, 443), "192.0.2.1")


async def main() -> None:
    warm()
    dialler = Dialler()  # (reads the host's CA bundle if a proxy needs it)
    harden()
    gateway = Gateway(DIRECTORY, dialler)

    def unforeseen(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        gateway.trouble("", context.get("exception") or RuntimeError(context.get("message")))

    asyncio.get_running_loop().set_exception_handler(unforeseen)
    side = Side(gateway.ops, sandboxes=lambda: gateway.sandboxes)
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, side.stop
    )  # what is summed up is written first
    try:
        await side.run(hardened=True)
    finally:
        gateway.close()


if __name__ == "__main__":
    gc.freeze()  # what has been imported stays: no collection need look at it
    asyncio.run(main())
    os._exit(0)  # a resolver's thread may hang for as long as the host's resolver does
