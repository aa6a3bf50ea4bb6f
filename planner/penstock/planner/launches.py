"""The share of a rank's actions that have no CUDA graph, so that their host launches them kernel by kernel.

The trainer records the actions of a rank until their graphs take the memory that they may take
(`penstock.core.graphs`). A step has M actions of each slice, stage and kind, so the memory of graphs follows from
counts, and the search needs no list of actions: all actions of a slice length have as many tokens, and are recorded
before all of shorter slices. If graphs of only some of them fit, the first ones of a step get them. Their tables are
shared by all micro-batches, so each is charged the mean.

An R counts as an F, of which it repeats a part. If a stage recomputes inside its backwards, their graphs are larger by
as much.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.graphs import recorded_shares
from penstock.core.model import ModelSpec
from penstock.planner.candidate import Candidate
from penstock.planner.stagecost import Integers, UnitTable, unit_counts
from penstock.planner.work import Floats


def launched_shares(
    tables: Sequence[UnitTable], model: ModelSpec, candidate: Candidate, owners: Sequence[int]
) -> list[Floats]:
    """[stages, slices] for each of `penstock.planner.tables.unit_tables`: the share of the actions without a graph;
    empty if launches take no time, or no action has a graph. ``owners`` has the rank of every stage.
    """
    most_bytes, num_stages = tables[0].cost.most_graph_bytes, len(candidate.stages)
    if most_bytes is None or not any(table.may_wait_for_launches for table in tables):
        return []
    num_tokens = np.concatenate([table.batch * np.array(table.slices) for table in tables])
    of_stages = np.concatenate(
        [
            times * _stage_bytes(table, model, candidate)
            for table, times in zip(tables, (candidate.mesh.num_alike, 1), strict=False)
        ],
        axis=1,
    )
    of_ranks = np.zeros((candidate.mesh.pp, len(num_tokens)), dtype=np.int64)
    np.add.at(of_ranks, list(owners), of_stages)
    shares = np.zeros((num_stages, len(num_tokens)))
    sizes, places = np.unique(num_tokens, return_inverse=True)
    for rank in np.flatnonzero(of_ranks.sum(axis=1) > most_bytes).tolist():
        of_sizes = np.bincount(places, weights=of_ranks[rank]).astype(np.int64)
        recorded = recorded_shares(dict(zip(sizes.tolist(), of_sizes.tolist(), strict=True)), most_bytes)
        shares[np.array(owners) == rank] = 1.0 - np.array([recorded[size] for size in sizes.tolist()])[places]
    return np.split(shares, np.cumsum([len(table.slices) for table in tables[:-1]]), axis=1)


def _stage_bytes(table: UnitTable, model: ModelSpec, candidate: Candidate) -> Integers:
    """[stages, slices]: bytes of the graphs of a micro-batch."""
    forward, gradient, weight = unit_counts(model, candidate.stages) @ table.graph_bytes.transpose(1, 0, 2)
    remade = np.array([bool(remakes) for remakes in candidate.recompute] or [False])[:, None]
    num_bytes: Integers = forward * (1 + remade) + gradient + weight
    return num_bytes
