"""A machine booted, warmed, frozen and published as a variant of a template.

Not here: what it is booted from (`images`, `engine.building`), what warms it (`warming`), clones of it (`creation`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from llm4agents import limits
from llm4agents.engine import contact, parts, tops
from llm4agents.engine.admission import Admission
from llm4agents.engine.parts import Variant
from llm4agents.errors import BootError, GuestError, TimedOutError
from llm4agents.guest.verbs import Agent
from llm4agents.images.cache import Cache
from llm4agents.images.process import in_thread
from llm4agents.images.progress import Progress
from llm4agents.vmm.base import Driver, Machine, MachineSpec, Placement


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where things are made. `machines`: where machines' run directories are; without an `admission` there is no
    bound on memory but the host's."""

    cache: Cache
    machines: Path
    admission: Admission | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be frozen."""

    variant: Variant
    """As it will be, in its place."""
    machine: Callable[[Path], MachineSpec]
    """To boot, by the path of its writable disk."""
    upper: Callable[[Path], Awaitable[None]]
    """Makes that disk, raw, at a path where nothing is."""
    warm: Callable[[Agent, Progress], Awaitable[None]]


async def build(workshop: Workshop, plan: Plan, driver: Driver, progress: Progress) -> None:
    """Make `plan.variant` and publish it, in the place of one that is there.

    Raises BootError, CapacityError, HostSetupError; then nothing is left.
    """
    variant, cache = plan.variant, workshop.cache
    async with cache.workdir() as tmp:
        built = tmp / "variant"
        built.mkdir(mode=0o755)
        progress("disk", "making the writable disk", None)
        upper = built / parts.UPPER
        await plan.upper(upper)
        for attempt in range(1, limits.BOOT_TRIES + 1):
            try:
                await _boot_and_freeze(workshop, plan, driver, built, progress)
                break
            except BootError as error:
                if attempt == limits.BOOT_TRIES or error.details.get("final"):
                    raise
                progress("boot", "the machine did not come up; trying once more", None)
                upper.unlink()
                await plan.upper(upper)
        progress("publish", "writing the template", None)
        own(upper)
        upper.chmod(0o444)
        await tops.of(variant.disk_format).finish(
            upper, built / parts.EMPTY, named=variant.path / parts.UPPER
        )
        parts.save(replace(variant, created_at=time.time()), built)
        if variant.path.exists():
            shutil.rmtree(variant.path)
        await in_thread(lambda _: cache.publish(built, variant.path))


def own(path: Path) -> None:
    """Of the VMM that wrote it: the next to have that uid is another."""
    if path.stat().st_uid != os.geteuid():
        os.chown(path, os.geteuid(), os.getegid())


async def _boot_and_freeze(
    workshop: Workshop, plan: Plan, driver: Driver, built: Path, progress: Progress
) -> None:
    boot, name = plan.machine(built / parts.UPPER), plan.variant.name
    ident = f"build-{secrets.token_hex(6)}"
    run_dir = workshop.machines / ident
    run_dir.mkdir(parents=True, mode=0o700)
    machine: Machine | None = None
    room = contextlib.AsyncExitStack()
    try:
        if workshop.admission is not None:
            await room.enter_async_context(workshop.admission.building(ident, boot.memory_mib))
        progress("boot", f"cold boot of {name}", None)
        # Past this deadline the shim ends a build whose server has died.
        deadline = time.time() + limits.BUILD_TIMEOUT_S
        machine = await driver.boot(boot, Placement(ident, run_dir, deadline))
        agent = await contact.greet(machine, timeout=limits.BOOT_TIMEOUT_S)
        await plan.warm(agent, progress)
        progress("freeze", "freezing the machine", None)
        await agent.freeze(sync=True, drop_caches=False)
        await agent.session.quiesce()
        await machine.pause()
        await machine.snapshot(built / parts.SNAPSHOT)
        await agent.session.close()
    except (GuestError, TimedOutError) as error:
        raise BootError(f"the template {name} could not be warmed: {error.message}") from error
    finally:
        if machine is not None:
            await asyncio.shield(machine.stop())
        await room.aclose()
        shutil.rmtree(run_dir, ignore_errors=True)
