"""The real agent, serving a socketpair; built when its sources have changed since."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llm4agents import binaries
from llm4agents.errors import HostSetupError
from llm4agents.guest.channel import Session
from llm4agents.guest.verbs import Agent


@cache
def agent_path() -> Path:
    with contextlib.suppress(HostSetupError):
        return binaries.path(binaries.AGENT)
    root = binaries.checkout_root()
    if root is None:
        pytest.skip("no agent is built")
    built = subprocess.run(
        [sys.executable, root / "scripts" / "build_bin.py"], capture_output=True, text=True, check=True
    )
    return Path(built.stdout.split()[-1]) / binaries.AGENT


class Served:
    """An agent process that serves one end of a socketpair, and the other end."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        """`listener`: it serves the connections to that, as on vsock, and `ours` is the first."""
        if listener is None:
            self.ours, theirs = socket.socketpair()
        else:
            self.ours, theirs = socket.socket(socket.AF_UNIX), listener.dup()
            listener.listen()
            self.ours.connect(listener.getsockname())
        with theirs:
            # What started us with `nohup` would have its ignored hang-up inherited by all that the agent starts.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            self.process = subprocess.Popen(
                [agent_path(), "--serve", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def end(self) -> None:
        self.ours.close()
        self.process.kill()
        self.process.wait()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Agent]:
    served = Served()
    try:
        session = await Session.open(served.ours)
        yield Agent(session)
        await session.close()
    finally:
        served.end()


def run(test: Callable[[Agent], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with serving() as agent:
            await test(agent)

    asyncio.run(asyncio.wait_for(whole(), 60))
