"""How things are shown: tables, sizes, progress, errors. rich only on a terminal, and only when used.

stdout carries what was asked for, stderr everything said about it.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llm4agents.errors import (
    InvalidRequestError,
    LLM4AgentsError,
    NotStartedError,
    ProgramFailedError,
    ProtectedPathError,
)

if TYPE_CHECKING:
    from llm4agents.sdk._landing import Downloaded

CODE_FAILED, USAGE, NOT_STARTED, UNKNOWN, PROTECTED = 1, 2, 3, 4, 5
_UNSEEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What JSON leaves as it is and a terminal may obey, or no encoding has."""
NAMED_MAX = 10
"""Protected paths that are named one by one."""


def report(error: LLM4AgentsError) -> int:
    """One line, and the hint, on stderr; the exit code that goes with it."""
    say(plain(f"error: {error.message}"))
    if error.hint:
        say(plain(f"hint: {error.hint}"))
    if isinstance(error, ProgramFailedError):
        return CODE_FAILED
    if isinstance(error, InvalidRequestError):
        return USAGE
    if isinstance(error, ProtectedPathError):
        return PROTECTED
    return NOT_STARTED if isinstance(error, NotStartedError) else UNKNOWN


def plain(text: str) -> str:
    """Without what would move a terminal: in errors and tables there are a guest's words, too."""
    return "".join(letter for letter in text if letter in "\n\t" or letter.isprintable())


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def left_out(done: Downloaded) -> int:
    """Says what was not copied out since this machine would obey it; the exit code that goes with it, or 0."""
    from llm4agents import protected

    if not done.protected_count:
        return 0
    for found in done.protected[:NAMED_MAX]:
        say(f"protected, not copied: {found.path!r}: {found.reason}")
    if done.protected_count > NAMED_MAX:
        say(f"… and {done.protected_count - NAMED_MAX} more")
    if all(found.reason == protected.OPERATOR for found in done.protected):
        say("hint: there is no way around the operator's list")
        return PROTECTED
    say(
        "hint: --allow-protected copies them too, except for those of the operator's list; look at them first"
    )
    return PROTECTED


def count(value: float | None, none: str = "-") -> str:
    """A quota's number, which JSON may say as a float: 5, not 5.0."""
    return none if value is None else str(int(value)) if float(value).is_integer() else f"{value:.2f}"


def emit(value: Any) -> None:
    """`--json`: one object on stdout; dates as RFC 3339."""
    # At once: a command that goes on after it (`forward`) would leave who reads its pipe waiting.
    print(as_json(value, indent=2), flush=True)


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Readable, and nothing in it drives the terminal it is shown on: names and words in it may be a guest's."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=_json)
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _json(value: Any) -> str:
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def quiet_warnings() -> None:
    """Shows our warnings as one line instead of Python's two with a source location."""

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        say(f"note: {message}")

    warnings.simplefilter("always")
    warnings.showwarning = show


def size(count: float | None) -> str:
    """Bytes for people: 1536 → 1.5 KiB."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1_024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1_024
    raise AssertionError("not reached")


def when(value: Any) -> str | None:
    """A moment in local time; unix seconds and RFC 3339 text are understood."""
    from datetime import datetime

    from llm4agents.sdk.results import parse_time

    moment = value if isinstance(value, datetime) else parse_time(value)
    return None if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(value: Any) -> str | None:
    """How long ago a moment was, for people: `45 s`, `3 min`, `5 h`, `12 d`."""
    from datetime import UTC, datetime

    from llm4agents.sdk.results import parse_time

    moment = value if isinstance(value, datetime) else parse_time(value)
    if moment is None:
        return None
    left = max(0.0, (datetime.now(UTC) - moment).total_seconds())
    for unit, length in (("s", 60), ("min", 60), ("h", 24)):
        if left < length:
            return f"{left:.0f} {unit}"
        left /= length
    return f"{left:.0f} d"


def vmm(name: str | None, nested: bool) -> str | None:
    """The VMM of a sandbox or template, for a table."""
    return f"{name},nested" if name is not None and nested else name


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table: drawn on a terminal, columns of plain text elsewhere."""
    cells = [["-" if cell is None else plain(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(*columns, box=None, header_style="bold")
        for row in cells:
            drawn.add_row(*(Text(cell) for cell in row))  # Text: nothing of a guest's is markup
        Console().print(drawn)
        return
    lines = [list(columns), *cells]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@contextlib.contextmanager
def waiting(words: str, after_s: float = 1.0) -> Iterator[Callable[[], None]]:
    """Says so on stderr, once, when what is waited for within it takes longer; what it gives is called when it came."""
    import threading

    timer = threading.Timer(after_s, say, [f"… {words}"])
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


class Progress:
    """A context manager to be given as `on_progress`; draws nothing until something is reported."""

    def __init__(self) -> None:
        self._drawn: Any = None
        self._task: Any = None
        self._last = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn is not None:
            self._drawn.stop()

    def __call__(self, step: str, detail: str = "", fraction: float | None = None) -> None:
        """One step of a build; `fraction` 0…1 of the whole, or None."""
        text = f"{step} {detail}".strip()
        if not sys.stderr.isatty():
            if step != self._last:
                self._last = step
                say(f"… {text}")
            return
        if self._drawn is None:
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Drawn

            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TimeElapsedColumn(),
            )
            self._drawn = Drawn(*columns, console=Console(stderr=True), transient=True)
            self._drawn.start()
            self._task = self._drawn.add_task(text, total=None)
        self._drawn.update(
            self._task, description=text, total=None if fraction is None else 1.0, completed=fraction or 0.0
        )

    def copied(self, name: str) -> Any:
        """As `on_progress` of a copy: bytes so far, bytes in all. Only for large files, on a terminal."""

        def step(done: int, total: int | None) -> None:
            if total and total > 8_388_608 and sys.stderr.isatty():
                self(name, f"{size(done)} of {size(total)}", done / total)

        return step
