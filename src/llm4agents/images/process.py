"""Running the host's tools (mmdebstrap, apt-get, mkfs.erofs…) and work in threads, cancellably.

Every tool is the leader of a process group of its own that ends with the call, is told to end when we die,
and has the tail of what it printed in the error when it fails. A full disk, whoever meets it, is a
CapacityError that says how much is needed and how much there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from llm4agents.errors import CapacityError, HostSetupError

T = TypeVar("T")

LOG_TAIL_BYTES = 16_384
OUTPUT_BYTES_MAX = 67_108_864
STOP_GRACE_S = 5.0
PATH = ":".join(
    dict.fromkeys([*os.environ.get("PATH", "").split(":"), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])
)
PACKAGE_OF = {
    "mmdebstrap": "mmdebstrap",
    "mkfs.erofs": "erofs-utils",
    "mke2fs": "e2fsprogs",
    "qemu-img": "qemu-utils",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "fakeroot": "fakeroot",
    "tar": "tar",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
_NO_SPACE = ("no space left on device", "enospc", "disk quota exceeded", "you don't have enough free space")
_NO_NETWORK = (
    "could not resolve",
    "temporary failure in name resolution",
    "failed to fetch",
    "could not connect",
)


def tool(name: str) -> str:
    """The absolute path of a host tool. Raises HostSetupError naming the Debian package that has it."""
    found = shutil.which(name, path=PATH)
    if found is None:
        raise missing_tools_error([name])
    return found


def require(names: Sequence[str]) -> None:
    """Raise one HostSetupError for all of `names` that are missing."""
    missing = [name for name in names if shutil.which(name, path=PATH) is None]
    if missing:
        raise missing_tools_error(missing)


def missing_tools_error(names: Sequence[str]) -> HostSetupError:
    packages = sorted({PACKAGE_OF.get(name, name) for name in names})
    return HostSetupError(
        f"not installed on this host: {', '.join(names)}",
        hint=f"run `llm4agents setup`, or as root: apt-get install {' '.join(packages)}",
        packages=packages,
    )


def no_space(where: Path, needed_bytes: int) -> CapacityError:
    """The CapacityError of a disk that is full or too small for `needed_bytes`."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(where).free
        needs = f"{needed_bytes / 1e6:.0f} MB needed, " if needed_bytes else ""
        return CapacityError(
            f"no room on the disk of {where}: {needs}{free / 1e6:.0f} MB free",
            hint="free some space (`llm4agents prune`), or set LLM4AGENTS_CACHE to a larger disk",
            needed_bytes=needed_bytes,
            free_bytes=free,
        )
    return CapacityError(f"no room on the disk of {where}", needed_bytes=needed_bytes)


def check_room(where: Path, needed_bytes: int) -> None:
    """Raise CapacityError before starting what cannot end well."""
    if shutil.disk_usage(where).free < needed_bytes:
        raise no_space(where, needed_bytes)


@contextlib.contextmanager
def room(where: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turns ENOSPC and EDQUOT of our own writes below `where` into CapacityError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(where, needed_bytes) from error
        raise


async def run(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    needed_bytes: int = 0,
    on_line: Callable[[str], None] | None = None,
) -> bytes:
    """Run `argv` to its end and return its stdout. `cwd` is also whose disk is meant when there is no room.

    stderr lines go to `on_line` as they come. Raises HostSetupError when the tool is missing or fails (its
    log's tail in `details`), CapacityError when it ran out of disk. Cancelled: the whole group is ended first.
    """
    command = [tool("setpriv"), "--pdeathsig", "KILL", "--", *_isolation(), tool(argv[0]), *argv[1:]]
    environment = {**os.environ, "PATH": PATH, "LC_ALL": "C.UTF-8", **(env or {})}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    log = bytearray()
    try:
        _, output = await asyncio.gather(_drain_log(process, log, on_line), _drain_output(process))
        code = await process.wait()
    finally:
        await _end_group(process)
    if code != 0:
        raise _failure(argv[0], code, (bytes(log) or output)[-LOG_TAIL_BYTES:], cwd, needed_bytes)
    return output


@lru_cache(maxsize=1)
def _isolation() -> tuple[str, ...]:
    """As root: namespaces of its own for every tool, which take its children and its mounts along when it ends.

    mmdebstrap mounts in its chroot; killed, it would leave these on the host.
    """
    command = (tool("unshare"), "--mount", "--pid", "--fork", "--kill-child=KILL", "--")
    if os.geteuid() != 0:
        return ()
    works = subprocess.run([*command, "true"], env={"PATH": PATH}, capture_output=True, check=False)
    return command if works.returncode == 0 else ()


async def _drain_log(
    process: asyncio.subprocess.Process, log: bytearray, on_line: Callable[[str], None] | None
) -> None:
    assert process.stderr is not None
    pending = b""
    while chunk := await process.stderr.read(65_536):
        log += chunk
        del log[:-LOG_TAIL_BYTES]
        if on_line is not None:
            *lines, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
            pending = pending[-4096:]
            for line in lines:
                if line.strip():
                    on_line(line.decode("utf-8", "replace").strip())


async def _drain_output(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    output = bytearray()
    while chunk := await process.stdout.read(65_536):
        if len(output) < OUTPUT_BYTES_MAX:
            output += chunk
    return bytes(output)


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End what is left of the group; a tool that was cancelled may have left children."""

    def send(number: int) -> bool:
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    async def end() -> None:
        if process.returncode is None and not _isolation() and send(signal.SIGTERM):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        send(signal.SIGKILL)
        await process.wait()
        for pipe in (process.stdout, process.stderr):  # to its end, which closes it
            with contextlib.suppress(asyncio.TimeoutError, RuntimeError):
                await asyncio.wait_for(pipe.read() if pipe else asyncio.sleep(0), 1.0)

    ending = asyncio.ensure_future(end())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await asyncio.wait([ending])
        raise


def _failure(name: str, code: int, log: bytes, cwd: Path, needed_bytes: int) -> Exception:
    text = log.decode("utf-8", "replace")
    lowered = text.lower()
    if any(word in lowered for word in _NO_SPACE):
        return no_space(cwd, needed_bytes)
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "error:", "ERROR:", "Error:"))]
    errors = [line for line in errors if line != f"E: {name} failed to run"] or errors  # not the reason
    said = (errors or lines or ["it printed nothing"])[-1]
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    hint = "details.log has the end of what it printed"
    if any(word in lowered for word in _NO_NETWORK):
        hint = (
            "the package sources could not be reached: check the network and proxies, then `apt-get update`"
        )
    return HostSetupError(f"{name} failed ({how}): {said}", hint=hint, log=text)


class Cancel:
    """Tells work in a thread that nobody waits for it any more."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raise (and so unwind the thread) once the caller was cancelled."""
        if self._event.is_set():
            raise InterruptedError("cancelled")


async def in_thread(work: Callable[[Cancel], T]) -> T:
    """Run blocking `work` in a thread; when cancelled, tell it and wait until it has let go of its files."""
    cancel = Cancel()
    task = asyncio.ensure_future(asyncio.to_thread(work, cancel))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancel.set()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # its InterruptedError is ours, and taken, else asyncio would complain
        raise
