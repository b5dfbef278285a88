"""Fork and snapshot: photographs of a sandbox that goes on, or of one that is paused.

A *photograph* is what a pause is without its durability: pages, devices and a frozen disk. Forks are woken from it at
once; a snapshot makes a template of it. How a disk is frozen is `tops`' business: a layer, by giving the sandbox a new
top, so that what a fork lies on is never written again, and belongs to no sandbox (it is there as long as one lies on
it); or a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llm4agents import limits
from llm4agents.barrier.barrier import Link
from llm4agents.engine import attached, clock, creation, parts, tops
from llm4agents.engine.creation import Origin
from llm4agents.engine.live import Live
from llm4agents.engine.node import Node
from llm4agents.engine.parts import Variant
from llm4agents.engine.pausing import cold_helps, frozen_of, standing_still, told_as_end
from llm4agents.engine.protecting import Protection
from llm4agents.engine.tops import Taken
from llm4agents.errors import CapacityError, ConflictError, LLM4AgentsError
from llm4agents.store import SandboxRow
from llm4agents.vmm import merge
from llm4agents.vmm import snapshot as snapshots
from llm4agents.vmm.base import Snapshot


@dataclass(frozen=True, slots=True)
class Photograph:
    variant: Variant
    base: Snapshot
    diff: Snapshot
    disk: Taken
    env: Mapping[str, str]
    stopped_ms: float
    overlays: Mapping[str, Path]
    """What the disks of volumes that are only read were then, by slot."""


@contextlib.asynccontextmanager
async def photograph(node: Node, row: SandboxRow, live: Live | None) -> AsyncIterator[Photograph]:
    """Of a running sandbox (`live`), which goes on at once, or of a paused one. Gone at the end.

    The caller holds other transitions of the sandbox back meanwhile.
    """
    variant, base = await node.templates.by_key(row.template, row.template_key)
    env = node.places.env(row.id)
    form = tops.of(node.places.chain(row)[0])
    if live is None:
        with cold_helps():
            diff = frozen_of(node, row)
            taken = await form.take(node, row, None, variant, node.places.photographs)
            top = node.places.chain(row)[0]
            theirs = {slot: attached.overlay(top, slot) for slot in node.volumes.of(row).reading_slots}
            # One that was attached since has none yet.
            overlays = {slot: path for slot, path in theirs.items() if path.exists()}
            yield Photograph(variant, base, diff, taken, env, 0.0, overlays)
        return
    if node.free_bytes() < limits.DISK_FREE_BYTES_MIN:
        raise CapacityError(f"{row.id} cannot be photographed: the host's disk is full", hint="free space")
    directory = node.places.photographs / secrets.token_hex(8)
    copy = directory.with_suffix(".raw")
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    overlays = {}
    try:
        async with standing_still(live, "a photograph of it", sync=False):
            began = time.perf_counter()
            checkpoint = await live.machine.checkpoint(directory, base=base)
            overlays = await node.volumes.of(row).photograph(node.places.chain(row)[0], directory)
            taken = await form.take(node, row, live, variant, copy)
            stopped = (time.perf_counter() - began) * 1000
        diff = await checkpoint.durable(sync=False)
        yield Photograph(variant, base, diff, taken, env, round(stopped, 1), overlays)
    finally:
        for path in overlays.values():
            path.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, directory, True)


async def fork(
    node: Node,
    row: SandboxRow,
    live: Live | None,
    idents: Sequence[str],
    *,
    turn: Callable[[], contextlib.AbstractAsyncContextManager[None]],
    idle_timeout_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[Live]:
    """New sandboxes of these ids that are what `row` is now, each a machine of its own. All of them, or none.

    `turn` is waited for before each is started.
    """
    async with photograph(node, row, live) as taken:

        async def one(ident: str) -> Live:
            async with turn():
                return await _fork_one(node, row, ident, taken, idle_timeout_s, metadata or {})

        made = await asyncio.gather(*(one(ident) for ident in idents), return_exceptions=True)
        failed = [result for result in made if isinstance(result, BaseException)]
        children = [result for result in made if isinstance(result, Live)]
        if failed:
            for child in children:
                await _end(node, child, "its fork failed")
            raise failed[0]
        return children


async def _fork_one(
    node: Node,
    parent: SandboxRow,
    ident: str,
    taken: Photograph,
    idle_timeout_s: float | None,
    metadata: Mapping[str, str],
) -> Live:
    began = clock.stamp()
    protection = await node.protecting.of(parent, taken.variant, taken.base)
    link = await node.networks.link_of(parent)
    row = replace(
        parent,
        id=ident,
        state="creating",
        reason=None,
        ending=None,
        created_at=began.wall_s,
        started_at=None,
        ended_at=None,
        life_ends_at=began.wall_s + parent.life_s,
        idle_timeout_s=parent.idle_timeout_s if idle_timeout_s is None else idle_timeout_s,
        metadata={**parent.metadata, **metadata},
        boot_id=None,
        record=None,
        paused_at=None,
        pause=None,
        disk=tops.of(taken.variant.disk_format).chain(taken.disk.under),
        parent=parent.id,
        volumes=node.volumes.share(parent, ident),
    )
    try:
        return await _created(node, row, taken, link, protection)
    except BaseException:
        node.volumes.release(ident)
        raise


async def _created(
    node: Node, row: SandboxRow, taken: Photograph, link: Link | None, protection: Protection | None
) -> Live:
    return await creation.create(
        row,
        Origin(taken.variant, taken.base, taken.diff),
        taken.env,
        link=link,
        driver=node.driver_of(taken.base),
        store=node.store,
        places=node.places,
        on_deadline=node.on_deadline,
        free_bytes=node.free_bytes,
        protection=protection,
        source=taken.disk.source,
        volumes=node.volumes.of(row, taken.overlays),
    )


async def _end(node: Node, live: Live, reason: str) -> None:
    live.ending = True
    live.stop_watching()
    with contextlib.suppress(LLM4AgentsError):
        await live.machine.stop()
    await live.agent.session.close()
    node.places.remove(live.row.id)
    now = clock.stamp()
    node.store.transition(live.row, "killed", reason, now, ended_at=now.wall_s, record=None)


async def snapshot(
    node: Node, row: SandboxRow, live: Live | None, name: str, description: str = ""
) -> Variant:
    """Make the template `name` of a sandbox as it is now: memory, processes and disk, without its environment.

    It lies on nothing: the template it came from may go. Raises ConflictError when `name` is a built-in's or taken, or
    the sandbox has protected paths.
    """
    if row.protect:
        # Its frozen memory would have their disk mounted, which the template's clones do not have.
        raise ConflictError(
            f"{row.id} has protected paths: no template can be made of it",
            hint="make the template from a sandbox without protect=, and protect the paths of its sandboxes",
        )
    node.templates.check_free(name)
    cache = node.templates.cache
    async with _without_env(node, row, live), photograph(node, row, live) as taken:
        if live is None:  # a fork's machines check what they load; here nobody else would
            await asyncio.to_thread(snapshots.load_diff, taken.diff.path)
        async with cache.workdir() as tmp:
            built = tmp / "variant"
            built.mkdir(mode=0o755)
            form = tops.of(taken.variant.disk_format)
            upper = built / parts.UPPER
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(form.whole(tops.files_of(taken.disk, node), taken.variant.upper, upper))
                    secrets_ = [value.encode() for value in taken.env.values()]
                    both.create_task(
                        asyncio.to_thread(
                            merge.merge, taken.base, taken.diff, built / parts.SNAPSHOT, secrets_
                        )
                    )
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
            upper.chmod(0o444)
            key = secrets.token_hex(16)
            dest = cache.templates / name / "keys" / key
            await form.finish(upper, built / parts.EMPTY, named=dest / parts.UPPER)
            variant = replace(
                taken.variant,
                path=dest,
                name=name,
                key=key,
                created_at=time.time(),
                family=taken.variant.family or taken.variant.name,
                description=description,
                left_slots=tuple(sorted({entry["slot"] for entry in row.volumes or ()})),
            )
            parts.save(variant, built)
            await asyncio.to_thread(partial(cache.publish, built, dest))
    node.templates.pin(variant)
    return variant


@contextlib.asynccontextmanager
async def _without_env(node: Node, row: SandboxRow, live: Live | None) -> AsyncIterator[None]:
    """The agent knows nothing of the create's environment meanwhile; it overwrites what it forgets."""
    env = node.places.env(row.id)
    if live is None or not env:
        yield
        return
    variant, _ = await node.templates.by_key(row.template, row.template_key)
    async with told_as_end(live, "a snapshot"):
        await live.agent.set_env(dict(variant.environment))
    try:
        yield
    finally:
        with contextlib.suppress(LLM4AgentsError):
            await live.agent.set_env({**variant.environment, **env})
