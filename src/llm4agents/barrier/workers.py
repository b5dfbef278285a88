"""The server's side of the barrier's processes: starts one, adopts one that lives, asks it things, replaces it.

A worker is a process in a session of its own that listens on `$RUN/barrier/NAME.sock` (made here, its descriptor 3) and
has a directory `$STATE/barrier/NAME` (its descriptor 4). It outlives the server; the next server connects to it, unless
it is of another version. What it must be told again after a restart is for `on_up` to say: a worker keeps nothing that
matters.

Not here: what the workers do (`gateway`, `link`, `intercept`), their half of this (`worker_side`), which are needed
(`barrier`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from llm4agents import limits
from llm4agents.barrier import wire
from llm4agents.barrier.worker_side import DIRECTORY_FD, ENV, LISTENER_FD
from llm4agents.errors import HostSetupError, LLM4AgentsError

log = structlog.get_logger()

BOOT = Path(__file__).with_name("boot.py")
LEASE_FD = 5
BACK_OFF_S = (0.0, 0.2, 1.0, 5.0, 15.0)
"""Before each restart after the last that lasted `LASTED_S`."""
LASTED_S = 60.0
START_WAITS_S = 1.0
"""A restart that is due within this is waited for by who wants it up."""
STOP_TIMEOUT_S = 3.0
TRIM_S = 30.0
PASSED_ON = (
    *(name for base in ("HTTP", "HTTPS", "NO", "ALL") for name in (f"{base}_PROXY", f"{base.lower()}_proxy")),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "RES_OPTIONS", "LOCALDOMAIN"),
)
"""What of the server's environment those that dial get: the way out of this host's network."""

OnEvent = Callable[[dict[str, Any], list[int]], None]
"""(event, descriptors, which are the callee's to close)"""
OnUp = Callable[[dict[str, Any]], Awaitable[None]]
"""Called with the answer to `hello` each time a connection is new; `sandboxes` in it is empty for a new process."""


class WorkerError(Exception):
    """Between the barrier's parts only: what a caller of ours sees is an error of `errors`."""


class WorkerLost(WorkerError):
    """It has ended, or could not be asked. What it was asked may have been done; `on_up` says it again."""


class WorkerRefused(WorkerError):
    """It answered with an error, in these words."""


@dataclass(frozen=True, slots=True)
class User:
    """Whom a worker becomes. `lease_fd` keeps the uid its own for as long as it lives; the worker inherits it."""

    uid: int
    gid: int
    lease_fd: int


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker is."""

    name: str
    module: str
    """Run as `__main__` by `boot`, e.g. `llm4agents.barrier.gateway`."""
    python: str = sys.executable
    privileged: bool = False
    """Keeps the server's uid and capabilities."""
    dials: bool = False
    """Gets the server's proxy and CA settings."""
    env: Mapping[str, str] = field(default_factory=dict)


def running(run: Path) -> dict[int, str]:
    """The workers that live of the server with that run directory: pid to name.

    By their own word: any user's process can look like one. Whoever waits for one, or ends it, looks whose it is.
    """
    found = {}
    place = os.fsencode(run / "barrier") + b"/"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if len(words) >= 6 and words[2].endswith(b"/barrier/boot.py") and words[4].startswith(place):
                    found[int(entry.name)] = os.fsdecode(words[4][len(place) :].removesuffix(b".sock"))
    return found


def _uid_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1])
    return None


class Worker:
    """One worker, kept alive from `start` to `close`. Belongs to one event loop."""

    def __init__(
        self,
        spec: Spec,
        *,
        run: Path,
        state: Path,
        version: str,
        user: Callable[[str], User] | None = None,
        on_up: OnUp | None = None,
        on_event: OnEvent | None = None,
        quiet: bool = False,
    ) -> None:
        """`run`, `state`: the server's. `user` leases a uid for a name (we are root); its descriptor is closed here.
        `quiet`: nothing is logged, for who has no server and no log."""
        self._log: Any = structlog.wrap_logger(structlog.ReturnLogger(), processors=[]) if quiet else log
        self.spec = spec
        self.socket_path = run / "barrier" / f"{spec.name}.sock"
        self.directory = state / "barrier" / spec.name
        self.log_path = state / "barrier" / f"{spec.name}.log"
        self._run, self._version, self._user = run, version, user
        self._on_up, self._on_event = on_up, on_event
        self._sock: socket.socket | None = None
        self._pid: int | None = None
        self._asked: deque[asyncio.Future[tuple[dict[str, Any], list[int]]]] = deque()
        self._out: deque[tuple[bytes, list[int]]] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._restarting: asyncio.Task[None] | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._later: asyncio.Task[None] | None = None
        self._delay_s = 0.0
        self._ready = asyncio.Event()
        self._closed = False
        self._up_since_s = 0.0
        self._failures = 0
        self.problem: str | None = None
        """Why it is not up, in words; None while it is."""

    @property
    def up(self) -> bool:
        return self._ready.is_set()

    @property
    def pid(self) -> int | None:
        return self._pid

    # -- its life -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Adopt the one that lives, or start one; return when it answers and `on_up` is done. Idempotent.

        Raises HostSetupError when it does not come up: it is tried again later all the same, and not sooner for being
        asked.
        """
        if self._later is not None and not self._later.done() and self._delay_s <= START_WAITS_S:
            await asyncio.shield(self._later)
        if self._restarting is None and not self.up and (self._later is None or self._later.done()):
            self._restarting = self._spawn_task(self._bring_up())
        if self._restarting is not None:
            await asyncio.shield(self._restarting)
        if not self.up:
            raise HostSetupError(
                f"the barrier's {self.spec.name} does not start: {self.problem}", hint=f"see {self.log_path}"
            )

    async def request(
        self,
        message: Mapping[str, Any],
        fds: Sequence[int] = (),
        *,
        timeout: float = limits.WORKER_REQUEST_TIMEOUT_S,
    ) -> tuple[dict[str, Any], list[int]]:
        """Its answer, and descriptors that are the caller's. The caller keeps `fds` and may close them on return.

        Raises WorkerLost when it is not up or ends meanwhile (one that is silent for `timeout` is ended and replaced),
        WorkerRefused with its words.
        """
        if self._sock is None:
            raise WorkerLost(
                f"the barrier's {self.spec.name} is not running: {self.problem or 'not started'}"
            )
        future = self._ask(dict(message), fds)
        try:
            async with asyncio.timeout(timeout):
                answer, given = await asyncio.shield(future)
        except TimeoutError:
            self._log.error("worker_hangs", worker=self.spec.name, op=message.get("op"))
            self._kill()
            raise WorkerLost(f"the barrier's {self.spec.name} did not answer within {timeout:g} s") from None
        except asyncio.CancelledError:
            future.add_done_callback(_forget)
            raise
        if not answer.get("ok"):
            wire.close(given)
            raise WorkerRefused(f"{self.spec.name}: {answer.get('error') or 'no reason given'}")
        return answer, given

    async def close(self, *, keep: bool) -> None:
        """Let go of it (`keep`: it goes on, and leaves when it has nothing to do), or end it."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not keep:
            await self._stop()
        self._drop(WorkerLost("the server is stopping"))

    # -- bringing it up -----------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Once: adopt or spawn. On failure `problem` says why and the next try is on its way."""
        try:
            try:
                if not await self._adopt():
                    await self._spawn()
            except (LLM4AgentsError, WorkerError, OSError) as error:
                self.problem = error.message if isinstance(error, LLM4AgentsError) else str(error)
                self._log.error("worker_not_started", worker=self.spec.name, error=self.problem)
                self._drop(WorkerLost(self.problem))
                self._again()
                return
            self.problem = None
            self._up_since_s = asyncio.get_running_loop().time()
        finally:
            self._restarting = None

    def _again(self) -> None:
        if self._closed:
            return
        delay = self._delay_s = BACK_OFF_S[min(self._failures, len(BACK_OFF_S) - 1)]
        self._failures += 1

        async def later() -> None:
            await asyncio.sleep(delay)
            if not self._closed and not self.up and self._restarting is None:
                self._restarting = self._spawn_task(self._bring_up())

        self._later = self._spawn_task(later())

    async def _adopt(self) -> bool:
        """Whether one lives, is of our version, and is ours now."""
        sock = _connected(self.socket_path)
        if sock is None:
            return False
        self._attach(sock)
        try:
            answer = await self._hello()
        except WorkerError:
            self._drop(WorkerLost("it did not answer"))
            return False  # what it is, `_spawn` ends
        if answer.get("version") != self._version:
            self._log.info("worker_of_another_version", worker=self.spec.name, version=answer.get("version"))
            await self._stop()
            return False
        self._log.info("worker_adopted", worker=self.spec.name, pid=answer.get("pid"))
        await self._is_up(answer)
        return True

    async def _spawn(self) -> None:
        await self._end_others()
        self.socket_path.parent.mkdir(mode=0o700, exist_ok=True)
        self.directory.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
        user = None if self.spec.privileged or self._user is None else self._user(f"barrier {self.directory}")
        with contextlib.ExitStack() as stack:
            if user is not None:
                stack.callback(os.close, user.lease_fd)
            directory = self._own_directory(user)
            stack.callback(os.close, directory)
            trim(self.log_path)
            errors = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, errors)
            listener = stack.enter_context(_listening(self.socket_path))
            lease = directory if user is None else user.lease_fd
            given = [(listener.fileno(), LISTENER_FD), (directory, DIRECTORY_FD), (lease, LEASE_FD)]
            self._pid = _launch(self._argv(), self._env(user), given, errors)
        self._spawn_task(self._reap(self._pid))
        sock = _connected(self.socket_path)
        if sock is None:
            raise HostSetupError("it ended at once")
        self._attach(sock)
        answer = await self._hello()
        self._log.info("worker_started", worker=self.spec.name, pid=self._pid)
        await self._is_up(answer)

    def _argv(self) -> list[str]:
        return [self.spec.python, "-I", str(BOOT), self.spec.module, str(self.socket_path)]

    def _env(self, user: User | None) -> dict[str, str]:
        who = {"name": self.spec.name, "version": self._version, "owner": os.geteuid()}
        if user is not None:
            who |= {"uid": user.uid, "gid": user.gid}
        passed = (
            {name: os.environ[name] for name in PASSED_ON if name in os.environ} if self.spec.dials else {}
        )
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "MALLOC_ARENA_MAX": "2",
            **passed,
            **self.spec.env,
            ENV: json.dumps(who),
        }

    def _own_directory(self, user: User | None) -> int:
        """A descriptor of the worker's directory, which is its uid's with all that an earlier uid of its left there."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        before = os.fstat(fd).st_uid
        if user is not None and before != user.uid:
            for _, names, files, below in os.fwalk(dir_fd=fd):
                for name in (*names, *files):
                    # Only what was its own: a link in there may lead to anybody's.
                    if os.stat(name, dir_fd=below, follow_symlinks=False).st_uid == before:
                        os.chown(name, user.uid, user.gid, dir_fd=below, follow_symlinks=False)
            os.fchown(fd, user.uid, user.gid)
        return fd

    async def _hello(self) -> dict[str, Any]:
        answer, fds = await self.request(
            {"op": "hello", "version": self._version}, timeout=limits.WORKER_START_TIMEOUT_S
        )
        wire.close(fds)
        return answer

    async def _is_up(self, answer: dict[str, Any]) -> None:
        self._pid = int(answer["pid"])
        if self._on_up is not None:
            await self._on_up(answer)
        if self._sock is None:
            raise WorkerLost("it ended at once")
        self._ready.set()
        if self._trimming is None:
            self._trimming = self._spawn_task(self._trim())

    # -- ending it ----------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """End it: asked, then not asked."""
        pid = self._pid
        if self._sock is not None:
            with contextlib.suppress(WorkerError, TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ask({"op": "stop"}, ())), STOP_TIMEOUT_S)
        self._drop(WorkerLost("it was stopped"))
        await self._end_others(politely=True)
        if pid is not None:
            _reaped(pid)
        self._pid = None
        self.socket_path.unlink(missing_ok=True)

    async def _end_others(self, *, politely: bool = False) -> None:
        """No process of this name lives after this."""
        loop = asyncio.get_running_loop()
        kill_at = loop.time() + (STOP_TIMEOUT_S if politely else 0.0)
        while pids := self._living():
            if loop.time() >= kill_at:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for pid in pids:
                _reaped(pid)
            await asyncio.sleep(0.01)

    def _living(self) -> list[int]:
        """Processes that are this worker: ours, or of the uid it was given. Nobody else's, whatever it looks like: it
        could not be ended (or not for good), and would be waited for for ever."""
        uids = {os.geteuid()}
        with contextlib.suppress(OSError):
            uids.add(self.directory.stat().st_uid)
        return [
            pid for pid, name in running(self._run).items() if name == self.spec.name and _uid_of(pid) in uids
        ]

    def _kill(self) -> None:
        if self._pid is not None and self._pid in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._lost()

    async def _reap(self, pid: int) -> None:
        """Our child leaves no zombie."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
            _reaped(pid)

    async def _trim(self) -> None:
        while True:
            trim(self.log_path)
            await asyncio.sleep(TRIM_S)

    def _spawn_task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- the connection -----------------------------------------------------------------------------------

    def _attach(self, sock: socket.socket) -> None:
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock, self._read, sock)

    def _ask(
        self, message: dict[str, Any], fds: Sequence[int]
    ) -> asyncio.Future[tuple[dict[str, Any], list[int]]]:
        try:
            raw = wire.encode(message)
        except wire.WireError as error:
            raise WorkerRefused(f"{self.spec.name}: {error}") from None
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieved)
        self._asked.append(future)
        self._out.append((raw, [os.dup(fd) for fd in fds]))
        self._flush()
        return future

    def _flush(self) -> None:
        sock = self._sock
        if sock is None:
            return
        loop = asyncio.get_running_loop()
        while self._out:
            raw, fds = self._out[0]
            try:
                wire.send_raw(sock, raw, fds)
            except BlockingIOError:
                loop.add_writer(sock, self._flush)
                return
            except wire.WireError:
                self._lost()
                return
            self._out.popleft()
            wire.close(fds)
        loop.remove_writer(sock)

    def _read(self, sock: socket.socket) -> None:
        for _ in range(32):
            if sock is not self._sock:
                return
            try:
                message, fds = wire.receive(sock)
            except BlockingIOError:
                return
            except wire.WireError:
                self._lost()
                return
            if "event" in message:
                if self._on_event is None:
                    wire.close(fds)
                else:
                    self._on_event(message, fds)
            elif self._asked and not (future := self._asked.popleft()).done():
                future.set_result((message, fds))
            else:
                wire.close(fds)

    def _lost(self) -> None:
        """The connection has ended though nobody wanted it to."""
        lasted = asyncio.get_running_loop().time() - self._up_since_s
        was_up = self.up
        self.problem = "it ended"
        self._drop(WorkerLost(f"the barrier's {self.spec.name} ended"))
        if was_up and not self._closed:
            self._log.warning("worker_lost", worker=self.spec.name, pid=self._pid, lasted_s=round(lasted, 1))
            if lasted > LASTED_S:
                self._failures = 0
            self._again()

    def _drop(self, error: WorkerLost) -> None:
        self._ready.clear()
        sock, self._sock = self._sock, None
        while self._out:
            wire.close(self._out.popleft()[1])
        if sock is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(sock)
            loop.remove_writer(sock)
            sock.close()
        asked, self._asked = self._asked, deque()
        for future in asked:
            if not future.done():
                future.set_exception(error)


def trim(path: Path) -> None:
    """Keep the end of a log that has grown past its bound; who writes it appends, so it is done in place."""
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        if size > limits.WORKER_LOG_BYTES_MAX:
            with path.open("rb") as file:
                file.seek(size - limits.WORKER_LOG_BYTES_MAX // 4)
                kept = file.read()
            os.truncate(path, 0)
            with path.open("ab") as file:
                file.write(kept)


def _reaped(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _forget(future: asyncio.Future[tuple[dict[str, Any], list[int]]]) -> None:
    """Nobody waits for that answer any more."""
    if not future.cancelled() and future.exception() is None:
        wire.close(future.result()[1])


def _retrieved(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _connected(path: Path) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        return None
    wire.enlarge(sock)
    return sock


def _listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(8)
    except OSError as error:
        sock.close()
        raise HostSetupError(
            f"cannot listen on {path}: {error}", hint="set LLM4AGENTS_RUN to a short path"
        ) from error
    finally:
        os.umask(before)
    return sock


def _launch(
    argv: Sequence[str], env: Mapping[str, str], given: Iterable[tuple[int, int]], errors: int
) -> int:
    """Start it with these of our descriptors under those numbers, stderr to `errors`, in a session of its own."""
    given = list(given)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        # First above all of them, so that no copy lands on one still to be copied.
        base = max([64, errors, null, *(source for source, _ in given)]) + 1
        actions: list[Any] = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1)]
        actions.append((os.POSIX_SPAWN_DUP2, errors, 2))
        for number, (source, _) in enumerate(given):
            actions.append((os.POSIX_SPAWN_DUP2, source, base + number))
        for number, (_, target) in enumerate(given):
            actions.append((os.POSIX_SPAWN_DUP2, base + number, target))
            actions.append((os.POSIX_SPAWN_CLOSE, base + number))
        return os.posix_spawn(argv[0], list(argv), dict(env), file_actions=actions, setsid=True)
    except OSError as error:
        raise HostSetupError(f"{argv[0]} cannot be started: {error.strerror}") from error
    finally:
        os.close(null)
