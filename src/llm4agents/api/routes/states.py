"""/v1/sandboxes/ID: pause, resume, fork, snapshot, and how its time is kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llm4agents.api import context, models
from llm4agents.api.answers import NDJSON, Json, Stream
from llm4agents.api.routes.node import with_progress
from llm4agents.engine import names
from llm4agents.engine.templates import Progress

router = APIRouter(prefix="/v1/sandboxes/{sandbox}")


@router.post("/pause")
async def pause(sandbox: str, body: models.Nothing, request: Request) -> Response:
    engine = context.of(request).engine
    return Json(models.sandbox(await engine.pause(context.check_id(sandbox))))


@router.post("/resume")
async def resume(sandbox: str, body: models.Resume, request: Request) -> Response:
    engine = context.of(request).engine
    context.check_id(sandbox)
    if NDJSON not in request.headers.get("accept", ""):
        row = await engine.resume(sandbox, cold=body.cold, idle_timeout_s=body.timeout_s)
        return Json(models.sandbox(row))

    async def work(progress: Progress) -> dict[str, Any]:
        row = await engine.resume(sandbox, cold=body.cold, idle_timeout_s=body.timeout_s, progress=progress)
        return {"type": "sandbox", **models.sandbox(row)}

    lines: AsyncGenerator[dict[str, Any], None] = with_progress(work)
    return Stream(lines, lines=True, media_type=NDJSON)


@router.post("/fork", status_code=201)
async def fork(sandbox: str, body: models.Fork, request: Request) -> Response:
    rows = await context.of(request).engine.fork(
        context.check_id(sandbox),
        body.count,
        idle_timeout_s=body.timeout_s,
        metadata=body.metadata,
        leave_volumes=body.volumes == "leave",
    )
    return Json({"data": [models.sandbox(row) for row in rows]}, status_code=201)


@router.post("/snapshot", status_code=201)
async def snapshot(sandbox: str, body: models.Snapshot, request: Request) -> Response:
    engine = context.of(request).engine
    row = engine.get(context.check_id(sandbox))
    variant = await engine.snapshot(
        sandbox, names.new(body.name, row.project), body.description, body.volumes == "leave"
    )
    return Json(engine.templates.describe(variant), status_code=201)


@router.post("/timeout")
async def timeout(sandbox: str, body: models.Timeout, request: Request) -> Response:
    row = context.of(request).engine.set_timeout(
        context.check_id(sandbox),
        body.timeout_s,
        on_timeout=body.on_timeout,
        keep_s=body.keep_s,
        auto_resume=body.auto_resume,
    )
    return Json(models.sandbox(row))
