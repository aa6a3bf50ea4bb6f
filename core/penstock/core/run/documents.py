"""Documents of a run that users name: measurements, plans and timelines, with errors that name file and field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from penstock.core import jsontext
from penstock.core.errors import UserError, mistakes_in, raise_all
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline

T = TypeVar("T")

COST, RUN_TIME = "cost", "runTime"
"""Fields that `penstock plan` adds to a plan if a price is given."""


def read_profile(path: Path) -> Profile:
    """The measurements in ``path``; raises `UserError` if they are corrupt."""
    remedy = "measure again: penstock profile JOB"
    return named(path, Profile.from_manifest, _load_json(path, remedy), remedy)


def read_plan(path: Path) -> Plan:
    """The plan in ``path``; raises `UserError` if it is corrupt."""
    remedy = "plan again: penstock plan JOB"
    document = _load_json(path, remedy)
    if isinstance(document, dict):
        document.pop(COST, None)
        document.pop(RUN_TIME, None)
    return named(path, Plan.from_manifest, document, remedy)


def read_timeline(path: Path) -> Timeline:
    """The timeline in ``path``; raises `UserError` if it is corrupt."""
    remedy = "delete it"
    return named(path, Timeline.from_manifest, _load_json(path, remedy), remedy)


def read_text(path: Path) -> str:
    """The text of a file that the user named."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise UserError(what="is not a text file", where=str(path), remedy="name another file") from None
    except OSError as error:
        raise UserError(what=f"cannot be read: {error.strerror}", where=str(path), remedy="name another file") from None


def _load_json(path: Path, remedy: str) -> Any:
    try:
        return jsontext.load(read_text(path))
    except ValueError as error:
        raise UserError(what=f"is corrupt: {error}", where=str(path), remedy=remedy) from None


def named(path: Path, read: Callable[[Any], T], manifest: Any, remedy: str = "") -> T:
    """``read(manifest)``; its errors name the file before the field."""
    try:
        return read(manifest)
    except UserError as error:
        raise_all([_in_file(path, mistake, remedy) for mistake in mistakes_in(error)])
        raise


def _in_file(path: Path, mistake: UserError, remedy: str) -> UserError:
    place = f"{path}: {mistake.where}" if mistake.where else str(path)
    return UserError(what=mistake.what, where=place, remedy=mistake.remedy or remedy)
