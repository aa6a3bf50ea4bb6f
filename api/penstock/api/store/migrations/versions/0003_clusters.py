"""Jobs of clusters: the cluster, the last snapshot, the measurements of attempts, and their checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

LIVE = sa.text("deleted_at IS NULL")


def upgrade() -> None:
    """Add the tables and columns; earlier jobs belong to no cluster."""
    op.add_column("jobs", sa.Column("cluster", sa.String(63), nullable=False, server_default=""))
    op.drop_index("uq_jobs_live", "jobs")
    names = ["cluster", "namespace", "name"]
    op.create_index("uq_jobs_live", "jobs", names, unique=True, sqlite_where=LIVE, postgresql_where=LIVE)
    op.add_column("attempts", sa.Column("last_checkpoint", sa.Integer()))
    op.create_table(
        "sightings",
        sa.Column("uid", sa.String(36), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_sightings_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", name="pk_sightings"),
    )
    op.create_table(
        "measurements",
        sa.Column("uid", sa.String(36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.Column("ref", sa.String(253), nullable=False),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_measurements_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", "attempt", name="pk_measurements"),
    )
    op.create_index("ix_measurements_ref", "measurements", ["ref"])
