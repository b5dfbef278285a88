"""/v1/sandboxes/{id}/code and /contexts. A client that goes away interrupts its cell."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context, models
from llm4agents.api.answers import NDJSON, Json, Stream, unless_gone
from llm4agents.engine import calls, contexts

router = APIRouter(prefix="/v1/sandboxes/{sandbox}")


@router.post("/code")
async def code(sandbox: str, body: models.Code, request: Request) -> Response:
    live = await context.access(request, sandbox)
    cell = calls.Cell(
        code=body.code,
        context=body.context,
        language=body.language,
        env=body.env,
        timeout_s=models.wait(body.timeout_s, limits.CODE_TIMEOUT_S),
    )
    if body.stream:
        return Stream(calls.code_stream(live, cell), lines=True, media_type=NDJSON)
    return Json(await unless_gone(request, calls.code_wait(live, cell)))


@router.post("/code/interrupt")
async def interrupt(sandbox: str, body: models.Context, request: Request) -> Response:
    await contexts.interrupt(await context.access(request, sandbox), body.context, body.language)
    return Json({})


@router.post("/code/restart")
async def restart(sandbox: str, body: models.Context, request: Request) -> Response:
    await contexts.restart(await context.access(request, sandbox), body.context, body.language)
    return Json({})


@router.get("/contexts")
async def list_(sandbox: str, request: Request) -> Response:
    return Json({"data": await contexts.list_(await context.access(request, sandbox))})


@router.post("/contexts")
async def create(sandbox: str, body: models.NewContext, request: Request) -> Response:
    live = await context.access(request, sandbox)
    cwd = context.directory(body.cwd, request)
    return Json(await contexts.create(live, body.language, cwd, body.env), status_code=201)


@router.delete("/contexts/{ident}")
async def remove(sandbox: str, ident: str, request: Request) -> Response:
    await contexts.remove(await context.access(request, sandbox), ident)
    return Json({})
