"""What a new server does with what an old one left: takes over machines that live, ends and records the rest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal

import structlog

from llm4agents import limits
from llm4agents.engine import clock, contact, creation, deadlines, lifecycle, pausing, tops, usage
from llm4agents.engine.live import Live
from llm4agents.engine.node import Node, Places
from llm4agents.errors import HostSetupError, LLM4AgentsError
from llm4agents.store import SandboxRow, Store
from llm4agents.vmm import clearing, procfs, shim
from llm4agents.vmm.base import Machine, MachineRecord
from llm4agents.vmm.choice import Drivers
from llm4agents.vmm.shim import EXIT, read_deadline, read_exit

log = structlog.get_logger()

LOST = "its machine is gone (the host may have restarted)"
AT_ONCE = 8
GREET_TIMEOUT_S = 15.0
"""For a guest that is busy: one that does not answer is ended."""


async def adopt_all(node: Node) -> list[Live]:
    """Every sandbox of the store that lives on, taken over; half-done acts finished or undone; the others ended, with
    their reason. No orphans: no machine, directory or layer that no sandbox has."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(row: SandboxRow) -> Live | None:
        async with slots:
            return await _adopt(row, node)

    found = await asyncio.gather(*(one(row) for row in node.store.alive() if row.state != "paused"))
    adopted = [live for live in found if live is not None]
    kept = node.store.alive()
    await _sweep(node.places, {live.row.id for live in adopted}, {row.id for row in kept})
    shutil.rmtree(node.places.photographs, ignore_errors=True)
    gone = node.places.sweep_layers(node.store.layers())
    if gone:
        log.info("swept_layers", count=len(gone))
    return adopted


async def _adopt(row: SandboxRow, node: Node) -> Live | None:
    machine, lost = await _machine(row, node.drivers)
    why = "its server died while it was being created"
    if row.state == "pausing" and row.ending is None and pausing.finished(node, row, row.reason):
        if machine is not None:
            await machine.stop()
        node.places.remove_run(row.id)
        log.info("pause_finished", sandbox=row.id)
        return None
    half_booted = row.state == "resuming" and row.reason == "cold"  # its services were never started
    if machine is not None and row.ending is None and row.state in lifecycle.ADOPTABLE and not half_booted:
        try:
            live = await _take_over(row, machine, node)
            log.info("adopted", sandbox=row.id)
            return live
        except (LLM4AgentsError, OSError) as error:
            why = f"could not be taken over: {error}"
        except (
            Exception
        ):  # whatever a monitor or a guest has answered: one sandbox keeps no server from starting
            log.exception("not_adopted", sandbox=row.id)
            why = "could not be taken over: what it answered made no sense (the server's log has it)"
    if machine is not None:
        await machine.stop()
    if row.ending is None and _paused_after_all(row, node):
        node.places.remove_run(row.id)
        return None
    adoptable = row.state in lifecycle.ADOPTABLE
    _record_end(row, node.store, node.places, why, adoptable=adoptable, lost=lost or LOST)
    return None


async def _take_over(row: SandboxRow, machine: Machine, node: Node) -> Live:
    if row.state == "resuming" and node.places.pause(row.id).exists():
        # It may have been about to run, and runs now: its pause is used up.
        shutil.rmtree(node.places.used(row.id), ignore_errors=True)
        node.places.pause(row.id).rename(node.places.used(row.id))
    if row.disk is not None and await _never_switched(row, machine, node.places):
        tops.unfreeze(node, row)
    await machine.resume()  # one that stood still, for a full disk or an act that was not finished
    agent = await contact.greet(machine, timeout=GREET_TIMEOUT_S, dirty=True)
    env = node.places.env(row.id)
    if row.state == "resuming":
        variant, _ = await node.templates.by_key(row.template, row.template_key, loadable=False)
        known = await creation.identify(
            agent,
            row.id,
            {**variant.environment, **env},
            linked=node.networks.linked(row.id),
            volumes=node.volumes.of(row).request(),
            without=True,
        )
        woken = creation.Woken(machine, agent, known.boot_id, unmounted=known.unmounted, busy=known.busy)
        return await pausing.running(node, row, woken, env)
    await agent.thaw()
    if env:  # a snapshot that was not finished had made it forget
        variant, _ = await node.templates.by_key(row.template, row.template_key, loadable=False)
        await agent.set_env({**variant.environment, **env})
    for path in (node.places.pause(row.id), node.places.used(row.id)):
        shutil.rmtree(path, ignore_errors=True)
    if row.state == "pausing":
        node.store.transition(row, "running", "its server died before the pause was whole", clock.stamp())
    live = node.live(row, machine, agent, env)
    live.last_used_s = _idle_since(row, node.places)
    live.watch_deadlines()
    return live


async def _never_switched(row: SandboxRow, machine: Machine, places: Places) -> bool:
    """Whether the machine still writes to what its row calls a layer: the fork's server died before it was told."""
    writes_to = await machine.disk_inode("upper")
    return writes_to is not None and writes_to != places.chain(row)[0].stat().st_ino


def _paused_after_all(row: SandboxRow, node: Node) -> bool:
    """A sandbox whose machine is gone may have a pause still: a whole one, or only its disk."""
    if row.state == "resuming":
        ran = node.places.used(row.id).exists() or row.reason == "cold"
        pausing.back_to_paused(node, row, ran, "its server died")
        return True
    # The host lost power after the pause was on disk, and before the store was.
    return row.state in ("running", "pausing") and pausing.finished(node, row, "its host restarted")


async def _machine(row: SandboxRow, drivers: Drivers) -> tuple[Machine | None, str | None]:
    """The machine of a row, and where it cannot be had although it may live: why. `_sweep` ends that one."""
    if row.record is None:
        return None, None
    with contextlib.suppress(KeyError, TypeError):
        record = MachineRecord.from_json(row.record)
        try:
            driver = drivers.of(record.driver)
        except HostSetupError as error:
            return None, f"its machine was ended: {error.message}"
        try:
            return await driver.adopt(record), None
        except LLM4AgentsError:
            pass
        except Exception:  # as above: `_sweep` ends it
            log.exception("not_adopted", sandbox=row.id)
    return None, None


def _idle_since(row: SandboxRow, places: Places) -> float:
    kept = read_deadline(places.run(row.id))
    return deadlines.idle_since(
        life_ends_wall_s=row.life_ends_at,
        idle_timeout_s=row.idle_timeout_s,
        kept_wall_s=kept[0] if kept is not None else None,
        boottime_s=clock.boottime_s(),
        wall_s=clock.wall_s(),
    )


def _record_end(
    row: SandboxRow, store: Store, places: Places, why: str, *, adoptable: bool, lost: str
) -> None:
    ended = read_exit(places.run(row.id))
    now = clock.stamp()
    if row.ending is not None:
        state, reason = "killed", row.ending
    elif ended.reason == "deadline":
        state, reason = "killed", "deadline"
    elif ended.reason == "lost" or not adoptable:
        state, reason = (
            "failed",
            why if not adoptable else lost,
        )
    else:
        state, reason = "failed", f"the machine {contact.exit_words(ended)}"
    files = [places.run(row.id) / EXIT, places.chain(row)[0]]
    ran_until = usage.evidence(files, now) if row.state == "running" else now
    store.transition(row, state, reason, now, ran_until=ran_until, ended_at=now.wall_s, record=None)
    places.remove(row.id)
    log.info("ended", sandbox=row.id, state=state, reason=reason)


async def _sweep(places: Places, alive: set[str], kept: set[str]) -> None:
    """End machines and remove directories that no sandbox of the store has: half-made creates and builds."""

    def orphans() -> list[int]:
        # Anybody can call a process so: what is not ours cannot be ended, and is not waited for.
        found = shim.running(places.machines).items()
        return [pid for pid, path in found if path.name not in alive and procfs.uid(pid) == os.geteuid()]

    def send(number: signal.Signals) -> None:
        for pid in orphans():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # Told, and not left to notice that its directory is gone: QEMU's bound sockets keep that from being seen.
    send(signal.SIGTERM)
    end = clock.boottime_s() + limits.VM_STOP_TIMEOUT_S
    while left := orphans():
        if clock.boottime_s() > end:
            log.warning("orphans_killed", pids=left)
            send(signal.SIGKILL)  # their VMMs go with them
            break
        await asyncio.sleep(0.01)
    for parent, wanted in ((places.machines, alive), (places.sandboxes, kept)):
        for path in parent.iterdir() if parent.is_dir() else []:
            if path.name not in wanted:
                clearing.remove(path)
