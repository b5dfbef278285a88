"""Building templates of one's own: which steps run, one build for all who ask for the same, its log, its end.

A build begins where the last kept disk of its recipe ends. Its steps run in one machine (`guest`), each disk is kept
(`stepcache`); then another machine is booted from the last disk, started, warmed and frozen (`freezing`): nothing of
the first one's memory is in it. Not here: what a recipe may say (`recipe`), HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from llm4agents import limits
from llm4agents import recipe as recipes
from llm4agents.engine import parts
from llm4agents.engine.building import bases, buildlog, commands, freezing, guest, starting
from llm4agents.engine.building.bases import Begin
from llm4agents.engine.building.buildlog import BuildLog, Listener
from llm4agents.engine.building.copies import Copies
from llm4agents.engine.building.freezing import Plan, Workshop
from llm4agents.engine.building.guest import Guest
from llm4agents.engine.building.stepcache import KEPT_S, Kept, StepCache
from llm4agents.engine.building.warming import warm_up
from llm4agents.engine.network import Asked, Networks, refused_address
from llm4agents.engine.parts import Shape, Variant
from llm4agents.engine.principal import DEFAULT
from llm4agents.engine.templates import Templates
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    ForbiddenError,
    GuestError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    TemplateBuildError,
    to_wire,
)
from llm4agents.guest.results import ExitStatus
from llm4agents.guest.verbs import Agent
from llm4agents.images import disk, oci, spec
from llm4agents.images.oci import Auth, OciRootfs
from llm4agents.images.progress import Progress
from llm4agents.recipe import Base, Recipe, Run, Start, State, Step
from llm4agents.vmm.base import Driver, Snapshot
from llm4agents.vmm.choice import Drivers

log = structlog.get_logger()
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
class _Build:
    wanted: Wanted
    shape: Shape
    log: BuildLog
    task: asyncio.Task[Made] | None = None
    waiting: int = 0
    cancelled: str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    """How each step is, as the wire has it."""

    @property
    def key(self) -> tuple[str, str, Shape, bool]:
        recipe = recipes.digest(self.wanted.recipe.to_json())
        return self.wanted.name, recipe, self.shape, self.wanted.force


class Builds:
    """Those of one server. `close` it; belongs to one event loop."""

    def __init__(
        self,
        workshop: Workshop,
        templates: Templates,
        networks: Networks,
        drivers: Drivers,
        logs: Path,
        registries: tuple[str | None, str] = (None, ""),
    ) -> None:
        """`logs`: where what builds have said is written down. `registries`: as the settings have them."""
        self._registries = registries
        self.steps, self.copies = StepCache(workshop.cache), Copies(workshop.cache)
        self._workshop, self._templates, self._networks = workshop, templates, networks
        self._drivers, self._logs = drivers, logs
        self._running: dict[tuple[str, str, Shape, bool], _Build] = {}
        self.find: Callable[[str, str], str] = lambda name, project: name
        """The template that a name means to a project."""
        self.room: Callable[[str], None] = lambda name: None
        """Asked before a template that its project has not. Raises QuotaError."""
        self.charged: Callable[[str, int, int], contextlib.AbstractContextManager[None]] = (
            lambda project, vcpus, memory_mib: contextlib.nullcontext()
        )
        """Within it a project is charged for the machine of a build. Raises QuotaError."""

    # -- asking for one -----------------------------------------------------------------------------------

    async def build(self, wanted: Wanted, listener: Listener) -> Made:
        """The template, built if it is not there as it would be; who asks for the same shares one build.

        `listener` is told of all of it, also of what was before it came. Who goes away (is cancelled) leaves it to the
        others; the last one's going ends it. Raises TemplateBuildError, InvalidRequestError, QuotaError, ConflictError
        when it is being built from another recipe, CapacityError, HostSetupError, BootError.
        """
        build = await self._join(wanted)
        task = build.task
        assert task is not None
        build.waiting += 1
        leave = build.log.listen(listener)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise TemplateBuildError(
                    f"the build of {wanted.name} was cancelled{build.cancelled or ''}",
                    hint="the steps that were done are kept",
                    cancelled=True,
                )
            return task.result()
        finally:
            leave()
            build.waiting -= 1
            if not build.waiting and not task.done():
                await self._end(build, ": whoever asked for it went away")

    async def _join(self, wanted: Wanted) -> _Build:
        shape = wanted.shape or await self._shape(wanted)
        build = _Build(wanted, shape, BuildLog())
        for other in self._running.values():
            if other.wanted.name == wanted.name and other.key[1] != build.key[1]:
                raise ConflictError(
                    f"{wanted.name} is being built from another recipe",
                    hint="wait for it, or cancel it (llm4agents template cancel)",
                )
        found = self._running.get(build.key)
        if found is not None:
            return found
        self._check_copies(wanted)
        if not (self._workshop.cache.templates / wanted.name).is_dir():
            self.room(wanted.name)
        mine = sum(other.wanted.project == wanted.project for other in self._running.values())
        if wanted.shape is None and mine >= limits.BUILDS_PER_PROJECT_MAX:
            raise CapacityError(
                f"the project has {mine} builds under way",
                hint="wait for one, or cancel it",
                retry_after_s=10,
            )
        self._running[build.key] = build
        build.task = asyncio.create_task(self._made(build))
        build.task.add_done_callback(lambda _: self._over(build))
        return build

    async def _shape(self, wanted: Wanted) -> Shape:
        recipe = wanted.recipe
        vcpus = recipe.vcpus or limits.DEFAULT_VCPUS
        memory = recipe.memory_mib or limits.DEFAULT_MEMORY_MIB
        parts.check_shape(vcpus, memory, os.cpu_count() or 1)
        if wanted.name in spec.BUILTIN:
            raise ConflictError(f"{wanted.name} is a built-in template", hint="give yours another name")
        driver = await self._drivers.pick(wanted.vmm, wanted.nested)
        return Shape(wanted.name, vcpus, memory, driver.name, wanted.nested)

    def _check_copies(self, wanted: Wanted) -> None:
        for at, step in enumerate(wanted.recipe.steps):
            if step.op == "copy" and self.copies.find(wanted.project, str(step.sha256)) is None:
                raise InvalidRequestError(
                    f"steps[{at}] copies files that were not sent ({step.value})",
                    hint="PUT /v1/templates/files/DIGEST first; the SDK and the command line do",
                    sha256=step.sha256,
                )

    def _over(self, build: _Build) -> None:
        self._running.pop(build.key, None)
        assert build.task is not None
        if build.task.cancelled():
            build.log.add(
                {"type": "end", "state": "cancelled", "detail": f"cancelled{build.cancelled or ''}"}
            )
        elif (error := build.task.exception()) is not None:
            if isinstance(error, LLM4AgentsError):
                build.log.add({"type": "end", "state": "failed", "error": to_wire(error)})
            else:
                log.error("build_failed", template=build.wanted.name, exc_info=error)
                build.log.add({"type": "end", "state": "failed", "error": {"detail": type(error).__name__}})
        else:
            build.log.add({"type": "end", "state": "done"})
        with contextlib.suppress(OSError):
            build.log.write(self._log_of(build.wanted.name))

    async def _end(self, build: _Build, why: str) -> None:
        assert build.task is not None
        # Forgotten first: who asks from now on must not join a build that is being ended.
        self._running.pop(build.key, None)
        build.cancelled = build.cancelled or why
        build.task.cancel()
        await asyncio.wait({build.task})

    def names(self, project: str) -> set[str]:
        """Of the templates of a project that are being built."""
        return {one.wanted.name for one in self._running.values() if one.wanted.project == project}

    async def cancel(self, name: str, who: str = "by request") -> None:
        """End what builds that template, whoever waits for it. Raises NotFoundError."""
        found = [build for build in self._running.values() if build.wanted.name == name]
        if not found:
            raise NotFoundError(f"{name} is not being built")
        for build in found:
            await self._end(build, f" {who}")

    async def close(self) -> None:
        for build in list(self._running.values()):
            await self._end(build, ": the server stops")

    @staticmethod
    def auth(username: str, password: str, token: str) -> Auth:
        """Credentials for a registry."""
        return Auth(username, password, token)

    # -- looking at one -----------------------------------------------------------------------------------

    def state(self, name: str) -> dict[str, Any]:
        """`{state, steps, events, dropped}` of the build under way, or of the last one. Raises NotFoundError."""
        for build in self._running.values():
            if build.wanted.name == name:
                steps, events = [dict(step) for step in build.steps], list(build.log.events)
                return {"state": "building", "steps": steps, "events": events, "dropped": build.log.dropped}
        events = buildlog.read(self._log_of(name)) or []
        if not events:
            raise NotFoundError(f"no build of {name} is known", hint="llm4agents template build makes one")
        told = {int(event["step"]): event for event in events if event.get("type") == "step"}
        return {
            "state": str(events[-1].get("state") or "lost"),
            "steps": [told[at] for at in sorted(told)],
            "events": events,
            "dropped": 0,
        }

    async def follow(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """The events of the build under way as they come, to its end; of the last one when there is none."""
        build = next((one for one in self._running.values() if one.wanted.name == name), None)
        if build is None:
            for event in self.state(name)["events"]:
                yield event
            return
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        leave = build.log.listen(queue.put_nowait)
        try:
            while True:
                event = await queue.get()
                yield event
                if event["type"] == "end":
                    return
        finally:
            leave()

    def _log_of(self, name: str) -> Path:
        return self._logs / f"{name}.jsonl"

    # -- making it ----------------------------------------------------------------------------------------

    async def _made(self, build: _Build) -> Made:
        wanted, recipe = build.wanted, build.wanted.recipe
        driver, tell = self._drivers.of(build.shape.vmm), build.log.progress
        build.steps = [
            {"type": "step", "step": at, "op": step.op, "words": step.words(), "status": "waiting"}
            for at, step in enumerate(recipe.steps)
        ]
        build.log.add(
            {"type": "build", "name": wanted.name, "steps": len(recipe.steps), "force": wanted.force}
        )
        shape = build.shape
        # One for a create is charged as the sandbox that is to come of it.
        free = wanted.shape is not None
        with (
            contextlib.nullcontext() if free else self.charged(wanted.project, shape.vcpus, shape.memory_mib)
        ):
            return await self._built(build, driver, tell)

    async def _built(self, build: _Build, driver: Driver, tell: Progress) -> Made:
        wanted, recipe, cache = build.wanted, build.wanted.recipe, self._workshop.cache
        async with (
            cache.building(tell),
            cache.lock(f"build-{recipes.digest(wanted.name)[:32]}", tell),
        ):
            begin = await bases.resolve(
                recipe.base,
                self._templates,
                lambda name: name if wanted.shape else self.find(name, wanted.project),
                driver,
                tell,
                nested=wanted.nested,
                refresh=wanted.force,
                image=lambda reference: self._image(wanted, reference, tell),
            )
            # A project's own: what a step fetched with its credentials is nobody else's.
            first = recipes.digest({"project": wanted.project, "begin": begin.key})
            keys = recipes.chain(first, recipe.steps)
            kept, state = await self._run_steps(build, driver, begin, keys)
            made = await self._freeze(build, driver, begin, state, kept, keys[-1] if keys else first)
        await asyncio.to_thread(self.steps.evict)
        return made

    async def _run_steps(
        self, build: _Build, driver: Driver, begin: Begin, keys: list[str]
    ) -> tuple[Kept | None, State]:
        """Those whose disks are not there; the last disk, and what the steps have set."""
        wanted, steps = build.wanted, build.wanted.recipe.steps
        before = [begin.state]
        for step in steps:
            before.append(recipes.after(before[-1], step))
        at, kept = -1, None
        if not wanted.force and (found := self.steps.last(keys)) is not None:
            at, kept = found
        for done in range(at + 1):
            self._told(build, done, "cached" if steps[done].on_disk else "set")
        if not any(step.on_disk for step in steps[at + 1 :]):
            for rest in range(at + 1, len(steps)):
                self._told(build, rest, "set")
            return kept, before[-1]
        asked = await self._asked(wanted, begin, build.log.progress)
        source = kept.upper if kept is not None else begin.upper
        build.log.progress("boot", "starting the machine of the build", None)
        async with guest.booted(
            self._workshop,
            self._networks,
            driver,
            lambda upper: begin.made_of.machine(build.shape, upper),
            lambda path: _disk(path, source),
            asked,
            begin.state.env,
            wanted.project,
            lambda words: build.log.progress("boot", words, None),
        ) as machine:
            for number in range(at + 1, len(steps)):
                step = steps[number]
                if not step.on_disk:
                    self._told(build, number, "set")
                    continue
                self._told(build, number, "running")
                began = time.perf_counter()
                try:
                    await self._step(build, machine, number, step, before[number])
                    kept = await self.steps.keep(
                        keys[number],
                        begin.made_of.rootfs_digest,
                        step.words(),
                        lambda path: machine.copy_disk(path, self._networks),
                        anew=wanted.force,
                    )
                except BaseException:
                    self._told(build, number, "failed", began)
                    raise
                self._told(build, number, "done", began)
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

    def _told(self, build: _Build, at: int, status: str, began: float | None = None) -> None:
        build.steps[at]["status"] = status
        if began is not None:
            build.steps[at]["ms"] = round((time.perf_counter() - began) * 1000)
        build.log.add(dict(build.steps[at]))

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

    async def _step(self, build: _Build, machine: Guest, at: int, step: Step, state: State) -> None:
        tail, wanted = bytearray(), build.wanted
        name = f"step {at + 1} of {len(wanted.recipe.steps)}"
        about = {"step": at, "op": step.op}

        def output(channel: int, data: bytes) -> None:
            nonlocal tail
            tail = (tail + data)[-limits.STEP_OUTPUT_TAIL_BYTES :]
            build.log.output(at, channel, data)

        try:
            status = await self._done(machine, wanted.project, step, state, output)
        except (GuestError, InvalidRequestError) as error:
            why = error.message
            if error.details.get("code") == "exec_failed" and isinstance(step.value, str):
                why += " (is there a shell in it? a command as a list needs none)"
            raise starting.failed(name, step.words(), why, bytes(tail), **about) from error
        finally:
            build.log.end_of_output(at)
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
        self, build: _Build, driver: Driver, begin: Begin, state: State, kept: Kept | None, disk_key: str
    ) -> Made:
        wanted, recipe, shape = build.wanted, build.wanted.recipe, build.shape
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
            await freezing.build(self._workshop, plan, driver, build.log.progress)
        return self._templates.published(path, about)

    # -- housekeeping -------------------------------------------------------------------------------------

    async def rebuild(self, shape: Shape, progress: Progress) -> Made:
        """Another shape of a template that was made by a recipe: on its disk, no step runs again."""
        about = self._templates.recipe_of(shape.name)
        if about is None:
            raise NotFoundError(f"there is no recipe of {shape.name}")
        recipe = replace(recipes.parse(about["recipe"]), base=Base("template", shape.name), steps=())
        project = str(about.get("project") or DEFAULT)
        wanted = Wanted(shape.name, recipe, project, nested=shape.nested, shape=shape)

        def told(event: dict[str, Any]) -> None:
            if event["type"] == "progress":
                progress(event["step"], event["detail"], event["fraction"])
            elif event["type"] == "step" and event["status"] == "running":
                progress(f"step {event['step'] + 1}", event["words"], None)

        return await self.build(wanted, told)

    def prune(self, *, everything: bool) -> list[str]:
        """Remove kept disks and files that no build has used for KEPT_S, or all; the paths. Not under a build."""
        if self._running:
            return []
        gone = self.steps.evict(0) if everything else self.steps.evict(unused_s=KEPT_S)
        return gone + self.copies.prune(everything=everything, unused_s=KEPT_S, now=time.time())


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
