"""Column with the devices of an attempt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column; earlier attempts have no named devices."""
    op.add_column("attempts", sa.Column("devices", sa.JSON(), nullable=False, server_default="[]"))
