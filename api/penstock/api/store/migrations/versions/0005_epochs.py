"""Epoch of the service that holds the cluster's Lease: writes of former holders are refused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table, without an epoch until a service begins one."""
    op.create_table(
        "epochs",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_epochs"),
    )
