"""First tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
    _audit()
    _idempotency()
    _jobs()
    _plan_requests()
    _plans()
    _profiles()
    _tokens()
    _attempts()
    _deliveries()
    _events()
    _job_labels()
    _job_plans()
    _log_lines()
    _login_links()
    _progress()
    _series()
    _sessions()
    _sources()
    _timelines()
    _points()
    _rollups()


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("rollups")
    op.drop_table("points")
    op.drop_table("timelines")
    op.drop_table("sources")
    op.drop_table("sessions")
    op.drop_table("series")
    op.drop_table("progress")
    op.drop_table("login_links")
    op.drop_table("log_lines")
    op.drop_table("job_plans")
    op.drop_table("job_labels")
    op.drop_table("events")
    op.drop_table("deliveries")
    op.drop_table("attempts")
    op.drop_table("tokens")
    op.drop_table("profiles")
    op.drop_table("plans")
    op.drop_table("plan_requests")
    op.drop_table("jobs")
    op.drop_table("idempotency")
    op.drop_table("audit")


def _audit() -> None:
    op.create_table(
        "audit",
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
    )
    op.create_index("ix_audit_at", "audit", ["at"], unique=False)


def _idempotency() -> None:
    op.create_table(
        "idempotency",
        sa.Column("identity", sa.String(length=63), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("request", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("headers", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("identity", "key", name="pk_idempotency"),
    )
    op.create_index("ix_idempotency_created_at", "idempotency", ["created_at"], unique=False)


def _jobs() -> None:
    op.create_table(
        "jobs",
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
    )
    op.create_index("ix_jobs_changed_at", "jobs", ["changed_at"], unique=False)
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"], unique=False)
    op.create_index("ix_jobs_name", "jobs", ["name", "number"], unique=False)
    op.create_index("ix_jobs_namespace_name", "jobs", ["namespace", "name", "number"], unique=False)
    op.create_index("ix_jobs_phase", "jobs", ["phase", "number"], unique=False)
    op.create_index("ix_jobs_priority", "jobs", ["priority", "number"], unique=False)
    op.create_index(
        "uq_jobs_live",
        "jobs",
        ["namespace", "name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )


def _plan_requests() -> None:
    op.create_table(
        "plan_requests",
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
    )
    op.create_index("ix_plan_requests_namespace", "plan_requests", ["namespace", "number"], unique=False)
    op.create_index("ix_plan_requests_state", "plan_requests", ["state", "number"], unique=False)


def _plans() -> None:
    op.create_table(
        "plans",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("timeline", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_plans"),
    )


def _profiles() -> None:
    op.create_table(
        "profiles",
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
    )
    op.create_index("ix_profiles_key_measured_at", "profiles", ["key", "measured_at"], unique=False)


def _tokens() -> None:
    op.create_table(
        "tokens",
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


def _attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("num_ranks", sa.Integer(), nullable=False),
        sa.Column("resume_from", sa.Integer(), nullable=True),
        sa.Column("launched_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_attempts_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", "attempt", name="pk_attempts"),
    )


def _deliveries() -> None:
    op.create_table(
        "deliveries",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_try_at", sa.Double(), nullable=False),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_deliveries_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", name="pk_deliveries"),
    )


def _events() -> None:
    op.create_table(
        "events",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=31), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_events_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", "number", name="pk_events"),
    )


def _job_labels() -> None:
    op.create_table(
        "job_labels",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("key", sa.String(length=317), nullable=False),
        sa.Column("value", sa.String(length=63), nullable=False),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_job_labels_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", "key", name="pk_job_labels"),
    )
    op.create_index("ix_job_labels_key_value", "job_labels", ["key", "value"], unique=False)


def _job_plans() -> None:
    op.create_table(
        "job_plans",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["plans.digest"], name="fk_job_plans_digest"),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_job_plans_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", "revision", name="pk_job_plans"),
    )


def _log_lines() -> None:
    op.create_table(
        "log_lines",
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


def _login_links() -> None:
    op.create_table(
        "login_links",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("token", sa.String(length=36), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"], name="fk_login_links_token", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("digest", name="pk_login_links"),
    )


def _progress() -> None:
    op.create_table(
        "progress",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("step_seconds", sa.Double(), nullable=True),
        sa.Column("last_checkpoint", sa.Integer(), nullable=True),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_progress_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", name="pk_progress"),
    )
    op.create_index("ix_progress_reported_at", "progress", ["reported_at"], unique=False)


def _series() -> None:
    op.create_table(
        "series",
        sa.Column("id", Id, nullable=False),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_series_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_series"),
    )
    op.create_index("uq_series_uid_name_rank", "series", ["uid", "name", "rank"], unique=True)


def _sessions() -> None:
    op.create_table(
        "sessions",
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
    )
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"], unique=False)
    op.create_index("ix_sessions_token", "sessions", ["token"], unique=False)


def _sources() -> None:
    op.create_table(
        "sources",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=63), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("uid", "attempt", "source", name="pk_sources"),
    )


def _timelines() -> None:
    op.create_table(
        "timelines",
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["uid"], ["jobs.uid"], name="fk_timelines_uid", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", "attempt", "step", name="pk_timelines"),
    )


def _points() -> None:
    op.create_table(
        "points",
        sa.Column("series", Id, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("series", "attempt", "step", name="pk_points"),
        sqlite_with_rowid=False,
    )


def _rollups() -> None:
    op.create_table(
        "rollups",
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
