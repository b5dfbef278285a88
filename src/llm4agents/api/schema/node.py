"""The node and its server: what it is, has done, uses, keeps ready. Models and operations. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from llm4agents.api.schema.kinds import DEFAULT_SANDBOX, NOW, Answer, Json, Lines, Operation, Operations, Raw


class Health(Answer):
    """Whether this server serves. `checks`: `ok`, or `failed`; the operator is told what is wrong in words."""

    status: Literal["ok", "degraded", "dead", "stopping"]
    checks: dict[str, str]


class Server(Answer):
    """This server. What is the operator's own affair is null for others."""

    version: str
    api: Literal[1]
    pid: int | None
    state: str | None
    log: str | None
    started_at: float
    listen: str | None = Field(description="What its TCP listener is reached at.")
    sandboxes: int = Field(description="How many live: of the caller's project, or (the operator) all.")
    vmm: str | None
    accelerator: str | None
    why_not_kvm: str | None
    slowdown_note: str | None


class Stopping(Answer):
    stopping: Literal[True]
    keep: bool


class BackedUp(Answer):
    file: str
    bytes: int
    sandboxes: int = Field(description="Paused ones that it has with their disks.")
    volumes: int


class DoctorCheck(Answer):
    name: str
    ok: bool
    required: bool
    detail: str
    hint: str | None


class DoctorVmm(Answer):
    name: str
    usable: bool
    version: str | None
    accelerator: str | None
    why_not_kvm: str | None
    nested: bool
    why_not_nested: str | None
    detail: str | None
    hint: str | None
    chosen_for: list[Literal["ordinary", "nested"]]


class DoctorTemplate(Answer):
    name: str
    vcpus: int
    memory_mib: int


class Doctor(Answer):
    """What this host has and lacks."""

    ok: bool
    vmm: str | None
    vmms: list[DoctorVmm]
    accelerator: str | None
    why_not_kvm: str | None
    slowdown_note: str | None
    checks: list[DoctorCheck]
    packages_missing: list[str]
    tools: dict[str, str | None]
    templates: list[DoctorTemplate]
    disk_free_bytes: int
    memory_available_bytes: int
    cores: int | None
    state: str
    cache: str
    run: str


class DiskUse(Answer):
    name: str
    path: str
    bytes: int


class DiskUsage(Answer):
    data: list[DiskUse]
    total_bytes: int


class Pruned(Answer):
    removed: list[str]
    bytes: int


class Shelf(Answer):
    """Machines of one shape that are kept ready."""

    template: str
    vcpus: int
    memory_mib: int
    wanted: int
    ready: int
    problem: str | None


class Room(Answer):
    """What the node has room for: memory that sandboxes may have together, in bytes."""

    memory_bytes: int
    held_bytes: int
    free_bytes: int
    available_bytes: int
    commit: float
    waiting: int


class Pool(Answer):
    data: list[Shelf]
    capacity: Room


class Event(Answer):
    """A transition of a sandbox. `id` is the cursor that the next call begins behind."""

    type: Literal["transition"]
    id: int
    sandbox: str
    project: str
    sequence: int
    from_: str | None = Field(alias="from")
    to: str
    reason: str | None
    at: float
    boot_id: str | None


class EventPage(Answer):
    data: list[Event]
    next: int | None = Field(description="`after` of the next page; null: this is the last.")


class CursorLine(Answer):
    """The first line: where it begins."""

    type: Literal["cursor"]
    id: int


class UsageRow(Answer):
    """A stretch of one sandbox in one state. Durations are exact: they sum up to its life."""

    id: int
    key: str = Field(description="`sandbox:boot:sequence`.")
    sandbox: str
    project: str
    boot_id: str
    sequence: int
    state: str
    vcpus: int
    memory_mib: int
    disk_bytes: int
    from_ns: int
    to_ns: int
    duration_ns: int
    event: int
    end_boottime_ns: int
    host_boot_id: str


class UsageTotal(Answer):
    """Of one sandbox in one state."""

    sandbox: str
    state: str
    duration_ns: int
    vcpu_ns: int = Field(description="Times its vCPUs.")
    memory_mib_ns: int = Field(description="Times its MiB of memory.")


class Usage(Answer):
    data: list[UsageRow | UsageTotal]
    next: int | None = Field(default=None, description="`after` of the next page. Totals have no pages.")


class LogEntry(Answer):
    """What the server did with a sandbox, or its console said at its end."""

    model_config = ConfigDict(extra="allow")

    type: Literal["log"]
    at: Json
    event: str


class ConsoleLine(Answer):
    type: Literal["console"]
    text: str


class Logs(Answer):
    data: list[LogEntry]
    console: str = Field(description="The end of the console of one that lives.")


class TopSandbox(Answer):
    id: str
    template: str
    project: str
    state: str
    vcpus: int
    memory_mib: int
    created_at: float
    ends_at: float
    calls: int
    idle_s: float | None
    cpu_s: float | None
    rss_bytes: int | None
    pss_bytes: int | None


class TopAdmission(Answer):
    held_bytes: int
    total_bytes: int
    waiting: int


class TopNode(Answer):
    at: float
    cores: int
    load1: float
    memory_available_bytes: int
    disk_free_bytes: int
    server_rss_bytes: int
    sandboxes: dict[str, int]
    admission: TopAdmission
    pool: list[Shelf]
    guest_memory_mib: int


class Top(Answer):
    node: TopNode | None = Field(description="Null for who does not see all of it.")
    data: list[TopSandbox]


_EVENT: Final = {
    "type": "transition",
    "id": 8,
    "sandbox": DEFAULT_SANDBOX,
    "project": "default",
    "sequence": 2,
    "from": "creating",
    "to": "running",
    "reason": None,
    "at": NOW,
    "boot_id": "4f1c9a52-0d8e-4c55-9a3e-5a1f6c0b7d21",
}
_POOL: Final[dict[str, Any]] = {
    "data": [
        {"template": "python", "vcpus": 1, "memory_mib": 1024, "wanted": 2, "ready": 2, "problem": None},
    ],
    "capacity": {
        "memory_bytes": 8_000_000_000,
        "held_bytes": 500_000_000,
        "free_bytes": 7_500_000_000,
        "available_bytes": 7_900_000_000,
        "commit": 0.15,
        "waiting": 0,
    },
}
_HEALTHY: Final = {
    "status": "ok",
    "checks": {"store": "ok", "disk": "ok", "memory": "ok", "vmm": "ok", "barrier": "ok"},
}
_LOG: Final = {"type": "log", "at": "2026-09-21T14:13:20.250Z", "event": "sandbox_created", "ms": 61.2}
_CURSOR: Final = {"after": "The `id` of the last one seen: what is behind it is told."}

OPERATIONS: Final[Operations] = {
    ("GET", "/health"): Operation(
        "health",
        "Server",
        "Whether this server serves",
        (Health,),
        words="`ok` and `degraded` are 200; `dead` and `stopping` are 503. Needs no key.",
        also={503: (Health, "It is dead, or stopping.")},
        example=_HEALTHY,
    ),
    ("GET", "/v1/server"): Operation(
        "server_get",
        "Server",
        "Look at this server",
        (Server,),
        example={
            "version": "0.6.0",
            "api": 1,
            "pid": None,
            "state": None,
            "log": None,
            "started_at": NOW,
            "listen": "https://0.0.0.0:8443",
            "sandboxes": 3,
            "vmm": "qemu",
            "accelerator": "kvm",
            "why_not_kvm": None,
            "slowdown_note": None,
        },
    ),
    ("POST", "/v1/server/stop"): Operation(
        "server_stop",
        "Server",
        "Stop this server",
        (Stopping,),
        words="`keep`: leave its sandboxes to the next one.",
        status=202,
        body={"keep": True},
        example={"stopping": True, "keep": True},
    ),
    ("POST", "/v1/server/backup"): Operation(
        "server_backup",
        "Server",
        "Write this server's state into a file of its host",
        (BackedUp,),
        words="`with_disks`: also paused sandboxes and volumes. The file has every secret of the server.",
        body={"file": "/backup/state.tar", "with_disks": True},
        example={"file": "/backup/state.tar", "bytes": 20_480, "sandboxes": 0, "volumes": 0},
    ),
    ("GET", "/v1/doctor"): Operation(
        "node_doctor",
        "Node",
        "What this host has and lacks",
        (Doctor,),
        words="Takes seconds.",
        example={
            "ok": True,
            "vmm": "qemu",
            "vmms": [],
            "accelerator": "kvm",
            "why_not_kvm": None,
            "slowdown_note": None,
            "checks": [
                {"name": "memory", "ok": True, "required": True, "detail": "7900 MiB available", "hint": None}
            ],
            "packages_missing": [],
            "tools": {"qemu-img": "7.2.7"},
            "templates": [{"name": "base", "vcpus": 1, "memory_mib": 1024}],
            "disk_free_bytes": 40_000_000_000,
            "memory_available_bytes": 7_900_000_000,
            "cores": 4,
            "state": "/var/lib/llm4agents",
            "cache": "/var/cache/llm4agents",
            "run": "/run/llm4agents",
        },
    ),
    ("GET", "/v1/du"): Operation(
        "node_disk_usage",
        "Node",
        "What takes disk",
        (DiskUsage,),
        example={
            "data": [{"name": "templates", "path": "/var/cache/llm4agents/templates", "bytes": 120_000_000}],
            "total_bytes": 120_000_000,
        },
    ),
    ("POST", "/v1/prune"): Operation(
        "node_prune",
        "Node",
        "Remove what nothing refers to",
        (Pruned,),
        words="`all`: also every template that no sandbox uses.",
        problems=(409,),
        body={"all": False},
        example={"removed": ["3 ended sandboxes from the list"], "bytes": 4_096},
    ),
    ("GET", "/v1/pool"): Operation(
        "pool_get", "Node", "Machines that are kept ready", (Pool,), example=_POOL
    ),
    ("PUT", "/v1/pool"): Operation(
        "pool_set",
        "Node",
        "Say what is to be kept ready",
        (Pool,),
        words="Of these shapes; of others nothing changes.",
        problems=(404,),
        body={"data": [{"template": "python", "wanted": 2}]},
        example=_POOL,
    ),
    ("GET", "/v1/events"): Operation(
        "events_list",
        "Observe",
        "Transitions of sandboxes",
        (
            EventPage,
            Lines(
                "EventLine",
                (CursorLine, Event),
                "With `follow`: those behind the cursor, then those that come.",
                (_EVENT,),
            ),
        ),
        words="In the order they happened. `follow` without `after` begins with what happens next.",
        problems=(404,),
        parameters={**_CURSOR, "sandbox": "Only those of this one."},
        example={"data": [_EVENT], "next": None},
    ),
    ("GET", "/v1/usage"): Operation(
        "usage_list",
        "Observe",
        "What was used",
        (Usage,),
        words="Rows in the order they were written; what lasts still has a row up to a minute ago.",
        problems=(404,),
        parameters={**_CURSOR, "sandbox": "Only that of this one.", "totals": "Sums per sandbox and state."},
        example={
            "data": [
                {
                    "id": 1,
                    "key": f"{DEFAULT_SANDBOX}:4f1c9a52:1",
                    "sandbox": DEFAULT_SANDBOX,
                    "project": "default",
                    "boot_id": "4f1c9a52-0d8e-4c55-9a3e-5a1f6c0b7d21",
                    "sequence": 1,
                    "state": "running",
                    "vcpus": 1,
                    "memory_mib": 1024,
                    "disk_bytes": 196_608,
                    "from_ns": 1_790_000_000_000_000_000,
                    "to_ns": 1_790_000_060_000_000_000,
                    "duration_ns": 60_000_000_000,
                    "event": 2,
                    "end_boottime_ns": 86_460_000_000_000,
                    "host_boot_id": "b3d0f4a8-6f2e-4b43-8d6a-1e0f5d1c2b3a",
                }
            ],
            "next": None,
        },
    ),
    ("GET", "/v1/sandboxes/{sandbox}/logs"): Operation(
        "sandboxes_logs",
        "Observe",
        "What was done with a sandbox",
        (
            Logs,
            Lines(
                "LogLine",
                (LogEntry, ConsoleLine),
                "With `follow`: those there are, then those that come.",
                (_LOG,),
            ),
        ),
        words="And what its console says.",
        reach="sandbox",
        example={"data": [_LOG], "console": ""},
    ),
    ("GET", "/v1/top"): Operation(
        "top_get",
        "Observe",
        "What each sandbox takes now",
        (Top,),
        example={
            "node": None,
            "data": [
                {
                    "id": DEFAULT_SANDBOX,
                    "template": "python",
                    "project": "default",
                    "state": "running",
                    "vcpus": 1,
                    "memory_mib": 1024,
                    "created_at": NOW,
                    "ends_at": NOW + 86_400,
                    "calls": 0,
                    "idle_s": 3.2,
                    "cpu_s": 1.4,
                    "rss_bytes": 90_000_000,
                    "pss_bytes": 28_000_000,
                }
            ],
        },
    ),
    ("GET", "/metrics"): Operation(
        "metrics_get",
        "Observe",
        "Figures for Prometheus",
        (Raw("text/plain", "Prometheus' text format.", text=True),),
    ),
}
