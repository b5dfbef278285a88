"""/health: whether this server serves. Everybody may ask; only the operator is told what is wrong in words."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llm4agents.api import context
from llm4agents.api.answers import Json

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """`ok` and `degraded` are 200; `dead` and `stopping` are 503."""
    here = context.of(request)
    if here.stop.is_set():
        return Json({"status": "stopping", "checks": {}}, status_code=503)
    report = await here.health.report()
    told = context.principal(request).may("node")
    checks = {
        check.name: "ok" if check.problem is None else check.problem if told else "failed"
        for check in report.checks
    }
    body = {"status": report.status, "checks": checks}
    return Json(body, status_code=503 if report.status == "dead" else 200)
