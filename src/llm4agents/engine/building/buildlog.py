"""What a build says: events, kept to a bound, told to whoever listens, written down when it is over.

Events are JSON-able dicts: `build` (what is built), `step` (its state), `log` (a line of its output), `progress` (of
what is no step), `end`. Not here: HTTP.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from llm4agents import limits
from llm4agents.fair import Held, surplus

Listener = Callable[[dict[str, Any]], None]
_STREAMS: Final = {1: "stdout", 2: "stderr"}


class BuildLog:
    """Of one build. Belongs to one event loop; only `progress` may be called from other threads."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque()
        self.dropped = 0
        """Events that are not kept any more."""
        self._bytes = 0
        self._listeners: list[Listener] = []
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._lines: dict[int, str] = {}

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell it of all that was kept, and from now on of everything; what is returned ends that."""
        for event in self.events:
            listener(event)
        self._listeners.append(listener)

        def leave() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return leave

    def add(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self._bytes += _size(event)
        while self._bytes > limits.BUILD_LOG_BYTES_MAX and len(self.events) > 1:
            self._bytes -= _size(self.events.popleft())
            self.dropped += 1
        for listener in list(self._listeners):
            listener(event)

    def progress(self, step: str, detail: str, fraction: float | None) -> None:
        """As `images.progress.Progress`; from any thread."""
        event = {"type": "progress", "step": step, "detail": detail, "fraction": fraction}
        if threading.get_ident() == self._thread:
            self.add(event)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self.add, event)

    def output(self, step: int, channel: int, data: bytes) -> None:
        """A piece of what a step says; told line by line."""
        decoder = self._decoders.setdefault(channel, codecs.getincrementaldecoder("utf-8")("replace"))
        text = self._lines.get(channel, "") + decoder.decode(data)
        *lines, rest = text.split("\n")
        # What a terminal would show in the end: of a bar that is drawn over itself its last form.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        while len(rest) >= limits.BUILD_LOG_LINE_BYTES_MAX:
            lines.append(rest[: limits.BUILD_LOG_LINE_BYTES_MAX])
            rest = rest[limits.BUILD_LOG_LINE_BYTES_MAX :]
        self._lines[channel] = rest
        for line in lines:
            self._line(step, channel, line)

    def end_of_output(self, step: int) -> None:
        for channel, rest in self._lines.items():
            if rest:
                self._line(step, channel, rest)
        self._lines.clear()
        self._decoders.clear()

    def _line(self, step: int, channel: int, text: str) -> None:
        if text:
            text = text[: limits.BUILD_LOG_LINE_BYTES_MAX]
            self.add({"type": "log", "step": step, "stream": _STREAMS[channel], "text": text})

    def write(self, path: Path, owner: Callable[[str], str] = lambda name: "") -> None:
        """Whole, in the place of what an earlier build has left there. `owner` says whose the log of a template is:
        past their bound the oldest of the owner of most go. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        tmp = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with tmp.open("w") as file:
                for event in self.events:
                    file.write(json.dumps(event) + "\n")
            tmp.replace(path)
        finally:
            tmp.unlink(missing_ok=True)
        _bound(path.parent, owner)


def read(path: Path) -> list[dict[str, Any]] | None:
    """The events that `write` wrote; None when there are none."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return None


def _size(event: dict[str, Any]) -> int:
    return 64 + len(str(event.get("text") or event.get("detail") or ""))


def _bound(directory: Path, owner: Callable[[str], str]) -> None:
    found = [Held(owner(path.stem), path.stat().st_mtime, path) for path in directory.glob("*.jsonl")]
    for path in surplus(found, limits.BUILD_LOGS_MAX):
        path.unlink(missing_ok=True)
