"""Runs the text of one cell in a namespace and gives its last expression's value.

Knows Python (and, through `magics`, IPython's syntax when Python refuses a cell); not connections, signals or
how values look.
"""

from __future__ import annotations

import __future__  # isort: skip
import ast
import linecache
import re
from collections.abc import Coroutine
from inspect import CO_COROUTINE
from types import CodeType
from typing import Any

_FUTURE_FLAGS = 0
for _name in __future__.all_feature_names:
    _FUTURE_FLAGS |= getattr(__future__, _name).compiler_flag
_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_MAGIC = re.compile(r"^[ \t]*[%!?]|=[ \t]*[%!]|\?[ \t]*$", re.MULTILINE)

NOTHING = object()
"""The cell has no value: it ended in a statement, or in `;`."""


class Interpreter:
    """The namespace of a context, and what else cells leave to the next: `from __future__` flags, the event loop."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._flags = 0
        self._runner: Any = None

    def run(self, code: str, count: int) -> Any:
        """Run `code`; its value or NOTHING. Raises whatever it raises, and SyntaxError."""
        filename = f"<cell {count}>"
        lines = code.splitlines(True)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        # An entry without a time stamp is never thrown away: tracebacks and inspect.getsource work for ever.
        linecache.cache[filename] = (len(code), None, lines, filename)
        flags = self._flags
        if "await" in code or "async" in code:
            flags |= _AWAIT
        if len(lines) == 1:
            # Most one-line cells are one expression, and then the syntax tree need not become Python objects.
            try:
                whole = compile(code.strip(), filename, "eval", flags, True)
            except SyntaxError:
                pass
            else:
                return self._value(whole)
        try:
            tree: ast.Module = compile(code, filename, "exec", flags | ast.PyCF_ONLY_AST, True)
        except SyntaxError:
            if not _MAGIC.search(code):
                raise
            from . import magics

            code = magics.transform(code)
            tree = compile(code, filename, "exec", flags | _AWAIT | ast.PyCF_ONLY_AST, True)
            flags |= _AWAIT
        return self._tree(tree, code, filename, flags)

    def _tree(self, tree: ast.Module, code: str, filename: str, flags: int) -> Any:
        body = tree.body
        if not body:
            return NOTHING
        last = body[-1]
        if not isinstance(last, ast.Expr):
            self._value(self._compile(tree, filename, "exec", flags))
            return NOTHING
        # Only after the body is compiled: a `from __future__` in it holds for the last line too.
        del body[-1]
        before = self._compile(tree, filename, "exec", flags) if body else None
        value = self._compile(ast.Expression(last.value), filename, "eval", flags | self._flags)
        if before is not None:
            self._value(before)
        found = self._value(value)
        return NOTHING if _silenced(code, last) else found

    def _compile(self, tree: Any, filename: str, mode: str, flags: int) -> CodeType:
        code: CodeType = compile(tree, filename, mode, flags, True)
        self._flags |= code.co_flags & _FUTURE_FLAGS
        return code

    def _value(self, code: CodeType) -> Any:
        value = eval(code, self.namespace)  # noqa: S307 (running the caller's code is the product)
        return self._await(value) if code.co_flags & CO_COROUTINE else value

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """One event loop for all cells, so that tasks and clients made in one can be awaited in the next."""
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()
        loop = self._runner.get_loop()
        asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise


def _silenced(code: str, last: ast.Expr) -> bool:
    """Whether a `;` follows the last expression."""
    if ";" not in code:
        return False
    lines = code.splitlines()
    line = lines[(last.end_lineno or 1) - 1].encode()
    return line[last.end_col_offset or 0 :].lstrip().startswith(b";")
