"""The slices of a last micro-batch that is smaller than the others.

It has as few as have none that takes longer than the longest slice of the others: one t_max for all batches (TeraPipe,
arXiv 2102.07988, section 3.4). A pipeline moves at the pace of its longest slice, so shorter ones at the end would save
nothing and cost their overhead. Times are those of the whole model, so the lengths follow from those of the other
slices alone: a plan that is made again with the same slices has the same.
"""

from __future__ import annotations

import numpy as np

from penstock.planner.problem import MOST_BALANCED_SLICES, Mesh, Problem, imported_schedule
from penstock.planner.stagecost import Slices, equal_slices, prefixes


def remainder_slices(problem: Problem, mesh: Mesh, slices: Slices) -> Slices:
    """Lengths in tokens, at most as many as ``slices`` of the other micro-batches; none if all are alike.

    An imported schedule that has fewer slices in its last micro-batch says how many.
    """
    if not mesh.remainder:
        return ()
    imported = imported_schedule(problem.pinned)
    own = 0 if imported is None else imported.num_remainder_slices
    if max(own, len(slices)) == 1 or mesh.pp == 1:
        return (problem.sequence_length,)
    if len(slices) > MOST_BALANCED_SLICES:
        return equal_slices(problem.sequence_length, own or -(-len(slices) * mesh.remainder // mesh.microbatch))
    found = problem.slicings(mesh.tp, mesh.remainder)
    if own:
        return found[own].lengths if own in found else equal_slices(problem.sequence_length, own)
    times = problem.slice_ns(mesh.tp, mesh.microbatch, np.array(slices), prefixes(slices))
    enough = (each for count, each in found.items() if count <= len(slices) and each.largest_ns <= times.max())
    return next((each.lengths for each in enough), slices)
