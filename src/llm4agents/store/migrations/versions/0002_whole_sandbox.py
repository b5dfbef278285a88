"""Pauses, layers, jobs, usage: what a sandbox that is come back to needs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("sandboxes") as table:
        table.add_column(sa.Column("life_s", sa.Float, nullable=False, server_default="86400"))
        table.add_column(sa.Column("on_timeout", sa.String, nullable=False, server_default="kill"))
        table.add_column(sa.Column("auto_resume", sa.Boolean, nullable=False, server_default=sa.true()))
        table.add_column(sa.Column("keep_s", sa.Float, nullable=False, server_default="2592000"))
        table.add_column(sa.Column("paused_at", sa.Float))
        table.add_column(sa.Column("pause", sa.JSON))
        table.add_column(sa.Column("disk", sa.JSON))
        table.add_column(sa.Column("limits", sa.JSON))
        table.add_column(sa.Column("parent", sa.String))
    op.create_table(
        "jobs",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("sandbox", sa.String, nullable=False, index=True),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("state", sa.String, nullable=False, index=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("next_at", sa.Float),
        sa.Column("ended_at", sa.Float),
    )
    op.create_table(
        "job_runs",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("job", sa.String, nullable=False, index=True),
        sa.Column("sequence", sa.Integer, nullable=False),
        sa.Column("due_at", sa.Float, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("process", sa.String),
        sa.Column("result", sa.JSON),
        sa.Column("told", sa.JSON),
        sa.UniqueConstraint("job", "sequence"),
    )
    op.create_table(
        "usage",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("key", sa.String, nullable=False, unique=True),
        sa.Column("sandbox", sa.String, nullable=False, index=True),
        sa.Column("boot_id", sa.String, nullable=False),
        sa.Column("sequence", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("vcpus", sa.Integer, nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("disk_bytes", sa.BigInteger, nullable=False),
        sa.Column("from_ns", sa.BigInteger, nullable=False),
        sa.Column("to_ns", sa.BigInteger, nullable=False),
        sa.Column("duration_ns", sa.BigInteger, nullable=False),
    )

    # Money is computed from these, exactly once: not even a bug of ours may change one.
    for act in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER usage_no_{act.lower()} BEFORE {act} ON usage "
            "BEGIN SELECT RAISE(ABORT, 'usage is append-only'); END"
        )
