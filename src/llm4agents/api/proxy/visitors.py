"""Who is in a sandbox's ports now, and by what right, so that a right that is taken back ends what it had let in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator

from llm4agents.errors import ForbiddenError


class Visitors:
    """One per server. Requests and WebSockets alike: each is a task."""

    def __init__(self) -> None:
        self._inside: dict[str, dict[asyncio.Task[object], str]] = {}
        self._shown_out: set[asyncio.Task[object]] = set()

    @contextlib.contextmanager
    def inside(self, sandbox: str, by: str) -> Iterator[None]:
        """Around what was let in by `by`. Raises ForbiddenError in the middle of it when that holds no more."""
        task = asyncio.current_task()
        assert task is not None
        here = self._inside.setdefault(sandbox, {})
        here[task] = by
        try:
            yield
        except asyncio.CancelledError:
            if task in self._shown_out and task.uncancel() == 0:
                raise ForbiddenError("this sandbox is not open to you any more") from None
            raise
        finally:
            self._shown_out.discard(task)
            here.pop(task, None)
            if not here and self._inside.get(sandbox) is here:
                del self._inside[sandbox]

    def show_out(self, sandbox: str, by: Collection[str]) -> None:
        """End what was let in by any of `by`."""
        for task, how in self._inside.get(sandbox, {}).items():
            if how in by and task not in self._shown_out:
                self._shown_out.add(task)
                task.cancel()
