"""/v1/sandboxes/{id}/files: bytes stream through, whole files are never held."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from llm4agents.api import context, models
from llm4agents.api.answers import Json, Stream
from llm4agents.engine.live import Live
from llm4agents.errors import LLM4AgentsError

router = APIRouter(prefix="/v1/sandboxes/{sandbox}/files")
BYTES = "application/octet-stream"
DRAIN_S = 60.0
"""How long the rest of a file is taken from a client after its writing has failed."""
PathQuery = Annotated[str, Query(min_length=1)]


@router.get("")
async def read(
    sandbox: str,
    request: Request,
    path: PathQuery,
    offset: Annotated[int, Query(ge=0)] = 0,
    length: Annotated[int | None, Query(ge=0)] = None,
    user: str | None = None,
) -> Response:
    source = context.query_path(request)
    context.check_protected(request, context.check_id(sandbox), source, "read")
    live = await context.access(request, sandbox)
    items = _read(live, source, offset, length, context.user_of(user, request))
    # The head needs the file's size, and a file that cannot be opened is an HTTP error and not a cut body.
    info = await anext(items)
    return answer(request, info, items)


def answer(request: Request, info: Any, items: AsyncGenerator[Any, None]) -> Response:
    """A file's bytes, and in the head what the file was when it was opened."""
    headers = {
        "x-file-size": str(info.size),
        "x-file-mode": str(info.mode),
        "x-file-mtime": repr(info.mtime),
        **context.protected_headers(request),
    }
    return Stream(items, lines=False, media_type=BYTES, headers=headers)


async def _read(
    live: Live, path: str, offset: int, length: int | None, user: str | int
) -> AsyncGenerator[Any, None]:
    async with live.use(f"read {path}") as agent:
        file = await agent.read(path, offset=offset, length=length, user=user)
        async with file:
            yield file.info
            async with contextlib.aclosing(aiter(file)) as chunks:
                async for chunk in chunks:
                    yield chunk


@router.put("")
async def write(
    sandbox: str,
    request: Request,
    path: PathQuery,
    mode: Annotated[int | None, Query(ge=0, le=0o7777)] = None,
    user: str | None = None,
    parents: bool = True,
) -> Response:
    target = context.query_path(request)
    async with (await context.access(request, sandbox)).use(f"write {target}") as agent:
        try:
            size = await agent.write(
                target, chunks(request), mode=mode, user=context.user_of(user, request), parents=parents
            )
        except LLM4AgentsError:
            await drain(request)
            raise
    return Json({"path": target, "size": size})


async def chunks(request: Request) -> AsyncGenerator[bytes, None]:
    """The body as it comes."""
    # ClientDisconnect comes out of here when the client goes away: the write is then cancelled, not ended.
    async for chunk in request.stream():
        if chunk:
            yield chunk


async def drain(request: Request) -> None:
    """Take the rest of a body whose writing has failed: most clients read an answer only after they have sent all."""
    # RuntimeError: it had been read to its end before the guest said no.
    with contextlib.suppress(TimeoutError, RuntimeError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in request.stream():
                pass


@router.get("/stat")
async def stat(
    sandbox: str, request: Request, path: PathQuery, follow: bool = True, user: str | None = None
) -> Response:
    async with (await context.access(request, sandbox)).use("stat") as agent:
        entry = await agent.stat(
            context.query_path(request), follow=follow, user=context.user_of(user, request)
        )
    return Json(asdict(entry))


@router.get("/list")
async def listing(
    sandbox: str,
    request: Request,
    path: PathQuery,
    depth: Annotated[int, Query(ge=1, le=64)] = 1,
    user: str | None = None,
) -> Response:
    async with (await context.access(request, sandbox)).use("list") as agent:
        found = await agent.list(
            context.query_path(request), depth=depth, user=context.user_of(user, request)
        )
    return Json({"entries": [asdict(entry) for entry in found.entries], "truncated": found.truncated})


@router.post("/mkdir")
async def mkdir(sandbox: str, body: models.Mkdir, request: Request) -> Response:
    async with (await context.access(request, sandbox)).use("mkdir") as agent:
        await agent.mkdir(
            context.guest_path(body.path, request),
            parents=body.parents,
            mode=body.mode,
            exist_ok=body.exist_ok,
            user=context.user_of(body.user, request),
        )
    return Json({})


@router.post("/move")
async def move(sandbox: str, body: models.Move, request: Request) -> Response:
    async with (await context.access(request, sandbox)).use("move") as agent:
        await agent.move(
            context.guest_path(body.source, request),
            context.guest_path(body.to, request),
            overwrite=body.overwrite,
            user=context.user_of(body.user, request),
        )
    return Json({})


@router.post("/remove")
async def remove(sandbox: str, body: models.Remove, request: Request) -> Response:
    async with (await context.access(request, sandbox)).use("remove") as agent:
        await agent.remove(
            context.guest_path(body.path, request),
            recursive=body.recursive,
            missing_ok=body.missing_ok,
            user=context.user_of(body.user, request),
        )
    return Json({})
