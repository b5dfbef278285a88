"""Starting harmless programs instead of a VMM through the shim, for the tests of it."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from llm4agents.vmm import shim, uids
from llm4agents.vmm.waiting import readable

ROOT = os.geteuid() == 0
SLEEP = ["/bin/sh", "-c", "echo up; exec sleep 100"]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="l4a-shim-") as path:
        yield Path(path)


@contextlib.asynccontextmanager
async def started(run_dir: Path, argv: list[str], **options: object) -> AsyncIterator[shim.Started]:
    settings: dict[str, object] = {"env": {"A": "b"}, "fds": [], "rlimits": {"core": 0}, **options}
    if ROOT:
        settings = {"uid": uids.UID_BASE, "gid": uids.UID_BASE, **settings}
    answer = await shim.start(shim.Launch(argv=argv, run_dir=run_dir, **settings))  # type: ignore[arg-type]
    try:
        yield answer
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(answer.shim_pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(answer.shim_pid, 0)


async def ended(answer: shim.Started, run_dir: Path, timeout: float = 20) -> dict[str, object]:
    fd = os.pidfd_open(answer.shim_pid)
    try:
        await asyncio.wait_for(readable(fd), timeout)
    finally:
        os.close(fd)
    body: dict[str, object] = json.loads((run_dir / "exit").read_text())
    return body


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def console(run_dir: Path, text: str) -> None:
    """Until the program's output has come through the shim."""
    deadline = time.monotonic() + 10
    while text not in shim.console_tail(run_dir):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
