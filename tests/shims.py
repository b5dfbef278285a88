"""Starting harmless programs instead of a VMM through the shim, for the tests of it."""

import asyncio
import concurrent.futures.thread  # noqa: F401 (of an ordinary user, who may not read it any more)
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from llm4agents import binaries
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


USER = 65_534


def as_user(
    home: Path, act: Callable[[], Coroutine[object, object, None]], *, chrooted: bool = False
) -> None:
    """Run `act` in a child that is an ordinary user, with a shim it may execute; `home` becomes that user's.

    In a mount namespace whose root is really its root, or (`chrooted`) is not: then the kernel lets it make no
    user namespace. The child must need no module that is not imported yet.
    """
    home.chmod(0o755)
    binary = home / binaries.SHIM
    binary.write_bytes(binaries.path(binaries.SHIM).read_bytes())
    binary.chmod(0o755)
    root = home / "mounted"
    root.mkdir()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.unshare(0x0002_0000) == 0
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            subprocess.run(["mount", "--rbind", "/", root], check=True)
            os.chdir(root)
            if chrooted:
                os.chroot(".")
            else:
                assert libc.syscall(155, b".", b".") == 0  # pivot_root: the old root lies over the new
                subprocess.run(["umount", "-l", "."], check=True)
            os.chdir("/")
            os.chown(home, USER, USER)
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            binaries.path = lambda name: binary
            asyncio.run(act())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
