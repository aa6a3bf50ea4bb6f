"""Attempts are closed once all their records are in. Those of before are open: the service collects them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

OPEN = sa.text("closed_at IS NULL")


def upgrade() -> None:
    """What an ended attempt has not sent yet is taken in after the upgrade."""
    op.add_column("attempts", sa.Column("closed_at", sa.Double()))
    op.create_index("ix_attempts_open", "attempts", ["uid"], sqlite_where=OPEN, postgresql_where=OPEN)


def downgrade() -> None:
    """Forget which are closed."""
    op.drop_index("ix_attempts_open", "attempts")
    op.drop_column("attempts", "closed_at")
