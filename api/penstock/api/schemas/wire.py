"""The base of all models that go over the wire, how times are written, and answers of a line or two."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Wire(BaseModel):
    """Written in camelCase; an unknown field is refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", serialize_by_alias=True)


def instant(seconds: float) -> datetime:
    """Seconds since the epoch as people and JSON write time."""
    return datetime.fromtimestamp(seconds, UTC)


def maybe(seconds: float | None) -> datetime | None:
    """The same, or none."""
    return None if seconds is None else instant(seconds)


class Acknowledged(Wire):
    """Acknowledgement of stored records."""

    sequence: int = Field(description="The highest sequence of this source that is kept; its records may be dropped.")


class Health(Wire):
    """The service answers."""

    status: str = Field(examples=["ok"])


class VersionView(Wire):
    """Which penstock this is."""

    version: str
    api: str = Field(examples=["v1"])
    schema_revision: str = Field(description="Of the database.")
