"""The server process: `python -m llm4agents.api.server`. One per state directory, over a unix socket.

Order: take the lock, open the store, take over what lives, and only then listen: who can connect is served.
It leaves by itself when nothing lives and nobody has asked for anything for a while, unless it listens on TCP
(`api.listen`). SIGTERM and SIGINT leave sandboxes to the next server (their deadlines hold), a listening server after
the calls under way; `POST /v1/server/stop` ends them unless it says keep. SIGHUP reads the certificate anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

import structlog
import uvicorn

from llm4agents import limits
from llm4agents.api.access.gate import guarded
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.api.listen import systemd
from llm4agents.api.listen.opening import Opened
from llm4agents.config import Settings, settings
from llm4agents.engine.engine import Engine
from llm4agents.engine.logs import Logs
from llm4agents.engine.tracing import Tracing
from llm4agents.errors import ConflictError, HostSetupError, LLM4AgentsError, to_wire

START_FAILED = "LLM4AGENTS-START-FAILED "
FOREGROUND = "--foreground"
"""Its one argument: a person started it."""
LOG_BYTES_MAX = 10 << 20
KEEP_ALIVE_S = 75
DRAIN_S = 5
EXIT_FAILED, EXIT_LOST_RACE = 1, 3


def lock(directory: Path, what: str) -> int:
    """Take a directory's lock for the life of the process. Raises ConflictError naming who has it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise ConflictError(
            f"a server (pid {holder}) already has the {what} directory {directory}",
            hint=f"use it, or llm4agents server stop, or set LLM4AGENTS_{what.upper()} to another directory",
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def prepare_run_dir(run_dir: Path) -> None:
    """Make the directory of sockets, ours alone. Raises HostSetupError when somebody else's is in its place."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = run_dir.lstat()
    if not run_dir.is_dir() or run_dir.is_symlink() or found.st_uid != os.geteuid():
        raise HostSetupError(
            f"{run_dir} is not a directory of ours", hint="set LLM4AGENTS_RUN to another one"
        )
    run_dir.chmod(0o700)
    (run_dir / "vm").mkdir(exist_ok=True, mode=0o700)


def listen(path: Path) -> socket.socket:
    """The listening socket, mode 0600, in place of one a dead server left (we hold the lock)."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        raise HostSetupError(
            f"cannot listen on {path}: {error}", hint="set LLM4AGENTS_RUN to a short path"
        ) from error
    finally:
        os.umask(before)
    sock.listen(512)
    sock.setblocking(False)
    return sock


def configure_logs(level: str, logs: Logs | None = None) -> None:
    """JSON lines on stderr, which whoever started us has sent to the log; `logs` keeps those about a sandbox."""
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,  # the request it is about
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            *([logs.processor] if logs else []),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def trim_log(path: Path) -> None:
    """Keep the last half of a log that has grown past its bound; it is open for appending, so in place."""
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        if size > LOG_BYTES_MAX:
            with path.open("rb") as file:
                file.seek(size - LOG_BYTES_MAX // 2)
                kept = file.read()
            os.truncate(path, 0)
            with path.open("ab") as file:
                file.write(kept)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: ours decide what happens to the sandboxes."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


async def serve(where: Settings) -> None:
    log = structlog.get_logger()
    opened = Opened(where) if where.listen else None
    tracing = Tracing() if where.otel else None
    engine = Engine.open(where)
    configure_logs(where.log_level, engine.logs)
    if tracing is not None:
        tracing.watch(engine.store)
    context = Context(where, engine, tracing)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _leave, context)
    aside: list[asyncio.Task[None]] = []
    try:
        await engine.start()
        sock = listen(where.socket_path)
        application = create_app(context)
        config = uvicorn.Config(
            guarded(application, context, via="unix"),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
            server_header=False,
            h11_max_incomplete_event_size=65_536,
            ws_max_size=limits.WEBSOCKET_MESSAGE_BYTES_MAX,
            # A client that does not read holds up its process and is not gone; one that is gone closes its socket.
            ws_ping_interval=None,
            ws_per_message_deflate=False,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        listener = None
        if opened is not None:
            listener = opened.listener(guarded(application, context, via="tcp"), context)
            listener.start()
            if opened.certificates is not None:
                aside.append(asyncio.create_task(opened.certificates.keep()))
        if systemd.asked() or (opened is not None and opened.certificates is not None):
            loop.add_signal_handler(signal.SIGHUP, _reload, opened)
        log.info(
            "listening",
            socket=str(where.socket_path),
            address=None if listener is None else str(listener.address),
            pid=os.getpid(),
            alive=engine.alive,
        )
        systemd.tell("READY=1\nSTATUS=serving")
        aside.append(asyncio.create_task(systemd.watchdog()))
        await _until_stop(context, serving)
        log.info("stopping", keep=context.keep, alive=engine.alive)
        systemd.tell("STOPPING=1\nSTATUS=stopping: calls under way end first")
        if listener is not None:
            await listener.leave()
            await _drained(context)
        where.socket_path.unlink(missing_ok=True)
        await engine.close(keep=context.keep)
        if listener is not None:
            await listener.close()
        server.should_exit = True
        await serving
    finally:
        for task in aside:
            task.cancel()
        if opened is not None:
            opened.close()
        engine.store.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    log.info("stopped")


def _leave(context: Context) -> None:
    """SIGTERM, SIGINT: leaves what lives to the next server; told once more, it waits for no call."""
    context.hurry = context.stop.is_set()
    context.keep = context.drain = True
    context.stop.set()


def _reload(opened: Opened | None) -> None:
    """SIGHUP: new connections have the certificate that is on disk now; one that cannot be used changes nothing.

    A unit's `systemctl reload` is this signal, with TLS or without: it must not be the end of a server that has none.
    """
    log = structlog.get_logger()
    if opened is None or opened.certificates is None:
        log.info("nothing_to_reload")
        return
    try:
        opened.certificates.reload()
        log.info("certificate_reloaded")
    except LLM4AgentsError as error:
        log.error("certificate_not_reloaded", error=str(error))


async def _drained(context: Context) -> None:
    """Until no call is under way, or the time for it is over; new ones are refused meanwhile."""
    if not context.drain:
        return
    end = time.monotonic() + context.settings.drain_s
    while context.active and not context.hurry and time.monotonic() < end:  # noqa: ASYNC110 (a count has no event)
        await asyncio.sleep(0.05)
    if context.active:
        structlog.get_logger().warning("calls_cut", calls=context.active)


async def _until_stop(context: Context, serving: asyncio.Task[None]) -> None:
    """Until somebody stops us, or nothing has lived and nobody has called for the idle time."""
    idle_s = context.settings.server_idle_exit_s
    while not serving.done():
        trim_log(context.settings.server_log)
        busy = context.active or context.engine.alive or context.engine.jobs.busy
        if busy:
            context.last_request_s = time.monotonic()
        left = context.last_request_s + idle_s - time.monotonic()
        if not busy and left <= 0:
            if context.listening is None:
                return
            left = idle_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(left, 0.1), 10.0)):
                await context.stop.wait()
                return


def main() -> int:
    # Images are built in this process: what their files may be read by must not depend on who starts it.
    os.umask(0o022)
    try:
        where = settings()
        configure_logs(where.log_level)
        # Two, since either may be shared by mistake: whoever has the sockets ends machines it does not know.
        held = [lock(where.state, "state")]
        prepare_run_dir(where.run_dir)
        held.append(lock(where.run_dir, "run"))
        try:
            asyncio.run(serve(where))
        finally:
            for fd in held:
                os.close(fd)
    except LLM4AgentsError as error:
        _say(error)
        return EXIT_LOST_RACE if isinstance(error, ConflictError) else EXIT_FAILED
    except Exception as error:
        structlog.get_logger().error("server_failed", exc_info=error)
        failed = HostSetupError(f"the server could not start: {type(error).__name__}: {error}")
        _say(failed)
        return EXIT_FAILED
    return 0


def _say(error: LLM4AgentsError) -> None:
    """Why it did not start: a line for the SDK that started it, words for whoever did (`server run`)."""
    if sys.argv[1:] != [FOREGROUND]:
        sys.stderr.write(START_FAILED + json.dumps(to_wire(error)) + "\n")
        return
    sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))


if __name__ == "__main__":
    sys.exit(main())
