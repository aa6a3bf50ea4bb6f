"""Bytes of single units, of which sums over the units of a rank bound its memory before stages are cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.layout import SlotKind
from penstock.core.model import UnitKind
from penstock.planner.memory import optimizer_bytes_per_parameter
from penstock.planner.problem import Problem
from penstock.planner.stagecost import UNIT_KINDS, Integers, Stages
from penstock.planner.tables import memory_of

_HELD = (SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS, SlotKind.KEYS_VALUES)
_IS_OF_LAYERS = np.array([kind in (UnitKind.ATTENTION, UnitKind.MLP) for kind in UNIT_KINDS])


def unit_bytes(problem: Problem, tp: int, batch: int, optimizer_shards: int = 1) -> tuple[Integers, Integers]:
    """[unit kinds]: bytes of a unit's state with the gradients of its keys and values, and bytes that it holds for one
    micro-batch. Those of a layer's units include their input.

    Replicas divide the optimizer's state of a whole stage. Of a unit's state an equal share counts here.
    """
    length = [problem.sequence_length]
    memory = memory_of(problem, _unit_stages(problem), batch, tp)
    optimizer = optimizer_bytes(problem, tp)
    state = memory.state_bytes - optimizer + -(-optimizer // optimizer_shards)
    state += memory.slot_bytes(SlotKind.KEYS_VALUES_GRADIENTS, length)[:, 0]
    held = memory.total_slot_bytes(_HELD, length)[:, 0]
    inputs = memory.slot_bytes(SlotKind.INPUT, length)[:, 0]
    return state, held + np.where(_IS_OF_LAYERS, inputs, 0)


def optimizer_bytes(problem: Problem, tp: int) -> Integers:
    """[unit kinds]: what replicas may divide of a unit's state."""
    memory = memory_of(problem, _unit_stages(problem), 1, tp)
    return memory.num_parameters * optimizer_bytes_per_parameter(problem.precision, problem.moment_type)


def _unit_stages(problem: Problem) -> Stages:
    """A stage of the first unit of each kind."""
    first = {unit.kind: unit.index for unit in reversed(problem.model.units)}
    return tuple((first[kind], first[kind] + 1) for kind in UNIT_KINDS)


def gradient_slot_bytes(problem: Problem, tp: int, batch: int, lengths: Sequence[int]) -> Integers:
    """[unit kinds, lengths]: the gradients of outputs of slices of each length in tokens."""
    return memory_of(problem, _unit_stages(problem), batch, tp).slot_bytes(SlotKind.OUTPUT_GRADIENTS, lengths)
