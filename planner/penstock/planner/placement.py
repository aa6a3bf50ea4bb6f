"""Placement of ranks on devices whose links differ (Pipette, arXiv 2405.18093, section 4).

A device group has ``tp`` adjacent devices; an arrangement assigns one to every rank of every replica. Arrangements are
ranked by a lower bound from the simulator's own tables. Then they are simulated in that order until no remaining bound
is lower: all arrangements if they are few, else the best ones of simulated annealing. The default order is always
included. A schedule that is made from costs is made for each arrangement; the best one is then tried with all
arrangements, since it may suit another better.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from penstock.planner.candidate import Candidate
from penstock.planner.device_order import devices_in_order
from penstock.planner.evaluate import VARIED, Simulated, owners_of
from penstock.planner.judge import Evaluation
from penstock.planner.problem import Mesh, Problem
from penstock.planner.work import Floats

MOST_DEVICE_GROUPS_TRIED_IN_FULL = 7
MOST_DEVICE_GROUPS, DEVICE_GROUPS_AT_ONCE = 4_096, 128
"""With more device groups, ranks stay in the default order: comparing the links of all pairs would take too long."""
MOST_MOVES = 1_500
MOST_FINALISTS = 12
MOST_ACTIONS_TRIED_ELSEWHERE = 1_000_000
"""Compute actions that may be simulated to try a schedule with other arrangements."""

HOTTEST, COLDEST = 0.02, 1e-5
"""The annealing temperature falls geometrically between these fractions of the first bound."""

Arrangement = tuple[int, ...]
"""The device group of every rank, replica after replica."""

Placed = tuple[Simulated, Evaluation]
"""The evaluation of a candidate, and the judge with its placement."""


def placed(judge: Simulated, evaluation: Evaluation) -> Placed:
    """The candidate on the devices where its step is shortest, and the judge with that placement."""
    problem, mesh = judge.problem, evaluation.candidate.mesh
    if mesh.dp * mesh.pp == 1 or links_are_alike(problem, mesh):
        return judge, evaluation
    ranked = _ranked(judge, evaluation.candidate)
    best = _shortest((judge, evaluation), evaluation.candidate, ranked)
    num_tried = MOST_ACTIONS_TRIED_ELSEWHERE // evaluation.candidate.num_actions
    if evaluation.candidate.schedule not in VARIED or not num_tried:
        return best
    recorded = replace(evaluation.candidate, schedule=best[0].spec(evaluation.candidate), variant=None)
    return _shortest(best, recorded, ranked[:num_tried])


def _shortest(best: Placed, candidate: Candidate, ranked: Sequence[tuple[int, Arrangement]]) -> Placed:
    """The best so far, or the candidate with an arrangement in which its step is shorter and fits."""
    problem = best[0].problem
    for bound_ns, arrangement in ranked:
        if bound_ns >= best[1].step_ns:
            break
        arranged = _with_arrangement(best[0], candidate.mesh, arrangement)
        evaluation = arranged.evaluate(candidate, in_full=best[1].is_exact)
        fits = max(evaluation.peak_bytes) <= problem.memory_limit_bytes
        if fits and evaluation.step_ns < best[1].step_ns:
            best = (arranged, evaluation)
    return best


def links_are_alike(problem: Problem, mesh: Mesh) -> bool:
    """Whether the default order suffices: all links are equal up to the problem's tolerance.

    Always true for more than `MOST_DEVICE_GROUPS` device groups. With many of them, links inside hosts may differ
    from those between hosts if the default order, stage after stage, fills hosts one after another.
    """
    if problem.num_devices // mesh.tp > MOST_DEVICE_GROUPS:
        return True
    first_devices = np.arange(problem.num_devices // mesh.tp) * mesh.tp
    hosts = problem.host_of(first_devices)
    order = np.reshape(devices_in_order(problem, mesh), (mesh.dp, mesh.pp)).T.ravel() // mesh.tp
    changes = np.count_nonzero(np.diff(hosts[order]))
    is_large = len(first_devices) > MOST_DEVICE_GROUPS_TRIED_IN_FULL
    keeps_to_hosts = is_large and changes < len(np.unique(hosts[order]))
    least, most = np.full((2, 2), math.inf), np.zeros((2, 2))
    for first in range(0, len(first_devices), DEVICE_GROUPS_AT_ONCE):
        source, target = np.meshgrid(first_devices[first : first + DEVICE_GROUPS_AT_ONCE], first_devices, indexing="ij")
        same_host = hosts[first : first + DEVICE_GROUPS_AT_ONCE, None] == hosts
        kinds = (~same_host, same_host & (source != target)) if keeps_to_hosts else (source != target,)
        for row, values in enumerate(problem.cost_of(mesh.tp).transfer(source, target)):
            for column, kind in enumerate(kinds):
                least[row, column] = min(least[row, column], values[kind].min(initial=math.inf))
                most[row, column] = max(most[row, column], values[kind].max(initial=0.0))
    return bool((most <= least * problem.link_tolerance).all())


def _with_arrangement(judge: Simulated, mesh: Mesh, arrangement: Arrangement) -> Simulated:
    """The judge with this mesh's ranks on these device groups."""
    devices = tuple(group * mesh.tp for group in arrangement)
    return judge.placing(lambda other: devices if other == mesh else judge.placement(other))


def bound_ns(judge: Simulated, candidate: Candidate, arrangement: Arrangement) -> int:
    """Lower bound of the arrangement's step: warm-up, busiest rank and cool-down, or all messages of its busiest
    channel.
    """
    arranged = _with_arrangement(judge, candidate.mesh, arrangement)
    costs = arranged.costs(candidate, owners_of(candidate))
    busiest = int((costs.transfer_ns @ costs.counts(candidate.mesh.num_microbatches)).max())
    return max(arranged.bound_ns(candidate), busiest)


def _ranked(judge: Simulated, candidate: Candidate) -> list[tuple[int, Arrangement]]:
    """Arrangements to simulate, by rising bound."""
    num_groups = judge.problem.num_devices // candidate.mesh.tp
    if num_groups <= MOST_DEVICE_GROUPS_TRIED_IN_FULL:
        return sorted(
            (bound_ns(judge, candidate, arrangement), arrangement)
            for arrangement in every_arrangement(judge, candidate.mesh)
        )
    return _annealed(judge, candidate, num_groups)


def every_arrangement(judge: Simulated, mesh: Mesh) -> Iterator[Arrangement]:
    """One of each set of arrangements that differ only in the order of replicas or of equivalent device groups."""
    classes = device_group_classes(judge.problem, mesh)
    keys = set()
    for arrangement in itertools.permutations(range(len(classes)), mesh.dp * mesh.pp):
        key = _arrangement_key(classes, mesh, arrangement)
        if key not in keys:
            keys.add(key)
            yield arrangement


def _arrangement_key(classes: list[int], mesh: Mesh, arrangement: Arrangement) -> tuple[tuple[int, ...], ...]:
    rank_classes = [classes[group] for group in arrangement]
    return tuple(sorted(tuple(rank_classes[i : i + mesh.pp]) for i in range(0, len(rank_classes), mesh.pp)))


def device_group_classes(problem: Problem, mesh: Mesh) -> list[int]:
    """For each device group the first equivalent one: on the same host, as fast, with the same links to all others."""
    first_devices = np.arange(problem.num_devices // mesh.tp) * mesh.tp
    links = np.stack(problem.cost_of(mesh.tp).transfer(first_devices[:, None], first_devices))
    slowness = problem.slowness_of(first_devices[:, None] + np.arange(mesh.tp)).max(axis=1)
    kinds = list(zip(problem.host_of(first_devices).tolist(), slowness.tolist(), strict=True))
    classes: list[int] = []
    for group in range(len(first_devices)):
        equivalent = (first for first in classes if kinds[first] == kinds[group] and _are_alike(links, first, group))
        classes.append(next(equivalent, group))
    return classes


def _are_alike(links: Floats, first: int, second: int) -> bool:
    """Whether swapping two device groups preserves all links; ``links`` is [2, groups, groups]."""
    order = np.arange(links.shape[1])
    order[[first, second]] = second, first
    exchanged = links[:, order][:, :, order]
    is_off_diagonal = ~np.eye(len(order), dtype=bool)
    return bool((exchanged == links)[:, is_off_diagonal].all())


def _annealed(judge: Simulated, candidate: Candidate, num_groups: int) -> list[tuple[int, Arrangement]]:
    """Simulated annealing over orders of all device groups, of which the first ones are used; returns the best
    arrangements visited.
    """
    rng = random.Random(0)
    mesh = candidate.mesh
    num_taken = mesh.dp * mesh.pp
    first = [device // mesh.tp for device in devices_in_order(judge.problem, mesh)]
    order = first + [group for group in range(num_groups) if group not in set(first)]
    bound = bound_ns(judge, candidate, tuple(order[:num_taken]))
    hottest = HOTTEST * bound
    bounds_ns = {tuple(order[:num_taken]): bound}
    for step in range(MOST_MOVES):
        temperature = hottest * (COLDEST / HOTTEST) ** (step / MOST_MOVES)
        moved = _moved(order, rng)
        arrangement = tuple(moved[:num_taken])
        if arrangement not in bounds_ns:
            bounds_ns[arrangement] = bound_ns(judge, candidate, arrangement)
        gain = bound - bounds_ns[arrangement]
        if gain >= 0 or rng.random() < math.exp(gain / temperature):
            order, bound = moved, bounds_ns[arrangement]
    return heapq.nsmallest(MOST_FINALISTS, ((bound, arrangement) for arrangement, bound in bounds_ns.items()))


def _moved(order: list[int], rng: random.Random) -> list[int]:
    """Two device groups swapped, a range of them reversed, or one moved."""
    low, high = sorted(rng.sample(range(len(order)), 2))
    moved, kind = order.copy(), rng.randrange(3)
    if kind == 0:
        moved[low], moved[high] = moved[high], moved[low]
    elif kind == 1:
        moved[low : high + 1] = reversed(moved[low : high + 1])
    else:
        moved.insert(low, moved.pop(high))
    return moved
