"""`AsyncTemplate` and, generated from it, `Template`: a template of one's own, step by step or from a file, built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llm4agents import recipe
from llm4agents.errors import InvalidRequestError, NotFoundError
from llm4agents.sdk import _wire
from llm4agents.sdk._async.transport import AsyncTransport, transport
from llm4agents.sdk._build_files import PIECE_BYTES, Source
from llm4agents.sdk._recipes import BuildEvent, BuiltTemplate, RecipeBuilder
from llm4agents.sdk._runtime import async_blocking, async_call, async_chunks

_ENDS = frozenset({"template"})


class AsyncTemplate(RecipeBuilder):
    """`AsyncTemplate().from_template("python").pip_install("humanize")`, then `build("mine")`."""

    async def build(
        self,
        name: str | None = None,
        *,
        force: bool = False,
        vmm: str | None = None,
        nested: bool = False,
        auth: Mapping[str, str] | None = None,
        on_log: Callable[[BuildEvent], Any] | None = None,
    ) -> BuiltTemplate:
        """Build it as `name` (default: that of its file), beginning with the first step that is not kept from before.

        `on_log` is told of everything as it happens (`on_log=print` shows it). `force`: every step again. `auth`:
        `{"username", "password"}` or `{"token"}` for the registry of an image. Ending this call ends the build, unless
        somebody else waits for it too; what was done is kept.

        Raises TemplateBuildError (names the step), InvalidRequestError, ConflictError, CapacityError, HostSetupError.
        """
        name = name or self.name
        if name is None:
            raise InvalidRequestError(
                "the template has no name", hint='build("name"), or name = "…" in its file'
            )
        recipe.check_name(name)
        body, sources = await async_blocking(self.resolved)
        async with transport() as wire:
            for digest, source in sources.items():
                await _send(wire, digest, source)
            asked = {"name": name, "recipe": body, "force": force, "nested": nested}
            more = {"vmm": vmm, "auth": None if auth is None else dict(auth)}
            count, steps = len(body.get("steps", [])), dict[int, BuildEvent]()
            events = await wire.events(
                "/v1/templates", {**asked, **_wire.without_none(more)}, ends=_ENDS, wait_s=None
            )
            async with events:
                async for event in events:
                    if event.get("type") == "template":
                        return BuiltTemplate(
                            name,
                            str(event.get("key")),
                            int(event.get("vcpus") or 0),
                            int(event.get("memory_mib") or 0),
                            int(event.get("bytes") or 0),
                            [steps[at] for at in sorted(steps)],
                            dict(event),
                        )
                    told = BuildEvent.of(event, count)
                    if told is not None:
                        if told.kind == "step" and told.step is not None:
                            steps[told.step] = told
                        await async_call(on_log, told)
        raise AssertionError("not reached: the stream ends with a template or raises")


async def _send(wire: AsyncTransport, digest: str, source: Source) -> None:
    """Send the files of a copy, unless they are there."""
    path = f"/v1/templates/files/{digest}"
    try:
        await wire.json("GET", path)
        return
    except NotFoundError:
        pass
    content = async_chunks(source.pieces(), PIECE_BYTES)
    stream = await wire.stream("PUT", path, content=content, headers=[("content-type", "application/x-tar")])
    async with stream:
        await stream.read()


class AsyncTemplates:
    """What can be asked of templates of one's own, beside building them."""

    def __init__(self) -> None:
        self._transport: AsyncTransport = transport()

    async def show(self, name: str) -> dict[str, Any]:
        """`name`, `variants` (one for each shape and VMM) and `recipe`, if it was made by one."""
        return await self._transport.json("GET", f"/v1/templates/{_wire.segment(name)}")

    async def build_state(self, name: str) -> dict[str, Any]:
        """`state` (building, done, failed, cancelled, lost), `steps`, `events` of the build under way, or the last."""
        return await self._transport.json("GET", f"/v1/templates/{_wire.segment(name)}/build")

    async def follow(self, name: str, on_log: Callable[[BuildEvent], Any]) -> str:
        """Tell `on_log` of the build under way (or the last one) until it is over; how it ended."""
        path, count = f"/v1/templates/{_wire.segment(name)}/build", 0
        stream = await self._transport.stream("GET", path, params={"follow": True}, wait_s=None)
        lines = _wire.LineDecoder()
        async with stream:
            async for piece in stream:
                for event in lines.feed(piece):
                    if event.get("type") == "build":
                        count = int(event.get("steps") or 0)
                    elif event.get("type") == "end":
                        return str(event.get("state"))
                    elif (told := BuildEvent.of(event, count)) is not None:
                        await async_call(on_log, told)
        return "lost"

    async def cancel(self, name: str) -> None:
        """End its build, whoever waits for it. Raises NotFoundError when it is not being built."""
        await self._transport.json("DELETE", f"/v1/templates/{_wire.segment(name)}/build")
