"""The server's side of links: what one is, and a few that are made ahead.

Not here: the process that makes them (`__main__`, a worker of `barrier.workers`), and who reads their sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llm4agents import limits
from llm4agents.barrier.workers import Spec, WorkerError
from llm4agents.errors import HostSetupError

SPEC = Spec("link", "llm4agents.barrier.link", privileged=True)
"""What the worker is."""
HINT = "`llm4agents doctor` checks it; sandboxes with network `none` work without"


class Worker(Protocol):
    async def request(
        self, message: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """One request to the link process and its answer, with the descriptors that came with it."""


@dataclass
class Planted:
    """The host's side of a namespace; holding any of these holds the namespace. Descriptors; -1 once closed."""

    tcp: int
    """Listens; every TCP connection of the guest, whatever it dialled (SO_ORIGINAL_DST)."""
    udp: int
    """Every DNS query over UDP; what is sent back comes from the address that was asked."""
    packets: int
    """What was refused (`nft.PREFIXES`), as NFLOG messages."""
    netns: int

    def names(self) -> dict[str, int]:
        """For `vmm.base.Placement.serve`."""
        return {"tcp": self.tcp, "udp": self.udp, "packets": self.packets, "netns": self.netns}

    def close(self) -> None:
        """Idempotent."""
        for name, fd in self.names().items():
            if fd >= 0:
                setattr(self, name, -1)
                os.close(fd)


@dataclass
class Link:
    """A namespace no machine uses yet. `tap` is for the VMM alone."""

    tap: int
    planted: Planted

    def release_tap(self) -> None:
        """Close `tap`, which somebody else is to open by its name in `planted.netns`. Idempotent."""
        if self.tap >= 0:
            fd, self.tap = self.tap, -1
            os.close(fd)

    def close(self) -> None:
        """Idempotent."""
        self.release_tap()
        self.planted.close()


class Links:
    """A few links made ahead (`ready`), so that a create waits for none. Belongs to one event loop."""

    def __init__(self, worker: Worker, *, ready: int = limits.LINKS_READY) -> None:
        self._worker = worker
        self._wanted = ready
        self._ready: deque[Link] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    async def take(self) -> Link:
        """A link of the caller's own, who closes it. Raises HostSetupError where none can be made."""
        link = self._ready.popleft() if self._ready else await self._make()
        self.fill(after_s=limits.LINK_REFILL_DELAY_S)
        return link

    def fill(self, *, after_s: float = 0.0) -> None:
        """Have the pool filled in the background."""
        if (
            not self._closed
            and len(self._ready) < self._wanted
            and (self._filling is None or self._filling.done())
        ):
            self._filling = asyncio.create_task(self._fill(after_s), name="links")

    @property
    def ready(self) -> int:
        return len(self._ready)

    async def check(self) -> str | None:
        """Why no link can be made on this host; None when one can."""
        try:
            answer, fds = await self._worker.request({"op": "check"})
        except WorkerError as error:
            return str(error)
        _close(fds)
        problem = answer.get("problem")
        return None if problem is None else str(problem)

    async def packet_socket(self, netns: int) -> int:
        """A packet socket on the tap of that namespace; the caller closes it."""
        return (await self._ask({"op": "packet_socket"}, [netns], 1))[0]

    async def close(self) -> None:
        """Let go of those nobody took. Idempotent."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filling
        while self._ready:
            self._ready.pop().close()

    async def _fill(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while len(self._ready) < self._wanted and not self._closed:
            try:
                self._ready.append(await self._make())
            except HostSetupError:
                return  # whoever takes one next is told

    async def _make(self) -> Link:
        tap, *planted = await self._ask({"op": "make"}, [], 5)
        return Link(tap, Planted(*planted))

    async def _ask(self, message: dict[str, Any], fds: Sequence[int], expected: int) -> list[int]:
        try:
            _, got = await self._worker.request(message, fds)
        except WorkerError as error:
            raise HostSetupError(f"a sandbox's network cannot be made: {error}", hint=HINT) from error
        if len(got) != expected:
            _close(got)
            raise HostSetupError("the link process gave an answer that makes no sense", hint=HINT)
        return got


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
