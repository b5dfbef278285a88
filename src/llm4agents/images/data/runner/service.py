"""The zygote: imports everything once, forks a worker per context, and serves what workers cannot.

It sleeps while cells run and end well. It wakes for connections while the default worker is busy, for other
contexts, for interrupts, timeouts, restarts, dead workers, and for what C code and child processes print. It
never waits for anyone: every descriptor it reads or writes is non-blocking. No threads, no timers that tick.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from . import wire
from .reseed import generation
from .slots import Handler, Peer, Slot
from .wire import BUSY, COUNT, THREADED
from .worker import Worker

DEFAULT = "default"
CONTROL_SUFFIX = ".control"


class Zygote:
    """The service's one object: its loop and its contexts."""

    def __init__(self, path: str, grace_s: float = wire.GRACE_S) -> None:
        self._not_ours = _open_fds()
        self._path = path
        self._grace_s = grace_s
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._slots: dict[str, Slot] = {}
        self._half_read: dict[int, tuple[socket.socket, bytearray]] = {}
        self._lock_fd = os.memfd_create("runner", os.MFD_CLOEXEC)
        size = wire.WINDOW_BYTES * wire.CONTEXTS_MAX
        os.ftruncate(self._lock_fd, size)
        self._memory = memoryview(mmap.mmap(self._lock_fd, size))
        self._listener = _listen(path)
        self._control = _listen(path + CONTROL_SUFFIX)

    # -- the loop --------------------------------------------------------------------------------------------

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        """Call `handler(event)` on `events` of `fd`; events -1: the epoll has it already, or will."""
        self._handlers[fd] = handler
        if events >= 0:
            self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def serve(self) -> NoReturn:
        signal.signal(signal.SIGUSR2, self._on_restored)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.watch(self._listener.fileno(), 0, lambda _: self._accept(self._listener))
        self.watch(self._control.fileno(), select.EPOLLIN, lambda _: self._accept(self._control))
        self._slot(DEFAULT)
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for something and handle it. What one handler raises is logged and ends nothing."""
        deadlines = [slot.kill_at for slot in self._slots.values() if slot.kill_at is not None]
        wait = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for fd, event in self._epoll.poll(wait):
            handler = self._handlers.get(fd)
            if handler is None:
                continue
            try:
                handler(event)
            except Exception:
                traceback.print_exc()
        if deadlines:
            now = time.monotonic()
            for slot in list(self._slots.values()):
                slot.tick(now)

    def _on_restored(self, _signal: int, _frame: Any) -> None:
        """The machine is a copy now: workers in which something runs reseed at once.

        An idle one does so when its next cell finds another generation, and the zygote draws nothing (what it
        forks reseeds itself): in software emulation this handler is on the way to a clone's first answer.
        """
        outside_a_guest = generation() is None
        for slot in self._slots.values():
            if outside_a_guest or slot.window.b[BUSY] or slot.window.b[THREADED]:
                slot.signal(signal.SIGUSR2)

    def _on_term(self, _signal: int, _frame: Any) -> NoReturn:
        for slot in self._slots.values():
            slot.kill()
        for path in (self._path, self._path + CONTROL_SUFFIX):
            with contextlib.suppress(OSError):
                Path(path).unlink()
        os._exit(0)

    # -- requests --------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if len(self._half_read) >= wire.HALF_READ_MAX:
            self._drop(next(iter(self._half_read)))
        fd = connection.fileno()
        self._half_read[fd] = connection, bytearray()
        self.watch(fd, select.EPOLLIN, lambda _: self._read(fd))

    def _drop(self, fd: int) -> socket.socket:
        connection, _ = self._half_read.pop(fd)
        self.unwatch(fd)
        return connection

    def _read(self, fd: int) -> None:
        connection, held = self._half_read[fd]
        try:
            part = connection.recv(262_144, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        held += part
        size = wire.LENGTH.unpack_from(held)[0] if len(held) >= wire.LENGTH.size else 0
        if not part or size > wire.REQUEST_BYTES_MAX:
            self._drop(fd).close()
        elif len(held) >= wire.LENGTH.size + size and size:
            self.dispatch(self._drop(fd).detach(), bytes(held[wire.LENGTH.size : wire.LENGTH.size + size]))

    def dispatch(self, fd: int, body: bytes) -> None:
        """Do what a request asks for. Takes the descriptor."""
        try:
            request = json.loads(body)
            op, context = request["op"], request.get("context", DEFAULT)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            op, context = None, DEFAULT
        slot = self._slots.get(context) if isinstance(context, str) else None
        if op == "run" and isinstance(context, str):
            if slot is None and len(self._slots) >= wire.CONTEXTS_MAX:
                value = f"{wire.CONTEXTS_MAX} contexts are open, and that is the most"
                self._answer(fd, wire.error_frame("TooManyContexts", value, ""), wire.end_frame("error", 0))
            else:
                (slot or self._slot(context)).run(fd, body)
        elif op == "restart" and slot is not None:
            slot.restart(Peer(self, fd))
        elif op in ("interrupt", "restart", "ping"):
            if op == "interrupt" and slot is not None:
                slot.interrupt(wire.INTERRUPT)
            self._answer(fd, wire.end_frame("ok", slot.window.w[COUNT] if slot is not None else 0))
        else:
            self._answer(fd, wire.error_frame("BadRequest", "not a request", ""), wire.end_frame("error", 0))

    def _answer(self, fd: int, *frames: bytes) -> None:
        Peer(self, fd).post(list(frames), last=True)

    # -- workers ---------------------------------------------------------------------------------------------

    def _slot(self, name: str) -> Slot:
        listener = self._listener if name == DEFAULT else None
        slot = Slot(
            name,
            len(self._slots),
            self,
            self._epoll,
            self._memory,
            self._lock_fd,
            listener,
            self._spawn,
            self.dispatch,
            self._grace_s,
        )
        self._slots[name] = slot
        return slot

    def _spawn(self, slot: Slot) -> int:
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # in both, so that neither races the other
            if slot.inherited.listener is not None:
                self.change(self._listener.fileno(), 0)  # its worker accepts again
            return pid
        try:
            os.setpgid(0, 0)
            self._become_worker(slot)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _become_worker(self, slot: Slot) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for number, fd in zip((1, 2), slot.write_fds, strict=True):
            os.dup2(fd, number)
        # Everything of the zygote's but what is this worker's, hosts' connections above all.
        for fd in _open_fds() - self._not_ours - slot.inherited.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        Worker(slot.inherited).serve()

    def warm(self, cells: list[str], ready: Path | None) -> None:
        """Run cells through the real socket in the default worker, from a child process; then write `ready`.

        Faults in the pages and imports the parts that a first cell would pay for, and leaves no trace.
        """
        pid = os.fork()
        if not pid:
            problems: list[str] = ["the warm-up did not end"]
            try:
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)
                self._epoll.close()
                problems = [problem for cell in cells for problem in warm_cell(self._path, cell)]
            except BaseException as error:
                problems = [f"warm-up: {error!r}"]
            finally:
                for problem in problems:
                    os.write(2, f"runner: {problem}\n".encode())
                if ready is not None:
                    temporary = ready.with_name(ready.name + ".tmp")
                    temporary.write_text(json.dumps({"problems": problems}))
                    temporary.rename(ready)
                os._exit(0)
        pidfd = os.pidfd_open(pid)

        def gone(_event: int) -> None:
            self.unwatch(pidfd)
            os.close(pidfd)
            os.waitpid(pid, 0)

        self.watch(pidfd, select.EPOLLIN, gone)


def warm_cell(path: str, code: str) -> list[str]:
    """Run one warm-up cell; what went wrong."""
    request = json.dumps({"op": "run", "context": DEFAULT, "code": code, "warm": True}).encode()
    problems: list[str] = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(wire.LENGTH.pack(len(request)) + request)
        stream = connection.makefile("rb")
        while head := stream.read(wire.LENGTH.size):
            event = json.loads(stream.read(wire.LENGTH.unpack(head)[0]))
            if event["type"] == "error":
                problems.append(f"warm-up cell: {event['name']}: {event['value']}")
            if event["type"] == "end":
                return problems
    return [*problems, "a warm-up cell got no answer"]


def _open_fds() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}


def _listen(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(path)
    listener.listen(64)
    return listener


def _prepare_environment() -> None:
    """What cells and their child processes find; what the template sets wins."""
    os.environ.setdefault("LANG", "C.UTF-8")
    os.environ.setdefault("MPLBACKEND", "agg")
    if os.cpu_count() == 1:
        # More threads than processors only cost; and none may exist before the fork.
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")


def _prepare_path() -> None:
    """`import` finds modules in the working directory and what `pip install --user` brings, also later."""
    import site

    user_site = site.getusersitepackages()
    with contextlib.suppress(OSError):
        Path(user_site).mkdir(parents=True, exist_ok=True)
    if "" not in sys.path:
        sys.path.insert(0, "")
    if user_site not in sys.path:
        sys.path.append(user_site)


def _preload(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            sys.stderr.write(f"runner: preload: {error}\n")
    pandas = sys.modules.get("pandas")
    if pandas is not None:
        pandas.set_option("display.width", 120)
    warnings = sys.modules.get("warnings")
    if warnings is not None:
        warnings.filterwarnings("ignore", message=".*non-interactive, and thus cannot be shown")
        warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.stderr.write(f"runner: preload left {threads - 1} threads; forking with them is unsafe\n")


def cells_of(text: str) -> list[str]:
    """The cells of a warm-up file: separated by lines that begin with `# %%`."""
    cells: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("# %%"):
            cells.append([])
        else:
            cells[-1].append(line)
    return [code for code in ("\n".join(cell).strip() for cell in cells) if code]


def main(arguments: list[str] | None = None) -> NoReturn:
    """The command line of the zygote; docs/design/interfaces.md has it."""
    parser = argparse.ArgumentParser(prog="zygote.py", description="The Python interpreter of a sandbox.")
    parser.add_argument(
        "--socket", type=Path, required=True, help="unix socket to listen on; SOCKET.control comes with it"
    )
    parser.add_argument("--preload", default="", help="modules to import, separated by commas")
    parser.add_argument(
        "--warm", type=Path, help="file of cells (separated by '# %%%%') to run once beforehand"
    )
    parser.add_argument(
        "--ready", type=Path, help='file to write {"problems": [...]} to when cells are taken'
    )
    parser.add_argument("--cwd", help="working directory; default: the home directory")
    parser.add_argument(
        "--grace-s", type=float, default=wire.GRACE_S, help="from a timeout to a kill, seconds"
    )
    options = parser.parse_args(arguments)
    path, ready = str(options.socket.absolute()), options.ready and options.ready.absolute()
    cells = cells_of(options.warm.read_text(encoding="utf-8")) if options.warm else []
    _prepare_environment()
    os.chdir(options.cwd or Path.home())
    _prepare_path()
    _preload([name for name in options.preload.split(",") if name])
    zygote = Zygote(path, options.grace_s)
    gc.collect()
    gc.freeze()
    zygote.warm([*cells, "print(6*7)"], ready)
    zygote.serve()
