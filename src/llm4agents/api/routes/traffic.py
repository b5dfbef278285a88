"""/v1/sandboxes/ID/traffic: who may reach its ports, and URLs of them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llm4agents.api import context, models
from llm4agents.api.answers import Json
from llm4agents.api.context import Context
from llm4agents.api.proxy import links
from llm4agents.engine import clock
from llm4agents.engine.traffic import Traffic

router = APIRouter(prefix="/v1/sandboxes/{sandbox}/traffic")


@router.get("")
async def get(sandbox: str, request: Request) -> Response:
    found = context.of(request)
    return Json(_shown(found, found.engine.get(context.check_id(sandbox))))


@router.post("")
async def change(sandbox: str, body: models.SetTraffic, request: Request) -> Response:
    """What held until now and holds no more lets nobody in, and those it had let in are shown out."""
    found = context.of(request)
    row = found.engine.set_traffic(context.check_id(sandbox), public=body.public, rotate=body.rotate)
    if not Traffic.of(row.traffic).public:
        found.visitors.show_out(sandbox, ("public",))
    if body.rotate:
        found.visitors.show_out(sandbox, ("token", "url", "cookie"))
    return Json(_shown(found, row))


@router.post("/urls")
async def url(sandbox: str, body: models.PortUrl, request: Request) -> Response:
    found = context.of(request)
    row = found.engine.get(context.check_id(sandbox))
    base = links.base(found.settings, found.listening, request.headers.get("host", ""))
    made = links.of(base, found.names, row.id, body.port, body.path)
    if body.expires_s is None:
        return Json({"url": made, "expires_at": None})
    expires = int(clock.wall_s() + body.expires_s)
    generation = Traffic.of(row.traffic).generation
    stamp = found.signer.stamp("url", row.id, body.port, expires, generation)
    return Json({"url": links.signed(made, expires, stamp), "expires_at": expires})


def _shown(found: Context, row: Any) -> dict[str, Any]:
    traffic = Traffic.of(row.traffic)
    return {
        "public": traffic.public,
        "token": found.signer.token(row.id, traffic.generation),
        "domain": found.settings.domain,
    }
