"""/v1/whoami, keys, projects, invites, register, audit: who may call, and who did."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context
from llm4agents.api.answers import Json
from llm4agents.api.models import Body, Name
from llm4agents.engine import invites as invitations
from llm4agents.engine import keys, projects, quotas
from llm4agents.engine.principal import SCOPES
from llm4agents.errors import ForbiddenError, InvalidRequestError

router = APIRouter(prefix="/v1")
Days = Annotated[float, Field(gt=0, le=limits.KEY_DAYS_MAX)]
Limit = Annotated[int, Query(ge=1, le=1000)]


class NewKey(Body):
    name: Name
    project: Name | None = None
    scopes: Annotated[list[str], Field(min_length=1, max_length=len(SCOPES))] | None = None
    expires_days: Days | None = None


class NewProject(Body):
    name: Name
    quotas: dict[str, Any] = Field(default_factory=dict)


class ChangedProject(Body):
    quotas: dict[str, Any] | None = None
    """Merged into those there are; null takes one away."""
    disabled: bool | None = None


class NewInvite(Body):
    note: Annotated[str, Field(max_length=256)] = ""
    uses: Annotated[int, Field(ge=1, le=limits.INVITE_USES_MAX)] = 1
    expires_days: Days | None = None
    quotas: dict[str, Any] = Field(default_factory=dict)


class Registration(Body):
    invite: Annotated[str, Field(min_length=1, max_length=128)]
    name: Name


@router.get("/whoami")
async def whoami(request: Request) -> Response:
    """The caller as the server sees him, and what his project may have and has."""
    principal, engine = context.principal(request), context.of(request).engine
    row = engine.projects.of(principal.project)
    return Json(
        {
            "project": principal.project,
            "project_name": principal.project if row is None else row.name,
            "actor": principal.actor,
            "scopes": sorted(principal.scopes, key=SCOPES.index),
            "origin": principal.origin,
            "quotas": {} if row is None else row.quotas,
            "used": engine.quotas.used(principal.project),
        }
    )


# -- keys -------------------------------------------------------------------------------------------------------


@router.post("/keys", status_code=201)
async def create_key(body: NewKey, request: Request) -> Response:
    """The key is in this answer and never again."""
    row, key = context.of(request).engine.keys.create(
        context.principal(request),
        body.name,
        project=body.project,
        scopes=body.scopes,
        expires_days=body.expires_days,
    )
    return Json({"key": key, **keys.describe(row)}, status_code=201)


@router.get("/keys")
async def list_keys(request: Request) -> Response:
    rows = context.of(request).engine.keys.list(context.principal(request).visible)
    return Json({"data": [keys.describe(row) for row in rows]})


@router.get("/keys/{key}")
async def get_key(key: str, request: Request) -> Response:
    return Json(keys.describe(context.of(request).engine.keys.get(key, context.principal(request).visible)))


@router.delete("/keys/{key}")
async def revoke_key(key: str, request: Request) -> Response:
    return Json(
        keys.describe(context.of(request).engine.keys.revoke(key, context.principal(request).visible))
    )


# -- projects ---------------------------------------------------------------------------------------------------


def _project(request: Request, row: projects.ProjectRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "created_at": row.created_at,
        "disabled_at": row.disabled_at,
        "quotas": row.quotas,
        "used": context.of(request).engine.quotas.used(row.id),
    }


@router.post("/projects", status_code=201)
async def create_project(body: NewProject, request: Request) -> Response:
    row = context.of(request).engine.projects.create(body.name, quotas.checked(body.quotas))
    return Json(_project(request, row), status_code=201)


@router.get("/projects")
async def list_projects(request: Request) -> Response:
    rows = context.of(request).engine.projects.list()
    return Json({"data": [_project(request, row) for row in rows]})


@router.get("/projects/{project}")
async def get_project(project: str, request: Request) -> Response:
    """By id or name."""
    return Json(_project(request, context.of(request).engine.projects.get(project)))


@router.patch("/projects/{project}")
async def change_project(project: str, body: ChangedProject, request: Request) -> Response:
    known = context.of(request).engine.projects
    row = known.get(project)
    if body.quotas is None and body.disabled is None:
        raise InvalidRequestError("give quotas or disabled")
    if body.quotas is not None:
        wanted = quotas.checked({**row.quotas, **body.quotas})
        row = known.set_quotas(row.id, wanted)
    if body.disabled is not None:
        row = known.disable(row.id, disabled=body.disabled)
    return Json(_project(request, row))


# -- invites, registration --------------------------------------------------------------------------------------


@router.post("/invites", status_code=201)
async def create_invite(body: NewInvite, request: Request) -> Response:
    """The code is in this answer and never again."""
    row, code = context.of(request).engine.invites.create(
        note=body.note,
        uses=body.uses,
        expires_days=body.expires_days,
        quotas=quotas.checked(body.quotas),
    )
    return Json({"invite": code, **invitations.describe(row)}, status_code=201)


@router.get("/invites")
async def list_invites(request: Request) -> Response:
    return Json({"data": [invitations.describe(row) for row in context.of(request).engine.invites.list()]})


@router.delete("/invites/{invite}")
async def revoke_invite(invite: str, request: Request) -> Response:
    context.of(request).engine.invites.revoke(invite)
    return Json({"id": invite, "revoked": True})


@router.post("/register", status_code=201)
async def register(body: Registration, request: Request) -> Response:
    """A project of one's own, and its first key, for an invite's code."""
    here = context.of(request)
    if not here.settings.registration:
        raise ForbiddenError(
            "this server takes no registrations", hint="its operator sets LLM4AGENTS_REGISTRATION=1"
        )
    here.engine.invites.check_attempt(context.principal(request).origin)
    project, row, key = here.engine.invites.register(body.invite, body.name)
    answer = {"project": {"id": project.id, "name": project.name, "quotas": project.quotas}}
    return Json({**answer, "key": key, "key_id": row.id, "scopes": row.scopes}, status_code=201)


# -- audit ------------------------------------------------------------------------------------------------------


@router.get("/audit")
async def audit(
    request: Request,
    limit: Limit = 100,
    before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
    actor: Annotated[str | None, Query(max_length=64)] = None,
    since: Annotated[float | None, Query(allow_inf_nan=False)] = None,
) -> Response:
    """What was changed and what was refused, the newest first; `next` is the `before` of the page after."""
    visible = context.principal(request).visible
    found = context.of(request).engine.audit.page(
        visible, limit=limit + 1, before=before, actor=actor, since=since
    )
    following = found[limit - 1]["id"] if len(found) > limit else None
    return Json({"data": found[:limit], "next": following})
