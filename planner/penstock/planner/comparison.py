"""A plan's memory by rank and cause, next to the measured peaks."""

from __future__ import annotations

from penstock.core.comparison import RankMemory
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.planner.compile import schedule_of
from penstock.planner.memory import StageMemory


def rank_memory(plan: Plan, constant_bytes: int, measured: Timeline | None) -> tuple[RankMemory, ...]:
    """Predicted bytes of each global rank by cause, and its measured peak. Replicas hold the same. Every shard of a
    pipeline rank is predicted like the largest one.

    ``constant_bytes`` is the memory of a rank's process before any parameter, from the profile.
    """
    if plan.prediction is None:
        return ()
    memory = StageMemory(
        model=plan.model,
        precision=plan.precision,
        stages=plan.stages,
        batch=plan.microbatch,
        sharding=plan.sharding,
        optimizer_shards=plan.optimizer_shards,
        has_buckets=not plan.late_receives,
        moment_type=plan.moment_type,
    )
    state = [0] * plan.pp
    for num_bytes, rank in zip(memory.state_bytes.tolist(), schedule_of(plan).stage_ranks, strict=True):
        state[rank] += num_bytes
    peaks = measured.peak_bytes if measured else ()
    slots, predicted = plan.prediction.slot_bytes, plan.prediction.peak_bytes
    return tuple(
        RankMemory(
            constant_bytes=constant_bytes,
            state_bytes=state[pipeline_rank],
            slot_bytes=slots[pipeline_rank],
            transient_bytes=predicted[pipeline_rank] - slots[pipeline_rank] - state[pipeline_rank] - constant_bytes,
            measured_bytes=peaks[rank] if rank < len(peaks) else None,
        )
        for rank in range(plan.num_ranks)
        for pipeline_rank in (plan.mesh.pipeline_rank(rank),)
    )
