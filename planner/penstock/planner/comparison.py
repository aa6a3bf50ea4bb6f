"""A plan's memory, rank by rank and by cause, beside what was measured."""

from __future__ import annotations

from penstock.core.comparison import RankMemory
from penstock.core.layout import stage_parameters
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.planner.memory import state_bytes_per_parameter
from penstock.planner.realise import schedule_of


def rank_memory(plan: Plan, constant_bytes: int, measured: Timeline | None) -> tuple[RankMemory, ...]:
    """Where each rank's bytes were predicted to go, beside the measured peak; replicas hold the same.

    ``constant_bytes`` is what a rank's process needs before any parameter, as the profile has it.
    """
    if plan.prediction is None:
        return ()
    state = [0] * plan.pp
    for (first, stop), rank in zip(plan.stages, schedule_of(plan).stage_ranks, strict=True):
        state[rank] += stage_parameters(plan.model, first, stop, plan.tp) * state_bytes_per_parameter(plan.precision)
    prediction = plan.prediction
    peaks: tuple[int | None, ...] = measured.peak_bytes if measured else ()
    return tuple(
        RankMemory(
            constant_bytes=constant_bytes,
            state_bytes=state[rank % plan.pp],
            slot_bytes=prediction.slot_bytes[rank % plan.pp],
            transient_bytes=prediction.peak_bytes[rank % plan.pp]
            - prediction.slot_bytes[rank % plan.pp]
            - state[rank % plan.pp]
            - constant_bytes,
            measured_bytes=peaks[rank] if rank < len(peaks) else None,
        )
        for rank in range(plan.num_ranks)
    )
