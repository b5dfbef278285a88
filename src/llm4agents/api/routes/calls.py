"""/v1/sandboxes/{id}/exec. A client that goes away leaves its command to itself, unless it said otherwise."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.background import BackgroundTask
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context, models
from llm4agents.api.answers import NDJSON, Json, Stream, unless_gone
from llm4agents.api.routes import commands
from llm4agents.engine import calls, processes

router = APIRouter(prefix="/v1/sandboxes/{sandbox}")


@router.post("/exec")
async def exec_(sandbox: str, body: models.Exec, request: Request) -> Response:
    live = await context.access(request, sandbox)
    command = commands.of(body, models.wait(body.timeout_s, limits.EXEC_TIMEOUT_S), request)
    manner = calls.Manner(id=body.id, tag=body.tag, kill_when_left=body.on_disconnect == "kill")
    if body.stream:
        return Stream(calls.exec_stream(live, command, manner), lines=True, media_type=NDJSON)
    answer = await unless_gone(request, calls.exec_wait(live, command, manner))
    forget = BackgroundTask(processes.forget_soon, live, answer["id"])
    return Json(answer, background=forget)
