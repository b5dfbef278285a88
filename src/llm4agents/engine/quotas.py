"""What a project may have. `exceeded` and `Bucket` are pure; `Quotas` knows what each project has now.

A sandbox's share is charged before anything is made for it, under the id it will have, so that creates that come at
once cannot pass a bound together; its transitions then keep the charge true, and a failed create gives it back.
`sandboxes`, `vcpus` and `memory_mib` count what runs (or is being made), `disk_mib` also what is paused, and the memory
that a pause has on disk.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from llm4agents import limits
from llm4agents.engine import clock
from llm4agents.engine.projects import Projects
from llm4agents.errors import CapacityError, InvalidRequestError, QuotaError
from llm4agents.store import SandboxRow, Store
from llm4agents.store.store import TERMINAL, Stamp

NAMES: Final = (
    "sandboxes",
    "vcpus",
    "memory_mib",
    "disk_mib",
    "volumes_mib",
    "templates",
    "creates_per_s",
)
RUNNING: Final = ("sandboxes", "vcpus", "memory_mib")
IDLE_STATES: Final = ("paused",)
"""Not `pausing`: its machine is there, with all its memory, until it is paused, and goes on when that fails."""


def checked(given: Mapping[str, Any]) -> dict[str, float]:
    """Quotas as a caller gives them; None takes one away. Raises InvalidRequestError."""
    found: dict[str, float] = {}
    for name, value in given.items():
        if name not in NAMES:
            raise InvalidRequestError(f"{name[:40]!r} is no quota", hint=f"any of {', '.join(NAMES)}")
        if value is None:
            continue
        whole = name != "creates_per_s"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise InvalidRequestError(f"{name} is a number", hint="leave it out (null) for no bound")
        if not (0 <= value <= 2**53 and math.isfinite(value)):
            raise InvalidRequestError(f"{name}={value} is not possible: 0 or more")
        found[name] = value
    return found


def exceeded(
    quotas: Mapping[str, Any], used: Mapping[str, float], more: Mapping[str, float]
) -> tuple[str, float, float] | None:
    """The first quota that `more` would pass: its name, the bound, what is used. Pure."""
    for name, wanted in more.items():
        bound = quotas.get(name)
        if bound is not None and wanted > 0 and used.get(name, 0) + wanted > bound:
            return name, bound, used.get(name, 0)
    return None


@dataclass(slots=True)
class Bucket:
    """A rate with a burst (two seconds' worth, at least one). Pure: its clock is the caller's."""

    level: float
    at_s: float

    def take(self, rate: float, now_s: float, count: int = 1, *, burst: float | None = None) -> float:
        """0 when `count` may be had now (and is taken), else in how many seconds to come again."""
        burst = max(1.0, 2 * rate) if burst is None else burst
        self.level = min(burst, self.level + max(0.0, now_s - self.at_s) * rate)
        self.at_s = now_s
        wanted = min(float(count), burst)  # what is more than a whole burst waits for a full one
        if self.level >= wanted:
            self.level -= float(count)
            return 0.0
        return (wanted - self.level) / rate if rate > 0 else 3_600.0


@dataclass(frozen=True, slots=True)
class Share:
    """Of one sandbox."""

    project: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    runs: bool = True
    sandboxes: int = 1
    paused_mib: int = 0
    """Of its memory, on disk."""

    @classmethod
    def of(cls, row: SandboxRow) -> Share:
        disk = (row.limits or {}).get("disk_mib") or row.disk_gib * 1024
        runs, pause = row.state not in IDLE_STATES, row.pause or {}
        paused = in_mib(int(pause.get("pages_bytes") or 0)) if pause.get("memory") else 0
        return cls(row.project, row.vcpus, row.memory_mib, int(disk), runs, paused_mib=paused)

    def figures(self) -> dict[str, float]:
        running = (self.sandboxes, self.vcpus, self.memory_mib) if self.runs else (0, 0, 0)
        return {**dict(zip(RUNNING, running, strict=True)), "disk_mib": self.disk_mib + self.paused_mib}


class Quotas:
    """One per engine."""

    def __init__(self, store: Store, projects: Projects) -> None:
        self._projects = projects
        self._shares: dict[str, Share] = {row.id: Share.of(row) for row in store.alive()}
        self._buckets: dict[str, Bucket] = {}
        self._builds = itertools.count()
        store.on_transition.append(self._changed)

    # -- sandboxes

    @contextlib.contextmanager
    def room(self, shares: Mapping[str, Share]) -> Iterator[None]:
        """Charge new sandboxes, by the ids they will have; given back for those that nothing was stored of.

        Raises QuotaError, and then nothing is charged.
        """
        try:
            for ident, share in shares.items():
                self.check_room(share)
                self.charge(ident, share)
            yield
        except BaseException:
            for ident, share in shares.items():
                self.release(ident, share)
            raise

    def charge(self, ident: str, share: Share) -> None:
        """Of one that there is room for (`check_room`, in the same turn of the event loop)."""
        self._shares[ident] = share

    def release(self, ident: str, share: Share) -> None:
        """It did not come to be. Nothing changes when its row has been stored: its transitions keep it true."""
        if self._shares.get(ident) is share:
            del self._shares[ident]

    def check_room(self, share: Share) -> None:
        """Whether there is room for one more. Raises QuotaError."""
        self._check(share.project, share.figures())

    def check_rate(self, project: str, count: int = 1) -> None:
        """The rate of creates, which these count for. Raises QuotaError with when to come again."""
        rate = self._of(project).get("creates_per_s")
        if rate is None:
            self._buckets.pop(project, None)
            return
        now = clock.boottime_s()
        bucket = self._buckets.setdefault(project, Bucket(max(1.0, 2 * rate), now))
        wait = bucket.take(rate, now, count)
        if wait:
            raise QuotaError(
                f"the project may create {rate:g} sandboxes a second",
                hint=f"again in {wait:.3g} s",
                quota="creates_per_s",
                limit=rate,
                used=rate,
                retry_after_s=max(1, math.ceil(wait)),
            )

    def check_resume(self, row: SandboxRow) -> None:
        """Before a paused sandbox runs again. Raises QuotaError."""
        share = Share.of(row)
        self._check(row.project, dict(zip(RUNNING, (1, share.vcpus, share.memory_mib), strict=True)))

    def check_pause(self, row: SandboxRow, bytes_: int) -> None:
        """Before so much of a sandbox's memory is put to disk. Raises QuotaError."""
        mib = max(1, in_mib(bytes_))
        words = f"{row.id} runs on, its memory takes {mib} MiB of disk: " if bytes_ else f"{row.id} runs on: "
        self._check(row.project, {"disk_mib": mib}, words)

    def pause(self, row: SandboxRow, bytes_: int) -> None:
        """Charge what a pause has on disk; what the sandbox then is, its transitions say. Raises QuotaError."""
        self.check_pause(row, bytes_)
        self._shares[row.id] = replace(Share.of(row), paused_mib=in_mib(bytes_))

    @contextlib.contextmanager
    def building(self, project: str, vcpus: int, memory_mib: int) -> Iterator[None]:
        """Charge the machine of a template's build: it is no sandbox, and takes as much. Raises QuotaError."""
        mine = sum(one.project == project and not one.sandboxes for one in self._shares.values())
        if mine >= limits.BUILDS_PER_PROJECT_MAX:
            raise CapacityError(
                f"the project has {mine} builds under way",
                hint="wait for one, or cancel it",
                retry_after_s=10,
            )
        share = Share(project, vcpus, memory_mib, 0, sandboxes=0)
        self.check_room(share)
        ident = f"build-{next(self._builds)}"
        self.charge(ident, share)
        try:
            yield
        finally:
            self.release(ident, share)

    @contextlib.contextmanager
    def resuming(self, row: SandboxRow) -> Iterator[None]:
        """Charge a paused sandbox as one that runs while it is woken, so that resumes that come at once cannot pass a
        bound together; what it then is, its transitions say. Raises QuotaError, and then nothing is charged."""
        self.check_resume(row)
        self._shares[row.id] = share = replace(Share.of(row), runs=True)
        try:
            yield
        finally:
            if self._shares.get(row.id) is share:
                self._shares[row.id] = Share.of(row)

    # -- other things

    def check(self, project: str, name: str, used: float, more: float) -> None:
        """May a project that has `used` of a thing (`volumes_mib`, `templates`) have `more`? Raises QuotaError."""
        _raise(exceeded(self._of(project), {name: used}, {name: more}))

    def bound(self, project: str, name: str) -> float | None:
        """None: there is none."""
        found = self._of(project).get(name)
        return None if found is None else float(found)

    def volumes_bytes(self, project: str) -> int | None:
        """What a project's volumes may have together; None: no bound."""
        found = self.bound(project, "volumes_mib")
        return None if found is None else int(found) << 20

    def used(self, project: str) -> dict[str, float]:
        """What its sandboxes take now."""
        total = dict.fromkeys((*RUNNING, "disk_mib"), 0.0)
        for share in self._shares.values():
            if share.project == project:
                for name, value in share.figures().items():
                    total[name] += value
        return total

    # -- inside

    def _of(self, project: str) -> Mapping[str, Any]:
        row = self._projects.of(project)
        return {} if row is None else row.quotas

    def _check(self, project: str, more: Mapping[str, float], words: str = "") -> None:
        quotas = self._of(project)
        if quotas:
            _raise(exceeded(quotas, self.used(project), more), words)

    def _changed(self, row: SandboxRow, _from: str | None, to: str, _reason: str | None, _at: Stamp) -> None:
        if to in TERMINAL:
            self._shares.pop(row.id, None)
        else:
            self._shares[row.id] = Share.of(row)


def _raise(found: tuple[str, float, float] | None, words: str = "") -> None:
    if found is not None:
        name, bound, used = found
        raise QuotaError(
            f"{words}the project may have {bound:g} of {name}, and has {used:g}",
            hint="kill or remove what is not needed, or ask whoever runs the server for more",
            quota=name,
            limit=bound,
            used=used,
        )


def in_mib(bytes_: int) -> int:
    """Whole MiB that so many bytes take."""
    return -(-bytes_ >> 20)


def share_of(project: str, vcpus: int, memory_mib: int, disk_mib: int | None) -> Share:
    return Share(project, vcpus, memory_mib, disk_mib or limits.DISK_GIB * 1024)
