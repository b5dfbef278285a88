"""One context's process: waits for a cell, runs it, answers. The hot path of the product.

The worker of the default context accepts connections itself, so a cell costs one process and one wake-up.
While it runs a cell it opens the listener to the zygote (an epoll the two share), which then serves interrupts
and everything else; the zygote sleeps otherwise. Not here: running code (`cell`), values (`display`), output
(`streams`).
"""

from __future__ import annotations

import _signal
import array
import builtins
import contextlib
import gc
import json
import linecache
import os
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from . import magics, wire
from .cell import NOTHING, Interpreter
from .display import Display
from .reseed import generation, prepare, reseed
from .streams import Connection, Stream
from .tracebacks import describe
from .wire import BUSY, CAUSE, CAUSE_SEQ, COUNT, LENGTH, SEQ, THREADED, Window

_SIGINT = int(signal.SIGINT)
_DESCRIPTORS = socket.SOL_SOCKET, socket.SCM_RIGHTS


@dataclass(slots=True)
class Inherited:
    """What a worker has of its zygote: all descriptors are shared with it."""

    name: str
    index: int
    window: Window
    lock_fd: int
    epoll: select.epoll
    listener: socket.socket | None
    """Only the default context's worker accepts."""
    control: socket.socket
    stash_in: socket.socket
    stash_out: socket.socket
    """A socket pair of which the worker has both ends: the running cell's connection lies in it as a message,
    so that it outlives the worker and the zygote can say on it that the worker died."""
    pipes: tuple[int, int]
    timer_fd: int

    @property
    def fds(self) -> set[int]:
        sockets = [self.control, self.stash_in, self.stash_out, *([self.listener] if self.listener else [])]
        return {
            0,
            1,
            2,
            self.lock_fd,
            self.epoll.fileno(),
            self.timer_fd,
            *self.pipes,
            *(s.fileno() for s in sockets),
        }


class Worker:
    """The interpreter of one context."""

    def __init__(self, inherited: Inherited) -> None:
        self._own = inherited
        self._window = inherited.window
        self._busy = inherited.window.b
        self._words = inherited.window.w
        self._epoll = inherited.epoll
        self._listener_fd = inherited.listener.fileno() if inherited.listener is not None else -1
        self._hangups = wire.HangupWatch(inherited.epoll.fileno(), inherited.index)
        self._connection = Connection(
            inherited.window, inherited.index, inherited.lock_fd, inherited.pipes, self._nudge
        )
        self._stdout = Stream("stdout", 1, self._connection)
        self._stderr = Stream("stderr", 2, self._connection)
        self._stdout.other, self._stderr.other = self._stderr, self._stdout
        self._display = Display(self._result)
        self._count = 0
        self._in_cell = False
        self._starting = False
        self._deferred = False
        self._child = False
        self._generation = generation()
        self._old_main = sys.modules["__main__"]
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        self._fresh = dict(main.__dict__)
        self._interpreter = Interpreter(main.__dict__)
        sys.modules["__main__"] = main
        self._install()

    # -- life ------------------------------------------------------------------------------------------------

    def serve(self) -> NoReturn:
        """Run cells until the zygote is gone."""
        poller = select.poll()
        control_fd = self._own.control.fileno()
        poller.register(control_fd, select.POLLIN)
        if self._listener_fd >= 0:
            poller.register(self._listener_fd, select.POLLIN)
        wait = poller.poll
        while True:
            for fd, event in wait():
                if fd == self._listener_fd:
                    self._accept()
                elif event & select.POLLIN:
                    self._from_zygote()
                else:
                    os._exit(0)

    def _accept(self) -> None:
        try:
            # The method under accept(): no socket object, which would cost a getsockname.
            fd: int = self._own.listener._accept()[0]  # type: ignore[union-attr]
        except OSError:
            return
        self._epoll.modify(self._listener_fd, select.EPOLLIN)
        try:
            body = _read_request(fd)
            request = _parse(body)
            if (
                request is None
                or request.get("op") != "run"
                or request.get("context", "default") != "default"
            ):
                send_request(self._own.control, fd, body)  # the zygote's business
            else:
                self._run(fd, request)
        except (OSError, ValueError):
            pass  # a client that went away or sent what is no request
        finally:
            os.close(fd)
            self._epoll.modify(self._listener_fd, 0)

    def _from_zygote(self) -> None:
        fd, body = receive_request(self._own.control)
        if fd < 0:
            return
        if self._listener_fd >= 0:
            self._epoll.modify(self._listener_fd, select.EPOLLIN)
        try:
            request = _parse(body)
            if request is not None:
                self._run(fd, request)
        finally:
            os.close(fd)
            if self._listener_fd >= 0:
                self._epoll.modify(self._listener_fd, 0)

    # -- one cell --------------------------------------------------------------------------------------------

    def _run(self, fd: int, request: dict[str, Any]) -> None:
        """Run one cell with everything that can go wrong around it, and answer on `fd`."""
        words, flags, own = self._words, self._busy, self._own
        seq = (words[SEQ] + 1) & 0xFFFFFFFF
        words[SEQ] = seq
        self._count += 1
        words[COUNT] = self._count
        self._starting = True
        own.stash_in.sendmsg([LENGTH.pack(seq)], [(*_DESCRIPTORS, LENGTH.pack(fd))])
        flags[BUSY] = 1
        self._hangups.add(fd)
        timeout = request.get("timeout_s")
        if timeout:
            wire.timer_set(own.timer_fd, timeout)
        self._connection.fd = fd
        life = generation()
        if life != self._generation:
            self._generation = life
            reseed(fresh=self._count == 1)
        status = "error"
        try:
            status = self._cell(request)
        except KeyboardInterrupt:
            status = "interrupted"  # a second one, while the first was being told
        finally:
            if self._child:
                self._leave()
            self._finish(fd, status, bool(timeout))
            if request.get("warm"):
                self._forget()

    def _finish(self, fd: int, status: str, timed: bool) -> None:
        self._in_cell = self._starting = False
        connection = self._connection
        while True:
            try:
                self._stdout.flush()
                self._stderr.flush()
                connection.settle()
                break
            except KeyboardInterrupt:  # pragma: no cover (raised by a handler that a cell installed)
                continue
        # Before the host may hang up: that must neither wake the zygote nor interrupt what the cell left running.
        self._busy[BUSY] = 0
        self._hangups.remove(fd)
        connection.raw(wire.end_frame(status, self._count))
        connection.fd = None
        # The host has its answer; what follows is off its path.
        if timed:
            wire.timer_set(self._own.timer_fd, 0)
        drain(self._own.stash_out, messages_max=1)
        self._busy[THREADED] = len(threading._active) > 1  # type: ignore[attr-defined]
        self._deferred = False

    def _cell(self, request: dict[str, Any]) -> str:
        code, env, cwd = request.get("code", ""), request.get("env"), request.get("cwd")
        # Not signal.getsignal, which tries to make an enum of the handler: an exception on the hot path.
        if _signal.getsignal(_SIGINT) is not self._on_interrupt_bound:
            signal.signal(signal.SIGINT, self._on_interrupt_bound)
        if sys.stdout is not self._stdout or sys.stderr is not self._stderr:
            sys.stdout, sys.stderr = self._stdout, self._stderr
        if "IPython" in code:
            magics.patch_display()
        before = None
        if env:
            before = {name: os.environ.get(name) for name in env}
            os.environ.update(env)
        try:
            self._in_cell = True
            self._starting = False
            if self._deferred:
                self._deferred = False
                raise KeyboardInterrupt
            if cwd:
                os.chdir(cwd)
            value = self._interpreter.run(code, self._count)
            if self._child:
                return "ok"
            if value is not NOTHING and value is not None:
                self._interpreter.namespace["_"] = value
                self._stdout.flush()
                self._display.value(value, main=True)
            if "matplotlib.pyplot" in sys.modules:
                self._figures()
            self._in_cell = False
            return "ok"
        except BaseException as error:
            self._in_cell = False
            return self._failed(error)
        finally:
            self._in_cell = False
            if before is not None:
                _restore(before)

    def _figures(self) -> None:
        self._stdout.flush()
        self._display.figures()
        self._display.patch_pyplot()

    def _failed(self, error: BaseException) -> str:
        """Say what ended the cell; its status."""
        if self._child:
            if not isinstance(error, SystemExit):
                os.write(2, describe(error)[2].encode("utf-8", "replace"))
                self._leave(1)
            self._leave(error.code if isinstance(error.code, int) else 1 if error.code else 0)
        name, value, text = describe(error)
        status = "error"
        cause = self._busy[CAUSE] if self._words[CAUSE_SEQ] == self._words[SEQ] else wire.NO_CAUSE
        if isinstance(error, KeyboardInterrupt) and cause:
            status = "interrupted"
            if cause == wire.TIMEOUT:
                status, name = "timed_out", "TimeoutError"
                value = "the cell ran longer than its timeout and was interrupted"
        elif isinstance(error, SystemExit):
            self._open_stdin()  # exit() closes it
            text += "note: the interpreter goes on, with its variables\n"
        self._stdout.flush()
        self._stderr.flush()
        self._connection.event({"type": "error", "name": name, "value": value, "traceback": text})
        if "matplotlib._pylab_helpers" in sys.modules:
            sys.modules["matplotlib._pylab_helpers"].Gcf.destroy_all()
        del error
        return status

    def _result(self, event: dict[str, Any]) -> None:
        if self._child:
            return
        self._stdout.flush()
        self._stderr.flush()
        self._connection.settle()
        self._connection.event(event)
        if self._deferred:
            self._deferred = False
            raise KeyboardInterrupt

    def _leave(self, code: int = 0) -> NoReturn:
        """End a process that a cell forked and that came back from the cell: it is not the worker."""
        self._stdout.flush()
        self._stderr.flush()
        os._exit(code & 0xFF)

    def _forget(self) -> None:
        """After a warm-up cell: as if it had never run, except that its pages and modules are there."""
        namespace = self._interpreter.namespace
        namespace.clear()
        namespace.update(self._fresh)
        self._count = 0
        self._words[COUNT] = 0
        for name in [name for name in linecache.cache if name.startswith("<cell ")]:
            del linecache.cache[name]
        prepare()
        gc.collect()
        gc.freeze()

    # -- what a process is set up with -----------------------------------------------------------------------

    def _install(self) -> None:
        sys.stdout = sys.__stdout__ = self._stdout  # type: ignore[assignment,misc]
        sys.stderr = sys.__stderr__ = self._stderr  # type: ignore[assignment,misc]
        self._open_stdin()
        sys.argv = [""]
        builtins.input = _no_input
        builtins.display = self._display.display  # type: ignore[attr-defined]
        magics.install(self._display)
        self._display.patch_pyplot()
        self._on_interrupt_bound: Callable[[int, Any], None] = self._on_interrupt
        signal.signal(signal.SIGINT, self._on_interrupt_bound)
        signal.signal(signal.SIGUSR2, _on_reseed)
        signal.siginterrupt(signal.SIGUSR2, False)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.register_at_fork(after_in_child=self._after_fork)
        reseed()

    def _open_stdin(self) -> None:
        """Descriptor 0 is /dev/null."""
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115

    def _after_fork(self) -> None:
        """In a child that a cell forked (os.fork, multiprocessing): never touch the host's connection."""
        self._child = True
        self._in_cell = True  # an interrupt ends it
        self._connection.fd = None
        self._stdout.to_descriptor()
        self._stderr.to_descriptor()

    def _on_interrupt(self, _signal: int, _frame: Any) -> None:
        if self._child:
            raise KeyboardInterrupt
        # The cause of an earlier cell: a signal that came too late. No cause at all: the cell signalled itself.
        if self._busy[CAUSE] and self._words[CAUSE_SEQ] != self._words[SEQ]:
            return
        if self._starting or self._connection.sending:
            self._deferred = True  # raised when the code is about to run, or the frame is out
            return
        if not self._in_cell:
            return
        raise KeyboardInterrupt

    def _nudge(self) -> None:
        """Have the zygote send what it holds for this cell."""
        with contextlib.suppress(OSError):  # it has enough of them waiting
            self._own.control.send(b"N", socket.MSG_DONTWAIT)


def _read_request(fd: int) -> bytes:
    """One length-prefixed message; ValueError if it is too long, cut off, or does not come."""
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    data = b""
    size = LENGTH.size
    while len(data) < size:
        if not ready.poll(wire.REQUEST_WAIT_MS):
            raise ValueError("no request came")
        part = os.read(fd, 65_536 if len(data) < LENGTH.size else max(size - len(data), 65_536))
        if not part:
            raise ValueError("cut off")
        data = data + part if data else part
        if size == LENGTH.size and len(data) >= size:
            size += LENGTH.unpack_from(data)[0]
            if size > wire.REQUEST_BYTES_MAX:
                raise ValueError("too long")
    return data[LENGTH.size : size]


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        request = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _no_input(prompt: object = "", /) -> NoReturn:
    raise RuntimeError(
        f"input({prompt!r}) cannot be answered: a cell has no keyboard; put the value in the code"
    )


def _on_reseed(_signal: int, _frame: Any) -> None:
    reseed()


def send_request(control: socket.socket, fd: int, body: bytes) -> None:
    """Pass a connection and the request read from it to the other process; BlockingIOError: it has too many."""
    if len(body) <= 64 * 1024:
        fds = array.array("i", [fd])
        control.sendmsg([b"R" + body], [(*_DESCRIPTORS, fds)], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return
    memory = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        view = memoryview(body)
        while view:
            view = view[os.write(memory, view) :]
        fds = array.array("i", [fd, memory])
        control.sendmsg([b"M"], [(*_DESCRIPTORS, fds)], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        os.close(memory)


def receive_request(control: socket.socket) -> tuple[int, bytes]:
    """The other end of `send_request`; descriptor -1 if the message carried none (a nudge), its body then."""
    space = socket.CMSG_SPACE(8)
    try:
        data, ancillary, _, _ = control.recvmsg(
            65 * 1024 + 1, space, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        return -1, b""
    fds = array.array("i")
    for level, kind, raw in ancillary:
        if (level, kind) == _DESCRIPTORS:
            fds.frombytes(raw[: len(raw) // fds.itemsize * fds.itemsize])
    if not fds:
        return -1, data
    if data[:1] == b"M" and len(fds) == 2:
        with open(fds[1], "rb") as memory:  # noqa: PTH123 (a descriptor)
            memory.seek(0)
            return fds[0], memory.read()
    return fds[0], data[1:]


def drain(stash: socket.socket, messages_max: int = 64) -> None:
    """Take what is in a stash and close it."""
    for _, fd in take(stash, messages_max):
        os.close(fd)


def take(stash: socket.socket, messages_max: int = 64) -> list[tuple[int, int]]:
    """(cell number, descriptor) of what lies in a stash; the caller owns the descriptors."""
    found: list[tuple[int, int]] = []
    for _ in range(messages_max):
        try:
            data, ancillary, _, _ = stash.recvmsg(
                4, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return found
        for _, _, raw in ancillary:
            found.append((LENGTH.unpack(data)[0], LENGTH.unpack(raw[:4])[0]))
    return found
