"""The tables, as SQLAlchemy Core; migrations/ makes them and this page must match its head (a test compares).

Not here: reading and writing (`store.py`), and what the states mean (`engine.lifecycle`).
Times: `*_at` are seconds of the wall clock since 1970, `*_ns` nanoseconds.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    false,
    true,
)

HEAD: Final = "0006"
"""The newest migration. Kept here so that opening a store of this version need not import Alembic."""

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", String, nullable=False),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("id", String, primary_key=True),
    Column("template", String, nullable=False),
    Column("template_key", String),
    Column("state", String, nullable=False, index=True),
    Column("reason", String),
    Column(
        "ending", String
    ),  # written before its machine is ended: a server that died in between finishes it
    Column("created_at", Float, nullable=False, index=True),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("life_ends_at", Float, nullable=False),
    Column("idle_timeout_s", Float, nullable=False),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("disk_gib", Integer, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("accelerator", String),
    Column("boot_id", String),
    Column("record", JSON),  # vmm.base.MachineRecord, to adopt it
    Column("life_s", Float, nullable=False, server_default="86400"),  # of each start: a resume renews it
    Column("on_timeout", String, nullable=False, server_default="kill"),  # pause | kill
    Column("auto_resume", Boolean, nullable=False, server_default=true()),
    Column("keep_s", Float, nullable=False, server_default="2592000"),  # how long a pause is kept
    Column("paused_at", Float),
    Column(
        "pause", JSON
    ),  # what the pause on disk is: directory, base, bytes, whether its memory can be used
    Column("disk", JSON),  # the layers its disk lies on, oldest first (names under `layers/`)
    Column("limits", JSON),  # disk_mib, pids, output rate: what was asked for at create
    Column("parent", String),  # the sandbox it was forked from
    Column("network", JSON),  # `network=` as it was asked for: names secrets, holds none
    Column("protect", JSON),  # the paths that are mounted read-only
    Column("vmm", String),  # the driver of its machine; a pause has no record to tell it from
    Column("nested", Boolean, nullable=False, server_default=false()),  # whether its guest has a /dev/kvm
    Column("project", String, nullable=False, server_default="default", index=True),
    Column("traffic", JSON),  # {"public": bool, "generation": int}: who may reach its ports; None: private, 0
    Column(
        "defaults", JSON
    ),  # {"user", "workdir"}: of its template, for calls that name none; None: `user`, at home
    Column("volumes", JSON),  # [{"volume", "path", "mode"}]: what is attached, in the order of its slots
)

projects = Table(
    "projects",
    metadata,
    Column("id", String, primary_key=True),  # `default`, or prj_…
    Column("name", String, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("disabled_at", Float),  # its keys work no more; what it has stays
    Column("quotas", JSON, nullable=False),  # engine.quotas.Quotas: name → number, missing means no bound
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String, primary_key=True),  # key_…: the part of a key that is no secret
    Column("project", String, nullable=False, index=True),
    Column("name", String, nullable=False),
    Column("digest", LargeBinary, nullable=False),  # SHA-256 of the key, which has 160 random bits
    Column("scopes", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("created_by", String),  # the key that made it; None: over the unix socket, or a registration
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("used_at", Float),  # to the minute
)

invites = Table(
    "invites",
    metadata,
    Column("id", String, primary_key=True),  # inv_…
    Column("digest", LargeBinary, nullable=False, unique=True),
    Column("note", String, nullable=False, server_default=""),
    Column("quotas", JSON, nullable=False),  # of the project that comes of it
    Column("uses_left", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False, index=True),
    Column("project", String, nullable=False, index=True),
    Column("actor", String, nullable=False),  # a key's id, `socket`, or `nobody`
    Column("origin", String, nullable=False),  # the peer's address, or `unix`
    Column("request", String, nullable=False),  # its id, which the answer and the log have too
    Column("action", String, nullable=False),  # METHOD and the route's pattern
    Column("target", String, nullable=False),  # the path, without its query
    Column("status", Integer, nullable=False),
    Column("code", String),  # of the error, if it was one
    Column("duration_ms", Float, nullable=False),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("project", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("request", LargeBinary, nullable=False),  # digest of method, path and body
    Column("status", Integer),  # None: under way, or its server died
    Column("answer", LargeBinary),
    Column("at", Float, nullable=False, index=True),
)

volumes = Table(
    "volumes",
    metadata,
    Column("id", String, primary_key=True),  # vol_…
    Column("project", String, nullable=False, index=True),
    Column("name", String, nullable=False),
    Column("kind", String, nullable=False),  # volume | snapshot (which nothing writes to)
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("source", String),  # the volume or snapshot it was made of
    Column("state", String, nullable=False),  # creating | ready | deleting
    Column("metadata", JSON, nullable=False),
    UniqueConstraint("project", "name"),
)

volume_holds = Table(
    "volume_holds",
    metadata,
    Column("volume", String, primary_key=True),
    Column("holder", String, primary_key=True),  # a sandbox; the volume it is copied to; a machine that reads
    Column("mode", String, nullable=False),  # rw | ro | copy
    Column("at", Float, nullable=False),
)

secrets = Table(
    "secrets",
    metadata,
    Column("project", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("version", Integer, nullable=False),  # counts the values it has had
    Column("sealed", LargeBinary, nullable=False),  # by barrier.vault; the key is not in here
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("sandbox", String, nullable=False),
    Column("sequence", Integer, nullable=False),
    Column("boot_id", String),
    Column("from_state", String),
    Column("to_state", String, nullable=False),
    Column("reason", String),
    Column("wall_ns", BigInteger, nullable=False),
    Column(
        "monotonic_ns", BigInteger, nullable=False
    ),  # CLOCK_BOOTTIME: durations are computed from this one
    Column("host_boot_id", String, nullable=False),  # and only within one boot of the host
    Column(
        "project", String, nullable=False, server_default="default", index=True
    ),  # outlives the sandbox's row
    UniqueConstraint("sandbox", "sequence"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String, primary_key=True),
    Column("sandbox", String, nullable=False, index=True),
    Column("spec", JSON, nullable=False),  # command, schedule, on_exit, webhook: as it was asked for
    Column("state", String, nullable=False, index=True),
    Column("created_at", Float, nullable=False),
    Column("next_at", Float),  # when it is due; None: no more
    Column("ended_at", Float),
)

job_runs = Table(
    "job_runs",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("job", String, nullable=False, index=True),
    Column("sequence", Integer, nullable=False),
    Column("due_at", Float, nullable=False),
    Column("state", String, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("process", String),  # the managed process that is the run, in the guest
    Column("result", JSON),
    Column("told", JSON),  # the webhook's deliveries
    UniqueConstraint("job", "sequence"),
)

usage = Table(
    "usage",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column(
        "key", String, nullable=False, unique=True
    ),  # sandbox:boot:sequence; writing one twice is writing it once
    Column("sandbox", String, nullable=False, index=True),
    Column("boot_id", String, nullable=False),
    Column("sequence", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("disk_bytes", BigInteger, nullable=False),
    Column("from_ns", BigInteger, nullable=False),  # wall clock
    Column("to_ns", BigInteger, nullable=False),
    Column("duration_ns", BigInteger, nullable=False),  # of CLOCK_BOOTTIME: what is charged
    Column(
        "event", Integer, nullable=False, server_default="0"
    ),  # `events.sequence` of the transition that began the state: rows of one stretch have the same
    Column("end_boottime_ns", BigInteger, nullable=False, server_default="0"),  # where the next row begins
    Column("host_boot_id", String, nullable=False, server_default=""),  # and the host's boot that is of
    Column("project", String, nullable=False, server_default="default", index=True),
)
