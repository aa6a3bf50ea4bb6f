"""Attempts are closed once all their records are stored. Earlier attempts are open, and the service collects them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

OPEN = sa.text("closed_at IS NULL")


def upgrade() -> None:
    """Add the column; remaining records of ended attempts are collected after the upgrade."""
    op.add_column("attempts", sa.Column("closed_at", sa.Double()))
    op.create_index("ix_attempts_open", "attempts", ["uid"], sqlite_where=OPEN, postgresql_where=OPEN)
