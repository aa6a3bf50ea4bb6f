"""Attempts have the devices that they hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Attempts of before hold none by name."""
    op.add_column("attempts", sa.Column("devices", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    """Forget them."""
    op.drop_column("attempts", "devices")
