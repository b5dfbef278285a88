"""/v1/sandboxes/{id}/files/…: whole directories. Tar streams through both ways, changes come as NDJSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any
from urllib.parse import parse_qsl

import structlog
from fastapi import APIRouter, Query, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context
from llm4agents.api.answers import NDJSON, Json, Stream, unless_gone
from llm4agents.api.models import Body, Path
from llm4agents.api.routes.files import PathQuery, chunks, drain
from llm4agents.engine import trees
from llm4agents.engine.live import Live
from llm4agents.errors import LLM4AgentsError
from llm4agents.tarblocks import Sieve

log = structlog.get_logger()
router = APIRouter(prefix="/v1/sandboxes/{sandbox}/files")
TAR = "application/x-tar"
TRAILER = b"LLM4AGENTS-TAR "
"""Begins the block after the archive's end marker, where readers of tar look no more: what was left out, as JSON."""
TRAILER_PATHS_MAX, TRAILER_PATH_CHARS_MAX = 50, 200
"""Of what the operator protects: the whole trailer is within what a client reads of one."""
EXCLUDES_MAX = 100
User = str | None
Pattern = Annotated[str, Field(min_length=1, max_length=1_024)]
Owner = Annotated[int, Field(ge=0, lt=2**32 - 1)] | Annotated[str, Field(min_length=1, max_length=256)]


class Attributes(Body):
    path: Path
    mode: Annotated[int | None, Field(ge=0, le=0o7777)] = None
    owner: Owner | None = None
    group: Owner | None = None
    mtime: Annotated[float | None, Field(allow_inf_nan=False)] = None
    follow: bool = True
    recursive: bool = False
    user: User = None

    @model_validator(mode="after")
    def _check(self) -> Attributes:
        if self.mode is self.owner is self.group is self.mtime is None:
            raise ValueError("give mode, owner, group or mtime")
        return self


class Link(Body):
    path: Path
    target: Path
    symbolic: bool = True
    overwrite: bool = False
    user: User = None


class Search(Body):
    path: Path
    name: Pattern | None = None
    content: Pattern | None = None
    regex: bool = False
    ignore_case: bool = False
    hidden: bool = True
    max: Annotated[int, Field(ge=1, le=limits.SEARCH_MATCHES_MAX)] = 1_000
    max_file_bytes: Annotated[int | None, Field(ge=1)] = None
    timeout_s: Annotated[float, Field(gt=0, le=limits.TREE_TIMEOUT_S)] = 60.0
    user: User = None


@router.get("/tar")
async def tar_out(sandbox: str, request: Request, path: PathQuery, user: User = None) -> Response:
    """`exclude` may be given several times."""
    query = request.scope["query_string"].decode("ascii", "surrogateescape")
    pairs = parse_qsl(query, errors="surrogateescape")
    exclude = [value for name, value in pairs if name == "exclude"][:EXCLUDES_MAX]
    top = context.query_path(request)
    context.check_protected(request, context.check_id(sandbox), top, "tar")
    live, patterns = await context.access(request, sandbox), context.protected_paths(request)
    items = _tar(
        live, top, exclude, context.user_of(user, request), Sieve(top, patterns) if patterns else None
    )
    await anext(items)  # what cannot be opened is an HTTP error and not a cut body
    return Stream(items, lines=False, media_type=TAR, headers=context.protected_headers(request))


async def _tar(
    live: Live, path: str, exclude: list[str], user: str | int, sieve: Sieve | None
) -> AsyncGenerator[Any, None]:
    stream = trees.tar_out(live, path, exclude=exclude, user=user)
    try:
        async with contextlib.aclosing(stream) as items:
            async for item in items:
                if isinstance(item, trees.Packed):
                    yield trailer(item, sieve)
                elif item is None or sieve is None:
                    yield item
                elif piece := sieve.feed(item):
                    yield piece
    finally:
        if sieve is not None and sieve.count:
            what = {"count": sieve.count, "paths": sieve.protected[:TRAILER_PATHS_MAX]}
            log.warning("protected_paths_left_out", sandbox=live.row.id, path=path, **what)


def trailer(packed: trees.Packed, sieve: Sieve | None = None) -> bytes:
    """What was packed and what was not, in blocks of their own."""
    first = None if packed.first_unreadable is None else packed.first_unreadable[:500]
    said: dict[str, Any] = {
        "entries": packed.entries,
        "skipped": packed.skipped,
        "unreadable": packed.unreadable,
        "first_unreadable": first,
    }
    if sieve is not None:
        said["protected"] = sieve.count
        said["protected_paths"] = [
            path[:TRAILER_PATH_CHARS_MAX] for path in sieve.protected[:TRAILER_PATHS_MAX]
        ]
    text = TRAILER + json.dumps(said).encode() + b"\n"
    return text + bytes(-len(text) % 512)


@router.put("/tar")
async def tar_in(
    sandbox: str,
    request: Request,
    path: PathQuery,
    parents: bool = True,
    preserve_owner: bool = False,
    user: User = None,
) -> Response:
    target = context.query_path(request)
    live = await context.access(request, sandbox)
    try:
        done = await trees.tar_in(
            live,
            target,
            chunks(request),
            parents=parents,
            preserve_owner=preserve_owner,
            user=context.user_of(user, request),
        )
    except LLM4AgentsError:
        await drain(request)
        raise
    return Json({"path": target, "entries": done.entries, "bytes": done.bytes, "skipped": done.skipped})


@router.post("/attributes")
async def attributes(sandbox: str, body: Attributes, request: Request) -> Response:
    live, user = await context.access(request, sandbox), context.user_of(body.user, request)
    wanted = body.model_dump(exclude={"path", "user"})
    work = trees.set_attributes(live, context.guest_path(body.path, request), **wanted, user=user)
    return Json({"changed": await unless_gone(request, work)})


@router.post("/link")
async def link(sandbox: str, body: Link, request: Request) -> Response:
    await trees.link(
        await context.access(request, sandbox),
        context.guest_path(body.path, request),
        body.target if body.symbolic else context.guest_path(body.target, request),
        symbolic=body.symbolic,
        overwrite=body.overwrite,
        user=context.user_of(body.user, request),
    )
    return Json({})


@router.post("/search")
async def search(sandbox: str, body: Search, request: Request) -> Response:
    live, user = await context.access(request, sandbox), context.user_of(body.user, request)
    wanted = body.model_dump(exclude={"path", "user", "timeout_s"})
    path = context.guest_path(body.path, request)
    found = await unless_gone(request, trees.search(live, path, **wanted, user=user, timeout=body.timeout_s))
    matches = [_match(match) for match in found.matches]
    return Json({"matches": matches, "files": found.files, "truncated": found.truncated})


def _match(match: trees.Match) -> dict[str, Any]:
    if match.text is None:
        return {"path": match.path, "kind": match.kind, "size": match.size, "mtime": match.mtime}
    text = match.text.decode("utf-8", "replace")
    return {"path": match.path, "line": match.line, "column": match.column, "text": text}


@router.get("/watch")
async def watch(
    sandbox: str,
    request: Request,
    path: PathQuery,
    recursive: Annotated[bool, Query()] = True,
    user: User = None,
) -> Response:
    """Lines `{"type": "watching"}`, then a change each, then `{"type": "end"}` if what is watched has gone."""
    live, user_ = await context.access(request, sandbox), context.user_of(user, request)
    items = _watch(live, context.query_path(request), recursive, user_)
    await anext(items)
    return Stream(items, lines=True, media_type=NDJSON)


async def _watch(live: Live, path: str, recursive: bool, user: str | int) -> AsyncGenerator[Any, None]:
    changes = trees.watch(live, path, recursive=recursive, user=user)
    async with contextlib.aclosing(changes) as seen:
        yield await anext(seen)
        yield {"type": "watching", "path": path}
        async for change in seen:
            if change is not None:
                yield {"type": change.event, "path": change.path, "to": change.to, "kind": change.kind}
        yield {"type": "end"}
