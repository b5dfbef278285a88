"""/v1/sandboxes/{id}/processes and /ports: managed processes, their output and terminals, ports that listen.

Nothing here ends a process but what says so: a client that goes away leaves it to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Query, Request, WebSocket
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect

from llm4agents import limits
from llm4agents.api import context, models
from llm4agents.api.answers import NDJSON, Json, Stream, dump, unless_gone
from llm4agents.api.routes import commands
from llm4agents.engine import processes
from llm4agents.engine.processes import Attached, Terminal
from llm4agents.errors import InvalidRequestError, LLM4AgentsError, UnknownOutcomeError, to_wire

router = APIRouter(prefix="/v1/sandboxes/{sandbox}")
log = structlog.get_logger()
Wait = Annotated[float, Query(ge=0, le=3_600)]


@router.post("/processes")
async def start(sandbox: str, body: models.Start, request: Request) -> Response:
    live = await context.access(request, sandbox)
    tty = None if body.tty is None else Terminal(body.tty.rows, body.tty.cols, body.tty.term)
    info = await processes.start(
        live,
        commands.of(body, body.timeout_s or None, request),
        id=body.id,
        tag=body.tag,
        tty=tty,
        keep_bytes=body.keep_bytes,
        full=body.full,
    )
    return Json(processes.describe(info), status_code=201)


@router.get("/processes")
async def listing(sandbox: str, request: Request) -> Response:
    found = await processes.listing(await context.access(request, sandbox))
    return Json({"data": [processes.describe(info) for info in found]})


@router.get("/processes/{process}")
async def get(sandbox: str, process: str, request: Request, wait_s: Wait = 0) -> Response:
    live = await context.access(request, sandbox)
    return Json(processes.describe(await unless_gone(request, processes.get(live, process, wait_s))))


@router.get("/processes/{process}/output")
async def output(
    sandbox: str,
    process: str,
    request: Request,
    from_: Annotated[int, Query(alias="from", ge=0, le=2**62)] = 0,
    follow: bool = False,
    wait_s: Wait = 0,
) -> Response:
    live = await context.access(request, sandbox)
    if follow:
        await processes.get(live, process)  # what is no process is no stream
        return Stream(processes.follow(live, process, from_), lines=True, media_type=NDJSON)
    return Json(await unless_gone(request, processes.output(live, process, from_, wait_s)))


@router.post("/processes/{process}/stdin")
async def stdin(sandbox: str, process: str, body: models.Stdin, request: Request) -> Response:
    live = await context.access(request, sandbox)
    await processes.write_stdin(live, process, body.data(), eof=body.eof)
    return Json({})


@router.post("/processes/{process}/signal")
async def signal(sandbox: str, process: str, body: models.Signal, request: Request) -> Response:
    await processes.signal(await context.access(request, sandbox), process, body.signal)
    return Json({})


@router.post("/processes/{process}/resize")
async def resize(sandbox: str, process: str, body: models.Resize, request: Request) -> Response:
    await processes.resize(await context.access(request, sandbox), process, body.rows, body.cols)
    return Json({})


@router.delete("/processes/{process}")
async def end(sandbox: str, process: str, request: Request) -> Response:
    return Json(processes.describe(await processes.end(await context.access(request, sandbox), process)))


# -- a live view, both ways ----------------------------------------------------------------------------------


@router.websocket("/processes/{process}/attach")
async def attach(socket: WebSocket, sandbox: str, process: str) -> None:
    await socket.accept()
    try:
        from_offset, wants_stdin = _wanted(socket)
        live = await context.access(socket, sandbox)
        async with processes.attach(live, process, from_offset=from_offset, stdin=wants_stdin) as attached:
            end = await _both_ways(socket, attached)
        last, code = {"exit": end}, 1000
    except WebSocketDisconnect:
        return
    except LLM4AgentsError as error:
        last, code = {"error": to_wire(error)}, 1011
    except asyncio.CancelledError:
        raise
    except Exception as error:
        log.error("attach_failed", process=process, exc_info=error)
        failed = UnknownOutcomeError(f"the server failed: {type(error).__name__}", hint="its log says more")
        last, code = {"error": to_wire(failed)}, 1011
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        await socket.send_text(dump(last).decode())
        await socket.close(code)


def _wanted(socket: WebSocket) -> tuple[int | None, bool]:
    """`from` (a number, or `now`) and `stdin` of the query."""
    given = socket.query_params.get("from", "0")
    if given != "now" and not (given.isascii() and given.isdecimal() and len(given) < 19):
        raise InvalidRequestError(f"from={given[:40]!r} is no offset", hint="a number, or now")
    return None if given == "now" else int(given), socket.query_params.get("stdin") in ("1", "true")


async def _both_ways(socket: WebSocket, attached: Attached) -> dict[str, Any]:
    """Until the process has ended and all it said is sent: how it ended. Raises WebSocketDisconnect."""
    head = {"id": attached.id, "pid": attached.pid, "offset": attached.offset, "gap": attached.gap}
    await socket.send_text(dump({"started": {**head, "tty": attached.tty}}).decode())
    sending = asyncio.create_task(_send(socket, attached))
    hearing = asyncio.create_task(_hear(socket, attached))
    try:
        await asyncio.wait({sending, hearing}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            return sending.result()
        hearing.result()
        return await sending
    finally:
        for task in (sending, hearing):
            task.cancel()
        await asyncio.gather(sending, hearing, return_exceptions=True)


async def _send(socket: WebSocket, attached: Attached) -> dict[str, Any]:
    async for offset, channel, data in attached:
        await socket.send_bytes(bytes([channel]) + offset.to_bytes(8, "little") + data)
    return {**processes.ending(await attached.wait()), "offset": attached.offset}


async def _hear(socket: WebSocket, attached: Attached) -> None:
    """What the client says, until it goes. Stdin of a process that has ended is dropped."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1005)
        if (data := message.get("bytes")) is not None:
            with contextlib.suppress(LLM4AgentsError):
                await attached.write(data)
        else:
            await _told(attached, message.get("text") or "")


async def _told(attached: Attached, text: str) -> None:
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError
        if "resize" in body:
            rows, cols = body["resize"]
            work = attached.resize(int(rows), int(cols))
        elif "signal" in body:
            work = attached.signal(processes.signal_number(body["signal"]))
        elif body.get("eof"):
            work = attached.close_stdin()
        else:
            raise ValueError
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, LLM4AgentsError):
            raise
        raise InvalidRequestError(
            f"{text[:80]!r} is nothing to say here", hint='{"resize":[rows,cols]}, {"signal":n}, {"eof":true}'
        ) from None
    with contextlib.suppress(LLM4AgentsError):  # it has ended meanwhile
        await work


# -- ports ---------------------------------------------------------------------------------------------------


@router.get("/ports")
async def ports(sandbox: str, request: Request) -> Response:
    found = await processes.ports(await context.access(request, sandbox))
    return Json({"data": [{"port": port.port, "address": port.address} for port in found]})


@router.get("/ports/{port}/wait")
async def wait_port(
    sandbox: str, port: int, request: Request, timeout_s: Wait = limits.EXEC_TIMEOUT_S
) -> Response:
    if not 1 <= port <= 65_535:
        raise InvalidRequestError(f"{port} is no TCP port")
    live = await context.access(request, sandbox)
    found = await unless_gone(request, processes.wait_port(live, port, timeout_s))
    return Json({"port": found.port, "address": found.address})
