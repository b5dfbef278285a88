"""Sandboxes, their append-only events, and meta."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.String, nullable=False),
    )
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("template", sa.String, nullable=False),
        sa.Column("template_key", sa.String),
        sa.Column("state", sa.String, nullable=False, index=True),
        sa.Column("reason", sa.String),
        sa.Column("ending", sa.String),
        sa.Column("created_at", sa.Float, nullable=False, index=True),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("life_ends_at", sa.Float, nullable=False),
        sa.Column("idle_timeout_s", sa.Float, nullable=False),
        sa.Column("vcpus", sa.Integer, nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("disk_gib", sa.Integer, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("accelerator", sa.String),
        sa.Column("boot_id", sa.String),
        sa.Column("record", sa.JSON),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("sandbox", sa.String, nullable=False),
        sa.Column("sequence", sa.Integer, nullable=False),
        sa.Column("boot_id", sa.String),
        sa.Column("from_state", sa.String),
        sa.Column("to_state", sa.String, nullable=False),
        sa.Column("reason", sa.String),
        sa.Column("wall_ns", sa.BigInteger, nullable=False),
        sa.Column("monotonic_ns", sa.BigInteger, nullable=False),
        sa.Column("host_boot_id", sa.String, nullable=False),
        sa.UniqueConstraint("sandbox", "sequence"),
    )
    # Money will be computed from events: not even a bug of ours may change one.
    for act in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER events_no_{act.lower()} BEFORE {act} ON events "
            "BEGIN SELECT RAISE(ABORT, 'events are append-only'); END"
        )
