"""Which measurements serve a job: of its model, its precision, its ranks, its micro-batches, and not old.

Of which machine they are is for the caller to compare: only PyTorch knows what this one is to it.
"""

from __future__ import annotations

from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.layout import Precision
from penstock.core.model import ModelSpec
from penstock.core.profile import MachineKey, Profile, digest
from penstock.core.units import MEBIBYTE, format_bytes

OLDEST_SECONDS = 7 * 86_400
LONGEST_BATCH = 4
ANY_GLOBAL_BATCH = 12
"""Its divisors are all that are measured, so a measurement for it serves every job."""


def model_digest(model: ModelSpec, sequence_length: int) -> str:
    """What unit costs depend on: the dimensions, but not how many blocks there are."""
    dimensions = model.to_manifest()
    del dimensions["layers"]
    return digest({**dimensions, "sequenceLength": sequence_length})


def require_device_memory(memory_per_rank: int, device_bytes: int) -> None:
    """Raise `UserError` if a rank may take more than the ``device_bytes`` of its CUDA device."""
    if memory_per_rank > device_bytes:
        raise UserError(
            what=f"{format_bytes(memory_per_rank)} is more than the {format_bytes(device_bytes)} of a device here",
            where="spec.resources.memoryPerRank",
            remedy=f"write at most {device_bytes // MEBIBYTE}Mi, less what CUDA itself takes",
        )


def subject(machine: MachineKey, model: str, precision: Precision, num_ranks: int) -> str:
    """What a profile is of, as one digest; of those with the same the newest counts. ``model`` is its digest."""
    return digest([machine.to_manifest(), model, precision.value, num_ranks])


def batches_to_measure(global_batch: int) -> tuple[int, ...]:
    """Micro-batch sizes that a plan could use, up to a bound beyond which costs are in proportion."""
    return tuple(b for b in range(1, min(global_batch, LONGEST_BATCH) + 1) if global_batch % b == 0)


def unfit(profile: Profile, spec: JobSpec, model: str) -> str | None:
    """Why ``profile`` does not serve ``spec``, whose model has the digest ``model``; none if it does."""
    if profile.model_digest != model:
        return "is of another model"
    if profile.precision is not spec.training.precision:
        return f"was measured in {profile.precision.value}, the job trains in {spec.training.precision.value}"
    if profile.num_ranks != spec.resources.ranks:
        return f"was measured with {profile.num_ranks} ranks, the job has {spec.resources.ranks}"
    if not set(batches_to_measure(spec.training.global_batch)) <= {record.batch for record in profile.units}:
        return "lacks micro-batch sizes that the job may use"
    if not all(link.is_physical for link in profile.links):
        return "has links of a speed that no network has"
    return None


def stale(profile: Profile, now: float) -> str | None:
    """Why ``profile`` is too old at ``now`` (seconds since the epoch) to speak for its machine; none if it is not."""
    age = now - profile.measured_at
    return f"is {age / 86_400:.0f} days old" if age > OLDEST_SECONDS else None
