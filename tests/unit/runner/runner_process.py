"""The real zygote as a process of its own, over a unix socket, with this test run's Python."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

ZYGOTE = Path(__file__).parents[3] / "src/llm4agents/images/data/runner/zygote.py"
WAIT_S = 60.0
"""Only how long a broken runner may hold up a test run."""


class Cell:
    """A cell under way: its events as they come."""

    def __init__(self, path: str, request: dict[str, Any]) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(path)
        body = json.dumps(request).encode()
        self.socket.sendall(struct.pack("<I", len(body)) + body)
        self._stream = self.socket.makefile("rb")
        self.events: list[dict[str, Any]] = []

    def next(self) -> dict[str, Any]:
        head = self._stream.read(4)
        assert len(head) == 4, f"closed without an end, after {self.events[-3:]}"
        event: dict[str, Any] = json.loads(self._stream.read(struct.unpack("<I", head)[0]))
        self.events.append(event)
        return event

    def wait(self) -> Cell:
        while self.next()["type"] != "end":
            pass
        self.close()
        return self

    def until(self, text: str) -> Cell:
        """Read until the output contains `text`."""
        while text not in self.stdout:
            assert self.next()["type"] != "end", self.events
        return self

    def close(self) -> None:
        self._stream.close()
        self.socket.close()

    def text(self, kind: str) -> str:
        return "".join(event["text"] for event in self.events if event["type"] == kind)

    @property
    def stdout(self) -> str:
        return self.text("stdout")

    @property
    def stderr(self) -> str:
        return self.text("stderr")

    @property
    def results(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == "result"]

    @property
    def value(self) -> str:
        """text/plain of the last expression."""
        return next(str(event["data"]["text/plain"]) for event in self.results if event["main"])

    @property
    def error(self) -> dict[str, Any]:
        return next(event for event in self.events if event["type"] == "error")

    @property
    def status(self) -> str:
        return str(self.events[-1]["status"])


class Runner:
    """A running zygote."""

    def __init__(self, directory: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.path = str(directory / "python.sock")
        ready = directory / "ready"
        with (directory / "log").open("wb") as log:
            paths = ["--socket", self.path, "--ready", str(ready), "--cwd", str(directory)]
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(ZYGOTE), *paths, "--grace-s", "0.5", *arguments],
                env={**os.environ, "HOME": str(directory), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait(ready)
        self.ready: dict[str, Any] = json.loads(ready.read_text())

    def _wait(self, ready: Path) -> None:
        """Until the listener exists and a first (queued) ping is answered; then the warm-up's answer is near."""
        while not Path(self.path).exists() or not Path(self.path + ".control").exists():
            assert self.process.poll() is None, self.log
            os.sched_yield()
        while not ready.exists():
            assert self.process.poll() is None, self.log
            os.sched_yield()

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def start(self, code: str, **more: Any) -> Cell:
        return Cell(self.path, {"op": "run", "context": "default", "code": code, **more})

    def run(self, code: str, **more: Any) -> Cell:
        return self.start(code, **more).wait()

    def ok(self, code: str, **more: Any) -> Cell:
        cell = self.run(code, **more)
        assert cell.status == "ok", cell.events
        return cell

    def op(self, op: str, context: str = "default", *, control: bool = False) -> Cell:
        return Cell(self.path + (".control" if control else ""), {"op": op, "context": context}).wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == 0, self.log
