"""Profiles in the store: compressed documents by digest, with columns for lists and searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from penstock.api.store.documents import pack, unpack
from penstock.api.store.engine import upsert
from penstock.api.store.schema import profiles
from penstock.core.errors import PenstockError
from penstock.core.job import JobSpec
from penstock.core.layout import Precision
from penstock.core.profile import Profile
from penstock.core.profile_matching import subject

MOST_LISTED = 500


class NoSuchProfileError(PenstockError):
    """No profile has this digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredProfile:
    """Profile in lists. ``key`` identifies the measured work; ``newest`` is true for the latest with that key."""

    digest: str
    key: str
    host: str
    device: str
    model_digest: str
    precision: Precision
    num_ranks: int
    method: str
    measured_at: float
    newest: bool


_NEWEST = (profiles.c.measured_at == func.max(profiles.c.measured_at).over(partition_by=profiles.c.key)).label("newest")
_LISTED = select(*[column for column in profiles.c if column.name != "body"], _NEWEST)


def keep(connection: Connection, profile: Profile) -> None:
    """Store a profile, unless it is stored already."""
    row = {
        "digest": profile.digest,
        "key": subject(profile.key, profile.model_digest, profile.precision, profile.num_ranks),
        "host": profile.key.host,
        "device": profile.key.device,
        "model_digest": profile.model_digest,
        "precision": profile.precision.value,
        "num_ranks": profile.num_ranks,
        "method": profile.method,
        "body": pack(profile.to_manifest()),
        "measured_at": profile.measured_at,
    }
    connection.execute(upsert(connection.dialect.name, profiles).values(row).on_conflict_do_nothing())


def every(connection: Connection) -> list[StoredProfile]:
    """Return the profiles, newest first, up to a limit."""
    newest_first = _LISTED.order_by(profiles.c.measured_at.desc(), profiles.c.digest)
    return [_stored(dict(row._mapping)) for row in connection.execute(newest_first.limit(MOST_LISTED))]


def get(connection: Connection, digest: str) -> tuple[StoredProfile, Profile]:
    """Return the profile with this digest; raises `NoSuchProfileError`."""
    listed = _LISTED.subquery()
    joined = select(listed, profiles.c.body).join(profiles, profiles.c.digest == listed.c.digest)
    row = connection.execute(joined.where(listed.c.digest == digest)).one_or_none()
    if row is None:
        raise NoSuchProfileError(digest)
    values = dict(row._mapping)
    body = values.pop("body")
    return _stored(values), Profile.from_manifest(unpack(body))


def find(connection: Connection, digest: str) -> Profile | None:
    """Return the profile with this digest, if it is stored."""
    body = connection.execute(select(profiles.c.body).where(profiles.c.digest == digest)).scalar_one_or_none()
    return None if body is None else Profile.from_manifest(unpack(body))


def measured_since(connection: Connection, spec: JobSpec, model_digest: str, host: str, since: float) -> list[Profile]:
    """Return profiles for such a job since that time, newest first; of any host if ``host`` is empty."""
    chosen = select(profiles.c.body).where(
        profiles.c.model_digest == model_digest,
        profiles.c.precision == spec.training.precision.value,
        profiles.c.num_ranks == spec.resources.ranks,
        profiles.c.measured_at >= since,
    )
    if host:
        chosen = chosen.where(profiles.c.host == host)
    bodies: Sequence[bytes] = connection.scalars(chosen.order_by(profiles.c.measured_at.desc()).limit(8)).all()
    return [Profile.from_manifest(unpack(body)) for body in bodies]


def _stored(values: dict[str, Any]) -> StoredProfile:
    return StoredProfile(**{**values, "precision": Precision(values["precision"]), "newest": bool(values["newest"])})
