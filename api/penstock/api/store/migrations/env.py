"""Runs migrations on the connection that `penstock.api.store.migrate` hands over, in its transaction."""

from __future__ import annotations

from alembic import context

from penstock.api.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,
)
context.run_migrations()
