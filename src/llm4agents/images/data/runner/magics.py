"""IPython's `%magics`, `!commands`, `name?` and display functions, for the cells that use them and no others.

IPython is imported on first use (seconds in an emulated guest unless the template preloads it). Only its
input transformer and an InteractiveShell for `get_ipython()` are used; `cell.Interpreter` still runs the cells.
"""

from __future__ import annotations

import builtins
import re
import sys
from importlib import import_module
from typing import Any

from .display import Display

_display: Display | None = None
_shell: Any = None
_BACKEND = re.compile(r"^[ \t]*%(matplotlib|pylab)\b.*$", re.MULTILINE)
_FORMAT = re.compile(r"^[ \t]*%config[ \t]+InlineBackend\.figure_formats?[ \t]*=[ \t]*(.+)$", re.MULTILINE)
_FORMATS = ("png", "svg", "pdf")


def install(display: Display) -> None:
    """Name the Display that IPython's output goes to. Imports nothing."""
    global _display
    _display = display


def transform(code: str) -> str:
    """IPython syntax as Python. Raises SyntaxError, saying so, where there is no IPython."""
    code = _FORMAT.sub(_figure_format, code)
    code = _BACKEND.sub("", code)  # figures are always inline here
    if not re.search(r"[%!?]", code):
        return code
    shell = _get_shell()
    text: str = shell.transform_cell(code)
    return text


def patch_display() -> None:
    """Make `IPython.display.display` the builtin one: IPython's own prints a repr when no shell is up."""
    if _display is None:
        return
    try:
        public = import_module("IPython.display")
        display_functions = import_module("IPython.core.display_functions")
    except ImportError:
        return
    for module in (display_functions, public):
        if module.display != _display.display:
            vars(module).update(display=_display.display, clear_output=_nothing)


def _nothing(*_: Any, **__: Any) -> None:
    """Output that was sent is sent."""


def _figure_format(found: re.Match[str]) -> str:
    wanted = {kind for kind in _FORMATS if kind in found.group(1)}
    if "retina" in found.group(1):
        wanted.add("png")
    if _display is not None and wanted:
        _display.figure_formats = wanted
    return ""


def _get_shell() -> Any:
    global _shell
    if _shell is not None:
        return _shell
    try:
        publisher: Any = import_module("IPython.core.displaypub").DisplayPublisher
        interactive: Any = import_module("IPython.core.interactiveshell").InteractiveShell
        config: Any = import_module("traitlets.config").Config()
    except ImportError as error:
        raise SyntaxError(
            f"this cell uses IPython syntax (% ! ?), and IPython is not installed: {error}"
        ) from None
    display = _display

    class Publisher(publisher):  # type: ignore[misc]
        def publish(self, data: Any, *_: Any, **__: Any) -> None:
            if display is not None:
                display.publish(dict(data))

    main = sys.modules["__main__"]
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "NoColor"
    config.InteractiveShell.display_pub_class = Publisher
    hook, excepthook = sys.displayhook, sys.excepthook
    shell = interactive.instance(config=config, user_module=main, user_ns=main.__dict__)
    sys.modules["__main__"] = main
    sys.displayhook, sys.excepthook = hook, excepthook
    shell.display_pub = Publisher(parent=shell)
    shell.system = shell.system_raw  # descriptors 1 and 2 are streamed; no pseudo-terminal needed
    shell.showtraceback = _raise
    builtins.get_ipython = lambda: shell  # type: ignore[attr-defined]
    patch_display()
    _shell = shell
    return shell


def _raise(*_: Any, **__: Any) -> None:
    """Errors inside a magic that IPython would print are the cell's error."""
    error = sys.exc_info()[1]
    if error is not None:
        raise error
