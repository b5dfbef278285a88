"""Who calls: keys, projects, invites, registration, the audit. Models and operations. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from llm4agents.api.schema.kinds import NOW, Answer, Operation, Operations

Quotas = dict[str, int | float]
"""Name → number: `sandboxes`, `vcpus`, `memory_mib`, `disk_mib`, `volumes_mib`, `templates`, `creates_per_s`."""


class Whoami(Answer):
    """The caller as the server sees him, and what his project may have and has."""

    project: str
    project_name: str
    actor: str = Field(description="The key's id; `socket` for the operator.")
    scopes: list[str]
    origin: str
    quotas: Quotas
    used: Quotas


class Key(Answer):
    """An API key: everything but the key."""

    id: str
    project: str
    name: str
    scopes: list[str]
    created_at: float
    created_by: str | None = Field(description="The key that made it.")
    expires_at: float | None
    revoked_at: float | None
    used_at: float | None


class KeyMade(Key):
    key: str = Field(description="The key. In this answer and never again.")


class KeyList(Answer):
    data: list[Key]


class Project(Answer):
    id: str
    name: str
    created_at: float
    disabled_at: float | None
    quotas: Quotas
    used: Quotas


class ProjectList(Answer):
    data: list[Project]


class Invite(Answer):
    """An invitation: everything but its code."""

    id: str
    note: str
    quotas: Quotas
    uses_left: int
    created_at: float
    expires_at: float | None


class InviteMade(Invite):
    invite: str = Field(description="The code. In this answer and never again.")


class InviteList(Answer):
    data: list[Invite]


class InviteRevoked(Answer):
    id: str
    revoked: Literal[True]


class RegisteredProject(Answer):
    id: str
    name: str
    quotas: Quotas


class Registered(Answer):
    """A project of one's own, and its first key."""

    project: RegisteredProject
    key: str = Field(description="The key. In this answer and never again.")
    key_id: str
    scopes: list[str]


class AuditEntry(Answer):
    """Something that was changed, or refused."""

    id: int
    at: float
    project: str
    actor: str
    origin: str
    request: str = Field(description="The `X-Request-ID` of the call.")
    action: str = Field(description="Method and route.")
    target: str = Field(description="The path.")
    status: int
    code: str | None = Field(description="Of the problem it was answered with.")
    duration_ms: float


class AuditPage(Answer):
    data: list[AuditEntry]
    next: int | None = Field(description="`before` of the next page; null: this is the last.")


_SCOPES: Final = ["read", "sandboxes", "templates", "volumes", "secrets"]
_KEY: Final[dict[str, Any]] = {
    "id": "key_ab12cd34",
    "project": "default",
    "name": "laptop",
    "scopes": _SCOPES,
    "created_at": NOW,
    "created_by": None,
    "expires_at": None,
    "revoked_at": None,
    "used_at": None,
}
_THE_KEY: Final = "l4a_ab12cd34_…"
_QUOTAS: Final = {"sandboxes": 10, "memory_mib": 16_384}
_USED: Final = {"sandboxes": 1.0, "vcpus": 1.0, "memory_mib": 1024.0, "disk_mib": 5120.0}
_PROJECT: Final[dict[str, Any]] = {
    "id": "prj_0123456789abcdef",
    "name": "research",
    "created_at": NOW,
    "disabled_at": None,
    "quotas": _QUOTAS,
    "used": _USED,
}
_INVITE: Final[dict[str, Any]] = {
    "id": "inv_ab12cd34",
    "note": "for the beta",
    "quotas": _QUOTAS,
    "uses_left": 1,
    "created_at": NOW,
    "expires_at": None,
}

OPERATIONS: Final[Operations] = {
    ("GET", "/v1/whoami"): Operation(
        "whoami",
        "Access",
        "Who you are here",
        (Whoami,),
        example={
            "project": "default",
            "project_name": "default",
            "actor": "key_ab12cd34",
            "scopes": _SCOPES,
            "origin": "192.0.2.7",
            "quotas": _QUOTAS,
            "used": _USED,
        },
    ),
    ("POST", "/v1/keys"): Operation(
        "keys_create",
        "Access",
        "Make a key",
        (KeyMade,),
        words="It can have no more scopes than the one that makes it. Without `scopes`: all but `project` and `node`.",
        status=201,
        problems=(404,),
        body={"name": "laptop"},
        example={"key": _THE_KEY, **_KEY},
        links={
            "get": ("keys_get", {"key": "$response.body#/id"}),
            "revoke": ("keys_revoke", {"key": "$response.body#/id"}),
        },
    ),
    ("GET", "/v1/keys"): Operation("keys_list", "Access", "List keys", (KeyList,), example={"data": [_KEY]}),
    ("GET", "/v1/keys/{key}"): Operation(
        "keys_get",
        "Access",
        "Look at a key",
        (Key,),
        problems=(404,),
        example=_KEY,
        parameters={"key": "Its id."},
    ),
    ("DELETE", "/v1/keys/{key}"): Operation(
        "keys_revoke",
        "Access",
        "Revoke a key",
        (Key,),
        words="From now on it is none any more.",
        problems=(404,),
        example={**_KEY, "revoked_at": NOW + 60},
        parameters={"key": "Its id."},
    ),
    ("POST", "/v1/projects"): Operation(
        "projects_create",
        "Access",
        "Make a project",
        (Project,),
        status=201,
        problems=(409,),
        body={"name": "research", "quotas": _QUOTAS},
        example=_PROJECT,
        links={"get": ("projects_get", {"project": "$response.body#/id"})},
    ),
    ("GET", "/v1/projects"): Operation(
        "projects_list", "Access", "List projects", (ProjectList,), example={"data": [_PROJECT]}
    ),
    ("GET", "/v1/projects/{project}"): Operation(
        "projects_get", "Access", "Look at a project", (Project,), problems=(404,), example=_PROJECT
    ),
    ("PATCH", "/v1/projects/{project}"): Operation(
        "projects_change",
        "Access",
        "Change a project's quotas, or disable it",
        (Project,),
        words="`quotas` are merged into those there are; null takes one away. What a disabled project has stays; its "
        "keys work no more.",
        problems=(404, 409),
        body={"quotas": {"sandboxes": 20}},
        example={**_PROJECT, "quotas": {**_QUOTAS, "sandboxes": 20}},
    ),
    ("POST", "/v1/invites"): Operation(
        "invites_create",
        "Access",
        "Make an invite",
        (InviteMade,),
        words="Whoever has its code can register a project.",
        status=201,
        body={"note": "for the beta", "quotas": _QUOTAS},
        example={"invite": "l4i_…", **_INVITE},
    ),
    ("GET", "/v1/invites"): Operation(
        "invites_list", "Access", "List invites", (InviteList,), example={"data": [_INVITE]}
    ),
    ("DELETE", "/v1/invites/{invite}"): Operation(
        "invites_revoke",
        "Access",
        "Revoke an invite",
        (InviteRevoked,),
        problems=(404,),
        example={"id": "inv_ab12cd34", "revoked": True},
    ),
    ("POST", "/v1/register"): Operation(
        "register",
        "Access",
        "Register a project with an invite",
        (Registered,),
        words="Needs no key. Only where the operator has opened it.",
        status=201,
        problems=(403, 404, 409),
        body={"invite": "l4i_…", "name": "research"},
        example={
            "project": {"id": "prj_0123456789abcdef", "name": "research", "quotas": _QUOTAS},
            "key": _THE_KEY,
            "key_id": "key_ab12cd34",
            "scopes": [*_SCOPES, "project"],
        },
    ),
    ("GET", "/v1/audit"): Operation(
        "audit_list",
        "Access",
        "What was changed, and what was refused",
        (AuditPage,),
        words="The newest first; of the caller's project, the operator sees all.",
        parameters={
            "before": "`next` of the page before.",
            "actor": "Only what this key (its id) did.",
            "since": "Only what is not older than this (Unix time).",
        },
        example={
            "data": [
                {
                    "id": 12,
                    "at": NOW,
                    "project": "default",
                    "actor": "key_ab12cd34",
                    "origin": "192.0.2.7",
                    "request": "req_0123456789abcdef",
                    "action": "POST /v1/sandboxes",
                    "target": "/v1/sandboxes",
                    "status": 201,
                    "code": None,
                    "duration_ms": 61.204,
                }
            ],
            "next": None,
        },
    ),
}
