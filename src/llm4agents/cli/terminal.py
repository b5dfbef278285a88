"""This terminal, lent to a process of a sandbox: raw mode, size, keys; and given back whatever happens."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable
from types import FrameType
from typing import Any

from llm4agents import Sandbox
from llm4agents.errors import ConflictError, ConnectionLostError, LLM4AgentsError, ServerUnavailableError
from llm4agents.sdk._sync.terminal import Terminal

DETACH_KEY = b"\x1d"
"""Ctrl-]: leaves what runs to itself."""
_KEYS_BYTES = 65_536
_RETRIES = 3


class _Left(BaseException):
    """We were told to go (SIGHUP, SIGTERM); what runs in the sandbox goes on."""


def size() -> tuple[int, int]:
    """(rows, columns) of this terminal."""
    found = shutil.get_terminal_size()
    return max(1, found.lines), max(1, found.columns)


def status_of(terminal: Terminal) -> int:
    """What a shell would say of how it ended."""
    exit = terminal.exit
    if exit is None:
        return 0
    return 128 + (exit.signal or 0) if exit.exit_code is None else exit.exit_code


def lend(sandbox: Sandbox, terminal: Terminal, *, raw: bool) -> int | None:
    """Pass keys in and output out until the process ends: its exit code. None: it was detached from and goes on.

    `raw`: every key goes to the process (Ctrl-C too), but Ctrl-]. A lost connection is made again, from the byte at
    which it was lost. Raises SandboxPausedError, SandboxDiedError, ConnectionLostError; the terminal is as before.
    """
    failures = 0
    with _Screen(raw) as screen:
        while True:
            try:
                with contextlib.closing(_Detaching(terminal)):
                    return None if screen.show(terminal) else status_of(terminal)
            except _Left:
                return None
            except (ConnectionLostError, ServerUnavailableError):
                failures += 1
                if failures > _RETRIES:
                    raise
            process = sandbox.processes.connect(terminal.id)
            terminal = process.attach(offset=terminal.offset, stdin=process.info.stdin)


class _Detaching:
    def __init__(self, terminal: Terminal) -> None:
        self.close = terminal.detach


class _Screen:
    """stdin, stdout and the signals of this process, while they are lent."""

    def __init__(self, raw: bool) -> None:
        self._raw = raw
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._saved: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._open = True

    def __enter__(self) -> _Screen:
        sys.stdout.flush()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        for number in (signal.SIGHUP, signal.SIGTERM):
            self._handle(number, self._leave)
        if self._raw:
            self._saved = termios.tcgetattr(self._in)
            self._handle(signal.SIGWINCH, self._resized)
            self._handle(signal.SIGTSTP, self._stop)
            self._handle(signal.SIGCONT, self._go_on)
            tty.setraw(self._in, termios.TCSADRAIN)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._wake)

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _restore(self) -> None:
        if self._saved is not None:
            with contextlib.suppress(termios.error):  # the terminal itself may be gone
                termios.tcsetattr(self._in, termios.TCSADRAIN, self._saved)

    # Signals

    def _leave(self, *_: object) -> None:
        raise _Left

    def _tell(self, what: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, what)

    def _resized(self, *_: object) -> None:
        self._tell(b"w")

    def _stop(self, *_: object) -> None:
        """Stopped from outside: whoever sees the terminal then has it as it was."""
        self._restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)

    def _go_on(self, *_: object) -> None:
        signal.signal(signal.SIGTSTP, self._stop)
        with contextlib.suppress(termios.error):
            tty.setraw(self._in, termios.TCSADRAIN)
        self._tell(b"w")

    # Flow

    def show(self, terminal: Terminal) -> bool:
        """True when the user has detached."""
        problems: list[LLM4AgentsError | OSError] = []
        ended = threading.Event()

        def out() -> None:
            try:
                while (output := terminal.read()) is not None:
                    _write(self._out if output.channel == "stdout" else sys.stderr.fileno(), output.data)
            except (LLM4AgentsError, OSError) as error:
                problems.append(error)
            finally:
                ended.set()
                self._tell(b"e")

        reader = threading.Thread(target=out, name="output", daemon=True)
        reader.start()
        try:
            if self._raw:
                terminal.resize(*size())
            if self._keys(terminal, ended):
                return True
        except ConflictError:
            pass  # it has ended while something was typed
        finally:
            if not ended.is_set():
                terminal.detach()
            reader.join(5)
        if problems:
            raise problems[0]
        return False

    def _keys(self, terminal: Terminal, ended: threading.Event) -> bool:
        """Pass on what is typed until it has ended; True when the user has detached."""
        while not ended.is_set():
            watched = [self._woken, *([self._in] if self._open else [])]
            ready, _, _ = select.select(watched, [], [])
            if self._woken in ready and b"w" in os.read(self._woken, 64) and not ended.is_set():
                terminal.resize(*size())
            if self._in not in ready:
                continue
            keys = os.read(self._in, _KEYS_BYTES)
            if not keys:
                self._open = False
                terminal.close_stdin()
            elif self._raw and DETACH_KEY in keys:
                terminal.write(keys[: keys.index(DETACH_KEY)])
                return True
            else:
                terminal.write(keys)
        return False


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
