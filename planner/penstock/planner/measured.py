"""The planning problem of a measured machine; separate from `problem` because fitting loads scipy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from penstock.core.devices import reported_peak_flops
from penstock.core.errors import UserError
from penstock.core.job import Device, JobSpec
from penstock.core.moments import MomentType
from penstock.core.profile import Profile
from penstock.core.replicas import ReductionType
from penstock.core.schedule import Kind
from penstock.planner.fit import FitReport, measured_cost
from penstock.planner.problem import Confidence, Problem, common_fields

LINK_TOLERANCE = 2.0
"""Links of one kind have been measured up to this factor apart."""


def problem_from_profile(spec: JobSpec, profile: Profile) -> Problem:
    """The problem of running ``spec`` on the machine that ``profile`` measured, limited to its degrees of tensor
    parallelism and parts of the head.
    """
    if profile.precision is not spec.training.precision:
        raise UserError(
            what=f"was measured in {profile.precision.value}, the job trains in {spec.training.precision.value}",
            where="profile",
            remedy="run penstock profile with this job",
        )
    tp_degrees = _tp_degrees(spec, profile)
    head_degrees = {tp: _head_degrees(profile, tp) for tp in tp_degrees}
    moment_type = spec.training.optimizer.moment_type
    reduction_type = spec.training.gradient_reduction_type
    costs = {
        (tp, parts): measured_cost(profile, tp, parts, moment_type, reduction_type)
        for tp in tp_degrees
        for parts in head_degrees[tp]
    }
    return Problem(
        **common_fields(spec),
        num_devices=spec.resources.ranks,
        memory_limit_bytes=spec.resources.memory_per_rank,
        costs=lambda tp, head_parts: costs[tp, head_parts],
        tp_degrees=tp_degrees,
        head_degrees=head_degrees.__getitem__,
        hosts=_hosts(profile, spec.resources.ranks),
        slowness=_slowness(profile, spec.resources.ranks),
        has_fixed_ranks=spec.resources.device is Device.CPU and not profile.hosts,
        link_tolerance=LINK_TOLERANCE,
        profile_digest=profile.digest,
        confidence=confidence_in(
            profile, [report for cost in costs.values() for report in cost.reports], moment_type, reduction_type
        ),
        peak_flops=reported_peak_flops(profile.key.device, profile.precision),
    )


def _tp_degrees(spec: JobSpec, profile: Profile) -> tuple[int, ...]:
    """The measured degrees; several shards only count if they divided hidden states as the job's do."""
    is_alike = profile.sequence_parallel is spec.parallelism.is_sequence_parallel
    degrees = tuple(tp for tp in profile.tp_degrees if tp == 1 or (is_alike and spec.model.can_be_sharded(tp)))
    return degrees or (1,)


def _head_degrees(profile: Profile, tp: int) -> tuple[int, ...]:
    """The measured numbers of parts of the head at this degree, ascending."""
    return tuple(sorted({1, *(parts for degree, parts in profile.degrees if degree == tp)}))


def confidence_in(
    profile: Profile,
    reports: Sequence[FitReport],
    moment_type: MomentType = MomentType.FP32,
    reduction_type: ReductionType = ReductionType.FP32,
) -> Confidence:
    """Of computing, half the median interquartile range or the held-out error of the fit, whichever is larger; of
    reductions and the optimizer, half the largest range; of transfers, the largest error of a link.

    The worst link and the worst reduction decide, since one slow link delays all ranks. R of the operations without
    products does not count: it is short, noisy, and a small part of any step.
    """
    passes = [record for record in profile.units if record.kind is not Kind.R]
    spreads = [record.spread if record.together_spread is None else record.together_spread for record in passes]
    errors = [report.held_out_error for report in reports if report.kind is not Kind.R]
    held_out = [error for error in errors if not math.isnan(error)]
    collectives = [
        record for record in profile.collectives if record.reduction_type in (ReductionType.FP32, reduction_type)
    ]
    return Confidence(
        computing=max(statistics.median(spreads) / 2, statistics.median(held_out) if held_out else 0.0),
        transfers=max((link.error for link in profile.links), default=0.0),
        reductions=max((record.spread for record in collectives), default=0.0) / 2,
        optimizer=max((record.spread for record in profile.optimizer if record.moment_type is moment_type), default=0.0)
        / 2,
        warnings=profile.warnings,
    )


def _slowness(profile: Profile, num_devices: int) -> tuple[float, ...]:
    """The slowness of every device; devices beyond the measured ones count like the last rank."""
    measured = profile.slowness
    return tuple(measured[min(device, len(measured) - 1)] for device in range(num_devices)) if measured else ()


def _hosts(profile: Profile, num_devices: int) -> tuple[int, ...]:
    """The host of every device; devices beyond the measured ones count as on the last host."""
    measured = profile.hosts or (0,) * profile.num_ranks
    return tuple(measured[min(device, len(measured) - 1)] for device in range(num_devices))
