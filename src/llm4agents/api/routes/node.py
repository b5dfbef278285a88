"""/v1/server, templates, doctor, du, prune: the node itself.

Bundles are files of the host, named by path: only its own user can reach this server."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llm4agents import __version__, limits
from llm4agents.api import context, models
from llm4agents.api.answers import NDJSON, Json, Stream, as_they_come, unless_gone
from llm4agents.engine import backup, doctor, names
from llm4agents.engine.templates import Progress, silent
from llm4agents.errors import ForbiddenError, InvalidRequestError

router = APIRouter(prefix="/v1")
API = 1


@router.get("/server")
async def server(request: Request) -> Response:
    here, principal = context.of(request), context.principal(request)
    own = principal.sees_all  # to others this host's own affairs are none
    can = await here.engine.capabilities()
    emulated = can is not None and can.accelerator == "tcg"
    return Json(
        {
            "version": __version__,
            "api": API,
            "pid": os.getpid() if own else None,
            "state": str(here.settings.state) if own else None,
            "log": str(here.settings.server_log) if own else None,
            "started_at": here.started_at,
            "listen": here.listening and "{}://{}:{}".format(*here.listening),
            "sandboxes": here.engine.alive if own else len(here.engine.store.alive(principal.project)),
            "vmm": can.vmm if can else None,
            "accelerator": can.accelerator if can else None,
            "why_not_kvm": can.why_not_kvm if can else "no VMM can run here; llm4agents doctor says why",
            "slowdown_note": doctor.SLOWDOWN if emulated else None,
        }
    )


@router.post("/server/stop")
async def stop(body: models.Stop, request: Request) -> Response:
    here = context.of(request)
    here.keep = body.keep
    here.stop.set()
    return Json({"stopping": True, "keep": body.keep}, status_code=202)


@router.post("/server/backup")
async def backup_(body: models.Backup, request: Request) -> Response:
    work = backup.write(context.of(request).engine, _local(body.file), with_disks=body.with_disks)
    return Json(await unless_gone(request, work))


@router.get("/doctor")
async def doctor_(request: Request) -> Response:
    return Json(await doctor.report_async(context.of(request).settings))


def with_progress(
    work: Callable[[Progress], Awaitable[dict[str, Any]]],
) -> AsyncGenerator[dict[str, Any], None]:
    """Progress lines of `work`, then its result as the last line. Closing it cancels the work."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=256)

    def tell(step: str, detail: str, fraction: float | None) -> None:
        # A reader that is slow misses steps; it never holds up a build. Builds also tell from threads.
        line = {"type": "progress", "step": step, "detail": detail, "fraction": fraction}
        loop.call_soon_threadsafe(_put, queue, line)

    loop = asyncio.get_running_loop()
    return as_they_come(lambda: work(tell), queue)


def _put(queue: asyncio.Queue[dict[str, Any]], line: dict[str, Any]) -> None:
    with contextlib.suppress(asyncio.QueueFull):
        queue.put_nowait(line)


@router.get("/templates")
async def templates(request: Request) -> Response:
    registry = context.of(request).engine.templates
    return Json({"data": await asyncio.to_thread(registry.catalogue, context.principal(request).visible)})


@router.post("/templates/import")
async def import_(body: models.LocalFile, request: Request) -> Response:
    registry = context.of(request).engine.templates
    variant = await unless_gone(request, registry.import_(_local(body.file), silent))
    return Json(registry.describe(variant))


@router.post("/templates/{name}/build")
async def build(name: str, body: models.Build, request: Request) -> Response:
    registry, principal = context.of(request).engine.templates, context.principal(request)
    name = context.template(request, name)
    registry.check_name(name)
    if body.force and not principal.sees_all and names.project_of(name) is None:
        raise ForbiddenError(f"{name} is everybody's: only the operator builds it anew", needs=["node"])
    if body.nested:
        context.of(request).engine.check_nested()

    vcpus, memory_mib = registry.size(name)

    wanted = body.vcpus or vcpus, body.memory_mib or memory_mib
    quotas = context.of(request).engine.quotas

    async def work(progress: Progress) -> dict[str, Any]:
        shape = await registry.shape(name, *wanted, vmm=body.vmm, nested=body.nested)
        free = principal.sees_all
        with contextlib.nullcontext() if free else quotas.building(principal.project, *wanted):
            variant, _ = await registry.variant(shape, progress, rebuild=body.force)
        return {"type": "template", **registry.describe(variant)}

    return Stream(with_progress(work), lines=True, media_type=NDJSON)


@router.post("/templates/{name}/export")
async def export(name: str, body: models.LocalFile, request: Request) -> Response:
    registry = context.of(request).engine.templates
    file = _local(body.file)
    ref = context.template(request, name)
    shape = await registry.shape(ref, *registry.size(ref))
    work = registry.export(shape, file, silent)
    return Json({"file": str(file), "bytes": await unless_gone(request, work)})


@router.delete("/templates/{name}")
async def remove(name: str, request: Request) -> Response:
    found = context.template(request, name)
    if not context.principal(request).sees_all and names.project_of(found) is None:
        raise ForbiddenError(f"{name} is everybody's: only the operator removes it", needs=["node"])
    await context.of(request).engine.templates.remove(found)
    return Json({"name": name})


@router.get("/du")
async def du(request: Request) -> Response:
    return Json(await asyncio.to_thread(context.of(request).engine.usage))


@router.post("/prune")
async def prune(body: models.Prune, request: Request) -> Response:
    return Json(await context.of(request).engine.prune(everything=body.all))


def _local(file: str) -> Path:
    """A file of the node by its absolute path; one that no file can have is refused. Looks at nothing on the disk."""
    path, shown = Path(file), repr(file[:200])
    if not path.is_absolute():
        raise InvalidRequestError(
            f"{shown} is not an absolute path", hint="the server's directory is not yours"
        )
    names = os.fsencode(path).split(b"/")
    whole, longest = sum(map(len, names)) + len(names), max(map(len, names))
    if not path.name or any(b"\0" in name for name in names):
        raise InvalidRequestError(f"{shown} cannot be a file's path")
    if whole > limits.PATH_BYTES_MAX or longest > limits.LOCAL_NAME_BYTES_MAX:
        raise InvalidRequestError(
            f"{shown}… is too long",
            hint=f"each name of a path has at most {limits.LOCAL_NAME_BYTES_MAX} bytes",
        )
    return path
