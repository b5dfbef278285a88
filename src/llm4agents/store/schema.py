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

HEAD: Final = "0005"
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
)

secrets = Table(
    "secrets",
    metadata,
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
)
