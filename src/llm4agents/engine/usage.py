"""What sandboxes have used: durable rows from which money can be computed, each moment once and none twice.

A row tells of a stretch of one state. It is written by the transition that leaves the state (in its transaction:
both are there or neither), by the clock (`tick`: a dead server loses nothing, but what it wrote need not be waited
for), and by whoever finds that a machine has ended while no server lived. Where a stretch begins is always read from
the store (`store.usage.open_stretch`): there is nothing in memory that a crash could lose or double.

Metered are `running` and `paused`; to create, pool, build, pause, resume and fail is free.
Not here: prices.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
from sqlalchemy import Connection

from llm4agents.engine import clock
from llm4agents.errors import CapacityError
from llm4agents.store import SandboxRow, Store
from llm4agents.store import usage as rows
from llm4agents.store.store import Stamp
from llm4agents.vmm.shim import DEADLINE

log = structlog.get_logger()

EVERY_S: Final = {"running": 60.0, "paused": 3600.0}
"""The metered states, and how often a row is written while one lasts."""
TICK_S: Final = 5.0
AT_ONCE: Final = 50
"""Rows written before others get their turn on the event loop."""
_NS: Final = 1_000_000_000


def between_ns(since: Stamp, until: Stamp) -> int:
    """From `since` to `until`, never negative. Within one boot of the host by CLOCK_BOOTTIME, which nobody steps;
    across a reboot (of a paused sandbox) there is the wall clock alone."""
    if since.host_boot_id == until.host_boot_id:
        return max(0, until.monotonic_ns - since.monotonic_ns)
    return max(0, until.wall_ns - since.wall_ns)


def evidence(files: list[Path], now: Stamp) -> Stamp:
    """Until when a machine that nobody watched has run: the first of `files` that is there was written last then
    (the exit record; without one its disk).

    Without any evidence: never, so that nothing is charged but what was seen.
    """
    for path in files:
        with contextlib.suppress(OSError):
            wall_ns = min(path.stat().st_mtime_ns, now.wall_ns)
            # Of an earlier boot of the host this comes out before anything of this one, as it should.
            return Stamp(wall_ns, now.monotonic_ns - (now.wall_ns - wall_ns), now.host_boot_id)
    return Stamp(0, 0, now.host_boot_id)


def stopped_since(run_dir: Path, vmm_pid: int) -> float | None:
    """Since when (unix seconds, at the earliest) a VMM stands that its keeper has stopped at its deadline, no server
    being there to pause it; None when it runs. It could do nothing since, so that is nobody's use."""
    try:
        unix, act = (run_dir / DEADLINE).read_text().split()
        stopped = Path(f"/proc/{vmm_pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        return float(unix) if act == "stop" and stopped else None
    except (OSError, ValueError, IndexError):
        return None


class Meter:
    """Writes usage rows. `disk_bytes(row)`: what the sandbox's files take on this host's disk now."""

    def __init__(
        self,
        store: Store,
        disk_bytes: Callable[[SandboxRow], int],
        now: Callable[[], Stamp] = clock.stamp,
    ) -> None:
        self._store, self._disk_bytes, self._now = store, disk_bytes, now
        self._due: dict[str, float] = {}
        """Sandbox → CLOCK_BOOTTIME (s) of its next row. Only when to look: what is written is the store's to say."""
        self._disk: dict[str, int] = {}
        store.in_transition.append(self._close)
        store.on_transition.append(self._changed)

    def start(self) -> None:
        """Take up what lives; the stretches of a dead server go on."""
        for row in self._store.alive():
            self._schedule(row)

    def leave_out_stops(self, run_dir: Callable[[str], Path]) -> None:
        """Before machines are taken over: what a keeper has stopped is `stopped` until now, which is free."""
        for row in self._store.alive():
            pid = (row.record or {}).get("vmm_pid")
            if row.state == "running" and isinstance(pid, int):
                since = stopped_since(run_dir(row.id), pid)
                if since is not None:
                    self.stood_still(row, since)

    def stood_still(self, row: SandboxRow, since_unix: float) -> None:
        """Close the stretch at `since_unix`; from there to now is a row of state `stopped`."""
        now = self._now()
        ago_ns = max(0, now.wall_ns - int(since_unix * _NS))
        with self._store.writing() as connection:
            stretch = rows.open_stretch(connection, row)
            if stretch is None or stretch.since.host_boot_id != now.host_boot_id:
                return
            mark = max(stretch.since.monotonic_ns, now.monotonic_ns - ago_ns)
            stop = Stamp(now.wall_ns - (now.monotonic_ns - mark), mark, now.host_boot_id)
            self._write(connection, row, stop)
            rest = rows.open_stretch(connection, row)
            assert rest is not None
            duration_ns = now.monotonic_ns - mark
            rows.append(connection, row, rest, now, duration_ns, self._measure(row), state="stopped")

    async def run(self) -> None:
        """Write rows as they are due, until cancelled."""
        while True:  # noqa: ASYNC110 (it is the clock that is waited for)
            await asyncio.sleep(0 if self.tick(AT_ONCE) else TICK_S)

    def tick(self, at_once: int = 1_000_000) -> int:
        """Write the rows that are due, at most `at_once`; how many. On a full disk they are written later."""
        now = self._now()
        due = [sandbox for sandbox, at in self._due.items() if at * _NS <= now.monotonic_ns][:at_once]
        for sandbox in due:
            row = self._store.get(sandbox)
            if row is None or row.state not in EVERY_S:
                self._forget(sandbox)
                continue
            try:
                with self._store.writing() as connection:
                    self._write(connection, row, now)
            except CapacityError as error:
                log.warning("usage_not_written", sandbox=sandbox, error=error.message)
                return 0
            self._due[sandbox] = now.monotonic_ns / _NS + EVERY_S[row.state]
        return len(due)

    def ending(self, row: SandboxRow) -> None:
        """Its machine has ended: measure the disk before it is removed, and leave the last row to the transition,
        which may have to wait for room on the host's disk."""
        self._measure(row)
        self._due.pop(row.id, None)

    def rows(
        self, sandbox: str | None, after: int, limit: int, project: str | None = None
    ) -> list[dict[str, Any]]:
        """As they were written, those with an id above `after` (of a project)."""
        return rows.rows(self._store, sandbox=sandbox, after=after, limit=limit, project=project)

    def totals(self, sandbox: str | None, project: str | None = None) -> list[dict[str, Any]]:
        """Sums per sandbox and state, of the rows there are."""
        return rows.totals(self._store, sandbox, project)

    def _measure(self, row: SandboxRow) -> int:
        self._disk[row.id] = self._disk_bytes(row) or self._disk.get(row.id, 0)
        return self._disk[row.id]

    def _close(self, connection: Connection, row: SandboxRow, until: Stamp) -> None:
        if row.state in EVERY_S:
            self._write(connection, row, until, last=True)

    def _write(self, connection: Connection, row: SandboxRow, until: Stamp, *, last: bool = False) -> None:
        stretch = rows.open_stretch(connection, row)
        if stretch is None:
            log.error("usage_without_event", sandbox=row.id, state=row.state)
            return
        duration_ns = between_ns(stretch.since, until)
        # A row of no length moves the mark to the clock of another boot of the host: from there it is exact again.
        if duration_ns or (not last and stretch.since.host_boot_id != until.host_boot_id):
            rows.append(connection, row, stretch, until, duration_ns, self._measure(row))

    def _changed(self, row: SandboxRow, _from: str | None, to: str, _reason: str | None, _at: Stamp) -> None:
        if to in EVERY_S:
            self._schedule(row)
        else:
            self._due.pop(row.id, None)
            if row.ended_at is not None:
                self._forget(row.id)

    def _schedule(self, row: SandboxRow) -> None:
        if row.state in EVERY_S:
            self._due[row.id] = self._now().monotonic_ns / _NS + EVERY_S[row.state]

    def _forget(self, sandbox: str) -> None:
        self._due.pop(sandbox, None)
        self._disk.pop(sandbox, None)
