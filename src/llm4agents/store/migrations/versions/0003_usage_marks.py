"""Usage rows say which stretch of a state they belong to, and where on the host's own clock they end.

From these the next row of the stretch begins exactly where the last one ended, whoever writes it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Nothing has written a row before this version; the defaults are for the letter of the law.
    op.add_column("usage", sa.Column("event", sa.Integer, nullable=False, server_default="0"))
    op.add_column("usage", sa.Column("end_boottime_ns", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("usage", sa.Column("host_boot_id", sa.String, nullable=False, server_default=""))
