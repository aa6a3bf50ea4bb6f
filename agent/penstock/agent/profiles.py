"""Selection of a profile for a job: it must be recent, and measured on this machine for this model.

New profiles are cached for later runs.
"""

from __future__ import annotations

from pathlib import Path

from penstock.agent.probe import Identity
from penstock.core import profile_matching
from penstock.core.errors import UserError
from penstock.core.host.cache import cache_folder
from penstock.core.job import JobSpec
from penstock.core.profile import MachineKey, Profile
from penstock.core.run.documents import read_profile
from penstock.core.serialization.files import write_json


class Profiles:
    """The profiles in ``folder``, by default this user's: one per machine, model, precision and number of ranks."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder() / "profiles"

    def path(self, identity: Identity) -> Path:
        """Return the path of the cached profile with that identity."""
        of = profile_matching.subject(identity.key, identity.model_digest, identity.precision, identity.num_ranks)
        return self._folder / f"{of[:32]}.json"

    def find(self, spec: JobSpec, identity: Identity, places: list[Path], now: float) -> Profile | None:
        """Return the first profile that is valid for ``spec`` at ``now``, from the files ``places``, then the cache."""
        for path in (*places, self.path(identity)):
            if path.exists() and unfit(profile := read_profile(path), spec, identity, now) is None:
                return profile
        return None

    def keep(self, profile: Profile, identity: Identity) -> Path:
        """Store a new profile."""
        path = self.path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, profile.to_manifest())
        return path


def unfit(profile: Profile, spec: JobSpec, identity: Identity, now: float) -> str | None:
    """Return the reason why ``profile`` is not valid for ``spec``; none if it is. ``now``: seconds since the epoch."""
    if profile.key != identity.key:
        return _difference(profile.key, identity.key)
    return profile_matching.unfit(profile, spec, identity.model_digest) or profile_matching.stale(profile, now)


def _difference(theirs: MachineKey, ours: MachineKey) -> str:
    """Describe the first field that differs, with both values."""
    here, there = ours.to_manifest(), theirs.to_manifest()
    name = next(name for name in {**there, **here} if there.get(name) != here.get(name))
    if name == "trainer":
        return "was measured with another version of the trainer"
    return f"is of another machine: its {name} is {there.get(name)}, on this one it is {here.get(name)}"


def require_fit(profile: Profile, where: Path, spec: JobSpec, identity: Identity, now: float) -> None:
    """Raise `UserError` unless the profile that the user named is valid for ``spec`` on this machine."""
    reason = unfit(profile, spec, identity, now)
    if reason is not None:
        raise UserError(what=reason, where=str(where), remedy="measure this machine with penstock profile JOB")
