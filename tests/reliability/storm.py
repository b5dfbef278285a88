"""A storm: clients at random operations while the server is killed with -9 at random moments. What must hold is
checked against what each client was told: `Ledger` is one client's account of it.

Used by `scripts/bench storm` (200 kills) and by a test (a few).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm4agents import AsyncSandbox
from llm4agents.errors import (
    ConnectionLostError,
    LLM4AgentsError,
    SandboxDiedError,
    SandboxNotFoundError,
)
from llm4agents.vmm import shim
from tests.support import Node

ALIVE_MAX = 2
"""Sandboxes of one client."""


@dataclass
class Ledger:
    """What a client knows of one sandbox: lines it was told were written, and lines that may have been."""

    handle: AsyncSandbox
    written: list[str] = field(default_factory=list)
    perhaps: set[str] = field(default_factory=set)
    ending: bool = False
    """A kill was asked for; it may be gone."""


@dataclass
class Outcome:
    kills: int = 0
    operations: int = 0
    unknown: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Calls that ended in no error of ours, or sandboxes in a state nobody asked for."""
    orphans: list[str] = field(default_factory=list)


class Storm:
    def __init__(self, node: Node, *, kills: int, clients: int = 8, seed: int | None = None) -> None:
        self.node, self.kills, self.clients = node, kills, clients
        self.random = random.Random(seed)
        self.outcome = Outcome()
        self._over = asyncio.Event()
        self._line = 0
        self._known: list[str] = []

    async def run(self) -> Outcome:
        ledgers: list[list[Ledger]] = [[] for _ in range(self.clients)]
        clients = [asyncio.create_task(self._client(mine)) for mine in ledgers]
        await self._killer()
        self._over.set()
        await asyncio.gather(*clients)
        for ledger in [ledger for mine in ledgers for ledger in mine]:
            await self._audit(ledger)
        await self._leave_nothing()
        return self.outcome

    # -- the killer

    async def _killer(self) -> None:
        while self.outcome.kills < self.kills:
            await asyncio.sleep(self.random.uniform(0.05, 1.5))
            pid = server_pid(self.node.state)
            if pid is None:
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.outcome.kills += 1

    # -- a client

    async def _client(self, mine: list[Ledger]) -> None:
        while not self._over.is_set():
            act = self._choose(mine)
            self.outcome.operations += 1
            try:
                await act(mine)
            except LLM4AgentsError as error:
                self.outcome.unknown += error.outcome == "unknown"
            except Exception as error:
                self.outcome.broken.append(f"{type(error).__name__}: {error}")

    def _choose(self, mine: list[Ledger]) -> Callable[[list[Ledger]], Awaitable[None]]:
        if not mine:
            return self._create
        acts: list[tuple[Callable[[list[Ledger]], Awaitable[None]], int]] = [
            (self._write, 10),
            (self._pause, 4),
            (self._resume, 2),
            (self._kill, 1),
        ]
        if len(mine) < ALIVE_MAX:
            acts += [(self._create, 2), (self._fork, 2)]
        return self.random.choices([act for act, _ in acts], [weight for _, weight in acts])[0]

    async def _create(self, mine: list[Ledger]) -> None:
        made = await AsyncSandbox.create("base", memory_mib=256, timeout=900)
        self._known.append(made.id)
        mine.append(Ledger(made))

    async def _write(self, mine: list[Ledger]) -> None:
        ledger = self.random.choice(mine)
        self._line += 1
        line = f"line-{self._line}"
        ledger.perhaps.add(line)
        try:
            result = await ledger.handle.exec(f"echo {line} >> /home/user/log", timeout=30)
        except LLM4AgentsError as error:
            if error.outcome == "not_started":
                ledger.perhaps.discard(line)
            self._told_dead(mine, ledger, error)
            raise
        if result.exit_code == 0:
            ledger.perhaps.discard(line)
            ledger.written.append(line)

    async def _pause(self, mine: list[Ledger]) -> None:
        await self.random.choice(mine).handle.pause()

    async def _resume(self, mine: list[Ledger]) -> None:
        await self.random.choice(mine).handle.resume()

    async def _fork(self, mine: list[Ledger]) -> None:
        parent = self.random.choice(mine)
        written, perhaps = list(parent.written), set(parent.perhaps)
        (child,) = await parent.handle.fork(1)
        self._known.append(child.id)
        mine.append(Ledger(child, written, perhaps))

    async def _kill(self, mine: list[Ledger]) -> None:
        ledger = self.random.choice(mine)
        ledger.ending = True
        await ledger.handle.kill()
        mine.remove(ledger)

    def _told_dead(self, mine: list[Ledger], ledger: Ledger, error: LLM4AgentsError) -> None:
        if isinstance(error, SandboxDiedError | SandboxNotFoundError):
            mine.remove(ledger)
            if not ledger.ending:
                self.outcome.lost.append(f"{ledger.handle.id}: {error.message}")

    # -- what must hold

    async def _audit(self, ledger: Ledger) -> None:
        read = "cat /home/user/log 2>/dev/null"
        try:
            try:
                text = (await ledger.handle.exec(read, timeout=60)).stdout
            except ConnectionLostError:  # the last kill may come in its middle, and reading may be done again
                text = (await ledger.handle.exec(read, timeout=60)).stdout
        except LLM4AgentsError as error:
            if not ledger.ending:
                self.outcome.lost.append(f"{ledger.handle.id}: {error.message}")
            return
        counts = Counter(text.split())
        ident = ledger.handle.id
        self.outcome.lost += [f"{ident}: {line}" for line in ledger.written if not counts[line]]
        self.outcome.doubled += [f"{ident}: {line}" for line, count in counts.items() if count > 1]
        known = {*ledger.written, *ledger.perhaps}
        self.outcome.broken += [f"{ident}: nobody wrote {line}" for line in counts if line not in known]

    async def _leave_nothing(self) -> None:
        infos = await AsyncSandbox.list()
        alive = [info for info in infos if info.state not in ("killed", "failed")]
        # One whose create nobody was told of is nobody's loss.
        known = set(self._known)
        self.outcome.lost += [f"{i.id}: {i.reason}" for i in infos if i.state == "failed" and i.id in known]
        running = {info.id for info in alive if info.state == "running"}
        self.outcome.broken += [
            f"{info.id} is {info.state}" for info in alive if info.state not in ("running", "paused")
        ]
        machines = self.node.machines()
        self.outcome.orphans += [f"a machine of {name}" for name in machines if name not in running]
        shims = Counter(path.name for path in shim.running(self.node.run / "vm").values())
        self.outcome.doubled += [name for name, count in shims.items() if count > 1]
        self.outcome.lost += [f"{name} has no machine" for name in running if name not in machines]
        for info in alive:
            await (await AsyncSandbox.connect(info.id)).kill()
        end = time.monotonic() + 30
        while self.node.processes() and time.monotonic() < end:
            await asyncio.sleep(0.1)
        self.outcome.orphans += [f"{name} {pid}" for pid, name in self.node.processes()]
        for part in ("sandboxes", "layers", "photographs"):
            self.outcome.orphans += [str(path) for path in (self.node.state / part).glob("*")]
        self.outcome.orphans += [str(path) for path in (self.node.run / "vm").glob("*")]


def server_pid(state: Path) -> int | None:
    """The server of that state directory, if one has written itself down."""
    try:
        pid = int((state / "lock").read_text().strip())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"llm4agents.api.server" in command else None


def report(outcome: Outcome) -> dict[str, Any]:
    return {
        "kills": outcome.kills,
        "operations": outcome.operations,
        "unknown": outcome.unknown,
        "orphans": len(outcome.orphans),
        "lost": len(outcome.lost),
        "doubled": len(outcome.doubled),
        "broken": len(outcome.broken),
    }
