#!/usr/bin/env python3
"""Generates `sdk/_sync/` from `sdk/_async/`; `--check` only says whether it is up to date (exit 1 if not).

In httpcore's manner: a table of words. What cannot be said by replacing words belongs in sdk/_runtime.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SDK = Path(__file__).resolve().parent.parent / "src" / "llm4agents" / "sdk"
FIRST_PARTY = 'lint.isort.known-first-party=["llm4agents"]'
SOURCE, TARGET = SDK / "_async", SDK / "_sync"

WORDS = [
    (r"`async with AsyncSandbox\(\.\.\.\)` or `await AsyncSandbox\.create\(\.\.\.\)`", "Sandbox(...)"),
    (r"`AsyncSandbox\(\.\.\.\)` at `async with`", "`AsyncSandbox(...)` at `async with`"),
    (r" Written once, asynchronously\.", ""),
    (r"`AsyncSandbox` and, generated from it, `Sandbox`", "`Sandbox`, generated from `_async/sandbox.py`"),
    (r"written once, asynchronously", "generated from `_async` by scripts/unasync.py"),
    (r"async def", "def"),
    (r"async with", "with"),
    (r"async for", "for"),
    (r"await ", ""),
    (
        r"from collections\.abc import AsyncIterable, Iterable, Sequence",
        "from collections.abc import Iterable, Sequence",
    ),
    (r" \| AsyncIterable\[bytes\]", ""),
    (r"handle_async_request", "handle_request"),
    (r"aiter_stream", "iter_stream"),
    (r"StopAsyncIteration", "StopIteration"),
    (r"__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\baclose\b", "close"),
    (r"\b_async\b", "_sync"),
    (r"\basync_(blocking|call|begin|chunks|fed)\b", r"\1"),
    (r"\bAsync(?=[A-Z])", ""),
]
# Said of the asynchronous class on purpose, also in the synchronous file.
KEPT = {"`AsyncSandbox(...)` at `async with`": "\0KEPT\0"}


def transform(text: str, name: str) -> str:
    for kept, mark in KEPT.items():
        text = text.replace(kept, mark)
    for pattern, word in WORDS:
        text = re.sub(pattern, word, text)
    for kept, mark in KEPT.items():
        text = text.replace(mark, kept)
    head = f"# Generated from _async/{name} by scripts/unasync.py: change that file, then run the script.\n"
    return ruff(head + text)


def ruff(text: str) -> str:
    """Import order and line breaks, which shorter words change."""
    for step in (
        ["check", "--config", FIRST_PARTY, "--select", "I,F401", "--fix", "--quiet", "--exit-zero"],
        ["format", "--quiet"],
    ):
        command = [sys.executable, "-m", "ruff", *step, "--stdin-filename", str(TARGET / "x.py"), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print(__doc__, file=sys.stderr)
        return 2
    wanted = {path.name: transform(path.read_text(), path.name) for path in sorted(SOURCE.glob("*.py"))}
    found = {path.name: path.read_text() for path in TARGET.glob("*.py")}
    stale = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if check:
        if stale:
            print(
                f"stale: {', '.join(f'sdk/_sync/{name}' for name in stale)}; run scripts/unasync.py",
                file=sys.stderr,
            )
        return 1 if stale else 0
    TARGET.mkdir(exist_ok=True)
    for name in stale:
        if name in wanted:
            (TARGET / name).write_text(wanted[name])
        else:
            (TARGET / name).unlink()
        print(f"sdk/_sync/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
