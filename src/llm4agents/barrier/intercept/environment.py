"""The interceptor's Python environment: a venv in the cache, by pip from a lock file with hashes, found by content.

mitmproxy pins old versions of what the server uses itself, so the two never share an environment. This module is the
server's; nothing here is imported by the interceptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import sys
import venv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from llm4agents import limits, scratch
from llm4agents.errors import HostSetupError

Progress = Callable[[str, str, float | None], None]
"""As in `images.progress`: (step, a line for people, how much of it is done or None)."""

_FORMAT = 1
"""Of what `_build` makes: another number, another directory."""
_HERE = Path(__file__).parent


def silent(step: str, detail: str, fraction: float | None) -> None:
    """The Progress of somebody who does not look."""


def lock_file(version: tuple[int, int] = sys.version_info[:2]) -> Path:
    """What is installed for a Python of that version: mitmproxy's newest releases want 3.12."""
    return _HERE / ("requirements-py311.lock" if version < (3, 12) else "requirements-py312.lock")


def directory(cache: Path) -> Path:
    """Where the environment of this Python and lock file is, or would be."""
    digest = hashlib.sha256(lock_file().read_bytes())
    digest.update(f"\0{_FORMAT}\0{sys.implementation.cache_tag}\0{platform.machine()}\0{_base()}".encode())
    return cache / "intercept" / digest.hexdigest()[:32]


def python(cache: Path) -> Path | None:
    """The environment's interpreter; None when it was not built yet (or its base Python has gone)."""
    found = directory(cache) / "bin" / "python"
    return found if found.exists() else None


async def ensure(cache: Path, progress: Progress = silent) -> Path:
    """The environment's interpreter, after building it if need be (about 15 s and 130 MB).

    Two may call this at once, in two processes: one builds, the other waits. Raises HostSetupError (no venv or pip, no
    network, a package whose hash differs, a full disk).
    """
    if (found := python(cache)) is not None:
        return found
    lock = await _locked(cache, progress)
    try:
        if (found := python(cache)) is not None:
            return found
        await _build(cache, progress)
    finally:
        os.close(lock)
    built = python(cache)
    assert built is not None
    return built


async def _locked(cache: Path, progress: Progress) -> int:
    place = cache / "locks" / "intercept.lock"
    fd = -1
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        told = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if not told:
                    progress("intercept", "waiting for another build of the interceptor's environment", None)
                    told = True
                await asyncio.sleep(0.1)  # polled, since a thread blocked in flock could not be cancelled
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError):
            raise HostSetupError(f"the cache cannot be written: {error}") from error
        raise


async def _build(cache: Path, progress: Progress) -> None:
    try:
        with scratch.held(cache / "tmp") as tmp:  # swept by the cache, should this be killed
            try:
                await _build_in(tmp, directory(cache), progress)
            finally:
                await asyncio.to_thread(shutil.rmtree, tmp, True)
    except OSError as error:
        raise HostSetupError(f"the interceptor's environment cannot be made in {cache}: {error}") from error


async def _build_in(tmp: Path, destination: Path, progress: Progress) -> None:
    progress("intercept", "making the interceptor's environment", 0.0)
    with_pip = not _has_pip()
    try:
        await asyncio.to_thread(venv.EnvBuilder(symlinks=True, with_pip=with_pip).create, tmp)
    except Exception as error:
        raise HostSetupError(
            f"{sys.executable} cannot make virtual environments: {error}",
            hint="install its venv and ensurepip modules (Debian: python3-venv)",
        ) from error
    interpreter = tmp / "bin" / "python"
    pip = (
        [str(interpreter), "-m", "pip"]
        if with_pip
        else [sys.executable, "-m", "pip", "--python", str(interpreter)]
    )
    wanted = lock_file().read_text().count("==")
    progress("intercept", f"downloading {wanted} Python packages", 0.1)
    quiet = (
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--no-warn-script-location",
    )
    # --ignore-installed: what a PYTHONPATH of the server's shows to pip is not in the environment.
    wanted_packages = ("--ignore-installed", "--no-deps", "--require-hashes", "-r", str(lock_file()))
    await _run([*pip, "install", *quiet, *wanted_packages])
    progress("intercept", "checking it", 0.9)
    await _run([str(interpreter), "-I", "-c", "import mitmproxy.proxy.layers, mitmproxy.proxy.server"])
    for script in (tmp / "bin").iterdir():  # they name the directory this was made in
        if not script.name.startswith("python"):
            script.unlink()
    await asyncio.to_thread(os.sync)  # thousands of files: one sync is quicker than an fsync of each
    destination.parent.mkdir(parents=True, exist_ok=True)
    tmp.chmod(0o755)
    tmp.rename(destination)
    progress("intercept", "the interceptor's environment is ready", 1.0)


async def _run(command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limits.INTERCEPT_BUILD_TIMEOUT_S):
            said, _ = await process.communicate()
    except TimeoutError:
        raise HostSetupError(
            f"pip did not come to an end within {limits.INTERCEPT_BUILD_TIMEOUT_S:g} s",
            hint="see whether this host reaches its package index",
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        raise HostSetupError(
            f"the interceptor's environment cannot be made: {_told(said)}",
            hint="pip must reach a package index from this host (pip config, PIP_INDEX_URL, HTTPS_PROXY)",
        )


def _told(said: bytes) -> str:
    """The end of what pip said, without a password that an index address may hold."""
    words = re.sub(r"(://)[^/@\s]+@", r"\1***@", said.decode(errors="replace"))
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    told = [line for line in lines if "ERROR" in line.upper()] or lines
    return " / ".join(told[-4:])[-1_000:]


def _has_pip() -> bool:
    return find_spec("pip") is not None


def _base() -> str:
    """The interpreter that a venv made by this one refers to."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def main() -> None:
    """For scripts/bootstrap."""
    from llm4agents.config import settings

    cache = settings().cache
    if python(cache) is None:
        asyncio.run(ensure(cache, lambda step, detail, fraction: print(detail, file=sys.stderr)))  # noqa: T201


if __name__ == "__main__":
    main()
