"""Sandboxes: their life, their time, who may reach their ports. Models and operations. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from llm4agents.api.schema.kinds import DEFAULT_SANDBOX, NOW, Answer, Json, Lines, Operation, Operations
from llm4agents.api.schema.templates import TEMPLATE, Template

State = Literal["creating", "running", "pausing", "paused", "resuming", "killed", "failed"]


class NetworkRules(Answer):
    """What a sandbox may reach (docs/reference/network-rules.md)."""

    profile: str = Field(description="`none`, or `packages`: the package registries.")
    rules: list[str] = Field(
        description="`allow` and `deny` lines, the first that fits decides; none fits: denied."
    )
    rewrite: list[str]
    credentials: list[dict[str, Json]] = Field(
        description="Which secret is put into which requests, by name: never a value."
    )


class Pause(Answer):
    """What lies on disk of a paused sandbox."""

    pages_bytes: int = Field(description="Memory that differs from the template's.")
    memory: bool = Field(description="Whether its memory can be resumed; if not, only its disk can (`cold`).")
    why_cold: str | None
    manifest: str = Field(description="SHA-256 of the pause's manifest.")
    pause_ms: float | None = Field(default=None, description="How long the guest stood still.")
    durable_ms: float | None = Field(default=None, description="Until it was safe on disk.")


class TrafficSetting(Answer):
    public: bool = Field(description="Whether anybody may reach its ports.")


class Attached(Answer):
    """A volume that is attached."""

    volume: str = Field(description="Its id.")
    path: str = Field(description="Where it is mounted.")
    mode: Literal["rw", "ro"]
    name: str
    error: str | None = Field(default=None, description="Why it could not be mounted.")


class Sandbox(Answer):
    """A microVM of one's own: as it was asked for, and what has become of it."""

    id: str = Field(pattern=r"^sbx_[a-z0-9]{20}$")
    template: str
    project: str
    state: State
    reason: str | None = Field(description="Why it is in this state.")
    created_at: float
    started_at: float | None
    ended_at: float | None
    ends_at: float = Field(description="When its life ends; of a paused one, until when it is kept.")
    idle_timeout_s: float
    vcpus: int
    memory_mib: int
    disk_gib: int
    metadata: dict[str, str]
    accelerator: str | None = Field(description="`kvm`, or `tcg`: emulated in software, and slow.")
    vmm: str | None
    nested: bool = Field(description="Whether it can run virtual machines itself.")
    boot_id: str | None
    limits: dict[str, int] | None = Field(
        description="`disk_mib`, `pids`, `output_bytes_per_s`: those asked for."
    )
    on_timeout: Literal["kill", "pause"]
    auto_resume: bool
    keep_s: float
    paused_at: float | None
    pause: Pause | None
    parent: str | None = Field(description="The sandbox that it was forked from.")
    network: NetworkRules
    protect: list[str] = Field(description="Paths that are read-only in the guest.")
    traffic: TrafficSetting
    volumes: list[Attached] = Field(default=[])


class SandboxPage(Answer):
    data: list[Sandbox]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class SandboxList(Answer):
    data: list[Sandbox]


class ProgressLine(Answer):
    """A step of work that is under way."""

    type: Literal["progress"]
    step: str
    detail: str
    fraction: float | None = Field(description="How much of the step is done, 0 to 1.")


class SandboxLine(Sandbox):
    """The last line: the sandbox."""

    type: Literal["sandbox"]


class SandboxMetrics(Answer):
    """Of the whole guest, as its kernel counts. Memory and disk in bytes; times since its boot, over all its CPUs."""

    cpu_user_ms: int
    cpu_system_ms: int
    cpu_idle_ms: int
    mem_total: int
    mem_available: int
    mem_cache: int
    disk_total: int
    disk_used: int
    processes: int
    uptime_s: float
    load1: float


class SandboxEvent(Answer):
    """A transition of one sandbox."""

    id: int
    sandbox: str
    project: str
    sequence: int
    boot_id: str | None
    from_state: str | None
    to_state: State
    reason: str | None
    wall_ns: int
    monotonic_ns: int = Field(description="CLOCK_BOOTTIME; comparable within one boot of the host.")
    host_boot_id: str


class SandboxEvents(Answer):
    data: list[SandboxEvent]


class IsolationDifference(Answer):
    process: str
    name: str
    words: str


class Isolation(Answer):
    """How the processes around a sandbox are confined, and what of the promise does not hold."""

    id: str
    ok: bool = Field(description="Whether everything that this version promises on such a host holds.")
    differences: list[IsolationDifference]
    missing: list[IsolationDifference] = Field(description="What the host cannot give.")
    driver: str
    as_root: bool
    said: dict[str, Json]
    run_dir: str
    host: dict[str, Json]
    processes: list[dict[str, Json]]
    clone: bool = Field(description="Its VMM runs on the memory of a template; else it was booted.")
    files_known: bool = Field(description="Which files its VMM was given was written down when it started.")


class Traffic(Answer):
    """Who may reach the ports of a sandbox."""

    public: bool
    token: str = Field(description="Lets in who sends it as `X-Traffic-Token`. A secret.")
    domain: str | None = Field(description="Ports are at `PORT-ID.DOMAIN`; null: this server has none.")


class PortUrl(Answer):
    url: str
    expires_at: int | None = Field(description="Unix time; null: it is not signed.")


SANDBOX: Final[dict[str, Any]] = {
    "id": DEFAULT_SANDBOX,
    "template": "python",
    "project": "default",
    "state": "running",
    "reason": None,
    "created_at": NOW,
    "started_at": NOW + 0.14,
    "ended_at": None,
    "ends_at": NOW + 86_400,
    "idle_timeout_s": 300.0,
    "vcpus": 1,
    "memory_mib": 1024,
    "disk_gib": 5,
    "metadata": {"task": "42"},
    "accelerator": "kvm",
    "vmm": "qemu",
    "nested": False,
    "boot_id": "4f1c9a52-0d8e-4c55-9a3e-5a1f6c0b7d21",
    "limits": None,
    "on_timeout": "kill",
    "auto_resume": True,
    "keep_s": 2_592_000.0,
    "paused_at": None,
    "pause": None,
    "parent": None,
    "network": {"profile": "none", "rules": ["allow api.example.com"], "rewrite": [], "credentials": []},
    "protect": [],
    "traffic": {"public": False},
    "volumes": [],
}
PAUSED: Final = {
    **SANDBOX,
    "state": "paused",
    "paused_at": NOW + 60,
    "pause": {
        "pages_bytes": 25_165_824,
        "memory": True,
        "why_cold": None,
        "manifest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "pause_ms": 31.2,
        "durable_ms": 74.9,
    },
}
FORK: Final = {**SANDBOX, "id": "sbx_abcdefghij0123456789", "parent": DEFAULT_SANDBOX}
PROGRESS: Final = {"type": "progress", "step": "rootfs", "detail": "python3.13", "fraction": 0.4}

_S = "/v1/sandboxes/{sandbox}"
_ID = {"sandbox": "$response.body#/id"}
_LINKS = {
    "get": ("sandboxes_get", _ID),
    "exec": ("commands_exec", _ID),
    "pause": ("sandboxes_pause", _ID),
    "kill": ("sandboxes_kill", _ID),
}
_AS_LINES = "With `Accept: application/x-ndjson`: lines of progress, then the sandbox."


def _lines(name: str) -> Lines:
    return Lines(name, (ProgressLine, SandboxLine), _AS_LINES, (PROGRESS, {"type": "sandbox", **SANDBOX}))


OPERATIONS: Final[Operations] = {
    ("POST", "/v1/sandboxes"): Operation(
        "sandboxes_create",
        "Sandboxes",
        "Create a sandbox",
        (Sandbox, _lines("SandboxCreateLine")),
        words="Answers when it runs. A template that is not built yet is built first, which takes minutes: ask for "
        "lines to hear of it. A client that goes away before the answer has none: the sandbox is undone.",
        status=201,
        reach="sandbox",
        problems=(501,),
        body={
            "template": "python",
            "timeout_s": 300,
            "metadata": {"task": "42"},
            "network": ["allow api.example.com"],
        },
        example=SANDBOX,
        links=_LINKS,
    ),
    ("GET", "/v1/sandboxes"): Operation(
        "sandboxes_list",
        "Sandboxes",
        "List sandboxes",
        (SandboxPage,),
        words="The newest first, also those that have ended a while ago. `metadata.NAME=VALUE`, as often as wanted, "
        "keeps those that have it.",
        problems=(404,),
        example={"data": [SANDBOX], "next": None},
        parameters={
            "state": "Only those in one of these states, by commas.",
            "after": "`next` of the page before.",
        },
        more_parameters=(
            {
                "name": "metadata",
                "in": "query",
                "required": False,
                "style": "form",
                "explode": True,
                "description": "Each property is sent as `metadata.NAME=VALUE`.",
                "schema": {
                    "type": "object",
                    "patternProperties": {r"^metadata\.": {"type": "string"}},
                    "additionalProperties": False,
                },
            },
        ),
    ),
    ("GET", _S): Operation(
        "sandboxes_get", "Sandboxes", "Look at a sandbox", (Sandbox,), reach="sandbox", example=SANDBOX
    ),
    ("DELETE", _S): Operation(
        "sandboxes_kill",
        "Sandboxes",
        "End a sandbox",
        (Sandbox,),
        words="For good: its memory and its disk go. One that has ended already is answered as it is.",
        reach="sandbox",
        example={**SANDBOX, "state": "killed", "reason": "by request", "ended_at": NOW + 90},
    ),
    ("POST", f"{_S}/pause"): Operation(
        "sandboxes_pause",
        "Sandboxes",
        "Pause a sandbox",
        (Sandbox,),
        words="Memory and disk are written, the machine ends. Calls under way end with `sandbox_paused`; what they had "
        "started goes on after the resume. One that is paused already is answered as it is. Refused when its memory "
        "would pass the project's `disk_mib`; it runs on.",
        reach="guest",
        body={},
        example=PAUSED,
    ),
    ("POST", f"{_S}/resume"): Operation(
        "sandboxes_resume",
        "Sandboxes",
        "Resume a paused sandbox",
        (Sandbox, _lines("SandboxResumeLine")),
        words="`cold`: boot its disk, without the memory.",
        reach="guest",
        body={"cold": False},
        example=SANDBOX,
    ),
    ("POST", f"{_S}/fork"): Operation(
        "sandboxes_fork",
        "Sandboxes",
        "Fork a sandbox",
        (SandboxList,),
        words="Copies of it as it is now, memory and disk: all of them or none.",
        status=201,
        reach="guest",
        body={"count": 1},
        example={"data": [FORK]},
    ),
    ("POST", f"{_S}/snapshot"): Operation(
        "sandboxes_snapshot",
        "Sandboxes",
        "Make a template of a sandbox",
        (Template,),
        status=201,
        reach="guest",
        body={"name": "prepared", "description": "with the data loaded"},
        example={**TEMPLATE, "name": "prepared", "description": "with the data loaded"},
    ),
    ("POST", f"{_S}/timeout"): Operation(
        "sandboxes_set_timeout",
        "Sandboxes",
        "Change how its time is kept",
        (Sandbox,),
        words="`timeout_s` counts from now on.",
        reach="sandbox",
        problems=(410,),
        body={"timeout_s": 600},
        example={**SANDBOX, "idle_timeout_s": 600.0},
    ),
    ("GET", f"{_S}/metrics"): Operation(
        "sandboxes_metrics",
        "Sandboxes",
        "What its guest uses",
        (SandboxMetrics,),
        reach="guest",
        example={
            "cpu_user_ms": 1200,
            "cpu_system_ms": 310,
            "cpu_idle_ms": 58_000,
            "mem_total": 1_032_000_000,
            "mem_available": 880_000_000,
            "mem_cache": 90_000_000,
            "disk_total": 5_200_000_000,
            "disk_used": 21_000_000,
            "processes": 6,
            "uptime_s": 61.4,
            "load1": 0.05,
        },
    ),
    ("GET", f"{_S}/events"): Operation(
        "sandboxes_events",
        "Sandboxes",
        "Its transitions, oldest first",
        (SandboxEvents,),
        reach="sandbox",
        example={
            "data": [
                {
                    "id": 7,
                    "sandbox": DEFAULT_SANDBOX,
                    "project": "default",
                    "sequence": 1,
                    "boot_id": None,
                    "from_state": None,
                    "to_state": "creating",
                    "reason": None,
                    "wall_ns": 1_790_000_000_250_000_000,
                    "monotonic_ns": 86_400_000_000_000,
                    "host_boot_id": "b3d0f4a8-6f2e-4b43-8d6a-1e0f5d1c2b3a",
                }
            ]
        },
    ),
    ("GET", f"{_S}/isolation"): Operation(
        "sandboxes_isolation",
        "Sandboxes",
        "How it is confined",
        (Isolation,),
        words="Of its virtual machine monitor and what serves it, read from the host's kernel now.",
        reach="sandbox",
        problems=(410, 504),
        example={
            "id": DEFAULT_SANDBOX,
            "ok": True,
            "differences": [],
            "missing": [],
            "driver": "qemu",
            "as_root": True,
            "said": {},
            "run_dir": "/run/llm4agents/vm/sbx_0123456789abcdefghij",
            "host": {},
            "processes": [],
            "clone": True,
            "files_known": True,
        },
    ),
    ("GET", f"{_S}/traffic"): Operation(
        "traffic_get",
        "Ports",
        "Who may reach its ports",
        (Traffic,),
        reach="sandbox",
        example={"public": False, "token": "tt_0_5e0c…", "domain": "sbx.example.com"},
    ),
    ("POST", f"{_S}/traffic"): Operation(
        "traffic_set",
        "Ports",
        "Change who may reach its ports",
        (Traffic,),
        words="`rotate`: the token and all signed URLs that were given out hold no more.",
        reach="sandbox",
        problems=(410,),
        body={"public": True},
        example={"public": True, "token": "tt_0_5e0c…", "domain": "sbx.example.com"},
    ),
    ("POST", f"{_S}/traffic/urls"): Operation(
        "traffic_create_url",
        "Ports",
        "A URL of one of its ports",
        (PortUrl,),
        words="Signed, for whoever has it, until it expires; with `expires_s` null not signed.",
        reach="sandbox",
        body={"port": 8000, "path": "/", "expires_s": 3600},
        example={
            "url": "https://8000-sbx-0123456789abcdefghij.sbx.example.com/?l4a-expires=1790003600&l4a-signature=…",
            "expires_at": 1_790_003_600,
        },
    ),
}
