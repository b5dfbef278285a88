"""The audit of one sandbox: lines of JSON in two files that take turns, by one writer.

`audit/ID.jsonl` grows to half of `limits.AUDIT_BYTES_MAX`, becomes `audit/ID.1.jsonl`, and the new one begins with a
record that says how many lines went with the one before. Records beyond a rate are summed up by what they have in
common, with `repeated`: a flood costs neither the disk nor the lines before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm4agents import limits

_FLUSH_S = 0.02
_SUM_S = 1.0
_SUMS_MAX = 64
_TEXT_MAX = 512
_COMMON = ("kind", "verdict", "rule", "reason", "protocol", "port")
_ADDED = ("bytes_in", "bytes_out", "repeated")


class Audit:
    """Belongs to one event loop; nothing it does raises: what could not be written is counted and told later."""

    def __init__(self, directory: Path, sandbox: str, *, bytes_max: int = limits.AUDIT_BYTES_MAX) -> None:
        self._path = directory / f"{sandbox}.jsonl"
        self._old = directory / f"{sandbox}.1.jsonl"
        self._sandbox, self._file_bytes_max = sandbox, bytes_max // 2
        self._lines: list[bytes] = []
        self._sums: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._flush_soon: asyncio.TimerHandle | None = None
        self._sum_soon: asyncio.TimerHandle | None = None
        self._budget, self._budget_at = float(limits.AUDIT_BURST), time.monotonic()
        self._lost = 0
        self._size: int | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """A record without `at` and `sandbox`, which are added; None values are left out."""
        now = time.monotonic()
        rate = limits.AUDIT_RECORDS_PER_S
        self._budget = min(float(limits.AUDIT_BURST), self._budget + (now - self._budget_at) * rate)
        self._budget_at = now
        whole = {"at": round(time.time(), 3), "sandbox": self._sandbox}
        whole.update((key, _short(value)) for key, value in record.items() if value is not None)
        if self._budget < 1:
            self._sum(whole)
            return
        self._budget -= 1
        self._line(whole)

    def _line(self, record: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        if self._flush_soon is None:
            self._flush_soon = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def _sum(self, record: dict[str, Any]) -> None:
        key = tuple(record.get(name) for name in _COMMON)
        found = self._sums.get(key)
        if found is None and len(self._sums) >= _SUMS_MAX:
            key = (record.get("kind"), record.get("verdict"))  # of many kinds: by verdict alone
            found = self._sums.get(key)
            record = {
                name: record[name] for name in ("at", "sandbox", "kind", "verdict", *_ADDED) if name in record
            }
            record["reason"] = "more records of many kinds than are written one by one"
        if found is None:
            self._sums[key] = {**record, "repeated": record.get("repeated", 1)}
        else:
            for name in _ADDED[:2]:
                if name in record:
                    found[name] = found.get(name, 0) + record[name]
            found["repeated"] += record.get("repeated", 1)
        if self._sum_soon is None:
            self._sum_soon = asyncio.get_running_loop().call_later(_SUM_S, self._summed)

    def _summed(self) -> None:
        if self._sum_soon is not None:
            self._sum_soon.cancel()
            self._sum_soon = None
        sums, self._sums = self._sums, {}
        for record in sums.values():
            self._line(record)

    def flush(self) -> None:
        """What is waiting goes into the file now."""
        if self._flush_soon is not None:
            self._flush_soon.cancel()
            self._flush_soon = None
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            self._append(lines)
        except OSError:
            self._lost += len(lines)

    def _append(self, lines: list[bytes]) -> None:
        if self._size is None:
            self._size = self._begin()
        if self._size > self._file_bytes_max:
            gone = _count(self._old)
            self._path.replace(self._old)
            self._size = 0
            if gone:
                lines.insert(0, self._own(f"{gone} older records have made room", repeated=gone))
        if self._lost:
            lines.insert(0, self._own("these could not be written", repeated=self._lost))
        raw = b"".join(lines)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            done = os.write(fd, raw)
            if done != len(raw):
                os.ftruncate(fd, max(0, os.fstat(fd).st_size - done))
                raise OSError(28, "the disk is full")
        finally:
            os.close(fd)
        self._lost = 0
        self._size += len(raw)

    def _begin(self) -> int:
        """The size of the file there is; a line that a dead writer cut short is ended."""
        with contextlib.suppress(FileNotFoundError):
            with self._path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                if size:
                    file.seek(size - 1)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                        size += 1
            return size
        return 0

    def _own(self, reason: str, **more: Any) -> bytes:
        record = {
            "at": round(time.time(), 3),
            "sandbox": self._sandbox,
            "kind": "gateway",
            "reason": reason,
            **more,
        }
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"

    def close(self) -> None:
        self._summed()
        self.flush()


def _count(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _TEXT_MAX:
        return value[: _TEXT_MAX - 1] + "…"
    return value
