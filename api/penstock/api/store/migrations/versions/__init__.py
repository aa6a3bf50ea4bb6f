"""One module per step; alembic finds them by their `down_revision`."""
