"""/v1/sandboxes: create, list, look at, extend, end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from llm4agents.api import context, models
from llm4agents.api.answers import NDJSON, Json, Stream, unless_gone
from llm4agents.engine import lifecycle
from llm4agents.engine.engine import Engine, Wish
from llm4agents.errors import InvalidRequestError, LLM4AgentsError

router = APIRouter(prefix="/v1/sandboxes")
PROGRESS_EVERY_S = 0.1


@router.post("", status_code=201)
async def create(body: models.Create, request: Request) -> Response:
    wish = Wish(
        template=body.template,
        idle_timeout_s=body.timeout_s,
        life_s=body.life_s,
        vcpus=body.vcpus,
        memory_mib=body.memory_mib,
        env=body.env,
        metadata=body.metadata,
        require_kvm=body.require_kvm,
    )
    engine = context.of(request).engine
    if NDJSON in request.headers.get("accept", ""):
        return Stream(progress_of(engine, wish), lines=True, media_type=NDJSON)
    return Json(models.sandbox(await unless_gone(request, engine.create(wish))), status_code=201)


async def progress_of(engine: Engine, wish: Wish) -> AsyncGenerator[dict[str, Any], None]:
    """Progress lines while the template is built, then the sandbox."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=256)

    def tell(step: str, detail: str, fraction: float | None) -> None:
        # A reader that is slow misses steps; it never holds up a build.
        with contextlib.suppress(asyncio.QueueFull):
            queue.put_nowait({"type": "progress", "step": step, "detail": detail, "fraction": fraction})

    task = asyncio.create_task(engine.create(wish, tell))
    row = None
    try:
        while not task.done():
            getter = asyncio.create_task(queue.get())
            await asyncio.wait({task, getter}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield getter.result()
            else:
                getter.cancel()
        while not queue.empty():
            yield queue.get_nowait()
        row = task.result()
        yield {"type": "sandbox", **models.sandbox(row)}
        row = None
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LLM4AgentsError):
                await task
        elif not task.cancelled() and task.exception() is None and row is not None:
            # The client went away before it knew the id: nobody could ever use or end this sandbox.
            await engine.kill(row.id, "the client went away during create")


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
    if after is not None:
        context.check_id(after)
    rows = context.of(request).engine.store.list(
        states=states, metadata=metadata, limit=limit + 1, after=after
    )
    following = rows[limit - 1].id if len(rows) > limit else None
    return Json({"data": [models.sandbox(row) for row in rows[:limit]], "next": following})


@router.get("/{sandbox}")
async def get(sandbox: str, request: Request) -> Response:
    return Json(models.sandbox(context.of(request).engine.get(context.check_id(sandbox))))


@router.delete("/{sandbox}")
async def kill(sandbox: str, request: Request) -> Response:
    return Json(models.sandbox(await context.of(request).engine.kill(context.check_id(sandbox))))


@router.post("/{sandbox}/timeout")
async def timeout(sandbox: str, body: models.Timeout, request: Request) -> Response:
    engine = context.of(request).engine
    return Json(models.sandbox(engine.set_timeout(context.check_id(sandbox), body.timeout_s)))


@router.get("/{sandbox}/metrics")
async def metrics(sandbox: str, request: Request) -> Response:
    live = context.live(request, sandbox)
    async with live.use("metrics") as agent:
        return Json(asdict(await agent.metrics()))


@router.get("/{sandbox}/events")
async def events(sandbox: str, request: Request) -> Response:
    engine = context.of(request).engine
    engine.get(context.check_id(sandbox))
    return Json({"data": engine.store.events(sandbox)})
