"""Whether a profile fits a job: its model, precision, ranks, micro-batches, links, degrees of parallelism, and age.

The caller compares the machine, which only PyTorch can identify.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.layout import Precision
from penstock.core.model import ModelSpec, UnitKind, linear_flops_per_token, step_flops
from penstock.core.moments import MomentType
from penstock.core.profile import MachineKey, Profile, digest
from penstock.core.replicas import ReductionType
from penstock.core.units import MEBIBYTE, format_bytes

OLDEST_SECONDS = 7 * 86_400
LARGEST_BATCH = 4
ENOUGH_TOKENS = 4096
"""Tokens of a micro-batch beyond which costs are proportional to tokens, since fixed costs are small."""

HEAVY_SHARE = 0.75
"""A head is divided for measurements only if its work is above this fraction of a pipeline rank's mean work."""

ANY_GLOBAL_BATCH = 12
"""Global batch of a measurement for any job. Micro-batches are measured if they divide it (`batches_to_measure`), as
all up to `LARGEST_BATCH` do.
"""


def model_digest(model: ModelSpec, sequence_length: int) -> str:
    """Digest of everything that unit costs depend on: the model's dimensions without the number of blocks."""
    dimensions = model.to_manifest()
    del dimensions["layers"]
    return digest({**dimensions, "sequenceLength": sequence_length})


def require_device_memory(memory_per_rank: int, device_bytes: int) -> None:
    """Raise `UserError` if a rank may take more than the ``device_bytes`` of its CUDA device."""
    if memory_per_rank > device_bytes:
        raise UserError(
            what=f"{format_bytes(memory_per_rank)} is more than the {format_bytes(device_bytes)} of a device here",
            where="spec.resources.memoryPerRank",
            remedy=f"write at most {device_bytes // MEBIBYTE}Mi, minus the memory of the CUDA context",
        )


def subject(machine: MachineKey, model: str, precision: Precision, num_ranks: int) -> str:
    """Digest of machine, model, precision and ranks. Of the profiles with the same digest the newest is used.

    ``model`` is the model's digest.
    """
    return digest([machine.to_manifest(), model, precision.value, num_ranks])


def batches_to_measure(global_batch: int) -> tuple[int, ...]:
    """Micro-batch sizes that a plan could use, up to a bound beyond which costs are proportional."""
    return tuple(b for b in range(1, min(global_batch, LARGEST_BATCH) + 1) if global_batch % b == 0)


def largest_microbatch(global_batch: int, sequence_length: int) -> int:
    """Sequences of the largest micro-batch that is measured as a whole: the largest of `batches_to_measure`, and for
    short sequences as many as have `ENOUGH_TOKENS`.
    """
    most = max(LARGEST_BATCH, ENOUGH_TOKENS // sequence_length)
    return max(b for b in range(1, min(global_batch, most) + 1) if global_batch % b == 0)


def tp_degrees_to_measure(spec: JobSpec, hosts: Sequence[int]) -> tuple[int, ...]:
    """Degrees of tensor parallelism that a plan may have, ascending; ``hosts`` are those of all ranks, in order.

    The pinned degree, else every degree that divides the model and the ranks and keeps the adjacent shards of each
    group on one host.
    """
    pinned, model, num_ranks = spec.parallelism.tp, spec.model, len(hosts)
    if pinned is not None:
        return (pinned if model.can_be_sharded(pinned) and pinned <= num_ranks else 1,)
    return tuple(
        tp
        for tp in range(1, num_ranks + 1)
        if num_ranks % tp == 0
        and model.can_be_sharded(tp)
        and all(len(set(hosts[first : first + tp])) == 1 for first in range(0, num_ranks, tp))
    )


def head_degrees_to_measure(spec: JobSpec, tp: int, num_ranks: int) -> tuple[int, ...]:
    """Numbers of parts, at least 2, in which the head is measured at a degree of tensor parallelism, ascending.

    Powers of two and the number of pipeline ranks, if a whole head is more than `HEAVY_SHARE` of an even share of the
    work: a lighter one leaves its rank time for blocks, and dividing it gains nothing. Also the pinned number.
    """
    model, pinned = spec.model, spec.parallelism.head_parts
    num_stages = num_ranks // tp
    length = spec.data.sequence_length
    head = 3 * length * linear_flops_per_token(model, UnitKind.HEAD)
    is_heavy = head * num_stages > HEAVY_SHARE * step_flops(model, 1, length)
    powers = (2**power for power in range(1, num_stages.bit_length()))
    degrees = {*powers, num_stages} if is_heavy else set()
    return tuple(sorted(parts for parts in {*degrees, pinned or 1} if 1 < parts <= model.vocab // tp))


def unfit(profile: Profile, spec: JobSpec, model: str) -> str | None:
    """The reason why ``profile`` does not fit ``spec``, whose model has the digest ``model``; None if it fits."""
    if profile.model_digest != model:
        return "is of another model"
    if profile.precision is not spec.training.precision:
        return f"was measured in {profile.precision.value}, the job trains in {spec.training.precision.value}"
    if profile.num_ranks != spec.resources.ranks:
        return f"was measured with {profile.num_ranks} ranks, the job has {spec.resources.ranks}"
    least_tp = min(profile.tp_degrees, default=1)
    batches = {record.batch for record in profile.units if record.tp == least_tp}
    if not set(batches_to_measure(spec.training.global_batch)) <= batches:
        return "lacks micro-batch sizes that the job may use"
    missing = unmeasured_type(profile, spec.training.optimizer.moment_type, spec.training.gradient_reduction_type)
    if missing:
        return missing
    if not all(link.is_physical for link in profile.links):
        return "has links of a speed that no network has"
    return unfit_degrees(profile, spec)


def unmeasured_type(profile: Profile, moment_type: MomentType, reduction_type: ReductionType | None) -> str | None:
    """Message about a type of moments or sums for which ``profile`` has no times; None if it has all.
    ``reduction_type`` is None if no sums are needed. Profiles without any such records pass.
    """
    if profile.optimizer and all(record.moment_type is not moment_type for record in profile.optimizer):
        return f"lacks times of the optimizer with moments in {moment_type.value}"
    if reduction_type is None or not profile.collectives:
        return None
    if all(record.reduction_type is not reduction_type for record in profile.collectives):
        return f"lacks sums of gradients in {reduction_type.value}"
    return None


def unfit_degrees(profile: Profile, spec: JobSpec) -> str | None:
    """The reason why ``profile`` does not fit the job's pinned parallelism; a profile that lacks a degree that is not
    pinned fits without that degree.
    """
    pinned, measured = spec.parallelism.tp, profile.tp_degrees
    if profile.only_tp not in (None, pinned):
        return f"was measured at tp {profile.only_tp} alone"
    degrees = tp_degrees_to_measure(spec, profile.hosts or (0,) * profile.num_ranks)
    if degrees[0] not in measured:
        return f"lacks units at tp {degrees[0]}"
    is_other = profile.sequence_parallel is not spec.parallelism.is_sequence_parallel
    if is_other and any(tp > 1 for tp in measured) and pinned != 1:
        return f"was measured {'with' if profile.sequence_parallel else 'without'} sequence parallelism"
    parts = spec.parallelism.head_parts or 1
    if (degrees[0], parts) not in profile.degrees:
        return f"lacks a head in {parts} parts at tp {degrees[0]}"
    return None


def stale(profile: Profile, now: float) -> str | None:
    """The reason why ``profile`` is too old at ``now`` (seconds since the epoch); None if it is not."""
    age = now - profile.measured_at
    return f"is {age / 86_400:.0f} days old" if age > OLDEST_SECONDS else None
