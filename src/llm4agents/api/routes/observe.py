"""What the node does and has done: /v1/events, /v1/usage, logs of a sandbox, /v1/top, /metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from llm4agents.api import context
from llm4agents.api.answers import NDJSON, Json, Stream
from llm4agents.engine import host, top

router = APIRouter()
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

Cursor = Annotated[int, Query(ge=0, le=2**62)]
Limit = Annotated[int, Query(ge=1, le=1000)]


@router.get("/v1/events")
async def events(
    request: Request,
    after: Cursor | None = None,
    follow: bool = False,
    sandbox: str | None = None,
    limit: Limit = 100,
) -> Response:
    """Transitions behind the cursor `after`; `follow` without one begins with what happens next."""
    feed, project = context.of(request).engine.feed, context.principal(request).visible
    if sandbox is not None:
        context.check_id(sandbox)
    if follow:
        start = feed.newest() if after is None else after
        return Stream(feed.follow(start, sandbox, project), lines=True, media_type=NDJSON)
    found = feed.page(after or 0, limit + 1, sandbox, project)
    following = found[limit - 1]["id"] if len(found) > limit else None
    return Json({"data": found[:limit], "next": following})


@router.get("/v1/usage")
async def usage(
    request: Request,
    sandbox: str | None = None,
    after: Cursor = 0,
    limit: Limit = 1000,
    totals: bool = False,
) -> Response:
    """Rows of usage in the order they were written; what lasts still has a row up to a minute ago."""
    meter, project = context.of(request).engine.meter, context.principal(request).visible
    if sandbox is not None:
        context.check_id(sandbox)
    if totals:
        return Json({"data": meter.totals(sandbox, project)})
    found = meter.rows(sandbox, after, limit + 1, project)
    following = found[limit - 1]["id"] if len(found) > limit else None
    return Json({"data": found[:limit], "next": following})


@router.get("/v1/sandboxes/{sandbox}/logs")
async def logs(sandbox: str, request: Request, follow: bool = False) -> Response:
    """What the server did with it, and what its console says."""
    engine = context.of(request).engine
    engine.get(context.check_id(sandbox))
    if follow:
        return Stream(engine.logs.follow(sandbox), lines=True, media_type=NDJSON)
    return Json({"data": engine.logs.read(sandbox), "console": engine.logs.console(sandbox)})


@router.get("/v1/top")
async def top_(request: Request) -> Response:
    """The sandboxes of the caller's project; the node's own figures only for who may see all of it."""
    principal = context.principal(request)
    node, rows = await _figures(request, principal.visible)
    return Json({"node": node if principal.sees_all else None, "data": rows})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    node, rows = await _figures(request, None)
    text = context.of(request).engine.metrics.text(top.gauges(node, rows))
    return Response(text, media_type=PROMETHEUS)


async def _figures(request: Request, project: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    here = context.of(request)
    rows = await here.engine.top(project)
    engine = here.engine
    return top.node(host.host(here.settings.state), engine.admission, engine.pool.describe(), rows), rows
