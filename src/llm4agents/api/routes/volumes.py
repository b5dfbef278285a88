"""/v1/volumes: disks that outlive sandboxes, and the files of those that no sandbox has; /v1/sandboxes/ID/volumes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from typing import Annotated, Any
from urllib.parse import parse_qsl

import structlog
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context, models
from llm4agents.api.answers import Json, Stream
from llm4agents.api.routes.files import PathQuery
from llm4agents.api.routes.files import answer as file_answer
from llm4agents.api.routes.trees import EXCLUDES_MAX, TAR, trailer
from llm4agents.engine.volume_files import Packed, inside, outside, tar_out
from llm4agents.engine.volumes import ID, VolumeRow
from llm4agents.errors import ConflictError, InvalidRequestError, NotFoundError
from llm4agents.tarblocks import Sieve

log = structlog.get_logger()
router = APIRouter()


def row_of(request: Request, volume: str) -> VolumeRow:
    """The volume of that id, if who calls may know of it. Raises NotFoundError."""
    principal = context.principal(request)
    if not ID.fullmatch(volume):
        raise NotFoundError(f"{volume[:80]!r} is not a volume's id", hint="GET /v1/volumes?name= finds it")
    found = context.of(request).engine.volumes.get(volume)
    if not principal.sees(found.project):
        raise NotFoundError(f"there is no volume {volume}", hint="llm4agents volume ls shows them")
    return found


def _told(request: Request, row: VolumeRow, status_code: int = 200) -> Response:
    return Json(context.of(request).engine.volumes.describe(row), status_code=status_code)


@router.post("/v1/volumes", status_code=201)
async def create(body: models.NewVolume, request: Request) -> Response:
    volumes, project = context.of(request).engine.volumes, context.principal(request).project
    if body.source is None:
        assert body.size_mib is not None  # the model has seen to that
        return _told(request, await volumes.create(project, body.name, body.size_mib, body.metadata), 201)
    source = volumes.get(body.source, project)
    row = await volumes.copy(source, body.name, kind="volume", size_mib=body.size_mib, metadata=body.metadata)
    return _told(request, row, 201)


@router.get("/v1/volumes")
async def listing(
    request: Request,
    name: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    after: str | None = None,
) -> Response:
    volumes, principal = context.of(request).engine.volumes, context.principal(request)
    if after is not None:
        row_of(request, after)
    # By name it is one's own; the operator's list is of every project.
    project = None if principal.sees_all and name is None else principal.project
    rows = volumes.rows(project, name=name, limit=limit + 1, after=after)
    following = rows[limit - 1].id if len(rows) > limit else None
    return Json({"data": volumes.describe_all(rows[:limit]), "next": following})


@router.get("/v1/volumes/{volume}")
async def get(volume: str, request: Request) -> Response:
    return _told(request, row_of(request, volume))


@router.delete("/v1/volumes/{volume}")
async def delete(volume: str, request: Request) -> Response:
    row = row_of(request, volume)
    await context.of(request).engine.volumes.delete(row)
    return _told(request, replace(row, state="deleted"))


@router.post("/v1/volumes/{volume}/snapshot", status_code=201)
async def snapshot(volume: str, body: models.VolumeSnapshot, request: Request) -> Response:
    volumes = context.of(request).engine.volumes
    row = await volumes.copy(row_of(request, volume), body.name, kind="snapshot", metadata=body.metadata)
    return _told(request, row, 201)


@router.post("/v1/volumes/{volume}/clone", status_code=201)
async def clone(volume: str, body: models.VolumeClone, request: Request) -> Response:
    volumes = context.of(request).engine.volumes
    source = row_of(request, volume)
    row = await volumes.copy(source, body.name, kind="volume", size_mib=body.size_mib, metadata=body.metadata)
    return _told(request, row, 201)


@router.post("/v1/volumes/{volume}/resize")
async def resize(volume: str, body: models.VolumeResize, request: Request) -> Response:
    volumes = context.of(request).engine.volumes
    return _told(request, await volumes.resize(row_of(request, volume), body.size_mib))


# -- files ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _agent(request: Request, row: VolumeRow) -> AsyncGenerator[Any, None]:
    engine = context.of(request).engine
    writers = [held for held in engine.volumes.describe(row)["attached"] if held["mode"] == "rw"]
    if writers:
        raise ConflictError(
            f"{row.name} is attached to {writers[0]['sandbox']}, which writes to it",
            hint="read its files there (llm4agents cp ID:/path), or those of a snapshot of the volume",
        )
    async with engine.volume_files.use(row) as agent:
        yield agent


def _path(request: Request) -> str:
    """As the volume has it: from its own root."""
    query = request.scope["query_string"].decode("ascii", "surrogateescape")
    path = dict(parse_qsl(query, errors="surrogateescape")).get("path", "")
    if "\0" in path:
        raise InvalidRequestError("a path has no NUL in it")
    if len(path.encode("utf-8", "surrogateescape")) > limits.PATH_BYTES_MAX - 64:
        raise InvalidRequestError("the path is too long")
    return outside(inside(path))


def _entry(entry: Any) -> dict[str, Any]:
    return {**asdict(entry), "path": outside(entry.path)}


@router.get("/v1/volumes/{volume}/files")
async def read(
    volume: str,
    request: Request,
    path: PathQuery,
    offset: Annotated[int, Query(ge=0)] = 0,
    length: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    row, source = row_of(request, volume), _path(request)
    context.check_protected(request, volume, source, "read")
    items = _read(request, row, source, offset, length)
    info = await anext(items)
    return file_answer(request, info, items)


async def _read(
    request: Request, row: VolumeRow, path: str, offset: int, length: int | None
) -> AsyncGenerator[Any, None]:
    async with _agent(request, row) as agent:
        file = await agent.read(inside(path), offset=offset, length=length, user="root")
        async with file:
            yield file.info
            async with contextlib.aclosing(aiter(file)) as chunks:
                async for chunk in chunks:
                    yield chunk


@router.get("/v1/volumes/{volume}/files/stat")
async def stat(volume: str, request: Request, path: PathQuery, follow: bool = True) -> Response:
    row = row_of(request, volume)
    async with _agent(request, row) as agent:
        return Json(_entry(await agent.stat(inside(_path(request)), follow=follow, user="root")))


@router.get("/v1/volumes/{volume}/files/list")
async def entries(
    volume: str, request: Request, path: PathQuery, depth: Annotated[int, Query(ge=1, le=64)] = 1
) -> Response:
    row = row_of(request, volume)
    async with _agent(request, row) as agent:
        found = await agent.list(inside(_path(request)), depth=depth, user="root")
    return Json({"entries": [_entry(entry) for entry in found.entries], "truncated": found.truncated})


@router.get("/v1/volumes/{volume}/files/tar")
async def tar(
    volume: str,
    request: Request,
    path: PathQuery,
    exclude: Annotated[list[str] | None, Query(max_length=EXCLUDES_MAX)] = None,
) -> Response:
    row, top = row_of(request, volume), _path(request)
    context.check_protected(request, volume, top, "tar")
    patterns = context.protected_paths(request)
    items = _tar(request, row, top, exclude or [], Sieve(top, patterns) if patterns else None)
    await anext(items)
    return Stream(items, lines=False, media_type=TAR, headers=context.protected_headers(request))


async def _tar(
    request: Request, row: VolumeRow, path: str, exclude: list[str], sieve: Sieve | None
) -> AsyncGenerator[Any, None]:
    try:
        async with (
            _agent(request, row) as agent,
            contextlib.aclosing(tar_out(agent, path, exclude)) as pieces,
        ):
            async for piece in pieces:
                if isinstance(piece, Packed):
                    yield trailer(piece, sieve)
                elif piece is None or sieve is None:
                    yield piece
                elif passed := sieve.feed(piece):
                    yield passed
    finally:
        if sieve is not None and sieve.count:
            log.warning("protected_paths_left_out", volume=row.id, path=path, count=sieve.count)


# -- of a sandbox --------------------------------------------------------------------------------------------


@router.post("/v1/sandboxes/{sandbox}/volumes")
async def attach(sandbox: str, body: models.Mount, request: Request) -> Response:
    """To a paused one; it is mounted when that is resumed."""
    context.check_volumes(request, True)
    engine = context.of(request).engine
    return Json(models.sandbox(await engine.attach(context.check_id(sandbox), body.wish())))


@router.post("/v1/sandboxes/{sandbox}/volumes/detach")
async def detach(sandbox: str, body: models.Detach, request: Request) -> Response:
    """From a paused one; the volume is free at once."""
    engine = context.of(request).engine
    return Json(models.sandbox(await engine.detach(context.check_id(sandbox), body.volume)))
