"""The planning problem of a machine that was measured; apart from `problem` because fitting loads scipy."""

from __future__ import annotations

from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.profile import Profile
from penstock.planner.fit import measured_cost
from penstock.planner.problem import Problem, common_fields

LINK_TOLERANCE = 2.0
"""Links of one kind were seen to be measured up to so much apart."""


def problem_from_profile(spec: JobSpec, profile: Profile) -> Problem:
    """The problem of running ``spec`` on the machine that ``profile`` measured; tp stays 1."""
    if profile.precision is not spec.training.precision:
        raise UserError(
            what=f"was measured in {profile.precision.value}, the job trains in {spec.training.precision.value}",
            where="profile",
            remedy="run penstock profile with this job",
        )
    cost = measured_cost(profile)
    return Problem(
        **common_fields(spec),
        num_devices=spec.resources.ranks,
        memory_limit_bytes=spec.resources.memory_per_rank,
        cost_of=lambda tp: cost,
        hosts=_hosts(profile, spec.resources.ranks),
        link_tolerance=LINK_TOLERANCE,
        profile_digest=profile.digest,
    )


def _hosts(profile: Profile, num_devices: int) -> tuple[int, ...]:
    """The host of every device; those beyond what was measured are taken to be on the last one."""
    measured = profile.hosts or (0,) * profile.num_ranks
    return tuple(measured[min(device, len(measured) - 1)] for device in range(num_devices))
