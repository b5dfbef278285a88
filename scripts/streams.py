"""All tests, in parts, a few parts at a time: what `scripts/test` without arguments runs when all is set up.

A part is one command, mostly a pytest process with some files of one directory; its output is printed whole when it
ends. At the end come the failing tests of all parts and a total. Exit code: 0 if every part ended with 0.

TEST_STREAMS says how many at a time (default: as many as there are processors and memory for, four at most). Ctrl-C is
passed on to what runs, which cleans up; a second one ends it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
STREAMS_MAX = 4
STREAM_MIB = 3_584
"""Memory of the host for each stream: a few guests and a server."""
FILES_MAX = 5
"""Of a part: few enough that the last parts end at about the same time, many enough that starting pytest is nothing."""
WHOLE = ("tests/unit", "tests/lab", "tests/barrier/attacks")
"""Directories that are one part each, with all below them, and come first: the first is quickest to find a mistake, the
second takes longest, the third has one laboratory and server for all its files."""
LAST = "tests/vm"
"""The one of many small parts."""


@dataclass
class Part:
    name: str
    command: Sequence[str]
    began: float = 0.0
    took_s: float = 0.0
    code: int | None = None
    process: subprocess.Popen[bytes] | None = None
    output: IO[bytes] | None = None
    words: list[str] = field(default_factory=list)
    """Lines of pytest's short summary."""
    counts: Counter[str] = field(default_factory=Counter)


def parts(root: Path = ROOT) -> list[tuple[str, list[str]]]:
    """(name, files or directories) of every part: together all test files below `root`/tests, each once."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        file = path.relative_to(root)
        whole = next((name for name in WHOLE if file.is_relative_to(name)), None)
        found.setdefault(whole or str(file.parent), []).append(str(file))
    rank = {**{name: number for number, name in enumerate(WHOLE)}, LAST: len(WHOLE) + 1}
    made = []
    for name in sorted(found, key=lambda name: (rank.get(name, len(WHOLE)), name)):
        files = found[name]
        if name in WHOLE:
            made.append((name, [name]))
            continue
        pieces = -(-len(files) // FILES_MAX)
        for number in range(pieces):
            made.append((f"{name} {number + 1}/{pieces}" if pieces > 1 else name, files[number::pieces]))
    return made


def streams() -> int:
    wish = os.environ.get("TEST_STREAMS")
    if wish is None:
        memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        return max(1, min(len(os.sched_getaffinity(0)), memory_mib // STREAM_MIB, STREAMS_MAX))
    if not re.fullmatch(r"[1-9]\d?", wish):
        sys.exit(f"error: TEST_STREAMS={wish!r}: expected a number of parts at a time, from 1 to 99")
    return int(wish)


def say(text: str) -> None:
    print(text, flush=True)


class Run:
    def __init__(self, commands: Iterable[tuple[str, Sequence[str]]], streams: int) -> None:
        self.parts = [Part(name, command) for name, command in commands]
        self.streams = streams
        self.signals = 0

    def run(self) -> int:
        began = time.monotonic()
        waiting, running = list(self.parts), list[Part]()
        before = {
            number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            while running or (waiting and not self.signals):
                while waiting and len(running) < self.streams and not self.signals:
                    running.append(waiting.pop(0))
                    self._start(running[-1])
                for part in [part for part in running if self._ended(part)]:
                    running.remove(part)
                time.sleep(0.05)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._summary(time.monotonic() - began)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        for part in self.parts:
            if part.process is not None and part.process.poll() is None:
                # Its own group, so that it gets one signal whether it was a terminal or somebody's kill.
                os.killpg(part.process.pid, signal.SIGINT if self.signals == 1 else signal.SIGTERM)

    def _start(self, part: Part) -> None:
        say(f"== {part.name}: started")
        part.began = time.monotonic()
        part.output = tempfile.TemporaryFile()  # noqa: SIM115 (read and closed when the part has ended)
        # A signal between the start and the assignment would miss it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            part.process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=part.output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, blocked),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _ended(self, part: Part) -> bool:
        assert part.process is not None and part.output is not None
        if part.process.poll() is None:
            return False
        part.code, part.took_s = part.process.returncode, time.monotonic() - part.began
        part.output.seek(0)
        text = part.output.read().decode("utf-8", "replace")
        part.output.close()
        part.words, part.counts = read(text)
        say(f"\n== {part.name}: {ending(part.code)} after {part.took_s:.0f} s\n{text.rstrip()}\n")
        return True

    def _summary(self, took_s: float) -> int:
        say(f"== parts ({self.streams} at a time)")
        for part in self.parts:
            say(f"{ending(part.code):>12} {part.took_s:5.0f} s  {part.name}  {told(part.counts)}")
        say("== short summary of all parts")
        for part in sorted(self.parts, key=lambda part: part.code != 0):
            for line in part.words:
                say(line)
            if part.code is None:
                say(f"FAILED {part.name}: not run")
            elif part.code != 0 and not any(line.startswith(("FAILED", "ERROR")) for line in part.words):
                say(f"FAILED {part.name}: {ending(part.code)}; its output is above")
        total: Counter[str] = Counter()
        for part in self.parts:
            total += part.counts
        failed = [part for part in self.parts if part.code != 0]
        verdict = f"{len(failed)} of {len(self.parts)} parts failed" if failed else f"{len(self.parts)} parts"
        say(f"== {told(total)}; {verdict}, in {took_s:.0f} s ({int(took_s) // 60}:{int(took_s) % 60:02d})")
        return 1 if failed else 0


SUMMARY = re.compile(r"=+ short test summary info =+")
COUNTS = re.compile(r"=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s(?: \([\d:]+\))? ?=*")


def read(text: str) -> tuple[list[str], Counter[str]]:
    """Of a pytest's output: the lines of its short summary, and how many of what."""
    lines = text.splitlines()
    counts: Counter[str] = Counter()
    last = next((at for at in range(len(lines) - 1, -1, -1) if COUNTS.fullmatch(lines[at])), None)
    if last is None:
        return [], counts
    match = COUNTS.fullmatch(lines[last])
    assert match is not None
    for piece in match[1].split(", "):
        number, what = piece.split()
        counts[{"errors": "error", "warnings": "warning"}.get(what, what)] += int(number)
    first = next((at for at in range(last, -1, -1) if SUMMARY.fullmatch(lines[at])), last)
    # What comes after it when somebody has pressed Ctrl-C is not of it.
    end = next((at for at in range(first, last) if lines[at].startswith("!!!")), last)
    return lines[first + 1 : end], counts


def told(counts: Counter[str]) -> str:
    order = ["failed", "error", "passed", "skipped"]
    whats = [*order, *sorted(counts.keys() - set(order))]
    return ", ".join(f"{counts[what]} {what}" for what in whats if counts[what])


def ending(code: int | None) -> str:
    if code is None:
        return "not run"
    return "passed" if code == 0 else f"ended by {-code}" if code < 0 else f"failed ({code})"


def main() -> int:
    """`scripts/streams.py DIRECTORY`: where cargo puts what it builds for its tests."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=10", "--durations-min=5"]
    # No documentation tests: rustdoc may be a proxy without a toolchain.
    cargo = [
        os.environ.get("CARGO", "cargo"),
        "test",
        "--locked",
        "--workspace",
        "--lib",
        "--bins",
        "--tests",
        "-q",
    ]
    commands = [("cargo test", ["env", f"CARGO_TARGET_DIR={sys.argv[1]}", *cargo])]
    commands += [("scripts/check", ["scripts/check"])]
    commands += [(name, [*pytest, *files]) for name, files in parts()]
    return Run(commands, streams()).run()


if __name__ == "__main__":
    sys.exit(main())
