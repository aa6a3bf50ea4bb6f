"""First tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
metadata = sa.MetaData()


def upgrade() -> None:
    """Create the tables."""
    metadata.create_all(op.get_bind())


def downgrade() -> None:
    """Drop the tables."""
    metadata.drop_all(op.get_bind())


sa.Table(
    "audit",
    metadata,
    sa.Column("number", Id, nullable=False),
    sa.Column("at", sa.Double(), nullable=False),
    sa.Column("identity", sa.String(length=63), nullable=False),
    sa.Column("action", sa.String(length=63), nullable=False),
    sa.Column("method", sa.String(length=15), nullable=False),
    sa.Column("path", sa.Text(), nullable=False),
    sa.Column("namespace", sa.String(length=63), nullable=False),
    sa.Column("status", sa.Integer(), nullable=False),
    sa.Column("address", sa.String(length=63), nullable=False),
    sa.PrimaryKeyConstraint("number", name="pk_audit"),
    sa.Index("ix_audit_at", "at"),
)
sa.Table(
    "idempotency",
    metadata,
    sa.Column("identity", sa.String(length=63), nullable=False),
    sa.Column("key", sa.String(length=255), nullable=False),
    sa.Column("request", sa.String(length=64), nullable=False),
    sa.Column("status", sa.Integer(), nullable=False),
    sa.Column("body", sa.LargeBinary(), nullable=False),
    sa.Column("headers", sa.JSON(), nullable=False),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint("identity", "key", name="pk_idempotency"),
    sa.Index("ix_idempotency_created_at", "created_at"),
)
sa.Table(
    "jobs",
    metadata,
    sa.Column("number", Id, nullable=False),
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("namespace", sa.String(length=63), nullable=False),
    sa.Column("name", sa.String(length=63), nullable=False),
    sa.Column("version", sa.Integer(), nullable=False),
    sa.Column("generation", sa.Integer(), nullable=False),
    sa.Column("created_by", sa.String(length=63), nullable=False),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.Column("changed_at", sa.Double(), nullable=False),
    sa.Column("phase", sa.String(length=16), nullable=False),
    sa.Column("phase_reason", sa.String(length=63), nullable=False),
    sa.Column("phase_message", sa.Text(), nullable=False),
    sa.Column("phase_entered_at", sa.Double(), nullable=False),
    sa.Column("priority", sa.Integer(), nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("failures", sa.Integer(), nullable=False),
    sa.Column("started_at", sa.Double(), nullable=True),
    sa.Column("failed_at", sa.Double(), nullable=True),
    sa.Column("finished_at", sa.Double(), nullable=True),
    sa.Column("delete_requested_at", sa.Double(), nullable=True),
    sa.Column("deleted_at", sa.Double(), nullable=True),
    sa.Column("executor", sa.Text(), nullable=True),
    sa.Column("plan_digest", sa.String(length=64), nullable=True),
    sa.Column("last_event", sa.Integer(), nullable=False),
    sa.Column("manifest", sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint("number", name="pk_jobs"),
    sa.UniqueConstraint("uid", name="uq_jobs_uid"),
    sa.Index("ix_jobs_changed_at", "changed_at"),
    sa.Index("ix_jobs_finished_at", "finished_at"),
    sa.Index("ix_jobs_name", "name", "number"),
    sa.Index("ix_jobs_namespace_name", "namespace", "name", "number"),
    sa.Index("ix_jobs_phase", "phase", "number"),
    sa.Index("ix_jobs_priority", "priority", "number"),
    sa.Index(
        "uq_jobs_live",
        "namespace",
        "name",
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    ),
)
sa.Table(
    "plan_requests",
    metadata,
    sa.Column("number", Id, nullable=False),
    sa.Column("id", sa.String(length=36), nullable=False),
    sa.Column("namespace", sa.String(length=63), nullable=False),
    sa.Column("name", sa.String(length=63), nullable=False),
    sa.Column("body", sa.LargeBinary(), nullable=False),
    sa.Column("created_by", sa.String(length=63), nullable=False),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.Column("state", sa.String(length=15), nullable=False),
    sa.Column("begun", sa.Integer(), nullable=False),
    sa.Column("worker", sa.String(length=36), nullable=True),
    sa.Column("renewed_at", sa.Double(), nullable=True),
    sa.Column("progress", sa.JSON(), nullable=False),
    sa.Column("finished_at", sa.Double(), nullable=True),
    sa.Column("error", sa.JSON(), nullable=False),
    sa.Column("plan_digest", sa.String(length=64), nullable=True),
    sa.Column("plan", sa.LargeBinary(), nullable=True),
    sa.PrimaryKeyConstraint("number", name="pk_plan_requests"),
    sa.UniqueConstraint("id", name="uq_plan_requests_id"),
    sa.Index("ix_plan_requests_namespace", "namespace", "number"),
    sa.Index("ix_plan_requests_state", "state", "number"),
)
sa.Table(
    "plans",
    metadata,
    sa.Column("digest", sa.String(length=64), nullable=False),
    sa.Column("body", sa.LargeBinary(), nullable=False),
    sa.Column("timeline", sa.LargeBinary(), nullable=True),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint("digest", name="pk_plans"),
)
sa.Table(
    "profiles",
    metadata,
    sa.Column("digest", sa.String(length=64), nullable=False),
    sa.Column("key", sa.String(length=64), nullable=False),
    sa.Column("host", sa.String(length=255), nullable=False),
    sa.Column("device", sa.Text(), nullable=False),
    sa.Column("model_digest", sa.String(length=64), nullable=False),
    sa.Column("precision", sa.String(length=15), nullable=False),
    sa.Column("num_ranks", sa.Integer(), nullable=False),
    sa.Column("method", sa.Text(), nullable=False),
    sa.Column("body", sa.LargeBinary(), nullable=False),
    sa.Column("measured_at", sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint("digest", name="pk_profiles"),
    sa.Index("ix_profiles_key_measured_at", "key", "measured_at"),
)
sa.Table(
    "tokens",
    metadata,
    sa.Column("id", sa.String(length=36), nullable=False),
    sa.Column("name", sa.String(length=63), nullable=False),
    sa.Column("digest", sa.String(length=64), nullable=False),
    sa.Column("role", sa.String(length=15), nullable=False),
    sa.Column("namespace", sa.String(length=63), nullable=True),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.Column("expires_at", sa.Double(), nullable=True),
    sa.Column("revoked_at", sa.Double(), nullable=True),
    sa.CheckConstraint("role IN ('viewer', 'editor', 'admin', 'ingest')", name="ck_tokens_role"),
    sa.PrimaryKeyConstraint("id", name="pk_tokens"),
    sa.UniqueConstraint("digest", name="uq_tokens_digest"),
)
sa.Table(
    "attempts",
    metadata,
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("num_ranks", sa.Integer(), nullable=False),
    sa.Column("resume_from", sa.Integer(), nullable=True),
    sa.Column("launched_at", sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_attempts_uid", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("uid", "attempt", name="pk_attempts"),
)
sa.Table(
    "deliveries",
    metadata,
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("tries", sa.Integer(), nullable=False),
    sa.Column("next_try_at", sa.Double(), nullable=False),
    sa.Column("delivered_at", sa.Double(), nullable=True),
    sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_deliveries_uid", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("uid", name="pk_deliveries"),
)
sa.Table(
    "events",
    metadata,
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("number", sa.Integer(), nullable=False),
    sa.Column("at", sa.Double(), nullable=False),
    sa.Column("kind", sa.String(length=31), nullable=False),
    sa.Column("body", sa.JSON(), nullable=False),
    sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_events_uid", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("uid", "number", name="pk_events"),
)
sa.Table(
    "job_labels",
    metadata,
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("key", sa.String(length=317), nullable=False),
    sa.Column("value", sa.String(length=63), nullable=False),
    sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_job_labels_uid", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("uid", "key", name="pk_job_labels"),
    sa.Index("ix_job_labels_key_value", "key", "value"),
)
sa.Table(
    "job_plans",
    metadata,
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("revision", sa.Integer(), nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("digest", sa.String(length=64), nullable=False),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(["digest"], ["plans.digest"], name="fk_job_plans_digest"),
    sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_job_plans_uid", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("uid", "revision", name="pk_job_plans"),
)
sa.Table(
    "log_lines",
    metadata,
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("rank", sa.Integer(), nullable=False),
    sa.Column("number", sa.BigInteger(), nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("at", sa.Double(), nullable=False),
    sa.Column("level", sa.String(length=15), nullable=False),
    sa.Column("message", sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint("uid", "rank", "number", name="pk_log_lines"),
    sqlite_with_rowid=False,
)
sa.Table(
    "login_links",
    metadata,
    sa.Column("digest", sa.String(length=64), nullable=False),
    sa.Column("token", sa.String(length=36), nullable=False),
    sa.Column("expires_at", sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(["token"], ["tokens.id"], name="fk_login_links_token", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("digest", name="pk_login_links"),
)
sa.Table(
    "progress",
    metadata,
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("step", sa.Integer(), nullable=False),
    sa.Column("loss", sa.Double(), nullable=True),
    sa.Column("step_seconds", sa.Double(), nullable=True),
    sa.Column("last_checkpoint", sa.Integer(), nullable=True),
    sa.Column("reported_at", sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_progress_uid", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("uid", name="pk_progress"),
    sa.Index("ix_progress_reported_at", "reported_at"),
)
sa.Table(
    "series",
    metadata,
    sa.Column("id", Id, nullable=False),
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("name", sa.String(length=63), nullable=False),
    sa.Column("rank", sa.Integer(), nullable=False),
    sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_series_uid", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("id", name="pk_series"),
    sa.Index("uq_series_uid_name_rank", "uid", "name", "rank", unique=True),
)
sa.Table(
    "sessions",
    metadata,
    sa.Column("id", sa.String(length=36), nullable=False),
    sa.Column("digest", sa.String(length=64), nullable=False),
    sa.Column("token", sa.String(length=36), nullable=False),
    sa.Column("address", sa.String(length=63), nullable=False),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.Column("expires_at", sa.Double(), nullable=False),
    sa.Column("revoked_at", sa.Double(), nullable=True),
    sa.ForeignKeyConstraint(["token"], ["tokens.id"], name="fk_sessions_token", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    sa.UniqueConstraint("digest", name="uq_sessions_digest"),
    sa.Index("ix_sessions_expires_at", "expires_at"),
    sa.Index("ix_sessions_token", "token"),
)
sa.Table(
    "sources",
    metadata,
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("source", sa.String(length=63), nullable=False),
    sa.Column("sequence", sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint("uid", "attempt", "source", name="pk_sources"),
)
sa.Table(
    "timelines",
    metadata,
    sa.Column("uid", sa.String(length=36), nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("step", sa.Integer(), nullable=False),
    sa.Column("body", sa.LargeBinary(), nullable=False),
    sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_timelines_uid", ondelete="CASCADE"),
    sa.PrimaryKeyConstraint("uid", "attempt", "step", name="pk_timelines"),
)
sa.Table(
    "points",
    metadata,
    sa.Column("series", Id, nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("step", sa.Integer(), nullable=False),
    sa.Column("value", sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint("series", "attempt", "step", name="pk_points"),
    sqlite_with_rowid=False,
)
sa.Table(
    "rollups",
    metadata,
    sa.Column("series", Id, nullable=False),
    sa.Column("steps", sa.Integer(), nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("bucket", sa.Integer(), nullable=False),
    sa.Column("count", sa.Integer(), nullable=False),
    sa.Column("sum", sa.Double(), nullable=False),
    sa.Column("min", sa.Double(), nullable=False),
    sa.Column("max", sa.Double(), nullable=False),
    sa.Column("last_step", sa.Integer(), nullable=False),
    sa.Column("last", sa.Double(), nullable=False),
    sa.Column("received_at", sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint("series", "steps", "attempt", "bucket", name="pk_rollups"),
    sqlite_with_rowid=False,
)
