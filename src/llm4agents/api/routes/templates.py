"""/v1/templates: templates of one's own: the files of a recipe's copies, its build, what it says, what comes of it.

Not here: building built-in ones, bundles (`node`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from llm4agents import recipe as recipes
from llm4agents.api import context
from llm4agents.api.answers import NDJSON, Json, Stream, as_they_come
from llm4agents.api.models import Body, Name
from llm4agents.api.routes.files import chunks, drain
from llm4agents.engine import names
from llm4agents.engine.building.buildlog import Listener
from llm4agents.engine.building.making import Wanted
from llm4agents.errors import ConflictError, LLM4AgentsError, NotFoundError, TemplateNotFoundError

router = APIRouter(prefix="/v1/templates")
QUEUED_MAX = 4_096
"""Events that a slow reader is behind before he misses some."""


class Registry(Body):
    """Credentials for the registry of an image that a recipe begins with: name and password, or a token."""

    username: Annotated[str, Field(max_length=1_024)] = ""
    password: Annotated[str, Field(max_length=65_536, repr=False)] = ""
    token: Annotated[str, Field(max_length=65_536, repr=False)] = ""


class NewTemplate(Body):
    name: Name
    recipe: Annotated[dict[str, Any], Field(description="docs/reference/template-toml.md")]
    vmm: Name | None = None
    nested: bool = False
    force: bool = False
    auth: Registry | None = None


@router.post("")
async def build(body: NewTemplate, request: Request) -> Response:
    """NDJSON: `build`, `step`, `log` and `progress` as it goes, `template` at the end. Who goes away ends the build, if
    nobody else waits for it."""
    project = context.principal(request).project
    builds, registry = context.of(request).engine.builds, context.of(request).engine.templates
    if names.project_of(ref := context.template(request, body.name)) is None:
        raise ConflictError(f"{body.name} is a built-in template", hint="give yours another name")
    context.of(request).engine.check_more_templates(ref)
    recipe = recipes.parse(body.recipe)
    context.check_network(request, recipe.network)
    wanted = Wanted(
        ref,
        recipe,
        project,
        vmm=body.vmm,
        nested=body.nested,
        force=body.force,
        auth=None
        if body.auth is None
        else builds.auth(body.auth.username, body.auth.password, body.auth.token),
        local=context.principal(request).sees_all,
    )
    if body.nested:
        context.of(request).engine.check_nested()

    async def work(listener: Listener) -> dict[str, Any]:
        variant, _ = await builds.build(wanted, listener)
        return {"type": "template", **await asyncio.to_thread(registry.describe, variant)}

    return Stream(_with_events(work), lines=True, media_type=NDJSON)


def _with_events(
    work: Callable[[Listener], Awaitable[dict[str, Any]]],
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of `work` as they come, then its result. Closing it cancels the work."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    missed = 0

    def tell(event: dict[str, Any]) -> None:
        nonlocal missed
        if event["type"] == "end":
            return  # the result or the error says it
        if queue.qsize() >= QUEUED_MAX and event["type"] != "step":
            missed += 1
            return
        if missed:
            queue.put_nowait({"type": "missed", "events": missed})
            missed = 0
        queue.put_nowait(event)

    return as_they_come(lambda: work(tell), queue)


@router.get("/{name}")
async def show(name: str, request: Request) -> Response:
    """What it is, each of its shapes, and the recipe it was made by."""
    registry = context.of(request).engine.templates
    ref = context.template(request, name)
    about = await asyncio.to_thread(registry.recipe_of, ref)
    found = await asyncio.to_thread(registry.described, ref)
    if not found:
        raise TemplateNotFoundError(
            f"there is no template {name[:100]!r}", hint="llm4agents template ls", name=name
        )
    recipe = None if about is None else about["recipe"]
    return Json({"name": names.shown(ref), "variants": found, "recipe": recipe})


@router.get("/{name}/build")
async def state(name: str, request: Request, follow: Annotated[bool, Query()] = False) -> Response:
    """How its build under way is, or its last one; with `follow` its events as they come (NDJSON), to its end."""
    builds, ref = context.of(request).engine.builds, context.template(request, name)
    found = builds.state(ref)
    if follow:
        return Stream(builds.follow(ref), lines=True, media_type=NDJSON)
    return Json({"name": name, **found})


@router.delete("/{name}/build")
async def cancel(name: str, request: Request) -> Response:
    """End its build, whoever waits for it. The steps that were done are kept."""
    await context.of(request).engine.builds.cancel(context.template(request, name), "by request")
    return Json({"name": name})


@router.get("/files/{digest}")
async def there(digest: str, request: Request) -> Response:
    """Whether the files of that digest have been sent."""
    copies, project = context.of(request).engine.builds.copies, context.principal(request).project
    path = await asyncio.to_thread(copies.find, project, digest)
    if path is None:
        raise NotFoundError(f"no files of the digest {digest} were sent", hint="PUT them here, as a tar")
    return Json({"sha256": digest, "bytes": path.stat().st_size})


@router.put("/files/{digest}")
async def send(digest: str, request: Request) -> Response:
    """A tar of files, directories and links below one directory, whose SHA-256 is the digest."""
    copies, project = context.of(request).engine.builds.copies, context.principal(request).project
    try:
        size = await copies.receive(project, digest, chunks(request))
    except LLM4AgentsError:
        await drain(request)
        raise
    return Json({"sha256": digest, "bytes": size})
