"""/v1/sandboxes/{id}/exec. A client that goes away kills its command."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context, models
from llm4agents.api.answers import NDJSON, Json, Stream, unless_gone
from llm4agents.engine import calls

router = APIRouter(prefix="/v1/sandboxes/{sandbox}")


@router.post("/exec")
async def exec_(sandbox: str, body: models.Exec, request: Request) -> Response:
    live = await context.access(request, sandbox)
    command = calls.Command(
        argv=body.argv if body.argv is not None else calls.shell(body.command or ""),
        env=body.env,
        cwd=None if body.cwd is None else context.guest_path(body.cwd),
        user=context.user_of(body.user),
        stdin=body.stdin_bytes(),
        timeout_s=models.wait(body.timeout_s, limits.EXEC_TIMEOUT_S),
    )
    if body.stream:
        return Stream(calls.exec_stream(live, command), lines=True, media_type=NDJSON)
    return Json(await unless_gone(request, calls.exec_wait(live, command)))
