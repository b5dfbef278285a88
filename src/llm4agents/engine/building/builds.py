"""Builds of templates of one's own: one for all who ask for the same, its log, its end, what a project may have.

Not here: how one is made (`making`), what a recipe may say (`recipe`), HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from llm4agents import limits
from llm4agents import recipe as recipes
from llm4agents.engine import names, parts
from llm4agents.engine.building import buildlog
from llm4agents.engine.building.buildlog import BuildLog, Listener
from llm4agents.engine.building.freezing import Workshop
from llm4agents.engine.building.making import Made, Making, Wanted, Work
from llm4agents.engine.building.stepcache import KEPT_S
from llm4agents.engine.network import Networks
from llm4agents.engine.parts import Shape
from llm4agents.engine.principal import DEFAULT
from llm4agents.engine.templates import Templates
from llm4agents.errors import (
    CapacityError,
    ConflictError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    TemplateBuildError,
    to_wire,
)
from llm4agents.images import spec
from llm4agents.images.oci import Auth
from llm4agents.images.progress import Progress
from llm4agents.recipe import Base
from llm4agents.vmm.choice import Drivers

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Build(Work):
    task: asyncio.Task[Made] | None = None
    waiting: int = 0
    cancelled: str | None = None

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
        self._making = Making(
            workshop, templates, networks, registries, lambda name, project: self.find(name, project)
        )
        self.steps, self.copies = self._making.steps, self._making.copies
        self._templates, self._cache, self._drivers, self._logs = templates, workshop.cache, drivers, logs
        self._running: dict[tuple[str, str, Shape, bool], _Build] = {}
        self._ending: list[_Build] = []
        """Those that nobody joins any more, and whose machines are not gone yet."""
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
        if not (self._cache.templates / wanted.name).is_dir():
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
        if self._running.get(build.key) is build:  # not one that has begun since
            del self._running[build.key]
        if build in self._ending:
            self._ending.remove(build)
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
            build.log.write(self._log_of(build.wanted.name), lambda name: names.project_of(name) or "")

    async def _end(self, build: _Build, why: str) -> None:
        assert build.task is not None
        # Forgotten first: who asks from now on must not join a build that is being ended.
        if self._running.get(build.key) is build:
            del self._running[build.key]
            self._ending.append(build)
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
        if (build := self._under_way(name)) is not None:
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
        build = self._under_way(name)
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

    def _under_way(self, name: str) -> _Build | None:
        return next(
            (one for one in (*self._running.values(), *self._ending) if one.wanted.name == name), None
        )

    def _log_of(self, name: str) -> Path:
        return self._logs / f"{name}.jsonl"

    async def _made(self, build: _Build) -> Made:
        wanted, recipe = build.wanted, build.wanted.recipe
        driver = self._drivers.of(build.shape.vmm)
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
            return await self._making.make(build, driver)

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
        if self._running or self._ending:
            return []
        gone = self.steps.evict(0) if everything else self.steps.evict(unused_s=KEPT_S)
        return gone + self.copies.prune(everything=everything, unused_s=KEPT_S, now=time.time())
