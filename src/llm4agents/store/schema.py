"""The tables, as SQLAlchemy Core; migrations/ makes them and this page must match its head (a test compares).

Not here: reading and writing (`store.py`), and what the states mean (`engine.lifecycle`).
Times: `*_at` are seconds of the wall clock since 1970, `*_ns` nanoseconds.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import JSON, BigInteger, Column, Float, Integer, MetaData, String, Table, UniqueConstraint

HEAD: Final = "0001"
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
