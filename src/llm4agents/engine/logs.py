"""A log per sandbox, `$STATE/logs/ID.jsonl`: what this server did with it, and the end of its console.

Lines come from structlog (`Logs.processor`: those with a `sandbox`) and from transitions. Each file is bounded, a
follower's queue too; both lose the oldest. What a guest wrote is in it only as text of a JSON string.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from llm4agents import limits
from llm4agents.store import SandboxRow, Store
from llm4agents.store.store import TERMINAL, Stamp
from llm4agents.vmm.shim import console_tail, read_exit

LINE_BYTES_MAX: Final = 16_384
FOLLOW_LINES_MAX: Final = 1_000
CONSOLE_POLL_S: Final = 1.0
_ID = re.compile(r"sbx_[a-z0-9]{20}")


class Logs:
    """`run_dir(sandbox)`: where its machine's console is written while it lives."""

    def __init__(self, directory: Path, run_dir: Callable[[str], Path], store: Store) -> None:
        self.directory, self._run_dir = directory, run_dir
        self._followers: dict[str, list[tuple[deque[dict[str, Any]], asyncio.Event]]] = {}
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        store.on_transition.append(self._changed)

    def processor(self, _: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """For structlog, before its renderer: keeps a copy of a line that is about a sandbox."""
        sandbox = line.get("sandbox")
        if isinstance(sandbox, str) and _ID.fullmatch(sandbox):
            more = {name: value for name, value in line.items() if name not in ("sandbox", "timestamp")}
            self.add(sandbox, str(more.pop("event", "")), **more)
        return line

    def add(self, sandbox: str, event: str, **more: Any) -> None:
        """One line. What cannot be written (a full disk) is told to followers and lost."""
        line = {"type": "log", "at": _now(), "event": event, **more}
        text = json.dumps(line, default=str)
        if len(text) > LINE_BYTES_MAX:
            line = {"type": "log", "at": line["at"], "event": event, "cut": text[: LINE_BYTES_MAX // 2]}
            text = json.dumps(line)
        with contextlib.suppress(OSError):
            path = self._path(sandbox)
            with path.open("ab") as file:
                file.write(text.encode() + b"\n")
                size = file.tell()
            if size > limits.SANDBOX_LOG_BYTES_MAX:
                _trim(path)
        for queue, news in self._followers.get(sandbox, ()):
            queue.append(line)
            news.set()

    def keep_console(self, sandbox: str) -> None:
        """Keep the end of its console, which is removed with its machine's directory."""
        where = self._run_dir(sandbox)
        # Of a machine that has ended only the exit record is left.
        tail = console_tail(where, limits.CONSOLE_BYTES_MAX) or read_exit(where).console_tail
        if tail:
            self.add(sandbox, "console", text=tail[-limits.CONSOLE_BYTES_MAX :])

    def read(self, sandbox: str) -> list[dict[str, Any]]:
        """What is kept, oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for text in self._path(sandbox).read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # a line that a full disk has cut
                    found.append(json.loads(text))
        return found

    def console(self, sandbox: str) -> str:
        """The end of the console of one that lives; empty when it does not."""
        return console_tail(self._run_dir(sandbox), limits.CONSOLE_BYTES_MAX)

    async def follow(self, sandbox: str) -> AsyncGenerator[dict[str, Any], None]:
        """What is kept, the end of its console, then both as they come; ends with the sandbox."""
        queue: deque[dict[str, Any]] = deque(maxlen=FOLLOW_LINES_MAX)
        news = asyncio.Event()
        mine = (queue, news)
        self._followers.setdefault(sandbox, []).append(mine)
        try:
            over = False
            for line in self.read(sandbox):
                yield line
                over = over or _ends(line)
            place = 0
            while not over:
                text, place = self._console_since(sandbox, place)
                if text:
                    yield {"type": "console", "text": text}
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CONSOLE_POLL_S):
                        await news.wait()
                news.clear()
                while queue:
                    line = queue.popleft()
                    yield line
                    over = over or _ends(line)
        finally:
            self._followers[sandbox].remove(mine)
            if not self._followers[sandbox]:
                del self._followers[sandbox]

    def sweep(self, known: Callable[[str], bool]) -> None:
        """Remove the logs of sandboxes that are not in the store any more."""
        for path in self.directory.glob("*.jsonl"):
            if not known(path.stem):
                path.unlink(missing_ok=True)

    def _console_since(self, sandbox: str, place: int) -> tuple[str, int]:
        """What the console has said behind byte `place` of its log, at most limits.CONSOLE_BYTES_MAX, the newest."""
        with contextlib.suppress(OSError), (self._run_dir(sandbox) / "serial.log").open("rb") as file:
            size = file.seek(0, 2)
            if size < place:  # it was rotated
                place = 0
            file.seek(max(place, size - limits.CONSOLE_BYTES_MAX))
            said = file.read(limits.CONSOLE_BYTES_MAX)
            return said.decode(errors="replace"), file.tell()
        return "", place

    def _changed(self, row: SandboxRow, was: str | None, to: str, reason: str | None, _: Stamp) -> None:
        if to in TERMINAL:
            self.keep_console(row.id)
        self.add(row.id, "state", **{"from": was, "to": to, "reason": reason})

    def _path(self, sandbox: str) -> Path:
        return self.directory / f"{sandbox}.jsonl"


def _ends(line: dict[str, Any]) -> bool:
    return line.get("event") == "state" and line.get("to") in TERMINAL


def _trim(path: Path) -> None:
    """Keep the newer half, whole lines."""
    kept = path.read_bytes()[-limits.SANDBOX_LOG_BYTES_MAX // 2 :]
    partial = path.with_suffix(".partial")
    partial.write_bytes(kept[kept.find(b"\n") + 1 :])
    partial.rename(path)


def _now() -> str:
    return datetime.now(UTC).isoformat()
