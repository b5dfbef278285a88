"""The create path: from a verified template to a running sandbox, and what is undone when that fails.

What we are measured on, so: nothing here waits for a disk, and the store, the overlay and the VMM's start overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.barrier.barrier import Link
from llm4agents.engine import attached, bounds, clock, contact, contexts, tops
from llm4agents.engine.attached import Attached
from llm4agents.engine.live import Live
from llm4agents.engine.node import Places
from llm4agents.engine.parts import Variant
from llm4agents.engine.protecting import Protection
from llm4agents.errors import BootError, CapacityError, GuestError, HostSetupError, LLM4AgentsError, disk_full
from llm4agents.guest.verbs import Agent
from llm4agents.store import SandboxRow, Store
from llm4agents.vmm.base import Disk, Driver, Machine, Placement, Snapshot

CREATE_GRACE_S = 60.0
"""The deadline of a machine whose creation is not finished: a server that dies then leaves it that long."""
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


def new_id() -> str:
    return "sbx_" + "".join(secrets.choice(_ALPHABET) for _ in range(20))


def host_name(sandbox: str) -> str:
    """The guest's host name: a DNS label, so no underscore."""
    return sandbox.replace("_", "-")


async def prepare(
    ident: str, variant: Variant, places: Places, layers: tuple[Path, ...] = (), source: Path | None = None
) -> tuple[Disk, ...]:
    """Make the directories of a new clone and its disk (of a fork over `layers`, or a copy of `source`); its disks.

    Raises OSError, CapacityError.
    """
    form = tops.of(variant.disk_format)
    top = places.disk(ident, form.first)
    places.run(ident).mkdir(mode=0o700)
    top.parent.mkdir(mode=0o700)
    await form.over(source or variant.upper, variant.empty, top)
    return variant.disks(top, layers)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a machine is cloned from: a template's variant with its frozen memory, and perhaps the pages of a pause."""

    variant: Variant
    snapshot: Snapshot
    diff: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Woken:
    """A machine that runs, has its own identity and answers."""

    machine: Machine
    agent: Agent
    boot_id: str
    linked: bool = False
    """Whether its NIC leads anywhere (`engine.network`)."""
    unmounted: Mapping[str, str] = field(default_factory=dict)
    """Volumes that could not be mounted, by their attachment's id, and why."""
    busy: tuple[str, ...] = ()
    """Slots whose former volume something in the guest still has in use."""


def placed(ident: str, run_dir: Path, deadline_unix: float, link: Link | None) -> Placement:
    """The placement of a machine with that link, which the caller closes once the machine has started."""
    if link is None:
        return Placement(ident, run_dir, deadline_unix)
    return Placement(
        ident,
        run_dir,
        deadline_unix,
        tap=link.tap,
        netns=link.planted.netns,
        release_tap=link.release_tap,
        serve=link.planted.names(),
    )


async def wake(
    ident: str,
    origin: Origin,
    disks: tuple[Disk, ...],
    env: Mapping[str, str],
    *,
    driver: Driver,
    places: Places,
    link: Link | None = None,
    while_starting: Callable[[], None] = lambda: None,
    while_waking: Callable[[Machine], None] = lambda _: None,
    protect: Mapping[str, object] | None = None,
    volumes: Sequence[Mapping[str, object]] = (),
    without: bool = False,
    before_running: Callable[[Machine], Awaitable[None]] | None = None,
) -> Woken:
    """Clone `origin` into `places.run(ident)` (made already), let it run, and make it a machine of its own.

    `while_starting` is called while the VMM starts, `while_waking` while the guest wakes up: room for a store's
    writes; `protect` and `volumes` are mounted before a process runs; `before_running` is waited for when it is
    loaded and stands still. Nothing runs any more when this raises (BootError when the guest does not answer in
    time). `link` is used up, whatever happens.
    """
    machine: Machine | None = None
    deadline = clock.wall_s() + CREATE_GRACE_S
    try:
        async with asyncio.timeout(limits.RESTORE_TIMEOUT_S):
            placement = placed(ident, places.run(ident), deadline, link)
            restoring = asyncio.create_task(
                driver.restore(origin.snapshot, placement, disks, diff=origin.diff)
            )
            try:
                await asyncio.sleep(0)
                while_starting()
            finally:
                machine = await restoring
            if link is not None:
                link.close()  # the shim has what keeps it
            if before_running is not None:
                await before_running(machine)
            await machine.resume()
            greeting = asyncio.create_task(contact.greet(machine, timeout=limits.RESTORE_TIMEOUT_S))
            try:
                await asyncio.sleep(0)
                while_waking(machine)
            finally:
                agent = await greeting
            environment = {**origin.variant.environment, **env}
            known = await identify(
                agent,
                ident,
                environment,
                linked=link is not None,
                protect=protect,
                volumes=volumes,
                without=without,
            )
        return Woken(machine, agent, known.boot_id, link is not None, known.unmounted, known.busy)
    except BaseException as error:
        if machine is not None:
            with contextlib.suppress(LLM4AgentsError):
                await asyncio.shield(machine.stop())
        if isinstance(error, TimeoutError) and not isinstance(error, LLM4AgentsError):
            raise BootError(
                f"the clone of {origin.variant.name} did not answer within {limits.RESTORE_TIMEOUT_S:g} s",
                hint="the host may be overloaded; try again",
            ) from error
        raise
    finally:
        if link is not None:
            link.close()


@dataclass(frozen=True, slots=True)
class Identified:
    """As `Woken` has them."""

    boot_id: str
    unmounted: Mapping[str, str]
    busy: tuple[str, ...]


async def identify(
    agent: Agent,
    ident: str,
    env: Mapping[str, str],
    *,
    linked: bool,
    protect: Mapping[str, object] | None = None,
    volumes: Sequence[Mapping[str, object]] | None = None,
    without: bool = False,
) -> Identified:
    """Make the machine another than its twins: entropy, clock, names; its processes run on.

    Its network is up before they do, or (not `linked`) down: what is dialled then fails at once. What is to `protect`
    is covered before they do, too, and `volumes` are mounted, and no others (None: those that are). A volume that
    cannot be is a GuestError, unless it is to go on `without`.
    """
    boot_id = secrets.token_hex(16)
    unmounted, busy = await agent.post_restore(
        entropy=os.urandom(64),
        unix_ns=time.time_ns(),
        hostname=host_name(ident),
        machine_id=secrets.token_hex(16),
        boot_id=boot_id,
        env=env,
        network=linked,
        protect=protect,
        volumes=volumes,
    )
    if unmounted and not without:
        raise GuestError(f"a volume could not be mounted: {next(iter(unmounted.values()))}", code="io")
    return Identified(boot_id, unmounted, busy)


async def create(
    row: SandboxRow,
    origin: Origin,
    env: Mapping[str, str],
    *,
    link: Link | None,
    driver: Driver,
    store: Store,
    places: Places,
    on_deadline: Callable[[Live, str], None],
    free_bytes: Callable[[], int],
    protection: Protection | None = None,
    source: Path | None = None,
    volumes: Attached | None = None,
) -> Live:
    """Clone `origin` for `row` (not stored yet): of a create its template, of a fork a photograph. On failure nothing
    is left but a row in state `failed`. `link` is used up, whatever happens; `source`: as `prepare` has it."""
    began = clock.stamp()
    stored, asked = False, bounds.Bounds.of(row.limits)

    def while_starting() -> None:
        # A server that dies before this line leaves a machine without a row, which the next one ends as it does
        # one whose row has no record.
        nonlocal stored
        store.add(row, began)
        stored = True

    try:
        can = await driver.capabilities()
        top, under = places.chain(row)
        disks = await prepare(row.id, origin.variant, places, under, source)
        if protection is not None:
            disks = (*disks, await protection.disk(top))
        if volumes is not None:
            disks = (*disks, *await volumes.disks(top, fresh=True))
        places.keep_env(row.id, env)
        woken = await wake(
            row.id,
            origin,
            disks,
            env,
            driver=driver,
            places=places,
            link=link,
            while_starting=while_starting,
            while_waking=lambda machine: store.change(row, record=machine.record.to_json()),
            # What a photograph is of has it mounted.
            protect=protection.request() if protection is not None and origin.diff is None else None,
            volumes=() if volumes is None else volumes.request(),
        )
    except BaseException as error:
        if link is not None:
            link.close()
        places.remove(row.id)
        if stored:
            record_failure(row, error, store)
        if isinstance(error, OSError) and not isinstance(error, LLM4AgentsError):
            raise _host_error(error) from error
        raise
    try:
        if asked:
            if can.bounds_files:
                bounds.on_host(woken.machine, row.limits, 0 if volumes is None else volumes.bytes_max)
            await bounds.in_guest(woken.agent, asked)
        now = clock.stamp()
        left = attached.resumed(row, {}, woken.busy)
        changes: dict[str, Any] = {} if left == row.volumes else {"volumes": left}
        store.transition(row, "running", None, now, boot_id=woken.boot_id, started_at=now.wall_s, **changes)
    except BaseException as error:
        await asyncio.shield(woken.machine.stop())
        places.remove(row.id)
        record_failure(row, error, store)
        raise
    live = Live(row, woken.machine, woken.agent, on_deadline, free_bytes, env=dict(env))
    if origin.diff is None:  # else the guest knows which contexts its parent had
        live.contexts = contexts.fresh(row.template)
    live.watch_deadlines()
    return live


CLOCK_AGE_S = 5.0
"""A clone that has waited longer is told the time when it is handed over: a guest's clock drifts."""


async def hand_over(
    row: SandboxRow,
    variant: Variant,
    woken: Woken,
    env: Mapping[str, str],
    *,
    age_s: float,
    store: Store,
    places: Places,
    on_deadline: Callable[[Live, str], None],
    free_bytes: Callable[[], int],
    bounds_files: bool,
) -> Live:
    """Make a sandbox of a machine that is awake already and has waited `age_s` in a pool: its agent is told what the
    create asked for, and `row` is stored, as running from the first. The answer is not waited for: what is sent
    later, the agent does later. On failure nothing is left, not even a row.
    """
    try:
        places.keep_env(row.id, env)
        asked = bounds.Bounds.of(row.limits)
        bounds.check(woken.agent, asked)
        if bounds_files:
            bounds.on_host(woken.machine, row.limits)
        telling = _tell(woken.agent, variant, env, asked, age_s)
        if telling:
            # Now it is on its way: a server that dies from here on leaves a whole sandbox.
            await asyncio.sleep(0)
        now = clock.stamp()
        row.record, row.boot_id = woken.machine.record.to_json(), woken.boot_id
        row.state, row.started_at = "running", now.wall_s
        store.add(row, now)
    except BaseException:
        await asyncio.shield(woken.machine.stop())
        places.remove(row.id)
        raise
    live = Live(row, woken.machine, woken.agent, on_deadline, free_bytes, env=dict(env))
    live.contexts = contexts.fresh(row.template)
    live.settling = telling
    live.watch_deadlines()
    return live


def _tell(
    agent: Agent, variant: Variant, env: Mapping[str, str], asked: bounds.Bounds, age_s: float
) -> list[asyncio.Task[None]]:
    """Each begins to send in the next turn of the event loop, in this order."""
    told = []
    if env:
        told.append(asyncio.create_task(agent.set_env({**variant.environment, **env})))
    if asked:
        told.append(asyncio.create_task(bounds.in_guest(agent, asked)))
    if age_s > CLOCK_AGE_S:
        told.append(asyncio.create_task(agent.set_time(time.time_ns())))
    return told


def _host_error(error: OSError) -> LLM4AgentsError:
    """What the host's kernel refused us while making a sandbox, as an error of ours."""
    if full := disk_full(error.errno):
        return full
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
        return CapacityError(f"the host has no more room: {error.strerror}", hint="end some sandboxes")
    return HostSetupError(f"a sandbox could not be made: {error}", hint="llm4agents doctor")


def record_failure(row: SandboxRow, error: BaseException, store: Store) -> None:
    cancelled = isinstance(error, asyncio.CancelledError)
    state, reason = ("killed", "cancelled") if cancelled else ("failed", f"create failed: {error}"[:500])
    now = clock.stamp()
    # On a full disk the row stays as it is: the next server finds it without a machine, and ends it.
    with contextlib.suppress(CapacityError):
        store.transition(row, state, reason, now, ended_at=now.wall_s, record=None)
