"""Parts of the hardware that a job may use: some kinds of a cluster's devices, and a number of devices of these.

On a fixed set of devices a shorter step means that a run ends sooner and costs less. So time and money only trade off
between sets, and each set needs only the usual search. The number of sets is limited. If a kind has few devices, every
number of them is tried, else the largest, the smallest, and divisors or whole hosts between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.core.cluster import ClusterSpec, LinkOverride, OtherDevices
from penstock.core.errors import UserError
from penstock.core.job import JobSpec, Objective
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.planner.measured import problem_from_profile
from penstock.planner.problem import Problem, problem_from_cluster
from penstock.planner.sizes import divisors

Hardware = Profile | ClusterSpec

MOST_SUBSETS = 12
"""Largest number of sets of devices that are planned for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subset:
    """``num_devices`` devices of ``hardware``, all of which a plan uses.

    ``devices`` maps the device numbers of ``hardware`` to those of the whole hardware; empty if both are the same.
    """

    spec: JobSpec
    hardware: Hardware
    num_devices: int
    devices: tuple[int, ...] = ()

    def problem(self, objective: Objective) -> Problem:
        """The planning problem on exactly this number of devices."""
        problem = problem_for(self.spec, self.hardware)
        number = self.num_devices
        return dataclasses.replace(problem, objective=objective, min_devices=number, most_devices=number, _divided={})

    def in_whole(self, plan: Plan) -> Plan | None:
        """The plan with the numbers that its devices have in the whole hardware.

        None if the shards of a rank would not have successive numbers there.
        """
        if not self.devices:
            return plan
        ranks = [[self.devices[first + shard] for shard in range(plan.tp)] for first in plan.placement]
        if any(shards[-1] - shards[0] != plan.tp - 1 for shards in ranks):
            return None
        return dataclasses.replace(plan, placement=tuple(shards[0] for shards in ranks))


def problem_for(spec: JobSpec, hardware: Hardware) -> Problem:
    """The planning problem of ``spec`` on ``hardware``."""
    if isinstance(hardware, ClusterSpec):
        return problem_from_cluster(spec, hardware)
    return problem_from_profile(spec, hardware)


def subsets(spec: JobSpec, hardware: Hardware) -> list[Subset]:
    """At most `MOST_SUBSETS` sets of the job's devices, from ``minRanks`` devices on, the largest sets first.

    Every combination of kinds, each with several numbers of devices.
    """
    whole = list(_whole_sets(spec, hardware))[:MOST_SUBSETS]
    fewest, host_size = (
        spec.resources.min_ranks or 1,
        hardware.devices_per_node if isinstance(hardware, ClusterSpec) else 1,
    )
    chosen = []
    for subset in whole:
        numbers = counts(fewest, subset.num_devices, MOST_SUBSETS // len(whole), host_size)
        chosen += [dataclasses.replace(subset, num_devices=number) for number in numbers]
    return sorted(chosen, key=lambda subset: -subset.num_devices)


def neglected_kinds(spec: JobSpec, hardware: Hardware) -> list[tuple[Subset, Problem]]:
    """Combinations of kinds that one search over all devices neglects, with their problems for the least time.

    That search limits every rank to the memory of the smallest device, and uses the fastest devices first, even if they
    are interrupted more often than others. There are none if the job uses all devices.
    """
    fewest = spec.resources.min_ranks
    if fewest is None:
        return []
    whole, *parts = itertools.islice(_whole_sets(spec, hardware), MOST_SUBSETS)
    of_all = whole.problem(Objective.TIME)
    differ = len(set(of_all.interruptions_per_hour)) > 1
    neglected = []
    for part in parts:
        problem = dataclasses.replace(part.problem(Objective.TIME), min_devices=fewest, _divided={})
        has_more_memory = problem.memory_limit_bytes > of_all.memory_limit_bytes
        if fewest <= part.num_devices and (differ or has_more_memory):
            neglected.append((part, problem))
    return neglected


def counts(fewest: int, most: int, limit: int, host_size: int = 1) -> list[int]:
    """Numbers of devices, descending: all from ``fewest`` to ``most`` if there are at most ``limit``.

    Else both ends, and between them numbers in about a geometric series, each a divisor of ``most`` or a multiple of
    ``host_size``; ``limit`` in all.
    """
    if fewest > most:
        return []
    if most - fewest < limit:
        return list(range(most, fewest - 1, -1))
    if limit == 1:
        return [most]
    suitable = [number for number in {*divisors(most), *range(host_size, most, host_size)} if fewest <= number <= most]
    ratios = [i / (limit - 1) for i in range(limit)]
    targets = [most * (fewest / most) ** ratio for ratio in ratios]
    nearest = {min(sorted(suitable), key=lambda number: abs(math.log(number / target))) for target in targets}
    return sorted({most, fewest, *sorted(nearest - {most, fewest}, reverse=True)[: limit - 2]}, reverse=True)


def _whole_sets(spec: JobSpec, hardware: Hardware) -> Iterator[Subset]:
    """All devices of the job, then those of each smaller combination of kinds, larger combinations first."""
    ranks = spec.resources.ranks
    yield Subset(spec=spec, hardware=hardware, num_devices=ranks)
    if isinstance(hardware, Profile):
        return
    kinds = sorted(set(hardware.kinds_of(ranks)))
    for size in range(len(kinds) - 1, 0, -1):
        for chosen in itertools.combinations(kinds, size):
            with contextlib.suppress(UserError):  # more devices are pinned than there are of these kinds
                yield _of_kinds(spec, hardware, chosen)


def _of_kinds(spec: JobSpec, cluster: ClusterSpec, chosen: Sequence[int]) -> Subset:
    """The job's devices of the ``chosen`` kinds, which are a cluster of their own."""
    kinds = cluster.kinds_of(cluster.num_devices)
    devices = tuple(device for device, kind in enumerate(kinds) if kind in chosen)
    nodes = sorted({cluster.node_of(device) for device in devices})
    counts_of_kinds = [sum(kinds[node * cluster.devices_per_node] == kind for node in nodes) for kind in chosen]
    numbers = {node: number for number, node in enumerate(nodes)}
    others = zip(chosen[1:], counts_of_kinds[1:], strict=True)
    part = dataclasses.replace(
        cluster,
        device=cluster.device_kinds[chosen[0]],
        num_nodes=len(nodes),
        other_devices=tuple(OtherDevices(device=cluster.device_kinds[kind], num_nodes=count) for kind, count in others),
        links=tuple(_renumbered(link, numbers) for link in cluster.links if {link.source, link.target} <= set(nodes)),
    )
    ranks = sum(device < spec.resources.ranks for device in devices)
    resources = dataclasses.replace(spec.resources, ranks=ranks, min_ranks=1)
    kubernetes = dataclasses.replace(spec.kubernetes, ranks_per_pod=1)
    part_spec = dataclasses.replace(spec, resources=resources, kubernetes=kubernetes)
    return Subset(spec=part_spec, hardware=part, num_devices=ranks, devices=devices[:ranks])


def _renumbered(link: LinkOverride, numbers: dict[int, int]) -> LinkOverride:
    return dataclasses.replace(link, source=numbers[link.source], target=numbers[link.target])
