"""Making a template of one's own: the steps whose disks are not kept, then another machine, frozen.

It begins where the last kept disk of its recipe ends. Its steps run in one machine (`guest`), each disk is kept
(`stepcache`); then another machine is booted from the last disk, started, warmed and frozen (`freezing`): nothing of
the first one's memory is in it. Not here: who asked for it, and its end (`builds`); what a recipe may say (`recipe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents import recipe as recipes
from llm4agents.engine import parts
from llm4agents.engine.building import bases, commands, freezing, guest, starting
from llm4agents.engine.building.bases import Begin
from llm4agents.engine.building.buildlog import BuildLog
from llm4agents.engine.building.copies import Copies
from llm4agents.engine.building.freezing import Plan, Workshop
from llm4agents.engine.building.guest import Guest
from llm4agents.engine.building.stepcache import Kept, StepCache
from llm4agents.engine.building.warming import warm_up
from llm4agents.engine.network import Asked, Networks, refused_address
from llm4agents.engine.parts import Shape, Variant
from llm4agents.engine.principal import DEFAULT
from llm4agents.engine.templates import Templates
from llm4agents.errors import ConflictError, ForbiddenError, GuestError, InvalidRequestError
from llm4agents.guest.results import ExitStatus
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk, oci
from llm4agents.images.oci import Auth, OciRootfs
from llm4agents.images.progress import Progress
from llm4agents.recipe import Recipe, Run, Start, State, Step
from llm4agents.vmm.base import Driver, Snapshot

Made = tuple[Variant, Snapshot]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A template to build. `name`: as it is called on disk; `project`: whose steps, files and secrets it uses."""

    name: str
    recipe: Recipe
    project: str = DEFAULT
    vmm: str | None = None
    nested: bool = False
    force: bool = False
    """Run every step again, and take what the package sources offer today."""
    auth: Auth | None = None
    """For an image's registry; kept nowhere."""
    local: bool = False
    """Whether it may begin with an image on the server's own disk."""
    shape: Shape | None = None
    """Of a further shape of one that is there, whose disk it is; None: that of the recipe."""


@dataclass(slots=True, eq=False)
class Work:
    """One template that is being made, and what is told of it."""

    wanted: Wanted
    shape: Shape
    log: BuildLog
    steps: list[dict[str, Any]] = field(default_factory=list)
    """How each step is, as the wire has it."""


class Making:
    """What one server makes templates with. Belongs to one event loop."""

    def __init__(
        self,
        workshop: Workshop,
        templates: Templates,
        networks: Networks,
        registries: tuple[str | None, str],
        find: Callable[[str, str], str],
    ) -> None:
        """`registries`: as the settings have them. `find`: the template that a name means to a project."""
        self.steps, self.copies = StepCache(workshop.cache), Copies(workshop.cache)
        self._workshop, self._templates, self._networks = workshop, templates, networks
        self._registries, self._find = registries, find
        self._at: dict[Work, str] = {}
        """The key of the kept disk that each goes on from."""

    async def make(self, work: Work, driver: Driver) -> Made:
        """The template, and its disks kept. Raises what `Builds.build` does."""
        wanted, recipe, cache, tell = work.wanted, work.wanted.recipe, self._workshop.cache, work.log.progress
        async with (
            cache.building(tell),
            cache.lock(f"build-{recipes.digest(wanted.name)[:32]}", tell),
        ):
            begin = await bases.resolve(
                recipe.base,
                self._templates,
                lambda name: name if wanted.shape else self._find(name, wanted.project),
                driver,
                tell,
                nested=wanted.nested,
                refresh=wanted.force,
                image=lambda reference: self._image(wanted, reference, tell),
            )
            # A project's own: what a step fetched with its credentials is nobody else's.
            first = recipes.digest({"project": wanted.project, "begin": begin.key})
            keys = recipes.chain(first, recipe.steps)
            try:
                kept, state = await self._run_steps(work, driver, begin, keys)
                return await self._freeze(work, driver, begin, state, kept, keys[-1] if keys else first)
            finally:
                self._at.pop(work, None)

    async def _run_steps(
        self, work: Work, driver: Driver, begin: Begin, keys: list[str]
    ) -> tuple[Kept | None, State]:
        """Those whose disks are not there; the last disk, and what the steps have set."""
        wanted, steps = work.wanted, work.wanted.recipe.steps
        before = [begin.state]
        for step in steps:
            before.append(recipes.after(before[-1], step))
        at, kept = -1, None
        if not wanted.force and (found := self.steps.last(keys)) is not None:
            at, kept = found
            self._at[work] = kept.key
        for done in range(at + 1):
            self._told(work, done, "cached" if steps[done].on_disk else "set")
        if not any(step.on_disk for step in steps[at + 1 :]):
            for rest in range(at + 1, len(steps)):
                self._told(work, rest, "set")
            return kept, before[-1]
        asked = await self._asked(wanted, begin, work.log.progress)
        source = kept.upper if kept is not None else begin.upper
        work.log.progress("boot", "starting the machine of the build", None)
        async with guest.booted(
            self._workshop,
            self._networks,
            driver,
            lambda upper: begin.made_of.machine(work.shape, upper),
            lambda path: _disk(path, source),
            asked,
            begin.state.env,
            wanted.project,
            lambda words: work.log.progress("boot", words, None),
        ) as machine:
            for number in range(at + 1, len(steps)):
                step = steps[number]
                if not step.on_disk:
                    self._told(work, number, "set")
                    continue
                self._told(work, number, "running")
                began = time.perf_counter()
                try:
                    await self._step(work, machine, number, step, before[number])
                    kept = await self.steps.keep(
                        keys[number],
                        begin.made_of.rootfs_digest,
                        step.words(),
                        lambda path: machine.copy_disk(path, self._networks),
                        project=wanted.project,
                        anew=wanted.force,
                    )
                    self._at[work] = kept.key
                    # At each, so that a build that is long, or ends in an error, is held to it too.
                    await asyncio.to_thread(self.steps.evict, but=set(self._at.values()))
                except BaseException:
                    self._told(work, number, "failed", began)
                    raise
                self._told(work, number, "done", began)
        return kept, before[-1]

    async def _image(self, wanted: Wanted, reference: str, progress: Progress) -> OciRootfs:
        """An image's root file system. Raises ForbiddenError for one on this host's disk that is not the caller's."""
        if oci.is_local(reference) and not wanted.local:
            raise ForbiddenError(
                "an image on the server's own disk is the operator's to name", hint="name one of a registry"
            )
        registries = oci.Registries.parse(self._registries[0], self._registries[1], refused_address)
        authority = await asyncio.to_thread(self._templates.authority)
        return await oci.rootfs(
            reference,
            self._workshop.cache,
            progress,
            registries=registries,
            auth=wanted.auth,
            authority=authority.certificate_pem,
        )

    def _told(self, work: Work, at: int, status: str, began: float | None = None) -> None:
        work.steps[at]["status"] = status
        if began is not None:
            work.steps[at]["ms"] = round((time.perf_counter() - began) * 1000)
        work.log.add(dict(work.steps[at]))

    async def _asked(self, wanted: Wanted, begin: Begin, progress: Progress) -> Asked:
        asked = await self._networks.asked(wanted.recipe.network, progress, wanted.project)
        authority = await asyncio.to_thread(self._templates.authority)
        if asked.wish.intercepts and begin.made_of.ca != authority.digest:
            raise ConflictError(
                "what this template begins with was made on a node with another CA: its programs trust no connection "
                "that this node looks into",
                hint="network = [] or rules of hosts and ports alone, or build what it begins with here",
            )
        return asked

    async def _step(self, work: Work, machine: Guest, at: int, step: Step, state: State) -> None:
        tail, wanted = bytearray(), work.wanted
        name = f"step {at + 1} of {len(wanted.recipe.steps)}"
        about = {"step": at, "op": step.op}

        def output(channel: int, data: bytes) -> None:
            nonlocal tail
            tail = (tail + data)[-limits.STEP_OUTPUT_TAIL_BYTES :]
            work.log.output(at, channel, data)

        try:
            status = await self._done(machine, wanted.project, step, state, output)
        except (GuestError, InvalidRequestError) as error:
            why = error.message
            if error.details.get("code") == "exec_failed" and isinstance(step.value, str):
                why += " (is there a shell in it? a command as a list needs none)"
            raise starting.failed(name, step.words(), why, bytes(tail), **about) from error
        finally:
            work.log.end_of_output(at)
        if status is None or status.exit_code == 0:
            return
        how = f"exit code {status.exit_code}" if status.exit_code is not None else f"signal {status.signal}"
        if status.timed_out:
            how = f"not done within {step.timeout_s:g} s (timeout_s)"
        more = {"exit_code": status.exit_code, "signal": status.signal, "timed_out": status.timed_out}
        failure = starting.failed(name, step.words(), how, bytes(tail), **about, **more)
        with contextlib.suppress(OSError):
            if denied := await self._networks.denied(machine.ident):
                failure.details["denied"] = denied
                failure.hint = (
                    f"the build's network refused {', '.join(denied)}; it may reach what `network` allows"
                )
        raise failure

    async def _done(
        self, machine: Guest, project: str, step: Step, state: State, output: guest.Output
    ) -> ExitStatus | None:
        if state.workdir is not None:
            await guest.make_directory(machine.agent, state.workdir, state.user)
        if step.op == "copy":
            tar = self.copies.find(project, str(step.sha256))
            if tar is None or step.to is None:
                raise InvalidRequestError("its files are gone", hint="build again: they are sent anew")
            await machine.copy(tar, recipes.absolute(step.to, state), state.user)
            return None
        command = commands.command(step, state)
        assert command is not None
        return await machine.run(
            command.run,
            user=command.user,
            cwd=command.cwd,
            env=command.env,
            timeout_s=command.timeout_s,
            output=output,
        )

    async def _freeze(
        self, work: Work, driver: Driver, begin: Begin, state: State, kept: Kept | None, disk_key: str
    ) -> Made:
        wanted, recipe, shape = work.wanted, work.wanted.recipe, work.shape
        start, command = _start(recipe, begin)
        if start is not None and command is not None:
            start = replace(start, run=command)
        made_of, can = begin.made_of, await driver.capabilities()
        identity = driver.identity(made_of.machine(shape, Path(parts.UPPER)), can)
        body = {
            "format": parts.FORMAT,
            "name": wanted.name,
            "disk": disk_key,
            "state": state.to_json(),
            "start": start and start.to_json(),
            "warm": recipe.frozen_inputs()["warm"],
            "family": begin.wanted and begin.wanted.warm_inputs(),
            "kernel": made_of.kernel_digest,
            "initrd": made_of.initrd_digest,
            "identity": identity,
            "shape": list(shape),
            "disks": can.disk_format,
            # One that is made anew stands beside the old one, on which sandboxes may lie.
            "anew": secrets.token_hex(8) if wanted.force else None,
        }
        key = recipes.digest(body)[:32]
        path = self._workshop.cache.templates / wanted.name / "keys" / key
        about = {"recipe": recipe.to_json(), "project": wanted.project, "at": time.time()}
        if wanted.shape is not None:
            about = self._templates.recipe_of(wanted.name) or about
        found = self._templates.find_at(path)
        if found is None or found[1].identity != identity:
            variant = replace(
                made_of.variant(shape, path=path, key=key, disk_format=can.disk_format),
                environment=dict(state.env),
                services=[] if begin.wanted is None else [one.name for one in begin.wanted.warm_up.services],
                family=begin.family,
                description=recipe.description,
                user=None if state.user == "user" else state.user,
                workdir=state.workdir,
                start=None if start is None else start.to_json(),
                disk=disk_key,
            )
            source = kept.upper if kept is not None else begin.upper
            plan = Plan(
                variant,
                lambda upper: made_of.machine(shape, upper),
                lambda path: _disk(path, source),
                lambda agent, progress: _warm(agent, begin, start, command, recipe, state, progress),
            )
            await freezing.build(self._workshop, plan, driver, work.log.progress)
        return self._templates.published(path, about)


def _start(recipe: Recipe, begin: Begin) -> tuple[Start | None, Run | None]:
    """What lives in the machine, and its command: the recipe's, else that of what it begins with."""
    start = recipe.start or begin.start
    if start is None:
        return None, None
    if start.run is not True:
        return start, start.run
    if begin.command is None:
        raise InvalidRequestError("start.run = true: the image says no command", hint="say the command")
    return start, begin.command


async def _warm(
    agent: Agent,
    begin: Begin,
    start: Start | None,
    command: Run | None,
    recipe: Recipe,
    state: State,
    progress: Progress,
) -> None:
    environment = dict(state.env)
    try:
        await guest.ids(agent, state.user)
        if state.workdir is not None:
            await guest.make_directory(agent, state.workdir, state.user)
    except (InvalidRequestError, GuestError) as error:
        raise starting.failed("start", f"user {state.user}", error.message, step="start") from error
    if begin.wanted is not None:
        services = tuple(replace(one, cwd=one.cwd or state.workdir) for one in begin.wanted.warm_up.services)
        warmed = replace(begin.wanted.warm_up, services=services)
        await warm_up(agent, replace(begin.wanted, environment=environment, warm_up=warmed), progress)
    await agent.set_env(environment)
    if start is not None and command is not None:
        await starting.start(agent, start, command, state, progress)
    await starting.warm(agent, recipe.warm, state, progress)


async def _disk(path: Path, source: Path | None) -> None:
    """A disk at `path`: a private copy of `source`, or an empty one. Raises CapacityError."""
    if source is None:
        await disk.make_upper(path, limits.DISK_GIB << 30)
        return
    try:
        await asyncio.to_thread(disk.copy_sparse, source, path)
    except FileNotFoundError as error:
        raise InvalidRequestError(
            "the disk it was to begin with has gone meanwhile", hint="build again"
        ) from error
