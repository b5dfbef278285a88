"""`shell`, `exec -t`, `attach`, `ps`, `logs` as a user at a terminal has them, with a real microVM."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from ..support import Node, eventually

pytestmark = pytest.mark.vm


class Desk:
    """A terminal with one command of ours in it, seen from the user's side."""

    def __init__(self, node: Node, *args: str, rows: int = 33, cols: int = 111) -> None:
        self.master, slave = pty.openpty()
        self.resize(rows, cols)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.said = b""

        def own() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llm4agents", *args],
            env={**node.env, "TERM": "xterm"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=own,
        )

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def until(self, seen: Callable[[bytes], bool], timeout_s: float = 40) -> None:
        end = time.monotonic() + timeout_s
        while not seen(self.said):
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, self.said
            self.said += os.read(self.master, 65_536)

    def ended(self, timeout_s: float = 40) -> int:
        """Its exit code; the terminal is as it was before."""
        with contextlib.suppress(AssertionError):
            self.until(lambda _: self.process.poll() is not None, 0.1)
        code = self._wait(timeout_s)
        assert termios.tcgetattr(self.slave)[:6] == self.before[:6]
        return code

    def _wait(self, timeout_s: float) -> int:
        end = time.monotonic() + timeout_s
        while (code := self.process.poll()) is None:
            assert time.monotonic() < end, self.said
            if select.select([self.master], [], [], 0.05)[0]:
                self.said += os.read(self.master, 65_536)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(node: Node, *args: str, **size: int) -> Desk:
        made.append(Desk(node, *args, **size))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def box(shared_node: Node) -> Iterator[tuple[Node, str]]:
    sandbox = shared_node.create()
    yield shared_node, sandbox
    shared_node.call("DELETE", f"/v1/sandboxes/{sandbox}")


def cli(node: Node, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-P", "-m", "llm4agents", *args]
    return subprocess.run(command, env=node.env, input=stdin, capture_output=True, timeout=60)


def test_a_shell_is_a_real_terminal(box: tuple[Node, str], desk: Callable[..., Desk]) -> None:
    node, sandbox = box
    at = desk(node, "shell", sandbox)
    at.type(b"stty size; echo $TERM\r")
    at.until(lambda said: b"33 111\r\n" in said and b"xterm\r\n" in said)
    assert not termios.tcgetattr(at.slave)[3] & (termios.ECHO | termios.ICANON | termios.ISIG)  # raw
    at.resize(20, 70)
    at.type(b"sleep 0.2; stty size\r")
    at.until(lambda said: b"20 70\r\n" in said)
    at.type(b"sleep 100\r")
    eventually(lambda: node.exec(sandbox, "pgrep -x sleep")["exit_code"] == 0)
    at.type(b"\x03")
    at.type(b"echo on $((5*5))\r")
    at.until(lambda said: b"on 25\r\n" in said)
    at.type(b"exit 7\r")
    assert at.ended() == 7
    assert node.call("GET", f"/v1/sandboxes/{sandbox}/processes")["data"] == []


def test_leaving_a_shell_and_coming_back(box: tuple[Node, str], desk: Callable[..., Desk]) -> None:
    node, sandbox = box
    at = desk(node, "shell", "--tag", "mine", sandbox)
    at.type(b"left=alone\r\x1d")
    at.until(lambda said: b"detached" in said)
    assert at.ended() == 0
    listed = cli(node, "ps", sandbox).stdout
    assert b"mine" in listed and b"running" in listed
    again = desk(node, "attach", sandbox, "mine")
    again.type(b"echo still $left\r")
    again.until(lambda said: b"still alone\r\n" in said)
    # Told to go, it gives the terminal back and leaves the shell.
    again.process.send_signal(signal.SIGTERM)
    assert again.ended() == 0
    last = desk(node, "attach", sandbox, "mine", "--from", "0")
    last.until(lambda said: b"still alone\r\n" in said)
    last.type(b"kill -9 $$\r")
    assert last.ended() == 128 + 9
    assert b"still alone" in cli(node, "logs", sandbox, "mine").stdout
    process = node.call("GET", f"/v1/sandboxes/{sandbox}/processes")["data"][0]["id"]
    node.call("DELETE", f"/v1/sandboxes/{sandbox}/processes/{process}")


def test_a_shell_goes_on_over_a_new_server(nodes: Callable[..., Node], desk: Callable[..., Desk]) -> None:
    node = nodes().start()
    sandbox = node.create()
    at = desk(node, "shell", sandbox)
    at.type(b"echo before $((1+1))\r")
    at.until(lambda said: b"before 2\r\n" in said)
    node.kill9()  # the shell's own client starts the next one
    at.type(b"echo after $((2+2))\r")
    at.until(lambda said: b"after 4\r\n" in said)
    assert at.said.count(b"before 2\r\n") == 1
    at.type(b"exit 3\r")
    assert at.ended() == 3
    assert cli(node, "server", "stop").returncode == 0


def test_the_sandboxs_end_gives_the_terminal_back(box: tuple[Node, str], desk: Callable[..., Desk]) -> None:
    node, _ = box
    sandbox = node.create()
    at = desk(node, "shell", sandbox)
    at.type(b"echo up\r")
    at.until(lambda said: said.count(b"up") >= 2)
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")
    assert at.ended() == 4
    assert b"error:" in at.said


def test_commands_with_and_without_a_terminal(box: tuple[Node, str], desk: Callable[..., Desk]) -> None:
    node, sandbox = box
    at = desk(node, "exec", "-t", sandbox, "tty; exit 5")
    assert at.ended() == 5
    assert b"/dev/pts/" in at.said
    piped = cli(node, "shell", sandbox, stdin=b"echo out; echo err >&2; exit 9\n")
    assert (piped.returncode, piped.stdout, piped.stderr) == (9, b"out\n", b"err\n")
    started = cli(node, "exec", "-d", "--tag", "job", sandbox, "echo working; sleep 0.5; echo done; exit 2")
    id = started.stdout.decode().strip()
    assert id.startswith("proc_")
    followed = cli(node, "logs", "-f", sandbox, "job")
    assert followed.stdout == b"working\ndone\n"
    attached = cli(node, "attach", sandbox, id[:12], "--from", "8")
    assert (attached.returncode, attached.stdout) == (2, b"done\n")
    node.call("DELETE", f"/v1/sandboxes/{sandbox}/processes/{id}")
    assert cli(node, "logs", sandbox, "job").returncode == 3


def test_ctrl_c_kills_what_exec_runs(box: tuple[Node, str], desk: Callable[..., Desk]) -> None:
    node, sandbox = box
    at = desk(node, "exec", sandbox, "echo up; exec sleep 4711")
    at.until(lambda said: b"up\r\n" in said)
    at.type(b"\x03")
    assert at.ended() == 130
    eventually(lambda: node.exec(sandbox, "pgrep -fx 'sleep 4711'")["exit_code"] == 1)
