"""Which profile serves a job: measured on this machine, of this model, and not old. Kept for other runs in a cache."""

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


def profiles_folder() -> Path:
    """Where this user's profiles are kept."""
    return cache_folder() / "profiles"


class Profiles:
    """The profiles in ``folder``, one per machine, model, precision and number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, identity: Identity) -> Path:
        """Where a profile of that identity is kept."""
        of = profile_matching.subject(identity.key, identity.model_digest, identity.precision, identity.num_ranks)
        return self._folder / f"{of[:32]}.json"

    def find(self, spec: JobSpec, identity: Identity, places: list[Path], now: float) -> Profile | None:
        """The first that serves ``spec`` now, of those in ``places`` and the one kept here."""
        for path in (*places, self.path(identity)):
            if path.exists() and unfit(profile := read_profile(path), spec, identity, now) is None:
                return profile
        return None

    def keep(self, profile: Profile, identity: Identity) -> Path:
        """Keep a new profile."""
        path = self.path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, profile.to_manifest())
        return path


def unfit(profile: Profile, spec: JobSpec, identity: Identity, now: float) -> str | None:
    """Why ``profile`` does not serve ``spec`` at ``now`` (seconds since the epoch); none if it does."""
    if profile.key != identity.key:
        return _difference(profile.key, identity.key)
    return profile_matching.unfit(profile, spec, identity.model_digest) or profile_matching.stale(profile, now)


def _difference(theirs: MachineKey, ours: MachineKey) -> str:
    """The first field that differs, both ways."""
    here, there = ours.to_manifest(), theirs.to_manifest()
    name = next(name for name in {**there, **here} if there.get(name) != here.get(name))
    if name == "trainer":
        return "was measured with other code of the trainer"
    return f"is of another machine: its {name} is {there.get(name)}, here it is {here.get(name)}"


def require_fit(profile: Profile, where: Path, spec: JobSpec, identity: Identity, now: float) -> None:
    """Raise `UserError` if a profile that the user named does not serve ``spec`` here."""
    reason = unfit(profile, spec, identity, now)
    if reason is not None:
        raise UserError(what=reason, where=str(where), remedy="measure this machine: penstock profile JOB")
