"""An exception as a cell's caller sees it: name, value, and a traceback of the caller's own frames.

Frames of the runner are never shown; of a run of library frames only the innermost is, where it was raised.
"""

from __future__ import annotations

import errno
import site
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from .wire import TRACEBACK_CHARS_MAX

_RUNNER = str(Path(__file__).parent) + "/"
_LIBRARIES = tuple(
    {
        *(path + "/" for path in sysconfig.get_paths().values() if "lib" in path),
        *(path + "/" for path in [*site.getsitepackages(), site.getusersitepackages()]),
        "/usr/lib/python3",
        "<frozen ",
        "<__array_function__",
    }
)
_NO_NETWORK_ERRNO = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL}
NO_NETWORK = (
    "note: this sandbox has no network that leads there: network= says what it may reach (default: none)"
)


def describe(error: BaseException) -> tuple[str, str, str]:
    """(name, value, traceback) of `error`; never raises, whatever the exception does."""
    name = type(error).__name__
    try:
        value = str(error)
    except Exception:
        value = f"<{name} whose str() failed>"
    try:
        shown = traceback.TracebackException.from_exception(error, compact=True)
        _strip(shown, set())
        text = "".join(shown.format())
    except Exception as failed:
        text = f"{name}: {value}\n(the traceback could not be formatted: {type(failed).__name__})\n"
    text = clip(text, TRACEBACK_CHARS_MAX)
    try:
        if _no_network(error):
            text += NO_NETWORK + "\n"
    except Exception:  # noqa: S110 (a hostile exception object; the note is a courtesy)
        pass
    return name, clip(value, TRACEBACK_CHARS_MAX), text


def clip(text: str, chars_max: int) -> str:
    """`text`, or its two ends with a note between them of how much was left out."""
    if len(text) <= chars_max:
        return text
    head = chars_max * 3 // 4
    tail = chars_max - head
    left_out = len(text) - head - tail
    return f"{text[:head]}\n... [{left_out} characters left out] ...\n{text[-tail:]}"


def _strip(shown: traceback.TracebackException, seen: set[int]) -> None:
    if id(shown) in seen:
        return
    seen.add(id(shown))
    kept: list[traceback.FrameSummary] = []
    library: traceback.FrameSummary | None = None
    for entry in shown.stack:
        if entry.filename.startswith(_RUNNER):
            continue
        # Compiled extensions name their sources by relative paths.
        if entry.filename.startswith(_LIBRARIES) or entry.filename.endswith((".pyx", ".pxi")):
            library = entry
        else:
            library = None
            kept.append(entry)
    if library is not None:
        kept.append(library)
    shown.stack = traceback.StackSummary.from_list(kept)
    related: list[Any] = [shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or [])]
    for other in related:
        if other is not None:
            _strip(other, seen)


def _no_network(error: BaseException) -> bool:
    """Whether this, or what caused it, is a name or a network that could not be reached."""
    socket = sys.modules.get("socket")
    todo: list[Any] = [error]
    seen: set[int] = set()
    while todo and len(seen) < 64:
        found = todo.pop()
        if not isinstance(found, BaseException) or id(found) in seen:
            continue
        seen.add(id(found))
        if socket is not None and isinstance(found, socket.gaierror):
            return True
        if isinstance(found, OSError) and found.errno in _NO_NETWORK_ERRNO:
            return True
        # urllib keeps the cause in .reason, requests in .args
        todo += [found.__cause__, found.__context__, getattr(found, "reason", None), *found.args]
    return False
