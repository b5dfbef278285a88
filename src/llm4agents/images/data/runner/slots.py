"""One context as the zygote sees it: its worker's process, its pipes, and what is said on the worker's behalf.

The descriptors of a slot outlive its workers: a process that an interpreter left behind goes on writing to the
same pipes, and cells that wait for a dead worker are taken by the next. Not here: accepting and reading requests
(`service`).
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from . import wire
from .wire import BIG, BUSY, CAUSE, CAUSE_SEQ, COUNT, LATE, PUMPING, SENT, SEQ, THREADED, Window
from .worker import Inherited, drain, receive_request, send_request, take

Handler = Callable[[int], None]


class Events(Protocol):
    """The zygote's loop, as slots and peers need it."""

    def watch(self, fd: int, events: int, handler: Handler) -> None: ...
    def change(self, fd: int, events: int) -> None: ...
    def unwatch(self, fd: int) -> None: ...


class Peer:
    """A host's connection that the zygote writes frames to and never waits for."""

    def __init__(self, events: Events, fd: int, *, lock: Callable[[bool], bool] | None = None) -> None:
        self._events = events
        self._socket = socket.socket(fileno=fd)
        self._frames: deque[bytes] = deque()
        self._lock = lock
        self._last = False
        self._watched = False
        self.closed = False
        self.on_empty: Callable[[], None] | None = None

    @property
    def waiting(self) -> bool:
        """Whether frames are left that the host has not taken."""
        return bool(self._frames)

    def post(self, frames: list[bytes], *, last: bool = False) -> None:
        """Send `frames` now or when the host reads; `last`: then close."""
        self._frames += frames
        self._last = self._last or last
        self.flush()

    def flush(self, _event: int = 0) -> None:
        if self.closed:
            return
        if self._lock is not None and not self._lock(True):
            return  # the worker is in the middle of a large frame, and nudges us after it
        try:
            while self._frames:
                sent = self._socket.send(self._frames[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                if sent == len(self._frames[0]):
                    self._frames.popleft()
                else:
                    self._frames[0] = self._frames[0][sent:]
        except BlockingIOError:
            self._wait()
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                sys.stderr.write(f"runner: sending: {error}\n")
            self.close()
        finally:
            if self._lock is not None:
                self._lock(False)
        self._done()

    def _wait(self) -> None:
        if not self._watched:
            self._watched = True
            self._events.watch(self._socket.fileno(), select.EPOLLOUT, self.flush)

    def _done(self) -> None:
        if self._watched and not self.closed:
            self._watched = False
            self._events.unwatch(self._socket.fileno())
        if self._last:
            self.close()
        if self.on_empty is not None:
            self.on_empty()

    def close(self) -> None:
        if self.closed:
            return
        if self._watched:
            self._events.unwatch(self._socket.fileno())
        self.closed = True
        self._frames.clear()
        # A process that a cell forked may hold the connection too; the host must see its end all the same.
        if self._last:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Pipe:
    """What C code and child processes write to descriptor 1 or 2 of a context."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.read_fd, self.write_fd = os.pipe()  # both close-on-exec
        os.set_blocking(self.read_fd, False)
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.late = ""


class Slot:
    """A context: its worker and everything the two share."""

    def __init__(
        self,
        name: str,
        index: int,
        events: Events,
        epoll: select.epoll,
        memory: memoryview,
        lock_fd: int,
        listener: socket.socket | None,
        spawn: Callable[[Slot], int],
        dispatch: Callable[[int, bytes], None],
        grace_s: float,
    ) -> None:
        self.name = name
        self.index = index
        self.window = Window(memory, index)
        self.control, worker_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stash_in, self._stash = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._pipes = (_Pipe("stdout"), _Pipe("stderr"))
        self._timer_fd = wire.timer_create()
        self.inherited = Inherited(
            name=name,
            index=index,
            window=self.window,
            lock_fd=lock_fd,
            epoll=epoll,
            listener=listener,
            control=worker_control,
            stash_in=stash_in,
            stash_out=self._stash,
            pipes=(self._pipes[0].read_fd, self._pipes[1].read_fd),
            timer_fd=self._timer_fd,
        )
        self._events = events
        self._lock_fd = lock_fd
        self._spawn = spawn
        self._dispatch = dispatch
        self._grace_s = grace_s
        self.pid = 0
        self._pidfd = -1
        self._peer: Peer | None = None
        self._peer_seq = -1
        self._in_pump = False
        self._grace_seq = -1
        self.kill_at: float | None = None
        """Monotonic seconds at which a worker that does not obey is killed."""
        self._restarts: list[Peer] = []
        events.watch(self.control.fileno(), select.EPOLLIN, self._on_control)
        events.watch(self._timer_fd, select.EPOLLIN, self._on_timer)
        for pipe in self._pipes:
            events.watch(pipe.read_fd, select.EPOLLIN, lambda event, pipe=pipe: self._pump(pipe))  # type: ignore[misc]
        events.watch(wire.HANGUP_TAG + index, -1, self._on_hangup)
        self.start()

    @property
    def write_fds(self) -> tuple[int, int]:
        return self._pipes[0].write_fd, self._pipes[1].write_fd

    # -- the worker's life -----------------------------------------------------------------------------------

    def start(self) -> None:
        self.pid = self._spawn(self)
        self._pidfd = os.pidfd_open(self.pid)
        self._events.watch(self._pidfd, select.EPOLLIN, self._on_death)

    def run(self, fd: int, body: bytes) -> None:
        """Have the worker run a request, after what already waits. Takes the descriptor."""
        try:
            send_request(self.control, fd, body)
        except OSError:
            refusal = wire.error_frame("TooManyCells", f"too many cells wait for context {self.name!r}", "")
            Peer(self._events, os.dup(fd)).post([refusal, wire.end_frame("error", 0)], last=True)
        os.close(fd)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def interrupt(self, cause: int) -> None:
        """SIGINT to the running cell and the processes it started, as a terminal's ^C would."""
        if not self.window.b[BUSY]:
            return
        self.window.b[CAUSE] = cause
        self.window.w[CAUSE_SEQ] = self.window.w[SEQ]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)

    def restart(self, peer: Peer) -> None:
        """Replace the worker; `peer` hears when the new one is there. A running cell has RESTART_GRACE_S."""
        self._restarts.append(peer)
        if self.window.b[BUSY]:
            told = self.window.b[CAUSE] and self.window.w[CAUSE_SEQ] == self.window.w[SEQ]
            self._die_by(wire.RESTART, wire.RESTART_GRACE_S / 4 if told else wire.RESTART_GRACE_S)
        else:
            self.kill()

    def kill(self) -> None:
        self.kill_at = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _die_by(self, cause: int, grace_s: float) -> None:
        self.interrupt(cause)
        self._grace_seq = self.window.w[SEQ]
        self.kill_at = time.monotonic() + grace_s

    def tick(self, now: float) -> None:
        """Kill what had its grace; called when `kill_at` may have passed."""
        if self.kill_at is None:
            return
        over = not self.window.b[BUSY] or self.window.w[SEQ] != self._grace_seq
        if over and not self._restarts:
            self.kill_at = None
        elif now >= self.kill_at or over:
            self.kill()

    def _on_timer(self, _event: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._timer_fd, 8)
            if self.window.b[BUSY]:
                self._die_by(wire.TIMEOUT, self._grace_s)

    def _on_hangup(self, _event: int) -> None:
        self.interrupt(wire.INTERRUPT)

    def _on_death(self, _event: int) -> None:
        _, status = os.waitpid(self.pid, 0)
        self._events.unwatch(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        window = self.window
        if window.b[BUSY]:
            for pipe in self._pipes:
                self._pump(pipe, bytes_max=1024 * 1024, dead=True)
            peer = self._current_peer()
            torn = window.b[BIG]
            self._peer = None
            if peer is not None:
                peer._lock = None  # its holder is gone
                peer.on_empty = None
                peer.post([] if torn else self._obituary(status), last=True)
        elif self._peer is not None:
            self._peer.close()
            self._peer = None
        wire.timer_set(self._timer_fd, 0)
        drain(self._stash)
        for flag in (BUSY, PUMPING, BIG, CAUSE, THREADED):
            window.b[flag] = 0
        window.w[COUNT] = 0
        self.kill_at = None
        for pipe in self._pipes:
            self._events.change(pipe.read_fd, select.EPOLLIN)
        self.start()
        for waiting in self._restarts:
            waiting.post([wire.end_frame("ok", 0)], last=True)
        self._restarts.clear()

    def _obituary(self, status: int) -> list[bytes]:
        code = os.waitstatus_to_exitcode(status)
        window = self.window
        how = f"exited with code {code}"
        if code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name} (signal {-code})"
            except ValueError:
                how = f"was killed by signal {-code}"
            if code == -signal.SIGKILL:
                how += ", perhaps for want of memory"
        cause = window.b[CAUSE] if window.w[CAUSE_SEQ] == window.w[SEQ] else wire.NO_CAUSE
        end = "died"
        if self._restarts and code == -signal.SIGKILL:
            how = "was restarted"
        elif cause == wire.TIMEOUT and code == -signal.SIGKILL:
            how = f"was killed: the cell's time was over and it did not stop within {self._grace_s:g} s"
            end = "timed_out"
        value = f"the Python interpreter {how}; its variables are gone, the next cell gets a new one"
        count = window.w[COUNT]
        return [
            wire.error_frame("InterpreterDied", value, f"InterpreterDied: {value}\n"),
            wire.end_frame(end, count),
        ]

    # -- its output ------------------------------------------------------------------------------------------

    def _current_peer(self) -> Peer | None:
        """The running cell's connection, taken out of the stash when it is first needed."""
        seq = self.window.w[SEQ]
        if self._peer is not None and self._peer_seq != seq:
            self._peer.close()
            self._peer = None
        for number, fd in take(self._stash):
            if number == seq and self._peer is None:
                self._peer = Peer(self._events, fd, lock=self._lock)
                self._peer_seq = seq
                self._peer.on_empty = self._pumped
            else:
                os.close(fd)
        if self._peer is not None and self._peer.closed:
            return None
        return self._peer

    def _lock(self, take_it: bool) -> bool:
        """The lock that a worker holds while it writes a large frame; POSIX, so it dies with its holder."""
        try:
            how = fcntl.LOCK_EX | fcntl.LOCK_NB if take_it else fcntl.LOCK_UN
            fcntl.lockf(self._lock_fd, how, 1, self.index)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _pump(self, pipe: _Pipe, bytes_max: int = 65_536, *, dead: bool = False) -> None:
        window = self.window
        if self._waiting() and not dead:
            return  # told before it was switched off
        window.b[PUMPING] = 1  # before the read: the worker's settle() looks at the pipe, then at this
        self._in_pump = True
        try:
            while bytes_max > 0 and (dead or not self._waiting()):
                data = os.read(pipe.read_fd, min(bytes_max, 65_536))
                bytes_max -= len(data)
                window.w[SENT] = (window.w[SENT] + len(data)) & 0xFFFFFFFF
                self._deliver(pipe, pipe.decode(data))
        except BlockingIOError:
            pass
        self._in_pump = False
        if self._waiting():
            for each in self._pipes:
                self._events.change(each.read_fd, 0)  # no more until the host has read this
        else:
            window.b[PUMPING] = 0

    def _waiting(self) -> bool:
        return self._peer is not None and self._peer.waiting

    def _deliver(self, pipe: _Pipe, text: str) -> None:
        peer = self._current_peer() if self.window.b[BUSY] else None
        if not text:
            return
        if peer is not None:
            peer.post(wire.text_frames(pipe.kind, pipe.late + text))
            pipe.late = ""
        elif not (self.window.b[BUSY] and self._peer_seq == self.window.w[SEQ]):
            # Between cells: for the next one, within reason. (With a peer that hung up: nobody wants it.)
            pipe.late = (pipe.late + text)[-wire.LATE_CHARS_MAX :]
        self.window.b[LATE] = int(bool(self._pipes[0].late or self._pipes[1].late))

    def _pumped(self) -> None:
        if self.window.b[PUMPING] and not self._in_pump:
            self.window.b[PUMPING] = 0
            for pipe in self._pipes:
                self._events.change(pipe.read_fd, select.EPOLLIN)

    def _on_control(self, _event: int) -> None:
        fd, body = receive_request(self.control)
        if fd >= 0:
            self._dispatch(fd, body)
            return
        if not self.window.b[BUSY]:
            return
        peer = self._current_peer()
        for pipe in self._pipes:
            if peer is not None and pipe.late:
                peer.post(wire.text_frames(pipe.kind, pipe.late))
            pipe.late = ""  # without a peer nobody wants it
        if peer is not None and peer.waiting:
            self.window.b[PUMPING] = 1
            peer.flush()
        self.window.b[LATE] = 0
