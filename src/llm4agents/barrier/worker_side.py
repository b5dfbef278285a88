"""What a worker of the barrier does as such: gives its privileges up, serves the server's requests, leaves when idle.

    import llm4agents.barrier.…          # everything that will be needed: see `harden`
    side = Side({"join": join, "leave": leave}, sandboxes=lambda: list(table))
    asyncio.run(side.run())

Not here: starting one (`workers`), the messages' form (`wire`). Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import encodings.idna  # noqa: F401  (looked up by name when it is used, which may be too late: see `harden`)
import json
import os
import resource
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.barrier import wire

LISTENER_FD, DIRECTORY_FD = 3, 4
DIRECTORY = Path(f"/proc/self/fd/{DIRECTORY_FD}")
"""The worker's own directory, whoever owns the ones above it."""
ENV = "LLM4AGENTS_WORKER"
EVENTS_QUEUED_MAX = 1_024
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38

Fds = Sequence[int]
Answer = Mapping[str, Any] | tuple[Mapping[str, Any], Fds] | None
Op = Callable[[dict[str, Any], list[int]], Awaitable[Answer]]
"""Gets the request and its descriptors, which are the op's to close from then on. Its answer is sent with `ok`; the
descriptors of its answer are closed once they are sent. An exception is the answer `{"ok": false, "error": text}`."""


class Refused(Exception):
    """Raised by an op: its words are the answer, and no traceback is logged."""


def identity() -> dict[str, Any]:
    """What the server said of this worker: `name`, `version`, `owner` (the server's uid), `uid`, `gid` (to become)."""
    return {
        "name": "worker",
        "version": "",
        "uid": None,
        "gid": None,
        **json.loads(os.environ.get(ENV, "{}")),
    }


def harden() -> None:
    """Become the uid of our own if we have one, and never more than that again.

    Done late and not at the start of the process, since the interpreter and the package may lie where only the server's
    user can read (a home directory): import what you need before. What is read later must be readable by anybody.
    """
    who = identity()
    with contextlib.suppress(OSError):
        os.chdir("/")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _raise_nofile()
    if who["uid"] is not None:
        resource.setrlimit(
            resource.RLIMIT_NPROC, (limits.WORKER_THREADS_MAX,) * 2
        )  # counted per uid: only where it is ours
        os.setgroups([])
        os.setresgid(who["gid"], who["gid"], who["gid"])
        os.setresuid(who["uid"], who["uid"], who["uid"])
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")


def _raise_nofile() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for wanted in ((limits.WORKER_FILES_MAX, max(limits.WORKER_FILES_MAX, hard)), (hard, hard)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
            return


def say(words: str, **more: Any) -> None:
    """One line in the worker's log (stderr)."""
    with contextlib.suppress(OSError):
        sys.stderr.write(json.dumps({"at": round(time.time(), 3), "event": words, **more}) + "\n")
        sys.stderr.flush()


class Side:
    """The worker's end of the control socket; belongs to one event loop.

    One server at a time: the one that connected last (a lock sees to it that it is the one that lives).
    """

    def __init__(
        self,
        ops: Mapping[str, Op],
        *,
        sandboxes: Callable[[], Sequence[str]] = lambda: (),
        leave_after_s: float = limits.WORKER_IDLE_EXIT_S,
    ) -> None:
        self._ops = {"hello": self._hello, "stop": self._stop, **ops}
        self._sandboxes, self._leave_after_s = sandboxes, leave_after_s
        self._peer: socket.socket | None = None
        self._out: deque[tuple[bytes, list[int]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._done = asyncio.Event()
        self._stopping = False
        self._alone_since_s = time.monotonic()
        self.dropped = 0
        """Events that no server read in time."""

    @property
    def connected(self) -> bool:
        return self._peer is not None

    def tell(self, event: str, fds: Fds = (), **more: Any) -> None:
        """An event for the server, if there is one; the caller keeps `fds`. Dropped when it does not read."""
        if self._peer is None or len(self._out) >= EVENTS_QUEUED_MAX:
            self.dropped += 1
            return
        self._send({"event": event, **more}, [os.dup(fd) for fd in fds])

    def stop(self) -> None:
        """Let `run` return."""
        self._done.set()

    async def run(self, *, hardened: bool = False) -> None:
        """Harden ourselves (unless that is done) and serve until told to stop, or idle without a server."""
        if not hardened:
            harden()
        listener = socket.socket(fileno=LISTENER_FD)
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(listener, self._accept, listener)
        say("started", pid=os.getpid())
        try:
            while not self._done.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(1.0, self._leave_after_s)):
                        await self._done.wait()
                if self._peer is not None or self._sandboxes():
                    self._alone_since_s = time.monotonic()
                elif time.monotonic() - self._alone_since_s >= self._leave_after_s:
                    say("idle")
                    break
        finally:
            loop.remove_reader(listener)
            listener.close()
            self._let_go()
            for task in list(self._tasks):
                task.cancel()

    # -- the connection -----------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, identity().get("owner", os.geteuid()), os.geteuid()):
            say("refused", uid=uid)
            peer.close()
            return
        self._let_go()
        peer.setblocking(False)
        wire.enlarge(peer)
        self._peer = peer
        asyncio.get_running_loop().add_reader(peer, self._read, peer)

    def _let_go(self) -> None:
        peer, self._peer = self._peer, None
        while self._out:
            wire.close(self._out.popleft()[1])
        if peer is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(peer)
            loop.remove_writer(peer)
            peer.close()

    def _read(self, peer: socket.socket) -> None:
        for _ in range(16):  # others get their turn
            if peer is not self._peer:
                return
            try:
                message, fds = wire.receive(peer)
            except BlockingIOError:
                return
            except wire.WireError:
                self._let_go()
                return
            task = asyncio.create_task(self._serve(peer, message, fds))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
        async with self._turn:  # answers come in the order of their requests
            op = self._ops.get(str(message.get("op")))
            given: list[int] = []
            answer: dict[str, Any]
            try:
                if op is None:
                    wire.close(fds)
                    raise Refused(f"there is no {message.get('op')!r} here")
                said = await op(message, fds)
                more, out = said if isinstance(said, tuple) else (said or {}, ())
                given = list(out)
                answer = {"ok": True, **more}
            except Refused as error:
                answer = {"ok": False, "error": str(error)}
            except Exception as error:  # the server is told, and every other sandbox is served on
                say(
                    "failed",
                    op=message.get("op"),
                    error=f"{type(error).__name__}: {error}",
                    trace=_where(error),
                )
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            if peer is self._peer:
                self._send(answer, given)
            else:
                wire.close(given)

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            raw = wire.encode(message)
        except wire.WireError as error:
            wire.close(fds)
            fds, raw = [], wire.encode({"ok": False, "error": str(error)})
            if "event" in message:
                self.dropped += 1
                return
        self._out.append((raw, fds))
        self._flush()

    def _flush(self) -> None:
        peer = self._peer
        if peer is None:
            return
        while self._out:
            raw, fds = self._out[0]
            try:
                wire.send_raw(peer, raw, fds)
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(peer, self._flush)
                return
            except wire.WireError:
                self._let_go()
                return
            self._out.popleft()
            wire.close(fds)
        asyncio.get_running_loop().remove_writer(peer)
        if self._stopping:
            self._done.set()

    # -- what every worker can be asked -------------------------------------------------------------------

    async def _hello(self, message: dict[str, Any], fds: list[int]) -> Answer:
        wire.close(fds)
        return {"version": identity()["version"], "pid": os.getpid(), "sandboxes": list(self._sandboxes())}

    async def _stop(self, message: dict[str, Any], fds: list[int]) -> Answer:
        wire.close(fds)
        self._stopping = True  # once this answer is sent
        return {}


def _where(error: BaseException) -> list[str]:
    trace, found = error.__traceback__, []
    while trace is not None:
        found.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return found[-8:]
