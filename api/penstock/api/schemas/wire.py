"""Base of all REST schemas, the format of times, and small answers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Wire(BaseModel):
    """Base of REST schemas: camelCase, and unknown fields are refused. A view is made from a stored object's fields."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", serialize_by_alias=True, from_attributes=True
    )


def instant(seconds: float) -> datetime:
    """Convert seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC)


Instant = Annotated[datetime, BeforeValidator(lambda at: instant(at) if isinstance(at, float) else at)]
"""A time, which the store has as seconds since the epoch."""


def maybe(seconds: float | None) -> datetime | None:
    """Convert seconds since the epoch, or none."""
    return None if seconds is None else instant(seconds)


class Acknowledged(Wire):
    """Acknowledgement of stored records."""

    sequence: int = Field(description="Highest stored sequence number of this source; records up to it may be dropped.")


class Health(Wire):
    """The service answers."""

    status: str = Field(examples=["ok"])


class VersionView(Wire):
    """Versions of the service."""

    version: str
    api: str = Field(examples=["v1"])
    schema_revision: str = Field(description="Revision of the database schema.")
