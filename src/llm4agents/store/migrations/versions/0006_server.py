"""A server for a team: projects, keys, invites, audit, idempotency, volumes; secrets belong to a project."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("project", sa.String, nullable=False, server_default="default"))
    op.create_index("ix_sandboxes_project", "sandboxes", ["project"])
    op.add_column("sandboxes", sa.Column("traffic", sa.JSON))
    op.add_column("sandboxes", sa.Column("defaults", sa.JSON))
    op.add_column("sandboxes", sa.Column("volumes", sa.JSON))
    for table in ("events", "usage"):
        op.add_column(table, sa.Column("project", sa.String, nullable=False, server_default="default"))
        op.create_index(f"ix_{table}_project", table, ["project"])
    op.create_table(
        "projects",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("disabled_at", sa.Float),
        sa.Column("quotas", sa.JSON, nullable=False),
    )
    op.execute("INSERT INTO projects (id, name, created_at, quotas) VALUES ('default', 'default', 0, '{}')")
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("project", sa.String, nullable=False, index=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("created_by", sa.String),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
        sa.Column("used_at", sa.Float),
    )
    op.create_table(
        "invites",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("note", sa.String, nullable=False, server_default=""),
        sa.Column("quotas", sa.JSON, nullable=False),
        sa.Column("uses_left", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float, nullable=False, index=True),
        sa.Column("project", sa.String, nullable=False, index=True),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
        sa.Column("request", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("target", sa.String, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("code", sa.String),
        sa.Column("duration_ms", sa.Float, nullable=False),
    )
    op.create_table(
        "idempotency",
        sa.Column("project", sa.String, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("answer", sa.LargeBinary),
        sa.Column("at", sa.Float, nullable=False, index=True),
    )
    op.create_table(
        "volumes",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("project", sa.String, nullable=False, index=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("source", sa.String),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.UniqueConstraint("project", "name"),
    )
    op.create_table(
        "volume_holds",
        sa.Column("volume", sa.String, primary_key=True),
        sa.Column("holder", sa.String, primary_key=True),
        sa.Column("mode", sa.String, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    # SQLite cannot change a primary key: the table is made anew.
    op.create_table(
        "secrets_of_projects",
        sa.Column("project", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
    )
    op.execute(
        "INSERT INTO secrets_of_projects (project, name, version, sealed, created_at, updated_at)"
        " SELECT 'default', name, version, sealed, created_at, updated_at FROM secrets"
    )
    op.drop_table("secrets")
    op.rename_table("secrets_of_projects", "secrets")
