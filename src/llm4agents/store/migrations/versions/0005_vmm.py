"""Several VMMs: which one a sandbox is on, and whether it is nested."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("vmm", sa.String))
    op.add_column("sandboxes", sa.Column("nested", sa.Boolean, nullable=False, server_default=sa.false()))
    op.execute("UPDATE sandboxes SET vmm = 'qemu'")  # there was no other
