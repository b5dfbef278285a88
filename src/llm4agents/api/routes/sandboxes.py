"""/v1/sandboxes: create, list, look at, extend, end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from llm4agents.api import context, models
from llm4agents.api.answers import NDJSON, Json, Stream, unless_gone
from llm4agents.api.routes.node import with_progress
from llm4agents.engine import attached, lifecycle, protecting
from llm4agents.engine.bounds import Bounds
from llm4agents.engine.engine import Engine
from llm4agents.engine.templates import Progress
from llm4agents.engine.wish import Wish
from llm4agents.errors import InvalidRequestError

router = APIRouter(prefix="/v1/sandboxes")
FILTERS_MAX = 32


@router.post("", status_code=201)
async def create(body: models.Create, request: Request) -> Response:
    principal = context.principal(request)
    context.check_network(request, body.network)
    context.check_volumes(request, bool(body.volumes))
    template = context.template(request, body.template)
    vcpus, memory_mib = context.of(request).engine.templates.size(template)
    protect = protecting.wanted(context.guest_path(path) for path in body.protect)
    wish = Wish(
        template=template,
        idle_timeout_s=body.timeout_s,
        life_s=body.life_s,
        vcpus=vcpus if body.vcpus is None else body.vcpus,
        memory_mib=memory_mib if body.memory_mib is None else body.memory_mib,
        env=body.env,
        metadata=body.metadata,
        require_kvm=body.require_kvm,
        vmm=body.vmm,
        nested=body.nested,
        bounds=Bounds(body.disk_mib, body.pids, body.output_bytes_per_s),
        wait_s=body.wait_s,
        on_timeout=body.on_timeout,
        auto_resume=body.auto_resume,
        keep_s=body.keep_s,
        network=body.network,
        protect=protect,
        volumes=attached.wanted((mount.wish() for mount in body.volumes), protect),
        project=principal.project,
        public=body.traffic is not None and body.traffic.public,
    )
    engine = context.of(request).engine
    if NDJSON in request.headers.get("accept", ""):
        return Stream(progress_of(engine, wish), lines=True, media_type=NDJSON)
    return Json(models.sandbox(await unless_gone(request, engine.create(wish))), status_code=201)


async def progress_of(engine: Engine, wish: Wish) -> AsyncGenerator[dict[str, Any], None]:
    """Progress lines while the template is built, then the sandbox, which is ended if nobody hears of it."""
    told = False
    made: list[str] = []

    async def work(progress: Progress) -> dict[str, Any]:
        row = await engine.create(wish, progress)
        made.append(row.id)
        return {"type": "sandbox", **models.sandbox(row)}

    try:
        async with contextlib.aclosing(with_progress(work)) as lines:
            async for line in lines:
                yield line
        told = True
    finally:
        if made and not told:
            await engine.kill(made[0], "the client went away during create")


@router.get("")
async def listing(
    request: Request,
    state: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: str | None = None,
) -> Response:
    states = tuple(state.split(",")) if state else ()
    if unknown := [name for name in states if name not in lifecycle.STATES]:
        raise InvalidRequestError(f"{unknown[0]!r} is no state", hint=f"one of {', '.join(lifecycle.STATES)}")
    metadata = {
        name.removeprefix("metadata."): value
        for name, value in request.query_params.items()
        if name.startswith("metadata.")
    }
    if any("\0" in name + value for name, value in metadata.items()):
        raise InvalidRequestError("metadata has no NUL in it")
    if len(metadata) > FILTERS_MAX:
        raise InvalidRequestError(f"a list is filtered by at most {FILTERS_MAX} pairs of metadata")
    if after is not None:
        context.check_id(after)
    rows = context.of(request).engine.store.list(
        states=states,
        metadata=metadata,
        limit=limit + 1,
        after=after,
        project=context.principal(request).visible,
    )
    following = rows[limit - 1].id if len(rows) > limit else None
    return Json({"data": [models.sandbox(row) for row in rows[:limit]], "next": following})


@router.get("/{sandbox}")
async def get(sandbox: str, request: Request) -> Response:
    return Json(models.sandbox(context.of(request).engine.get(context.check_id(sandbox))))


@router.delete("/{sandbox}")
async def kill(sandbox: str, request: Request) -> Response:
    return Json(models.sandbox(await context.of(request).engine.kill(context.check_id(sandbox))))


@router.get("/{sandbox}/metrics")
async def metrics(sandbox: str, request: Request) -> Response:
    live = await context.access(request, sandbox)
    async with live.use("metrics") as agent:
        return Json(asdict(await agent.metrics()))


@router.get("/{sandbox}/isolation")
async def isolation(sandbox: str, request: Request) -> Response:
    """How its VMM and what serves it are confined, and what of the promise does not hold."""
    return Json(await context.of(request).engine.isolation(context.check_id(sandbox)))


@router.get("/{sandbox}/events")
async def events(sandbox: str, request: Request) -> Response:
    engine = context.of(request).engine
    engine.get(context.check_id(sandbox))
    return Json({"data": engine.store.events(sandbox)})
