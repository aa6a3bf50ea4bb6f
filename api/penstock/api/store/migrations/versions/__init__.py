"""A module for each step; alembic orders them by their `down_revision`."""
