"""/v1/sandboxes/ID/network: what a sandbox may reach; looked at, changed while it runs, explained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context, models
from llm4agents.api.answers import NDJSON, Json, Stream
from llm4agents.engine.network import AUDIT_KINDS, Wanted
from llm4agents.errors import InvalidRequestError

router = APIRouter(prefix="/v1/sandboxes/{sandbox}/network")
PCAP = "application/vnd.tcpdump.pcap"


@router.get("")
async def show(sandbox: str, request: Request) -> Response:
    engine = context.of(request).engine
    row = engine.get(context.check_id(sandbox))
    return Json(await engine.networks.describe(row))


@router.put("")
async def change(sandbox: str, body: models.Network, request: Request) -> Response:
    """Answered when gateway and interceptor obey it; `cut`: connections that ended for it."""
    engine = context.of(request).engine
    context.check_network(request, body.network)
    row, cut = await engine.update_network(context.check_id(sandbox), body.network)
    return Json({**await engine.networks.describe(row), "cut": cut})


@router.post("/why")
async def why(sandbox: str, body: models.Why, request: Request) -> Response:
    engine = context.of(request).engine
    return Json(await engine.networks.why(engine.get(context.check_id(sandbox)), body.url))


@router.get("/log")
async def log(
    sandbox: str,
    request: Request,
    follow: bool = False,
    verdict: Literal["allow", "deny"] | None = None,
    kind: str | None = None,
    limit: Annotated[int, Query(ge=1, le=limits.AUDIT_RECORDS_MAX)] = 1_000,
    after: Annotated[float | None, Query(allow_inf_nan=False)] = None,
) -> Response:
    """The newest records, oldest first; with `follow` as lines, and then those that come. `kind`: several by commas."""
    engine = context.of(request).engine
    row = engine.get(context.check_id(sandbox))
    kinds = tuple(kind.split(",")) if kind else ()
    if unknown := [name for name in kinds if name not in AUDIT_KINDS]:
        raise InvalidRequestError(
            f"{unknown[0]!r} is no kind of record", hint=f"one of {', '.join(AUDIT_KINDS)}"
        )
    wanted = Wanted(verdict, kinds, after)
    if follow:
        return Stream(engine.networks.follow(row, wanted, limit), lines=True, media_type=NDJSON)
    return Json({"data": await engine.networks.log(row, wanted, limit)})


@router.post("/capture")
async def capture(sandbox: str, body: models.Capture, request: Request) -> Response:
    engine = context.of(request).engine
    row = engine.get(context.check_id(sandbox))
    await engine.networks.capture(row, body.bytes_max)
    return Json(await engine.networks.captures.state(row.id) or {})


@router.delete("/capture")
async def stop_capture(sandbox: str, request: Request) -> Response:
    """What was captured stays, until it is captured anew or the sandbox is forgotten."""
    engine = context.of(request).engine
    row = engine.get(context.check_id(sandbox))
    await engine.networks.captures.stop(row.id)
    return Json(await engine.networks.captures.state(row.id) or {})


@router.get("/capture")
async def captured(sandbox: str, request: Request) -> Response:
    """The pcap so far, whole packets."""
    engine = context.of(request).engine
    captures, row = engine.networks.captures, engine.get(context.check_id(sandbox))
    await captures.state(row.id)  # has what has arrived written
    return Stream(_pieces(captures.pieces(row.id)), lines=False, media_type=PCAP)


async def _pieces(pieces: Iterator[bytes]) -> AsyncGenerator[Any, None]:
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece
