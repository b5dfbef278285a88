"""The barrier as one thing: which workers run, which sandboxes they know, with which policy and secrets.

What is wanted of each sandbox is kept here, and the workers are made to agree with it: after a join, a new policy, a
rotated secret, and after a worker was lost and started again. A worker's death ends no sandbox; until the next one
has been told of it, the sandbox's connections wait.

Not here: what a policy says (`policy`), where planted sockets come from (the engine asks the shims), how a worker is
started and asked (`workers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from llm4agents.barrier import wire, workers
from llm4agents.barrier.link.links import SPEC as LINK
from llm4agents.barrier.link.links import Link, Links
from llm4agents.barrier.workers import Spec, User, Worker, WorkerError, WorkerLost, WorkerRefused
from llm4agents.config import Settings
from llm4agents.errors import HostSetupError, LLM4AgentsError, UnknownOutcomeError

log = structlog.get_logger()

GATEWAY = Spec("gateway", "llm4agents.barrier.gateway", dials=True)

INTERCEPT = "llm4agents.barrier.intercept"
PLANTED = ("tcp", "udp", "packets")
"""What the gateway is given of a sandbox, and the descriptor of its VMM after them."""
RETRY_S = (0.1, 0.5, 2.0, 10.0)
CHECK_AGAIN_S = 10.0
LEAVE_TIMEOUT_S = 2.0
AT_ONCE = 8

Values = Mapping[str, Any]
"""Secrets by name, as the interceptor wants them."""
Sockets = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the barrier is to do for a sandbox. `policy`: as `Policy.to_json()` gives it."""

    policy: Mapping[str, Any]
    intercepts: bool = False
    """Whether some of its connections go through the interceptor."""
    secrets: tuple[str, ...] = ()
    """Names of those that may be put into its requests."""


@dataclass(slots=True)
class _Entry:
    wish: Wish
    names_from: str | None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    gateway: tuple[int, Wish] | None = None
    """Which connection of the gateway was told what."""
    intercept: tuple[int, Wish] | None = None
    values_known: bool = False
    """Whether the interceptor has the secrets as they are now."""
    left: bool = False
    problem: str | None = None
    """Why a worker has not been told what it should be."""
    retry: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What the engine brings: the barrier knows no VMs, no store and no key."""

    sockets: Callable[[str], Awaitable[Sockets | None]]
    """The planted sockets of a sandbox (`tcp`, `udp`, `packets`) and a `pidfd` of its VMM; copies, closed here. None:
    it has none, or has ended."""
    secrets: Callable[[str, Iterable[str]], Awaitable[Values]]
    """Values of these secrets for a sandbox; those that are not there are left out."""
    authority: Callable[[], tuple[str, str]]
    """Certificate and key (PEM) of the node's CA."""
    interpreter: Callable[[], Awaitable[Path]]
    """The interceptor's Python, built if need be. Raises HostSetupError."""


class Barrier:
    """One per server. `start` it, `close` it; belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        *,
        version: str,
        user: Callable[[str], User] | None = None,
    ) -> None:
        self._settings, self._parts, self._version, self._user = settings, parts, version, user
        self._entries: dict[str, _Entry] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._gateway = self._worker(GATEWAY, self._gateway_up)
        self._link = self._worker(LINK)
        self._links = Links(self._link)
        self._intercept: Worker | None = None
        self._starting_intercept: asyncio.Lock = asyncio.Lock()
        self._gateway_epoch = self._intercept_epoch = 0
        self._gateway_has: set[str] = set()
        """What an adopted gateway serves already, and has not been told of by us: its connections go on."""
        self._introduced: tuple[int, int] | None = None
        """The connections of gateway and interceptor that have been given a socket to each other."""
        self._introducing = asyncio.Lock()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._checking: asyncio.Task[str | None] | None = None
        self._checked_s = 0.0

    def worker(self, spec: Spec, on_up: workers.OnUp) -> Worker:
        """One more worker, for a capture; the caller's to start and close."""
        return self._worker(spec, on_up)

    def _worker(self, spec: Spec, on_up: workers.OnUp | None = None) -> Worker:
        return Worker(
            spec,
            run=self._settings.run_dir,
            state=self._settings.state,
            version=self._version,
            user=self._user if os.geteuid() == 0 else None,
            on_up=on_up,
            on_event=self._on_event,
        )

    # -- its life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Find out whether links can be made, and take over the workers that live. Waits for nothing."""
        if self._settings.barrier == "off":
            # A gateway from before would go on letting out what its sandboxes were allowed then.
            if workers.running(self._settings.run_dir):
                self._spawn(self._end_workers())
            return
        self._look()
        if "gateway" in workers.running(self._settings.run_dir).values():
            self._spawn(self._up(self._gateway))

    async def close(self, *, keep: bool) -> None:
        """End the workers; with `keep` those that serve a sandbox live on."""
        keep = keep and bool(self._entries)
        if self._leaving:
            await asyncio.wait(list(self._leaving.values()), timeout=LEAVE_TIMEOUT_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._links.close()
        if self._settings.barrier == "off" and not workers.running(self._settings.run_dir):
            return
        await self._end_workers(keep=keep)

    async def _end_workers(self, *, keep: bool = False) -> None:
        intercept = self._intercept or self._worker(Spec("intercept", INTERCEPT))
        await asyncio.gather(
            self._link.close(keep=False), self._gateway.close(keep=keep), intercept.close(keep=keep)
        )

    async def available(self) -> str | None:
        """None when sandboxes here can have a link, else why not. Looks again now and then after a problem."""
        if self._settings.barrier == "off":
            return "LLM4AGENTS_BARRIER=off"
        return await asyncio.shield(self._look())

    def _look(self) -> asyncio.Task[str | None]:
        now = asyncio.get_running_loop().time()
        task = self._checking
        if task is None or (
            task.done() and (task.cancelled() or task.result()) and now - self._checked_s > CHECK_AGAIN_S
        ):
            self._checked_s = now
            task = self._checking = self._spawn(self._check())
        return task

    async def _check(self) -> str | None:
        try:
            await self._link.start()
            answer, fds = await self._link.request({"op": "check"})
            wire.close(fds)
            problem = answer.get("problem")
        except (WorkerError, LLM4AgentsError) as error:
            problem = _words(error)
        if problem:
            log.warning("no_links", problem=problem)
        else:
            self._links.fill()  # the first create waits for none either
        return str(problem) if problem else None

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("barrier_task_failed", exc_info=error)

    # -- links --------------------------------------------------------------------------------------------

    async def link(self) -> Link:
        """A link for a new machine, from those made ahead if there is one. The caller's to close.

        Raises HostSetupError, CapacityError.
        """
        if (problem := await self.available()) is not None:
            raise no_link(problem)
        try:
            await self._link.start()
            return await self._links.take()
        except WorkerError as error:
            raise HostSetupError(f"no link could be made: {error}", hint="llm4agents doctor") from error

    async def packet_socket(self, netns: int) -> int:
        """An AF_PACKET socket on the tap of that namespace; the caller's to close. Raises HostSetupError."""
        try:
            await self._link.start()
            return await self._links.packet_socket(netns)
        except WorkerError as error:
            raise HostSetupError(f"no capture socket could be made: {error}") from error

    # -- sandboxes ----------------------------------------------------------------------------------------

    async def join(self, sandbox: str, wish: Wish, *, names_from: str | None = None) -> None:
        """Let a sandbox's connections out, as its policy says. Also of one that has joined.

        `names_from`: a sandbox whose names and their addresses it begins with. When it fails it is tried again until
        `leave`, and the error says why it did this time; the sandbox's connections wait.
        """
        entry = self._entries.get(sandbox)
        if entry is None:
            entry = self._entries[sandbox] = _Entry(wish, names_from)
        entry.wish = wish
        await self._agree(sandbox, entry)

    async def update(self, sandbox: str, wish: Wish) -> int:
        """Change the policy of one that has joined; how many of its flows were cut.

        Returns once gateway and interceptor obey it. Raises UnknownOutcomeError when one of them does not answer: it is
        told as soon as it does.
        """
        entry = self._entries.get(sandbox)
        if entry is None:
            return 0
        entry.wish = wish
        try:
            return await self._agree(sandbox, entry)
        except LLM4AgentsError as error:
            raise UnknownOutcomeError(
                f"the new policy of {sandbox} is not in force everywhere yet: {error.message}",
                hint="it will be as soon as that is mended; the log says when",
            ) from error

    def leave(self, sandbox: str, *, forget: bool) -> None:
        """It has paused (`forget` is false: its names are kept) or ended. Told in the background; a join that follows
        comes after it."""
        entry = self._entries.pop(sandbox, None)
        self._gateway_has.discard(sandbox)
        if entry is None:
            if forget and self._gateway.up:  # it was paused: there are names still
                self._spawn(self._quietly(self._gateway, _leaving(sandbox, forget)))
            return
        entry.left = True
        if entry.retry is not None:
            entry.retry.cancel()
        task = self._leaving[sandbox] = self._spawn(self._leave(sandbox, entry, forget))

        def left(_: object) -> None:
            if self._leaving.get(sandbox) is task:
                del self._leaving[sandbox]

        task.add_done_callback(left)

    async def _leave(self, sandbox: str, entry: _Entry, forget: bool) -> None:
        async with entry.lock:
            if entry.intercept is not None and self._intercept is not None:
                await self._quietly(self._intercept, {"op": "leave", "sandbox": sandbox})
            if entry.gateway is not None:
                await self._quietly(self._gateway, _leaving(sandbox, forget))

    def has(self, sandbox: str) -> bool:
        return sandbox in self._entries

    def problem(self, sandbox: str) -> str | None:
        """Why what is wanted of it is not in force everywhere; None when it is, or is about to be."""
        entry = self._entries.get(sandbox)
        return None if entry is None else entry.problem

    async def rotated(self, name: str, of: Callable[[str], bool] = lambda _: True) -> None:
        """A secret has another value, or none: the sandboxes that use it get what there is now.

        `of`: whose it is; another's secret of that name is another.
        """
        users = [(key, one) for key, one in self._entries.items() if name in one.wish.secrets and of(key)]
        for _, entry in users:
            entry.values_known = False
        await asyncio.gather(*(self._agree(key, entry) for key, entry in users))

    async def ask_gateway(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """`stats`, `flows`. Raises HostSetupError when there is no gateway."""
        try:
            answer, fds = await self._gateway.request(message)
        except WorkerError as error:
            raise HostSetupError(str(error), hint="llm4agents doctor") from error
        wire.close(fds)
        return answer

    @property
    def gateway_up(self) -> bool:
        return self._gateway.up

    def processes(self) -> dict[str, int]:
        """The pids of gateway and interceptor, as far as they are up."""
        found = (self._gateway, *(() if self._intercept is None else (self._intercept,)))
        return {worker.spec.name: worker.pid for worker in found if worker.up and worker.pid is not None}

    def workers_problem(self) -> str | None:
        """Which worker that sandboxes here need is not up, and why; None when none is missing."""
        wanted = [self._gateway] if self._entries else []
        if self._intercept is not None and any(entry.wish.intercepts for entry in self._entries.values()):
            wanted.append(self._intercept)
        return next(
            (f"{one.spec.name} is not up: {one.problem or 'it starts'}" for one in wanted if not one.up), None
        )

    # -- making the workers agree -------------------------------------------------------------------------

    async def _agree(self, sandbox: str, entry: _Entry) -> int:
        """Tell both what they have not been told. Tried again later if it fails; the number of flows cut."""
        problem: WorkerError | LLM4AgentsError | None = None
        cut = 0
        async with entry.lock:
            if (leaving := self._leaving.get(sandbox)) is not None:
                await asyncio.wait([leaving])
            if entry.left:
                return 0
            # The interceptor first: flows of the new policy must find it, and if it cannot be had, the rest still goes.
            for step in (self._agree_intercept, self._agree_gateway):
                try:
                    try:
                        done = await step(sandbox, entry)
                    except WorkerLost:  # it ended under the question: its successor is asked once
                        done = await step(sandbox, entry)
                    cut += done
                except (WorkerError, LLM4AgentsError) as error:
                    problem = problem or error
        entry.problem = None if problem is None else _words(problem)
        if problem is not None:
            log.warning("join_failed", sandbox=sandbox, error=_words(problem))
            if entry.retry is None or entry.retry.done():
                entry.retry = self._spawn(self._retry(sandbox, entry))
            if isinstance(problem, LLM4AgentsError):
                raise problem
            raise HostSetupError(str(problem), hint="llm4agents doctor") from problem
        return cut

    async def _retry(self, sandbox: str, entry: _Entry) -> None:
        tries = 0
        while not entry.left:
            await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1
            with contextlib.suppress(LLM4AgentsError):
                await self._agree(sandbox, entry)
                return

    async def _agree_gateway(self, sandbox: str, entry: _Entry) -> int:
        await self._up(self._gateway)
        epoch, wish = self._gateway_epoch, entry.wish
        told = entry.gateway
        joined = told is not None and told[0] == epoch
        if joined and told is not None and told[1].policy == wish.policy:
            return 0
        if joined or sandbox in self._gateway_has:
            self._gateway_has.discard(sandbox)
            with contextlib.suppress(WorkerRefused):  # not there any more: it joins
                answer = await self._ask(
                    self._gateway, {"op": "policy", "sandbox": sandbox, "policy": dict(wish.policy)}
                )
                entry.gateway = (epoch, wish)
                return int(answer.get("cut") or 0)
        message = {
            "op": "join",
            "sandbox": sandbox,
            "policy": dict(wish.policy),
            "names_from": entry.names_from,
        }
        async with self._turns:
            sockets = await self._parts.sockets(sandbox)
            if sockets is None:
                return 0  # it ended meanwhile: who watches it says so
            try:
                await self._ask(
                    self._gateway, message, [*(sockets[name] for name in PLANTED), sockets["pidfd"]]
                )
            finally:
                wire.close(list(sockets.values()))
        entry.gateway, entry.names_from = (epoch, wish), None
        return 0

    async def _agree_intercept(self, sandbox: str, entry: _Entry) -> int:
        wish = entry.wish
        if not wish.intercepts:
            cut = 0
            if entry.intercept is not None and self._intercept is not None and self._intercept.up:
                answer = await self._ask(
                    self._intercept, {"op": "leave", "sandbox": sandbox, "changed": True}
                )
                cut = int(answer.get("cut") or 0)
            entry.intercept = None
            return cut
        worker = await self._interceptor()
        epoch, told = self._intercept_epoch, entry.intercept
        if told is None or told[0] != epoch or told[1].secrets != wish.secrets:
            values = dict(await self._parts.secrets(sandbox, wish.secrets))
            answer = await self._ask(
                worker, {"op": "join", "sandbox": sandbox, "policy": dict(wish.policy), "secrets": values}
            )
            entry.intercept, entry.values_known = (epoch, wish), True
            return int(answer.get("cut") or 0)
        cut = 0
        if told[1].policy != wish.policy:
            answer = await self._ask(
                worker, {"op": "policy", "sandbox": sandbox, "policy": dict(wish.policy)}
            )
            entry.intercept = (epoch, wish)
            cut = int(answer.get("cut") or 0)
        if not entry.values_known:
            values = dict(await self._parts.secrets(sandbox, wish.secrets))
            await self._ask(worker, {"op": "secrets", "sandbox": sandbox, "secrets": values})
            entry.values_known = True
        return cut

    # -- the workers --------------------------------------------------------------------------------------

    async def _up(self, worker: Worker) -> None:
        await worker.start()

    async def _interceptor(self) -> Worker:
        """The interceptor, up, with the CA, and known to the gateway. Raises HostSetupError."""
        async with self._starting_intercept:
            if self._intercept is None:
                python = await self._parts.interpreter()
                spec = Spec("intercept", INTERCEPT, python=str(python), dials=True)
                self._intercept = self._worker(spec, self._intercept_up)
            await self._intercept.start()
        await self._up(self._gateway)
        await self._introduce()
        return self._intercept

    async def _gateway_up(self, answer: dict[str, Any]) -> None:
        self._gateway_epoch += 1
        self._gateway_has = set(answer.get("sandboxes") or ())
        self._all_agree()

    async def _intercept_up(self, answer: dict[str, Any]) -> None:
        self._intercept_epoch += 1
        assert self._intercept is not None
        certificate, key = self._parts.authority()
        await self._ask(self._intercept, {"op": "ca", "certificate": certificate, "key": key})
        self._all_agree()

    def _all_agree(self) -> None:
        """In the background, since who is up only now must be so for everybody first."""

        async def one(sandbox: str, entry: _Entry) -> None:
            with contextlib.suppress(LLM4AgentsError):
                await self._agree(sandbox, entry)

        for sandbox, entry in self._entries.items():
            self._spawn(one(sandbox, entry))

    async def _introduce(self) -> None:
        """Give gateway and interceptor a socket to each other, once for each pair of connections to them."""
        async with self._introducing:
            epochs = (self._gateway_epoch, self._intercept_epoch)
            if self._introduced == epochs or self._intercept is None:
                return
            ends = wire.pair()
            try:
                await self._ask(self._intercept, {"op": "accept"}, [ends[0].fileno()])
                await self._ask(self._gateway, {"op": "interceptor"}, [ends[1].fileno()])
            finally:
                for end in ends:
                    end.close()
            self._introduced = epochs

    async def _ask(
        self, worker: Worker, message: Mapping[str, Any], fds: Iterable[int] = ()
    ) -> dict[str, Any]:
        answer, given = await worker.request(message, list(fds))
        wire.close(given)
        return answer

    async def _quietly(self, worker: Worker, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(WorkerError):
            await self._ask(worker, message)

    def _on_event(self, event: dict[str, Any], fds: list[int]) -> None:
        wire.close(fds)
        log.debug("barrier_event", **{str(name): value for name, value in event.items() if name != "event"})


def _leaving(sandbox: str, forget: bool) -> dict[str, Any]:
    return {"op": "leave", "sandbox": sandbox, "forget": forget}


def no_link(problem: str) -> HostSetupError:
    """The error of who needs a network where there can be none."""
    return HostSetupError(
        f"sandboxes here can have no network: {problem}",
        hint="llm4agents doctor says what is missing; network='none' needs nothing",
    )


def _words(error: WorkerError | LLM4AgentsError) -> str:
    return error.message if isinstance(error, LLM4AgentsError) else str(error)


__all__ = ["Barrier", "Link", "Parts", "Wish", "WorkerLost", "no_link"]
