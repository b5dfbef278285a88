"""Pause and resume by difference: a sandbox's pages, devices and disk on its template's, and back.

The order is what makes it safe. Pausing: nothing of the running machine is given up before every part of the
pause is on disk with its digest; until then any failure lets it go on. Resuming: nothing of the pause is given up
before its machine runs, and from the moment it runs the pause's memory is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from llm4agents import limits
from llm4agents.engine import attached, bounds, clock, contact, creation, tops, usage
from llm4agents.engine.building import starting
from llm4agents.engine.creation import Origin
from llm4agents.engine.live import Live
from llm4agents.engine.node import Node, chain_of
from llm4agents.engine.parts import Variant
from llm4agents.engine.templates import warm_up
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    ConnectionLostError,
    CorruptSnapshotError,
    HostSetupError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    ProtocolError,
    SandboxPausedError,
    VersionMismatchError,
    VmmError,
)
from llm4agents.images import layers
from llm4agents.images.cache import fsync
from llm4agents.images.progress import Progress, silent
from llm4agents.store import SandboxRow
from llm4agents.vmm import snapshot as snapshots
from llm4agents.vmm.base import Driver, Machine, MachineSpec, Snapshot

log = structlog.get_logger()

PAUSE_GRACE_S = 120.0
"""What a machine is left at least while it is paused or photographed, should the server die in it."""
COLD = "its memory cannot be used any more"


@contextlib.asynccontextmanager
async def told_as_end(live: Live, what: str) -> AsyncIterator[None]:
    """Errors that came with the end of the sandbox's machine are told as that end.

    Whatever goes wrong once it is being ended does so for that: its files are removed under what is written to them.
    """
    try:
        yield
    except (LLM4AgentsError, OSError) as error:
        if live.ending:
            raise live.ended_words(what) from error
        if isinstance(error, (VmmError, ConnectionLostError, ProtocolError, ConflictError)):
            raise await contact.died(live.machine, error, live.row.id) from error
        raise


@contextlib.asynccontextmanager
async def standing_still(live: Live, what: str, *, sync: bool) -> AsyncIterator[float]:
    """Within it nothing of the guest moves: processes and (`sync`) file systems frozen, channel silent, vCPUs stopped.

    Gives the moment (perf_counter) before the first process was frozen. At the end the guest goes on, unless its
    machine has been ended (SandboxDiedError, with how). Calls under way feel a delay. `what`: of the act, for messages.
    """
    live.stop_watching()
    try:
        async with told_as_end(live, what):
            # Later than its own time if need be, never before.
            await live.write_deadline(at_least_s=PAUSE_GRACE_S)
            # An agent from before file systems were frozen only syncs them.
            whole = sync and "fsfreeze" in live.agent.session.hello.capabilities
            began = time.perf_counter()
            await live.agent.freeze(sync=sync and not whole, fs=whole)
            await live.agent.session.quiesce()
            await live.machine.pause()
            await live.machine.flush_disks()
            yield began
    finally:
        if not live.ending:
            await asyncio.shield(_go_on(live))


async def _go_on(live: Live) -> None:
    try:
        await live.machine.resume()
        if live.machine.channel_cut:
            live.agent.session.reconnect(await live.machine.channel())
        await live.agent.session.unquiesce()
        await live.agent.thaw()
    except LLM4AgentsError as error:
        # The machine or its channel has ended; the engine's watchers see it too, and end the sandbox.
        log.warning("could_not_go_on", sandbox=live.row.id, error=error.message)
    else:
        live.watch_deadlines()


async def pause(node: Node, live: Live, reason: str, room: Callable[[int], None]) -> dict[str, float]:
    """Pause `live`; afterwards its machine is gone and its row `paused`. What it took, in ms.

    Raises CapacityError when the host's disk has no room, and what `room` does of the bytes that its memory takes there
    (first of none): the sandbox runs on. The caller holds new calls back.
    """
    row, places = live.row, node.places
    directory = places.pause(row.id)
    _, base = await node.templates.by_key(row.template, row.template_key)
    if node.free_bytes() < limits.DISK_FREE_BYTES_MIN:
        raise CapacityError(
            f"{row.id} cannot be paused: the host's disk is full", hint="free space; the sandbox runs on"
        )
    if live.ending:  # since the caller looked: its row may say so already, and is no other's to move
        raise live.ended_words("a pause")
    node.store.transition(row, "pausing", reason, clock.stamp())
    began = time.perf_counter()
    try:
        room(0)
        await asyncio.to_thread(shutil.rmtree, directory, True)
        async with standing_still(live, "a pause", sync=True) as stood:
            checkpoint = await live.machine.checkpoint(directory, base=base)
            copied = time.perf_counter()
            live.pages_bytes = checkpoint.pages_bytes
            room(checkpoint.pages_bytes)
            frozen = await checkpoint.durable(also=asyncio.to_thread(_disk_durable, node, row))
            durable = time.perf_counter()
            if live.ending:
                raise live.ended_words("a pause")
            # From here on there is a pause, and no way back.
            live.ending = True
            live.end_error = SandboxPausedError(
                f"{row.id} was paused", hint="what was started goes on when it is resumed", sandbox=row.id
            )
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        why = _words(error)
        if not live.ending:
            log.warning("pause_failed", sandbox=row.id, error=why)
            moved(node, row, "running", f"pause failed: {why}"[:300])
        raise
    with contextlib.suppress(LLM4AgentsError):
        await asyncio.shield(live.machine.stop())
    await live.agent.session.close()
    now = clock.stamp()
    took = {
        "pause_ms": round((copied - stood) * 1000, 1),
        "durable_ms": round((durable - began) * 1000, 1),
    }
    body = {**_body(frozen), **took}
    node.store.transition(row, "paused", reason, now, paused_at=now.wall_s, record=None, pause=body)
    places.remove_run(row.id)
    log.info("paused", sandbox=row.id, reason=reason, bytes=frozen.pages_bytes, **took)
    return took


def _body(frozen: Snapshot) -> dict[str, object]:
    return {
        "pages_bytes": frozen.pages_bytes,
        "memory": True,
        "why_cold": None,
        "manifest": snapshots.manifest_digest(frozen.path),
    }


def frozen_of(node: Node, row: SandboxRow) -> Snapshot:
    """The pause a row speaks of. Raises VersionMismatchError when its memory cannot be used, CorruptSnapshotError when
    what lies on disk is not what was written (of its parts that is found out when they are read)."""
    body, path = row.pause or {}, node.places.pause(row.id)
    if not body.get("memory"):
        raise VersionMismatchError(
            f"the memory of {row.id} cannot be resumed: {body.get('why_cold') or COLD}"
        )
    found = snapshots.manifest_digest(path)
    if found is None:
        raise snapshots.corrupt(path / snapshots.MANIFEST, "it is gone")
    if body.get("manifest", found) != found:
        raise snapshots.corrupt(path / snapshots.MANIFEST, "its digest is not what was written down")
    return snapshots.load(path)


@contextlib.contextmanager
def cold_helps() -> Iterator[None]:
    """Errors of a pause's memory say what can be done about them."""
    try:
        yield
    except (VersionMismatchError, CorruptSnapshotError) as error:
        error.hint = "resume --cold boots its disk: files are kept, processes are not"
        raise


def moved(node: Node, row: SandboxRow, state: str, reason: str, **changes: Any) -> None:
    """The transition that undoes an act. On a full disk it is written later and holds at once all the same."""
    now = clock.stamp()
    try:
        node.store.transition(row, state, reason, now, **changes)
    except CapacityError:
        node.later(partial(node.store.transition, replace(row), state, reason, now, **changes))
        for name, value in {**changes, "state": state, "reason": reason}.items():
            setattr(row, name, value)


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, LLM4AgentsError) else f"{type(error).__name__}: {error}"


def _disk_durable(node: Node, row: SandboxRow) -> None:
    """All of a sandbox's disk, and which files it is. Blocks."""
    top, under = node.places.chain(row)
    volumes = [node.volumes.files.path(entry["volume"]) for entry in attached.writable(row)]
    for path in (top, *under, top.parent, *([node.places.layers] if under else []), *volumes):
        fsync(path)  # of a layer that has not changed since its last it costs nothing
    if under or top.name != tops.of(top).first:
        node.store.checkpoint()


def finished(node: Node, row: SandboxRow, reason: str | None) -> bool:
    """Whether a whole pause lies on disk for a row that does not say so yet; then it says so."""
    try:
        frozen = snapshots.load(node.places.pause(row.id))
    except LLM4AgentsError:
        return False
    now = clock.stamp()
    body = _body(frozen)
    # Of a host that lost power the store may still say `running`: it ran until the pause was written at most.
    written = usage.evidence([node.places.pause(row.id) / "manifest.json"], now)
    ran_until = written if row.state == "running" else now
    node.store.transition(
        row, "paused", reason, now, ran_until=ran_until, paused_at=now.wall_s, record=None, pause=body
    )
    return True


async def resume(node: Node, row: SandboxRow) -> Live:
    """The paused sandbox, running where it was. On failure it is paused as before, and the error says why.

    Raises VersionMismatchError (QEMU or host changed) and CorruptSnapshotError, both curable by `resume_cold`.
    """
    with cold_helps():
        return await _resume(node, row)


async def _resume(node: Node, row: SandboxRow) -> Live:
    places = node.places
    directory, used = places.pause(row.id), places.used(row.id)
    variant, base = await node.templates.by_key(row.template, row.template_key)
    frozen = frozen_of(node, row)
    node.store.transition(row, "resuming", None, clock.stamp())
    ran = False

    async def before_running(machine: Machine) -> None:
        nonlocal ran
        node.store.change(row, record=machine.record.to_json())
        shutil.rmtree(used, ignore_errors=True)
        directory.rename(used)
        ran = True

    env = places.env(row.id)
    try:
        places.remove_run(row.id)
        places.run(row.id).mkdir(mode=0o700)
        top, under = places.chain(row)
        protection = await node.protecting.of(row, variant, base)
        more = () if protection is None else (await protection.disk(top),)
        volumes = node.volumes.of(row)
        more = (*more, *await volumes.disks(top, fresh=False))
        woken = await creation.wake(
            row.id,
            Origin(variant, base, frozen),
            (*variant.disks(top, under), *more),
            env,
            driver=node.driver_of(base),
            places=places,
            link=await node.networks.link_of(row),
            volumes=volumes.request(),
            without=True,
            before_running=before_running,
        )
    except BaseException as error:
        back_to_paused(node, row, ran, _words(error))
        raise
    return await running(node, row, woken, env)


def back_to_paused(node: Node, row: SandboxRow, ran: bool, why: str) -> None:
    node.places.remove_run(row.id)
    body = dict(row.pause or {})
    if ran:
        # Its guest may have written to the disk: memory and disk are no longer of one moment.
        body |= {"memory": False, "why_cold": f"a resume failed after it had begun to run ({why})"[:300]}
        shutil.rmtree(node.places.used(row.id), ignore_errors=True)
    moved(node, row, "paused", f"resume failed: {why}"[:300], record=None, pause=body)


async def running(
    node: Node,
    row: SandboxRow,
    woken: creation.Woken,
    env: dict[str, str],
) -> Live:
    for words in woken.unmounted.values():  # a memory is not given up for one
        log.warning("volume_not_mounted", sandbox=row.id, error=words)
    with contextlib.suppress(HostSetupError):  # of a VMM removed under a sandbox that is being adopted
        if (await node.drivers.can(woken.machine.record.driver)).bounds_files:
            bounds.on_host(woken.machine, row.limits, node.volumes.of(row).bytes_max)
    now = clock.stamp()
    node.store.transition(
        row,
        "running",
        None,
        now,
        boot_id=woken.boot_id,
        started_at=now.wall_s,
        life_ends_at=now.wall_s + row.life_s,
        paused_at=None,
        pause=None,
        volumes=attached.resumed(row, woken.unmounted, woken.busy),
    )
    for path in (node.places.used(row.id), node.places.pause(row.id)):
        shutil.rmtree(path, ignore_errors=True)
    live = node.live(row, woken.machine, woken.agent, env)
    live.watch_deadlines()
    return live


async def resume_cold(node: Node, row: SandboxRow, progress: Progress = silent) -> Live:
    """Boot the paused disk anew: files are there, processes and memory are not. Works whatever the memory came from."""
    places = node.places
    variant, base = await node.templates.by_key(row.template, row.template_key, loadable=False)
    driver = await _driver_of_cold(node, row, base)
    onto = await _onto(node, row, variant, base, driver, progress)
    boot_parts = await node.templates.boot_parts(driver, row.nested, progress)
    node.store.transition(row, "resuming", "cold", clock.stamp())
    machine: Machine | None = None
    ran = False
    env = places.env(row.id)
    try:
        places.remove_run(row.id)
        places.run(row.id).mkdir(mode=0o700)
        if onto is not None:
            await tops.moved(node, row, variant, onto[0])
            ran, (variant, base) = True, onto  # a pause of the template it lay on is none any more
        top, under = places.chain(row)
        protection = await node.protecting.of(row, variant, base)
        more = () if protection is None else (await protection.disk(top),)
        volumes = node.volumes.of(row)
        more = (*more, *await volumes.disks(top, fresh=True))
        spec = MachineSpec(
            vcpus=row.vcpus,
            memory_mib=row.memory_mib,
            kernel=boot_parts.kernel,
            initrd=boot_parts.initrd,
            kernel_release=boot_parts.kernel_release,
            disks=(*variant.disks(top, under), *more),
            kernel_args=base.spec.kernel_args,
            nested=row.nested,
        )
        link = await node.networks.link_of(row)
        placement = creation.placed(row.id, places.run(row.id), clock.wall_s() + limits.BUILD_TIMEOUT_S, link)
        with contextlib.nullcontext() if link is None else contextlib.closing(link):
            ran = True
            shutil.rmtree(places.pause(row.id), ignore_errors=True)
            machine = await driver.boot(spec, placement)
        accelerator = (await driver.capabilities()).accelerator
        node.store.change(row, record=machine.record.to_json(), vmm=driver.name, accelerator=accelerator)
        agent = await contact.greet(machine, timeout=limits.BOOT_TIMEOUT_S)
        # Before its services are there: the signal that reseeds a frozen interpreter ends one that is starting.
        protect = None if protection is None else protection.request()
        known = await creation.identify(
            agent,
            row.id,
            {},
            linked=link is not None,
            protect=protect,
            volumes=volumes.request(),
            without=True,
        )
        await warm_up(agent, node.templates.spec_of(variant), progress, services_only=True)
        await agent.set_env({**variant.environment, **env})
        await starting.again(agent, variant, progress)
        await bounds.in_guest(agent, bounds.Bounds.of(row.limits))
    except BaseException as error:
        if machine is not None:
            with contextlib.suppress(LLM4AgentsError):
                await asyncio.shield(machine.stop())
        back_to_paused(node, row, ran, _words(error))
        raise
    return await running(
        node, row, creation.Woken(machine, agent, known.boot_id, unmounted=known.unmounted), env
    )


async def _driver_of_cold(node: Node, row: SandboxRow, base: Snapshot) -> Driver:
    """The driver that the sandbox had, where it can be used still, else the one that it would get now."""
    try:
        return await node.drivers.pick(base.identity["driver"], row.nested)
    except (HostSetupError, InvalidRequestError):
        return await node.drivers.pick(None, row.nested)


async def _onto(
    node: Node, row: SandboxRow, variant: Variant, base: Snapshot, driver: Driver, progress: Progress
) -> tuple[Variant, Snapshot] | None:
    """What the disk of a sandbox is to lie on if `driver` is to boot it; None: on what it lies on now.

    One whose template's memory cannot be loaded any more could be booted and never be paused again. So it moves to
    the template of this host, if that has the same root file system; the disk of a snapshot takes another form at most.
    """
    if base.identity.get("driver") == driver.name:
        with contextlib.suppress(VersionMismatchError):
            await node.templates.check_loadable(base)
            return None
    if variant.family is None:
        try:
            here = await node.templates.variant(variant.shape._replace(vmm=driver.name), progress)
            if here[0].rootfs_digest == variant.rootfs_digest:
                return here
        except NotFoundError:
            pass  # of a version that had another set of templates
    form = (await driver.capabilities()).disk_format
    if form == tops.of(node.places.chain(row)[0]).format:
        return None
    return replace(variant, disk_format=form), base


async def compact(node: Node, row: SandboxRow) -> bool:
    """Merge the layers of a paused sandbox's disk into its top when they have become many. True when it did."""
    chain = chain_of(row)
    if len(chain.layers) < limits.LAYERS_MAX or row.state != "paused":
        return False
    variant, _ = await node.templates.by_key(row.template, row.template_key, loadable=False)
    top, under = node.places.chain(row)
    merged = replace(chain, top=tops.of(top).name(), layers=())
    dest = node.places.disk(row.id, merged.top)
    await layers.flatten((top, *under), variant.upper, dest)
    node.store.change(row, disk=merged.to_json())
    top.unlink(missing_ok=True)
    return True
