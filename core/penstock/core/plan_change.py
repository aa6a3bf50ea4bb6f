"""Change of a running plan: whether the same processes can continue with another one from the next step on.

A rank has the parameters, gradients and optimizer state of its stages. Their layout follows from the model, its
precision, the mesh, the stages and their ranks, and the division of the optimizer state. A plan that has all of these
in common with the running one needs no restart: the ranks compile its Program, lay out a new arena, and continue with
the same parameters. Slices, micro-batches, the order of actions and recomputation may differ.

Example: two ranks run 1F1B with four slices, and later a plan with eight slices and another order is faster. Its stages
are the same ranges of units on the same ranks, so it is taken after the current step. A plan with other stages moves
units to another rank. That needs a checkpoint, from which a new attempt starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.plan import Plan

_LAYOUT = {
    "model": "the model",
    "precision": "the precision",
    "moment_type": "the type of moments",
    "gradient_reduction_type": "the type in which gradients are exchanged",
    "global_batch": "the global batch",
    "sequence_length": "the sequence length",
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "sequence_parallel": "sequence parallelism",
    "zero": "zero",
    "stages": "the stages",
    "late_receives": "the kind of device",
}
"""Attributes of a plan on which the state of a rank depends, and their names in messages."""


def restart_reasons(
    plan: Plan, stage_ranks: Sequence[int], other: Plan, other_stage_ranks: Sequence[int]
) -> tuple[str, ...]:
    """The differences because of which processes that run ``plan`` cannot continue with ``other``; empty if they can.

    ``stage_ranks`` and ``other_stage_ranks`` are the ranks of the stages, which follow from the schedules.
    """
    reasons = [text for name, text in _LAYOUT.items() if getattr(plan, name) != getattr(other, name)]
    if _devices(plan) != _devices(other):
        reasons.append("the placement of ranks on devices")
    if tuple(stage_ranks) != tuple(other_stage_ranks):
        reasons.append("the ranks of the stages")
    return tuple(reasons)


def _devices(plan: Plan) -> tuple[int, ...]:
    """The device of every rank; a plan without a placement has them in order."""
    return plan.devices or tuple(range(plan.num_ranks))
