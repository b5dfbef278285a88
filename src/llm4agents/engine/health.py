"""How a node is: what it needs to serve, looked at. Degraded: some of it will not work; dead: nothing will.

Cheap enough to be asked every few seconds, and asked no more often than that, whoever asks.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import SQLAlchemyError

from llm4agents import limits
from llm4agents.engine import host as hosts
from llm4agents.errors import LLM4AgentsError

if TYPE_CHECKING:
    from llm4agents.engine.engine import Engine

VITAL: Final = "store"
"""Without it no call can be answered."""
_MEMORY_FREE_PART: Final = 0.02


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    problem: str | None
    """In words; None: it is in order."""


@dataclass(frozen=True, slots=True)
class Report:
    checks: tuple[Check, ...]

    @property
    def status(self) -> str:
        """`ok`, `degraded` or `dead`."""
        failed = {check.name for check in self.checks if check.problem is not None}
        return "dead" if VITAL in failed else "degraded" if failed else "ok"


class Health:
    """One per engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: asyncio.Task[Report] | None = None
        self._at = float("-inf")

    async def report(self) -> Report:
        """How it is, or was HEALTH_KEPT_S ago at most."""
        task, now = self._asked, time.monotonic()
        if task is None or (task.done() and now - self._at > limits.HEALTH_KEPT_S):
            task = self._asked = asyncio.create_task(self._look())
            self._at = now
        return await asyncio.shield(task)

    async def _look(self) -> Report:
        looks: dict[str, Callable[[], Awaitable[str | None]]] = {
            "store": self._store,
            "disk": self._disk,
            "memory": self._memory,
            "vmm": self._vmm,
            "barrier": self._barrier,
        }
        found = await asyncio.gather(*(_within(look) for look in looks.values()))
        return Report(tuple(Check(name, problem) for name, problem in zip(looks, found, strict=True)))

    async def _store(self) -> str | None:
        try:
            self._engine.store.set_meta("health", f"{time.time():.0f}")
        except (LLM4AgentsError, SQLAlchemyError) as error:
            return f"the store cannot be written: {error}"
        return None

    async def _disk(self) -> str | None:
        for place in (self._engine.settings.state, self._engine.settings.cache):
            if place.exists() and shutil.disk_usage(place).free < limits.DISK_FREE_BYTES_MIN:
                return f"less than {limits.DISK_FREE_BYTES_MIN >> 20} MiB are free under {place}"
        return None

    async def _memory(self) -> str | None:
        figures = hosts.host(self._engine.settings.state)
        if figures.memory_available_bytes < figures.memory_total_bytes * _MEMORY_FREE_PART:
            return f"{figures.memory_available_bytes >> 20} MiB of memory are left"
        return None

    async def _vmm(self) -> str | None:
        if await self._engine.capabilities() is None:
            return "no VMM can run here; llm4agents doctor says why"
        return None

    async def _barrier(self) -> str | None:
        return self._engine.networks.barrier.workers_problem()


async def _within(look: Callable[[], Awaitable[str | None]]) -> str | None:
    try:
        async with asyncio.timeout(limits.HEALTH_TIMEOUT_S):
            return await look()
    except TimeoutError:
        return f"no answer within {limits.HEALTH_TIMEOUT_S:g} s"
    except Exception as error:  # a check that fails is a finding
        return f"{type(error).__name__}: {error}"
