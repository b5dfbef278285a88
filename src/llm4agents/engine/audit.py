"""The audit of the control plane: a row for each call that changes something, and for each that was refused.

A row is written some milliseconds after its answer, together with others; whoever reads them gets them all. Refusals of
strangers are many when somebody guesses: past a rate they are counted, and the count is a row.
Not here: which calls get one (`api.access.gate`).
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from typing import Any

import structlog

from llm4agents import limits
from llm4agents.engine import clock
from llm4agents.errors import LLM4AgentsError
from llm4agents.store import Store
from llm4agents.store import audit as rows

log = structlog.get_logger()
FLUSH_S = 0.05
TRIM_ROWS = 10_000
"""How many are written before it is looked whether there are too many."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call; columns as in `store.schema.audit`."""

    at: float
    project: str
    actor: str
    origin: str
    request: str
    action: str
    target: str
    status: int
    code: str | None
    duration_ms: float


class Audit:
    """One per engine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        store.before_close.append(self.flush)
        self._waiting: list[dict[str, Any]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._written = 0
        self._allowance, self._at_s, self._dropped = float(limits.AUDIT_REFUSALS_BURST), 0.0, 0

    def add(self, entry: Entry) -> None:
        self._waiting.append(asdict(entry))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def add_strangers(self, entry: Entry) -> None:
        """A refusal of somebody who is not known."""
        now_s = clock.boottime_s()
        gained = max(0.0, now_s - self._at_s) * limits.AUDIT_REFUSALS_PER_S
        self._allowance = min(float(limits.AUDIT_REFUSALS_BURST), self._allowance + gained)
        self._at_s = now_s
        if self._allowance < 1:
            self._dropped += 1
            return
        self._allowance -= 1
        if self._dropped:
            self.add(replace(entry, origin="several", action="refused", target=f"{self._dropped} more calls"))
            self._dropped = 0
        self.add(entry)

    def flush(self) -> None:
        """Write what waits. On a full disk it is lost, and the log says how much."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            rows.add(self._store, waiting)
            self._written += len(waiting)
            if self._written >= TRIM_ROWS:
                self._written = 0
                before = clock.wall_s() - limits.AUDIT_KEPT_S
                rows.trim(self._store, before=before, keep=limits.AUDIT_ROWS_MAX)
        except LLM4AgentsError as error:
            log.error("audit_not_written", rows=len(waiting), error=error.message)

    def page(
        self,
        project: str | None,
        *,
        limit: int,
        before: int | None = None,
        actor: str | None = None,
        since: float | None = None,
    ) -> list[dict[str, Any]]:
        """The newest first, with an id below `before`; of a project, or (None) of all."""
        self.flush()
        return rows.page(self._store, project=project, before=before, limit=limit, actor=actor, since=since)
