"""How values look: MIME bundles, open figures, the `display` builtin. IPython's conventions without IPython.

Nothing here may end a cell: a representation that fails falls back to the next poorer one, and at last to a
line that says so.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from .tracebacks import clip
from .wire import BUNDLE_CHARS_MAX, IMAGE_BYTES_MAX, RESULT_TEXT_CHARS_MAX

Emit = Callable[[dict[str, Any]], None]

_PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), list, tuple, dict, set, frozenset, FunctionType}
)
_METHODS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
)
_BINARY = frozenset({"image/png", "image/jpeg", "application/pdf"})
_CANARY = "_ipython_canary_method_should_not_exist_"


class Display:
    """Makes `result` events of values and figures and hands them to `emit`."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.figure_formats: set[str] = {"png"}

    def value(self, value: Any, *, main: bool) -> None:
        data = self.bundle(value)
        if data:
            self._send(data, main)

    def publish(self, data: dict[str, Any]) -> None:
        """A ready MIME bundle, as IPython's display publisher gets it."""
        self._send(_wire_ready(data), False)

    def display(
        self, *values: Any, include: Any = None, exclude: Any = None, raw: bool = False, **_: Any
    ) -> None:
        """Show values now, richly, in the order of the output. The builtin `display` of every cell."""
        for value in values:
            data = _wire_ready(value) if raw else self.bundle(value)
            if include:
                data = {mime: data[mime] for mime in data if mime in include}
            if exclude:
                data = {mime: data[mime] for mime in data if mime not in exclude}
            self._send(data, False)

    def bundle(self, value: Any) -> dict[str, Any]:
        """Every representation `value` has; text/plain always, unless the value itself says otherwise."""
        if type(value) in _PLAIN:
            return {"text/plain": _text(value)}
        if isinstance(value, type) or _has(value, _CANARY):
            return {"text/plain": _text(value)}
        data: dict[str, Any] = {}
        found = _call(value, "_repr_mimebundle_", include=None, exclude=None)
        if isinstance(found, tuple):  # (data, metadata)
            found = found[0] if found else None
        if isinstance(found, dict):
            data.update(found)
        else:
            for method, mime in _METHODS:
                part = _call(value, method)
                if isinstance(part, tuple):
                    part = part[0] if part else None
                if part is not None:
                    data[mime] = part
        if _is_figure(value):
            data.update(self._draw(value))
            _close_figures(value)
        if "text/plain" not in data:
            data["text/plain"] = _text(value)
        return _wire_ready(data)

    def figures(self) -> None:
        """Send and close every figure that pyplot has open: at the end of a cell, and for `plt.show()`."""
        helpers = sys.modules.get("matplotlib._pylab_helpers")
        if helpers is None:
            return
        managers = helpers.Gcf.get_all_fig_managers()
        for manager in managers:
            figure = manager.canvas.figure
            data = self._draw(figure)
            if data:
                self._send({**data, "text/plain": _text(figure)}, False)
        if managers:
            helpers.Gcf.destroy_all()

    def patch_pyplot(self) -> None:
        """`plt.show()` sends the figures; with Agg alone it only warns."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None and getattr(pyplot.show, "__module__", "") != __name__:

            def show(*_: Any, **__: Any) -> None:
                self.figures()

            pyplot.show = show  # type: ignore[attr-defined]

    def _draw(self, figure: Any) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for kind, mime in (("png", "image/png"), ("svg", "image/svg+xml"), ("pdf", "application/pdf")):
            if kind not in self.figure_formats:
                continue
            target = io.BytesIO()
            try:
                figure.savefig(target, format=kind, bbox_inches="tight")
            except Exception as error:
                data["text/plain"] = f"<figure that could not be drawn: {type(error).__name__}: {error}>"
                continue
            raw = target.getvalue()
            data[mime] = raw.decode("utf-8", "replace") if kind == "svg" else raw
        return _wire_ready(data)

    def _send(self, data: dict[str, Any], main: bool) -> None:
        if data:
            self._emit({"type": "result", "main": main, "data": data})


def _text(value: Any) -> str:
    try:
        return clip(repr(value), RESULT_TEXT_CHARS_MAX)
    except Exception as error:
        return f"<{type(value).__name__} whose repr() raised {type(error).__name__}: {_str(error)}>"


def _str(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return "?"


def _has(value: Any, name: str) -> bool:
    """Whether an object answers to any name at all (mocks, RPC proxies): then none of its answers count."""
    try:
        return getattr(value, name, None) is not None
    except Exception:
        return True


def _call(value: Any, name: str, **arguments: Any) -> Any:
    try:
        method = getattr(value, name, None)
        return method(**arguments) if callable(method) else None
    except Exception:  # NotImplementedError is how some say no; the rest is a broken representation
        return None


def _wire_ready(data: dict[str, Any]) -> dict[str, Any]:
    """Within the bounds and fit for JSON; what was left out is said in text/plain."""
    ready: dict[str, Any] = {}
    notes: list[str] = []
    left = BUNDLE_CHARS_MAX
    for mime, part in data.items():
        if not isinstance(mime, str) or len(mime) > 100 or len(ready) >= 24:
            continue  # the host takes no more
        kept = _part(mime, part)
        left -= len(kept) if isinstance(kept, str) else 0
        if kept is None or left < 0:
            notes.append(f"[{mime} left out: too large or not of that type]")
        else:
            ready[mime] = kept
    if notes:
        ready["text/plain"] = "\n".join([ready.get("text/plain", ""), *notes]).lstrip("\n")
    return ready


def _part(mime: str, part: Any) -> Any:
    if isinstance(part, (bytes, bytearray, memoryview)):
        if len(part) > IMAGE_BYTES_MAX:
            return None
        if mime in _BINARY or not mime.startswith(("text/", "image/svg", "application/j")):
            return base64.b64encode(part).decode("ascii")
        part = bytes(part).decode("utf-8", "replace")
    if isinstance(part, str):
        if mime in _BINARY:
            return part if len(part) <= IMAGE_BYTES_MAX * 4 // 3 + 4 else None
        if mime == "text/plain":
            return clip(part, RESULT_TEXT_CHARS_MAX)
        limit = IMAGE_BYTES_MAX if mime.startswith("image/") else RESULT_TEXT_CHARS_MAX
        return part if len(part) <= limit else None
    import json

    try:
        text = json.dumps(part, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    if len(text) > RESULT_TEXT_CHARS_MAX:
        return None
    return part if mime == "application/json" else text  # objects are for JSON; the rest is text on the wire


def _is_figure(value: Any) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def _close_figures(figure: Any) -> None:
    """A figure that was the value is not sent a second time as an open one."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is not None:
        helpers.Gcf.destroy_fig(figure)
