"""The local server: find it, start it, hand its state to our version. It blocks; async callers use a thread.

Not here: talking to it (transport). The rules (interfaces.md): one server per state directory, whoever
holds `$STATE/lock`; starting is serialised by `$RUN/start.lock`; a server of an older version is asked to
leave its sandboxes to ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from llm4agents import __version__, limits
from llm4agents.config import Settings
from llm4agents.errors import (
    ConflictError,
    HostSetupError,
    InvalidRequestError,
    LLM4AgentsError,
    ServerUnavailableError,
    VersionMismatchError,
    from_wire,
)
from llm4agents.sdk import _wire

API: Final = 1
START_FAILED: Final = "LLM4AGENTS-START-FAILED "
_PROBE_TIMEOUT_S: Final = 10.0
_TRY_EVERY_S: Final = 0.01
_TAIL_BYTES: Final = 4_096
_SOCKET_PATH_BYTES_MAX: Final = 107

_known: dict[tuple[int, str], dict[str, Any]] = {}
_guard = threading.Lock()


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def known(settings: Settings) -> dict[str, Any] | None:
    """What `ensure` found before in this process, or None."""
    return _known.get((os.getpid(), str(settings.socket_path)))


def forget(settings: Settings) -> None:
    """The server did not answer: the next `ensure` looks again."""
    _known.pop((os.getpid(), str(settings.socket_path)), None)


def ensure(settings: Settings) -> dict[str, Any]:
    """What `GET /v1/server` of a server of our version says, after starting one if need be.

    Raises ServerUnavailableError (none, and none may or could be started), VersionMismatchError (a newer
    one runs, or the store is newer), HostSetupError, UnsupportedPlatformError.
    """
    _wire.check_platform(None)
    with _guard:
        info = known(settings)
        if info is None:
            info = _find(settings)
            _known[(os.getpid(), str(settings.socket_path))] = info
        return info


def probe(settings: Settings) -> dict[str, Any] | None:
    """What the running server says, of whatever version, or None when none answers. Starts nothing."""
    if len(os.fsencode(settings.socket_path)) > _SOCKET_PATH_BYTES_MAX:
        raise InvalidRequestError(
            f"the socket path {settings.socket_path} is too long",
            hint="set LLM4AGENTS_RUN to a shorter directory",
        )
    if not _answers(settings.socket_path):
        return None
    try:
        return _call(settings, "GET", "/v1/server")
    except ConnectionError:
        return None  # it left between the two


def stop(settings: Settings, *, keep: bool) -> bool:
    """Ends the server, if one runs, and waits until it has let go of its state. Says whether one ran."""
    if probe(settings) is None:
        return False
    with contextlib.suppress(ConnectionError):
        _call(settings, "POST", "/v1/server/stop", {"keep": keep})
    forget(settings)
    _await_lock(settings)
    return True


def _find(settings: Settings) -> dict[str, Any]:
    info = probe(settings)
    if info is not None and _ours(info, settings):
        return info
    if not settings.autostart:
        raise ServerUnavailableError(
            "no server answers and LLM4AGENTS_AUTOSTART=0 forbids starting one"
            if info is None
            else f"the running server has version {info.get('version')}, not {__version__}",
            hint=f"start it with: llm4agents server start (its log: {settings.server_log})",
            log=str(settings.server_log),
        )
    return start(settings)


def _ours(info: dict[str, Any], settings: Settings) -> bool:
    """Whether that server serves us; False when it is older and must make room."""
    version = str(info.get("version"))
    if version == __version__ and info.get("api") == API:
        return True
    if _wire.release_of(version) >= _wire.release_of(__version__):
        raise VersionMismatchError(
            f"the running server has version {version}, newer than this client's {__version__}",
            hint="upgrade llm4agents here, or stop the server: llm4agents server stop --keep",
            log=str(settings.server_log),
        )
    return False


def start(settings: Settings) -> dict[str, Any]:
    """A server of our version: the running one, or a new one in a session of its own."""
    make_private(settings.run_dir)
    settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + limits.SERVER_START_TIMEOUT_S
    with _locked(settings.run_dir / "start.lock", deadline, settings):
        info = probe(settings)
        if info is not None:
            if _ours(info, settings):
                return info
            with contextlib.suppress(ConnectionError):
                _call(settings, "POST", "/v1/server/stop", {"keep": True})
            _await_lock(settings)
        return _spawn(settings, deadline)


def _spawn(settings: Settings, deadline: float) -> dict[str, Any]:
    """Starts the server and waits for it: until it answers, or it ended, or the time is up."""
    log = settings.server_log
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        since = os.fstat(out).st_size
        process = subprocess.Popen(
            server_command(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd="/",
            env=_environment(settings),
            start_new_session=True,
            close_fds=True,
        )
    finally:
        os.close(out)
    # Reaped here if we outlive it; nobody waits for this thread.
    reaper = threading.Thread(target=process.wait, name="llm4agents-server-reaper", daemon=True)
    ended = os.pidfd_open(process.pid)
    reaper.start()
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        while time.monotonic() < deadline:
            exited = bool(poll.poll(_TRY_EVERY_S * 1_000))
            info = probe(settings)
            if info is not None:
                return info
            if exited:
                reaper.join()
                failure = _failure(_tail(log, since), process.returncode, settings)
                if not isinstance(failure, ConflictError):
                    raise failure
                # Another server holds the state: it is on its way up (or down); keep trying, not in a spin.
                poll.unregister(ended)
    finally:
        os.close(ended)
    raise ServerUnavailableError(
        f"the server did not answer within {limits.SERVER_START_TIMEOUT_S:g} s; its log ends: "
        f"{_tail(log, since) or '(empty)'}",
        hint=f"see {log}",
        log=str(log),
    )


def server_command() -> list[str]:
    """How the server is started. `-P`: `/` is no place to import from."""
    return [sys.executable, "-P", "-m", "llm4agents.api.server"]


def _environment(settings: Settings) -> dict[str, str]:
    """Ours, with the directories we mean said in full: the server's cwd is `/`."""
    env = dict(os.environ)
    env.pop("LLM4AGENTS_URL", None)
    env.update(
        LLM4AGENTS_STATE=str(settings.state),
        LLM4AGENTS_CACHE=str(settings.cache),
        LLM4AGENTS_RUN=str(settings.run_dir),
    )
    if paths := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(
            str(Path(part).absolute()) for part in paths.split(os.pathsep) if part
        )
    return env


def _failure(tail: str, code: int | None, settings: Settings) -> LLM4AgentsError:
    """Why a server that ended before it answered did so: in its own words if it had any."""
    log = str(settings.server_log)
    for line in reversed(tail.splitlines()):
        if line.startswith(START_FAILED):
            with contextlib.suppress(ValueError):
                body = json.loads(line.removeprefix(START_FAILED))
                error = from_wire(body, int(body.get("status") or 503))
                error.details.setdefault("log", log)
                if log not in str(error):
                    hint = f"{error.hint}; log: {log}" if error.hint else f"log: {log}"
                    error.hint, error.args = hint, (f"{error.message} ({hint})",)
                return error
    return ServerUnavailableError(
        f"the server ended with code {code} before it answered; its log ends:\n{tail.strip() or '(empty)'}",
        hint=f"log: {log}; llm4agents doctor checks this host",
        log=log,
    )


def _tail(log: Path, since: int) -> str:
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(since, end - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def make_private(directory: Path) -> None:
    """The run directory, 0700 and ours. Raises HostSetupError when someone else got there first."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if ours and found.st_mode & 0o077 and not found.st_mode & 0o022:
        directory.chmod(0o700)  # others could read it, nobody could have put anything there
        return
    if not ours or found.st_mode & 0o077:
        raise HostSetupError(
            f"{directory} is not a private directory of ours "
            f"(owner {found.st_uid}, mode {stat.filemode(found.st_mode)})",
            hint="remove it or chmod 700 it, or set LLM4AGENTS_RUN to another",
        )


@contextlib.contextmanager
def _locked(path: Path, deadline: float, settings: Settings) -> Iterator[None]:
    """flock of `path`, exclusively; the lock goes with the descriptor, so a dead client holds nothing."""
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServerUnavailableError(
                        "another client is starting the server and does not get done",
                        hint=f"log: {settings.server_log}",
                        log=str(settings.server_log),
                    ) from None
                time.sleep(_TRY_EVERY_S)
        yield
    finally:
        os.close(fd)


def _await_lock(settings: Settings) -> None:
    """Returns when no server holds the state directory (it may take as long as a start may)."""
    import fcntl

    fd = os.open(settings.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + limits.SERVER_START_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServerUnavailableError(
                        f"the former server does not let go of {settings.state}",
                        hint=f"log: {settings.server_log}; llm4agents server status",
                        log=str(settings.server_log),
                    ) from None
                time.sleep(_TRY_EVERY_S)
    finally:
        os.close(fd)


def _answers(path: Path) -> bool:
    """Whether anything listens on the socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_PROBE_TIMEOUT_S)
        try:
            sock.connect(str(path))
        except PermissionError:
            raise ServerUnavailableError(
                f"{path} belongs to another user", hint="set LLM4AGENTS_RUN and LLM4AGENTS_STATE to your own"
            ) from None
        except OSError:
            return False
        return True


def _call(settings: Settings, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request on a connection of its own. ConnectionError when it breaks."""
    import httpcore

    content = None if body is None else json.dumps(body).encode()
    headers = [("content-type", "application/json")] if content else []
    wait = {"connect": _PROBE_TIMEOUT_S, "read": _PROBE_TIMEOUT_S, "write": _PROBE_TIMEOUT_S}
    try:
        with httpcore.ConnectionPool(uds=str(settings.socket_path)) as pool:
            answer = pool.request(
                method,
                f"http://llm4agents{path}",
                headers=headers,
                content=content,
                extensions={"timeout": wait},
            )
    except httpcore.TimeoutException as error:
        raise ServerUnavailableError(
            f"the server does not answer within {_PROBE_TIMEOUT_S:g} s",
            hint=f"log: {settings.server_log}",
            log=str(settings.server_log),
        ) from error
    except (httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise ConnectionError(str(error)) from error
    if answer.status >= 400:
        raise _wire.error_of(answer.status, answer.content)
    found = json.loads(answer.content or b"{}")
    return found if isinstance(found, dict) else {}
