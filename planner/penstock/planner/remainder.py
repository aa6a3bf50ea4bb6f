"""Slices of a last micro-batch that is smaller than the others.

It has the fewest slices of which none takes longer than the longest slice of the others: one t_max for all batches
(TeraPipe, arXiv 2102.07988, section 3.4). A pipeline runs at the pace of its longest slice, so shorter ones at the end
would save nothing and cost their overhead. Times are those of the whole model, so the lengths depend only on the other
slices: the same slices always give the same remainder.
"""

from __future__ import annotations

import itertools

import numpy as np

from penstock.planner.problem import MOST_BALANCED_SLICES, Mesh, Problem, imported_schedule
from penstock.planner.stagecost import Slices, equal_slices, prefixes


def remainder_slices(problem: Problem, mesh: Mesh, slices: Slices) -> Slices:
    """Lengths in tokens, at most as many as ``slices`` of the other micro-batches; empty if all micro-batches are
    alike.

    An imported schedule with fewer slices in its last micro-batch determines their number.
    """
    if not mesh.remainder:
        return ()
    imported = imported_schedule(problem.pinned)
    num_slices = 0 if imported is None else imported.num_remainder_slices
    if max(num_slices, len(slices)) == 1 or mesh.pp == 1:
        return (problem.sequence_length,)
    if len(slices) > MOST_BALANCED_SLICES:
        return equal_slices(problem.sequence_length, num_slices or -(-len(slices) * mesh.remainder // mesh.microbatch))
    slicings = problem.slicings(mesh.tp, mesh.remainder)
    if num_slices:
        return (
            slicings[num_slices].lengths
            if num_slices in slicings
            else equal_slices(problem.sequence_length, num_slices)
        )
    times = problem.slice_ns(mesh.tp, mesh.microbatch, np.array(slices), prefixes(slices))
    counts = itertools.takewhile(lambda count: count <= len(slices), slicings)
    fitting = (slicings[count].lengths for count in counts if slicings[count].largest_ns <= times.max())
    return next(fitting, slices)
