"""Time of a job's last failure on the clock of the machine's boot, which corrections of the wall clock do not move."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the columns, empty for earlier failures."""
    op.add_column("jobs", sa.Column("failed_boot_id", sa.String(36)))
    op.add_column("jobs", sa.Column("failed_boottime", sa.Double()))
