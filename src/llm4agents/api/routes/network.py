"""/v1/sandboxes/ID/network: what a sandbox may reach; looked at, changed while it runs, explained."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from llm4agents.api import context, models
from llm4agents.api.answers import Json

router = APIRouter(prefix="/v1/sandboxes/{sandbox}/network")


@router.get("")
async def show(sandbox: str, request: Request) -> Response:
    engine = context.of(request).engine
    row = engine.get(context.check_id(sandbox))
    return Json(await engine.networks.describe(row))


@router.put("")
async def change(sandbox: str, body: models.Network, request: Request) -> Response:
    """Answered when gateway and interceptor obey it; `cut`: connections that ended for it."""
    engine = context.of(request).engine
    row, cut = await engine.update_network(context.check_id(sandbox), body.network)
    return Json({**await engine.networks.describe(row), "cut": cut})


@router.post("/why")
async def why(sandbox: str, body: models.Why, request: Request) -> Response:
    engine = context.of(request).engine
    return Json(await engine.networks.why(engine.get(context.check_id(sandbox)), body.url))
