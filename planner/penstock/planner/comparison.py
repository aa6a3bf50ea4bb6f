"""A plan's memory, rank by rank and by cause, beside what was measured."""

from __future__ import annotations

from penstock.core.comparison import RankMemory
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.planner.memory import StageMemory
from penstock.planner.realise import schedule_of


def rank_memory(plan: Plan, constant_bytes: int, measured: Timeline | None) -> tuple[RankMemory, ...]:
    """Where each global rank's bytes were predicted to go, next to its measured peak. Replicas hold the same, shards of
    a pipeline rank no more than the largest of them.

    ``constant_bytes`` is what a rank's process needs before any parameter, as the profile has it.
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
    )
    state = [0] * plan.pp
    for num_bytes, rank in zip(memory.state_bytes.tolist(), schedule_of(plan).stage_ranks, strict=True):
        state[rank] += num_bytes
    peaks = measured.peak_bytes if measured else ()
    slots, predicted = plan.prediction.slot_bytes, plan.prediction.peak_bytes
    return tuple(
        RankMemory(
            constant_bytes=constant_bytes,
            state_bytes=state[own],
            slot_bytes=slots[own],
            transient_bytes=predicted[own] - slots[own] - state[own] - constant_bytes,
            measured_bytes=peaks[rank] if rank < len(peaks) else None,
        )
        for rank in range(plan.num_ranks)
        for own in (rank // plan.tp % plan.pp,)
    )
