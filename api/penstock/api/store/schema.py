"""Tables of the store. Migrations create them; a test compares the two.

Times are seconds since the epoch. Manifests, plans and other documents are JSON. A job is identified by its uid;
namespace and name only find it. Columns that change often (progress, series) are in separate tables, or the version of
a job would change with every step.

Tables to which every report adds rows (points, roll-ups, log lines, sources) have no foreign keys, because PostgreSQL
would check them row by row. A writer there locks the job's row, as does the deletion of the job.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Id = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only in a column of type INTEGER
UID_LENGTH = 36


def _uid() -> Column[str]:
    return Column("uid", String(UID_LENGTH), ForeignKey("jobs.uid", ondelete="CASCADE"), nullable=False)


jobs = Table(
    "jobs",
    metadata,
    Column("number", Id, primary_key=True),  # order of creation: times may be equal or go back
    Column("uid", String(UID_LENGTH), nullable=False, unique=True),
    Column("namespace", String(63), nullable=False),
    Column("name", String(63), nullable=False),
    Column("version", Integer, nullable=False),  # of the row's visible content; an ETag
    Column("generation", Integer, nullable=False),  # of the spec
    Column("created_by", String(63), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("changed_at", Double, nullable=False),  # by the clock of its writer
    Column("phase", String(16), nullable=False),
    Column("phase_reason", String(63), nullable=False),
    Column("phase_message", Text, nullable=False),
    Column("phase_entered_at", Double, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("started_at", Double),
    Column("failed_at", Double),
    Column("finished_at", Double),
    Column("delete_requested_at", Double),
    Column("deleted_at", Double),
    Column("executor", Text),  # the one that it is bound to
    Column("plan_digest", String(64)),
    Column("last_event", Integer, nullable=False),  # the number of the newest of its events
    Column("manifest", JSON, nullable=False),  # near the end: SQLite reads a row up to the requested column
    Column("cluster", String(63), nullable=False, server_default=""),  # where it runs; empty: on a machine
    Column("failed_boot_id", String(36)),  # with failed_boottime, failed_at by the clock of the machine's boot
    Column("failed_boottime", Double),
    Index("ix_jobs_namespace_name", "namespace", "name", "number"),
    Index("ix_jobs_name", "name", "number"),
    Index("ix_jobs_priority", "priority", "number"),
    Index("ix_jobs_phase", "phase", "number"),
    Index("ix_jobs_changed_at", "changed_at"),
    Index("ix_jobs_finished_at", "finished_at"),
    Index(
        "uq_jobs_live",
        "cluster",
        "namespace",
        "name",
        unique=True,
        sqlite_where=text("deleted_at IS NULL"),
        postgresql_where=text("deleted_at IS NULL"),
    ),
)

job_labels = Table(
    "job_labels",
    metadata,
    _uid(),
    Column("key", String(317), nullable=False),
    Column("value", String(63), nullable=False),
    PrimaryKeyConstraint("uid", "key"),
    Index("ix_job_labels_key_value", "key", "value"),
)

progress = Table(
    "progress",
    metadata,
    Column("uid", String(UID_LENGTH), ForeignKey("jobs.uid", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("loss", Double),
    Column("step_seconds", Double),
    Column("last_checkpoint", Integer),
    Column("reported_at", Double, nullable=False),
    Index("ix_progress_reported_at", "reported_at"),
)

events = Table(
    "events",
    metadata,
    _uid(),
    Column("number", Integer, nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", String(31), nullable=False),
    Column("body", JSON, nullable=False),
    PrimaryKeyConstraint("uid", "number"),
)

epochs = Table(  # of the Lease of a cluster's service
    "epochs",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("epoch", Integer, nullable=False),
)

attempts = Table(
    "attempts",
    metadata,
    _uid(),
    Column("attempt", Integer, nullable=False),
    Column("num_ranks", Integer, nullable=False),
    Column("resume_from", Integer),
    Column("launched_at", Double, nullable=False),
    Column("devices", JSON, nullable=False),  # names of its CUDA devices, which no other live attempt has
    Column("last_checkpoint", Integer),  # the step of the newest that it reported
    Column("closed_at", Double),  # when all of its records were stored; it accepts none after that
    PrimaryKeyConstraint("uid", "attempt"),
    Index(
        "ix_attempts_open",
        "uid",
        sqlite_where=text("closed_at IS NULL"),
        postgresql_where=text("closed_at IS NULL"),
    ),
)

plans = Table(
    "plans",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("body", LargeBinary, nullable=False),  # compressed JSON: a recorded schedule is long
    Column("timeline", LargeBinary),  # of its step as simulated
    Column("created_at", Double, nullable=False),
)

job_plans = Table(
    "job_plans",
    metadata,
    _uid(),
    Column("revision", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("digest", String(64), ForeignKey("plans.digest"), nullable=False),
    Column("created_at", Double, nullable=False),
    PrimaryKeyConstraint("uid", "revision"),
)

profiles = Table(
    "profiles",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("key", String(64), nullable=False),  # of the machine and the job's shape; the newest of a key is used
    Column("host", String(255), nullable=False),
    Column("device", Text, nullable=False),
    Column("model_digest", String(64), nullable=False),
    Column("precision", String(15), nullable=False),
    Column("num_ranks", Integer, nullable=False),
    Column("method", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("measured_at", Double, nullable=False),
    Index("ix_profiles_key_measured_at", "key", "measured_at"),
)

sightings = Table(
    "sightings",
    metadata,
    Column("uid", String(UID_LENGTH), ForeignKey("jobs.uid", ondelete="CASCADE"), primary_key=True),
    Column("version", BigInteger, nullable=False),  # of the cluster's object, as last observed
    Column("status", JSON, nullable=False),  # all of it but progress
)

measurements = Table(
    "measurements",
    metadata,
    _uid(),
    Column("attempt", Integer, nullable=False),
    Column("digest", String(64), nullable=False),  # of the profile that the attempt reported
    Column("reported_at", Double, nullable=False),
    Column("ref", String(253), nullable=False),  # the ConfigMap that holds it on the job's cluster, once there is one
    PrimaryKeyConstraint("uid", "attempt"),
    Index("ix_measurements_ref", "ref"),
)

plan_requests = Table(
    "plan_requests",
    metadata,
    Column("number", Id, primary_key=True),
    Column("id", String(UID_LENGTH), nullable=False, unique=True),
    Column("namespace", String(63), nullable=False),
    Column("name", String(63), nullable=False),  # of the planned job, which need not exist
    Column("body", LargeBinary, nullable=False),  # the job, and the cluster or the profile's digest
    Column("created_by", String(63), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("state", String(15), nullable=False),
    Column("begun", Integer, nullable=False),  # number of starts by services
    Column("worker", String(UID_LENGTH)),  # the service that works on it
    Column("renewed_at", Double),  # by the worker; after a lapse another one may claim it
    Column("progress", JSON, nullable=False),
    Column("finished_at", Double),
    Column("error", JSON, nullable=False),
    Column("plan_digest", String(64)),
    Column("plan", LargeBinary),
    Index("ix_plan_requests_state", "state", "number"),
    Index("ix_plan_requests_namespace", "namespace", "number"),
)

sources = Table(
    "sources",
    metadata,
    Column("uid", String(UID_LENGTH), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("source", String(63), nullable=False),
    Column("sequence", BigInteger, nullable=False),  # the highest that is stored
    PrimaryKeyConstraint("uid", "attempt", "source"),
)

series = Table(
    "series",
    metadata,
    Column("id", Id, primary_key=True),
    _uid(),
    Column("name", String(63), nullable=False),
    Column("rank", Integer, nullable=False),  # -1: of all ranks together
    Index("uq_series_uid_name_rank", "uid", "name", "rank", unique=True),
)


points = Table(
    "points",
    metadata,
    Column("series", Id, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("value", Double, nullable=False),
    PrimaryKeyConstraint("series", "attempt", "step"),
    sqlite_with_rowid=False,
)

rollups = Table(
    "rollups",
    metadata,
    Column("series", Id, nullable=False),
    Column("steps", Integer, nullable=False),  # how many a row covers, from bucket * steps on
    Column("attempt", Integer, nullable=False),
    Column("bucket", Integer, nullable=False),
    Column("count", Integer, nullable=False),
    Column("sum", Double, nullable=False),
    Column("min", Double, nullable=False),
    Column("max", Double, nullable=False),
    Column("last_step", Integer, nullable=False),
    Column("last", Double, nullable=False),
    Column("received_at", Double, nullable=False),
    PrimaryKeyConstraint("series", "steps", "attempt", "bucket"),
    sqlite_with_rowid=False,
)

log_lines = Table(
    "log_lines",
    metadata,
    Column("uid", String(UID_LENGTH), nullable=False),
    Column("rank", Integer, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("at", Double, nullable=False),
    Column("level", String(15), nullable=False),
    Column("message", Text, nullable=False),
    PrimaryKeyConstraint("uid", "rank", "number"),
    sqlite_with_rowid=False,
)

timelines = Table(
    "timelines",
    metadata,
    _uid(),
    Column("attempt", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
    PrimaryKeyConstraint("uid", "attempt", "step"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("uid", String(UID_LENGTH), ForeignKey("jobs.uid", ondelete="CASCADE"), primary_key=True),
    Column("tries", Integer, nullable=False),
    Column("next_try_at", Double, nullable=False),  # by the clock of the service that tried last
    Column("delivered_at", Double),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(UID_LENGTH), primary_key=True),
    Column("name", String(63), nullable=False),
    Column("digest", String(64), nullable=False, unique=True),  # SHA-256; the token itself is shown once
    Column("role", String(15), nullable=False),
    Column("namespace", String(63)),  # none: every namespace
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    CheckConstraint("role IN ('viewer', 'editor', 'admin', 'ingest')", name="role"),
)

login_links = Table(
    "login_links",
    metadata,
    Column("digest", String(64), primary_key=True),  # the row is deleted when the link is used
    Column("token", String(UID_LENGTH), ForeignKey("tokens.id", ondelete="CASCADE"), nullable=False),
    Column("expires_at", Double, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(UID_LENGTH), primary_key=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("token", String(UID_LENGTH), ForeignKey("tokens.id", ondelete="CASCADE"), nullable=False),
    Column("address", String(63), nullable=False),  # of the client that began it
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("revoked_at", Double),
    Index("ix_sessions_token", "token"),
    Index("ix_sessions_expires_at", "expires_at"),
)

audit = Table(
    "audit",
    metadata,
    Column("number", Id, primary_key=True),
    Column("at", Double, nullable=False),
    Column("identity", String(63), nullable=False),
    Column("action", String(63), nullable=False),  # the operation's id
    Column("method", String(15), nullable=False),
    Column("path", Text, nullable=False),
    Column("namespace", String(63), nullable=False),
    Column("status", Integer, nullable=False),
    Column("address", String(63), nullable=False),
    Index("ix_audit_at", "at"),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("identity", String(63), nullable=False),
    Column("key", String(255), nullable=False),
    Column("request", String(64), nullable=False),  # SHA-256 of method, path, query and body
    Column("status", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("headers", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    PrimaryKeyConstraint("identity", "key"),
    Index("ix_idempotency_created_at", "created_at"),
)
