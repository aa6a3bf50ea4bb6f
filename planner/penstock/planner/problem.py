"""A planning problem: the job's numbers, the hardware's costs, and the user's pins."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from penstock.core.cluster import PENSTOCK, ClusterSpec, SoftwareSpec
from penstock.core.errors import UserError
from penstock.core.job import Device, JobSpec, Objective, ParallelismSpec
from penstock.core.layout import LONG_SEQUENCE, Precision
from penstock.core.mesh import mesh_text
from penstock.core.model import ModelSpec, UnitKind, linear_flops_per_token
from penstock.core.moments import MomentType
from penstock.core.plan import microbatches_text
from penstock.core.replicas import ReductionType
from penstock.core.residency import NUM_PLACES
from penstock.core.schedule import Schedule, ScheduleSpec, parse_schedule
from penstock.core.sharding import Sharding
from penstock.core.units import NANOSECONDS_PER_SECOND, to_seconds
from penstock.planner.cost import CostModel, DescribedCost
from penstock.planner.interruptions import NO_RESTARTS, Interruptions
from penstock.planner.passes.rounds import can_join
from penstock.planner.pricing import interruptions_of, interruptions_of_kinds, prices_of_kinds
from penstock.planner.schedules.registry import find
from penstock.planner.sizes import divisors, microbatch_sizes
from penstock.planner.slicing import BalancedSlicings, Slicing, SlicingProblem, summable_unit_ns, tabulate
from penstock.planner.stagecost import Integers, UnitTable, slower_seconds, stage_slice_ns, unit_counts
from penstock.planner.work import Floats, rows_of

Value = TypeVar("Value")

MOST_QUANTA = 256
"""Slice boundaries fall on a grid of at most this many quanta, so that slicing takes milliseconds."""

MOST_BALANCED_SLICES = 64
"""With more slices only equal lengths are tried: each slice has few quanta, and boundaries lie between quanta."""

MOST_NUMBERED = 128
"""Above this number of devices, only numbers of whole hosts are tried, and at most this many of them: 1,023 of 1,024
devices are not tried.
"""

MOST_PARTS = 64
"""More parts of the head are only searched if they are pinned, or if a pinned pipeline needs the units: a slice passes
through all parts in turn.
"""

LEAST_GAIN = 400
"""Devices are left unused only if the step is shorter by more than 1 / `LEAST_GAIN` of it, 0.25 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Confidence:
    """Errors of costs, as fractions, and reasons for larger ones."""

    computing: float
    transfers: float
    reductions: float
    optimizer: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """All inputs of a search. ``costs(tp, parts)`` is the cost model for a degree of tensor parallelism and a number of
    parts of the head.
    """

    model: ModelSpec
    precision: Precision
    sequence_length: int
    global_batch: int
    num_devices: int
    memory_limit_bytes: int
    pinned: ParallelismSpec
    costs: Callable[[int, int], CostModel]
    objective: Objective = Objective.TIME
    price_per_device_hour: float = 0.0
    tp_degrees: tuple[int, ...] = (1,)
    """Degrees of tensor parallelism that divide the model and the hosts."""
    head_degrees: Callable[[int], Sequence[int]] = lambda tp: (1,)
    """Possible numbers of parts of the head (`penstock.core.model.DividedModel`), ascending, by degree of tensor
    parallelism.
    """
    sequence_parallel: bool = True
    """Whether shards divide hidden states by tokens (`penstock.core.sharding`)."""
    min_devices: int | None = None
    """The least number of devices to use; None: all of them, or to save money any divisor of theirs."""
    most_devices: int | None = None
    """The largest number of devices to use; None: all of them."""
    hosts: tuple[int, ...] = ()
    """The host of every device; empty if each device has its own host."""
    moment_type: MomentType = MomentType.FP32
    """The type of the optimizer's moments."""
    gradient_reduction_type: ReductionType = ReductionType.FP32
    """The type in which replicas exchange gradients."""
    software: SoftwareSpec = PENSTOCK
    """The software stack whose memory and reductions count; penstock's own unless described."""
    cards: tuple[int, ...] = ()
    """The network card of every device; empty if each host has one."""
    device_memory_bytes: int = 2**63 - 1
    """The highest possible memory limit."""
    num_places: int | None = None
    """Communication kernels that a CUDA device runs at once (`penstock.core.residency`); None for ranks on CPU."""
    slowness: tuple[float, ...] = ()
    """For every device, the time of its computation divided by that of ``costs``; empty if all are alike."""
    has_fixed_ranks: bool = False
    """Whether every rank runs on the device of its own number, like the processes on the CPU of one machine."""
    prices: tuple[float, ...] = ()
    """The price of every device for an hour; empty if all cost the same."""
    interruptions_per_hour: tuple[float, ...] = ()
    """How often every device is taken away in an hour; empty if none is."""
    interruptions: Interruptions = NO_RESTARTS
    """What an interruption costs."""
    link_tolerance: float = 1.0
    """Factor up to which links count as equal, since measurements scatter."""
    profile_digest: str = ""
    confidence: Confidence | None = None
    """Errors of the costs, from the spread of measurements or as described."""
    peak_flops: float | None = None
    """Peak of one device, if known (`penstock.core.speed`)."""
    peaks: tuple[float, ...] = ()
    """The peak of every device; empty if all have the same."""
    units: Callable[[int, int, tuple[int, ...]], UnitTable] = field(init=False, repr=False, compare=False)
    """Costs of units by degree of tensor parallelism, sequences of a micro-batch and slices; recent ones are cached."""
    slicings: Callable[[int, int], Mapping[int, Slicing]] = field(init=False, repr=False, compare=False)
    """By number of slices, ascending, the slicing whose largest slice is cheapest over the whole model; by degree of
    tensor parallelism and sequences of a micro-batch. Recent ones are cached.
    """
    _divided: dict[int, Problem] = field(default_factory=dict, repr=False, compare=False)
    _kept: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    _hosts: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    _cards: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    _slowness: Floats = field(init=False, repr=False, compare=False)
    _prices_of_first: Integers = field(init=False, repr=False, compare=False)
    """Total price of the cheapest 1, 2, ... devices by `cost_rates`, in thousandths of the lowest price."""
    _interruptions_of_first: Floats = field(init=False, repr=False, compare=False)
    """Interruptions per hour of the first one, two, ... devices by their cost rates."""

    def __post_init__(self) -> None:
        cost_of = functools.partial(_cost_of, self.costs, self.model.head_parts)

        @functools.lru_cache(maxsize=512)
        def units(tp: int, batch: int, slices: tuple[int, ...]) -> UnitTable:
            return UnitTable.of(cost_of(tp), batch, slices)

        @functools.lru_cache(maxsize=64)
        def slicings(tp: int, batch: int) -> Mapping[int, Slicing]:
            shape = {"sequence_length": self.sequence_length, "quantum": self.quantum}
            cost_ns = tabulate(functools.partial(self.slice_ns, tp, batch), **shape)
            unit_ns = summable_unit_ns(cost_ns)
            counted = SlicingProblem(cost_ns=cost_ns // unit_ns, max_slices=MOST_BALANCED_SLICES, **shape)
            return BalancedSlicings(counted, unit_ns)

        object.__setattr__(self, "units", units)
        object.__setattr__(self, "slicings", slicings)
        object.__setattr__(self, "_hosts", np.array(self.hosts, dtype=np.int64))
        object.__setattr__(self, "_cards", np.array(self.cards, dtype=np.int64))
        object.__setattr__(self, "_slowness", np.array(self.slowness, dtype=np.float64))
        prices, by_rate = np.array(self.prices), np.argsort(self.cost_rates(range(len(self.prices))), kind="stable")
        costs = np.cumsum(prices[by_rate]) * 1000 / prices.min(initial=math.inf)
        object.__setattr__(self, "_prices_of_first", np.rint(costs).astype(np.int64))
        per_hour = np.array(self.interruptions_per_hour)
        by_rate = np.argsort(self.cost_rates(range(len(per_hour))), kind="stable")
        object.__setattr__(self, "_interruptions_of_first", np.cumsum(per_hour[by_rate]))

    def limited(self, memory_limit_bytes: int) -> Problem:
        """The problem with another limit; both share all that does not depend on it."""
        divided = {parts: problem.limited(memory_limit_bytes) for parts, problem in self._divided.items()}
        other = dataclasses.replace(self, memory_limit_bytes=memory_limit_bytes, _divided=divided)
        object.__setattr__(other, "units", self.units)
        object.__setattr__(other, "slicings", self.slicings)
        object.__setattr__(other, "_kept", self._kept)
        return other

    def kept(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The result of ``make`` for this key, made once for all problems that differ only in the limit."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(Value, self._kept[key])

    def divided(self, head_parts: int) -> Problem:
        """The problem with the head in ``head_parts`` parts, to which its units, costs and bytes refer. Repeated calls
        return the same object.
        """
        if head_parts == self.model.head_parts:
            return self
        if head_parts not in self._divided:
            model = self.model.divided(head_parts)
            self._divided[head_parts] = dataclasses.replace(self, model=model, _divided={})
        return self._divided[head_parts]

    def cost_of(self, tp: int) -> CostModel:
        """The cost model for this degree of tensor parallelism."""
        return _cost_of(self.costs, self.model.head_parts, tp)

    def slice_ns(self, tp: int, batch: int, lengths: Integers, before: Integers) -> Integers:
        """[points]: nanoseconds of the whole model for slices of micro-batches of ``batch`` sequences."""
        cost, counts = self.cost_of(tp), unit_counts(self.model, ((0, self.model.num_units),))[0]
        return stage_slice_ns(cost, counts, slower_seconds(cost, batch, lengths, before))

    def sharding(self, tp: int) -> Sharding:
        """The division of a rank's units over ``tp`` shards."""
        return Sharding(tp, self.sequence_parallel)

    def message_bytes(self, tp: int, tokens: Floats) -> Floats:
        """Bytes of hidden states that one of ``tp`` shards sends for each number of ``tokens``, elementwise."""
        return rows_of(self.sharding(tp), tokens) * (self.model.hidden * self.precision.compute_bytes)

    @property
    def late_receives(self) -> bool:
        """Whether plans post receives only when messages are due, because a posted receive occupies its device."""
        return self.num_places is not None

    def has_buckets(self, mesh: Mesh) -> bool:
        """Whether replicas reduce gradients in buckets (`penstock.core.buckets`): on the host, next to compute."""
        return mesh.dp > 1 and not self.late_receives and self.software == PENSTOCK

    def prefix_by_slice(self, slices: Sequence[int]) -> bool:
        """Whether every slice has its own keys, values and gradients of these: only where sequences are long."""
        return len(slices) > 1 and self.sequence_length >= LONG_SEQUENCE

    @property
    def quantum(self) -> int:
        """Tokens between possible slice boundaries."""
        return -(-self.sequence_length // MOST_QUANTA)

    def score(self, duration_ns: int, num_devices: int) -> int:
        """The objective for a step on ``num_devices`` devices, with expected interruptions: its time, or its cost. The
        cost is device time, or with ``prices`` the money for the devices with the lowest `cost_rates`.

        A step that leaves devices unused has to be shorter by one part in `LEAST_GAIN`.
        """
        expected_ns = self.interruptions.expected_ns(duration_ns, self._interruptions_of(num_devices))
        return self._weighted(expected_ns, num_devices)

    def _weighted(self, expected_ns: int, num_devices: int) -> int:
        if self.objective is Objective.COST:
            return expected_ns * (int(self._prices_of_first[num_devices - 1]) if self.prices else num_devices)
        return expected_ns + (expected_ns // LEAST_GAIN if num_devices < self.num_devices else 0)

    def _interruptions_of(self, num_devices: int) -> float:
        return float(self._interruptions_of_first[num_devices - 1]) if self.interruptions_per_hour else 0.0

    def longest_ns(self, score: float, num_devices: int) -> float:
        """The longest step on ``num_devices`` devices whose score is at most ``score``."""
        expected_ns = score * NANOSECONDS_PER_SECOND / self._weighted(NANOSECONDS_PER_SECOND, num_devices)
        per_hour = self._interruptions_of(num_devices)
        if not per_hour:
            return expected_ns
        return NANOSECONDS_PER_SECOND * self.interruptions.step_seconds(to_seconds(expected_ns), per_hour)

    def cost_rates(self, devices: npt.ArrayLike) -> Floats:
        """Cost of the same work on each of these devices, elementwise: price times slowness if the objective is the
        cost and devices have ``prices``, else slowness alone.
        """
        slowness = self.slowness_of(devices)
        counts = self.prices and self.objective is Objective.COST
        return slowness * np.array(self.prices)[np.asarray(devices, dtype=np.int64)] if counts else slowness

    def slowness_of(self, devices: npt.ArrayLike) -> Floats:
        """`slowness` of devices, elementwise."""
        numbers = np.asarray(devices, dtype=np.int64)
        return self._slowness[numbers] if self.slowness else np.ones(numbers.shape)

    def host_of(self, devices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The hosts of devices, elementwise."""
        numbers = np.asarray(devices, dtype=np.int64)
        return self._hosts[numbers] if self.hosts else numbers

    def card_of(self, devices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The network cards of devices, elementwise."""
        numbers = np.asarray(devices, dtype=np.int64)
        return self._cards[numbers] if self.cards else self.host_of(numbers)


def _cost_of(costs: Callable[[int, int], CostModel], head_parts: int, tp: int) -> CostModel:
    return costs(tp, head_parts)


def problem_from_cluster(spec: JobSpec, cluster: ClusterSpec) -> Problem:
    """The problem of running ``spec`` on described hardware; tp divides a node's devices or spans whole nodes.

    A cost table holds for the pinned tp, else for 1, and for a whole head.
    """
    if spec.resources.ranks > cluster.num_devices:
        raise UserError(
            what=f"the job asks for {spec.resources.ranks} ranks, the cluster has {cluster.num_devices} devices",
            where="spec.resources.ranks",
            remedy="lower ranks or describe a larger cluster",
        )

    @functools.cache
    def costs(tp: int, head_parts: int) -> CostModel:
        sharding = Sharding(tp, spec.parallelism.is_sequence_parallel)
        model = spec.model.divided(head_parts)
        return DescribedCost(
            model=model,
            cluster=cluster,
            precision=spec.training.precision,
            sharding=sharding,
            copies_prefix=spec.data.sequence_length >= LONG_SEQUENCE,
            moment_type=spec.training.optimizer.moment_type,
            reduction_type=spec.training.gradient_reduction_type,
        )

    devices, kinds = cluster.device_kinds, cluster.kinds_of(spec.resources.ranks)
    memory_bytes = min(devices[kind].memory_bytes for kind in set(kinds))
    # A cost table has the times of a whole head, and other software than penstock's runs its backward as separate
    # passes.
    is_divided = cluster.software.head_in_forward and not cluster.costs
    return Problem(
        **common_fields(spec),
        num_devices=spec.resources.ranks,
        memory_limit_bytes=min(spec.resources.memory_per_rank, memory_bytes),
        device_memory_bytes=memory_bytes,
        costs=costs,
        tp_degrees=_tp_degrees(spec, cluster),
        head_degrees=lambda tp: range(1, 1 + spec.model.vocab // tp) if is_divided else (1,),
        hosts=tuple(map(cluster.node_of, range(spec.resources.ranks))),
        software=cluster.software,
        cards=tuple(map(cluster.card_of, range(spec.resources.ranks))),
        confidence=_stated(cluster.error),
        peak_flops=cluster.device.peak_flops,
        peaks=tuple(devices[kind].peak_flops for kind in kinds) if cluster.other_devices else (),
        slowness=_slowness_of_kinds(spec, cluster, kinds),
        prices=prices_of_kinds(spec, cluster, kinds),
        interruptions_per_hour=interruptions_of_kinds(spec, cluster, kinds),
        interruptions=interruptions_of(spec, cluster),
    )


def _slowness_of_kinds(spec: JobSpec, cluster: ClusterSpec, kinds: Sequence[int]) -> tuple[float, ...]:
    """The slowness of devices of these ``kinds``: by the seconds of the whole model for one sequence on one device."""
    if not any(kinds):
        return ()

    def model_ns(kind: int) -> int:
        described = dataclasses.replace(cluster, device=cluster.device_kinds[kind], other_devices=())
        cost = DescribedCost(model=spec.model, cluster=described, precision=spec.training.precision)
        counts = unit_counts(spec.model, ((0, spec.model.num_units),))[0]
        length = np.array([spec.data.sequence_length], dtype=np.float64)
        return int(stage_slice_ns(cost, counts, slower_seconds(cost, 1, length, np.zeros(1)))[0])

    of_kinds = {kind: model_ns(kind) for kind in sorted({0, *kinds})}
    return tuple(of_kinds[kind] / of_kinds[0] for kind in kinds)


def _tp_degrees(spec: JobSpec, cluster: ClusterSpec) -> tuple[int, ...]:
    """Degrees that divide a node's devices or are multiples of them, and divide the model."""
    degrees, per_node = divisors(spec.model.heads), cluster.devices_per_node
    if cluster.costs:
        degrees = [spec.parallelism.tp or 1]
    return tuple(
        tp
        for tp in degrees
        if spec.model.can_be_sharded(tp) and (per_node % tp == 0 or tp % per_node == 0) and tp <= cluster.num_devices
    )


def _stated(error: float) -> Confidence:
    """A description states one error for all times."""
    return Confidence(computing=error, transfers=error, reductions=error, optimizer=error)


def common_fields(spec: JobSpec) -> dict[str, Any]:
    """Fields of a problem that depend only on the job."""
    return {
        "model": spec.model,
        "precision": spec.training.precision,
        "moment_type": spec.training.optimizer.moment_type,
        "gradient_reduction_type": spec.training.gradient_reduction_type,
        "sequence_length": spec.data.sequence_length,
        "global_batch": spec.training.global_batch,
        "pinned": spec.parallelism,
        "sequence_parallel": spec.parallelism.is_sequence_parallel,
        "min_devices": spec.resources.min_ranks,
        "num_places": NUM_PLACES if spec.resources.device is Device.CUDA else None,
        "objective": spec.objective,
        "price_per_device_hour": spec.price_per_device_hour,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Division of devices and sequences: dp x tp x pp devices, ``microbatch`` sequences at a time, and ``remainder``
    sequences in a smaller last micro-batch unless that is 0.
    """

    dp: int
    tp: int
    pp: int
    microbatch: int
    num_microbatches: int
    remainder: int = 0

    @classmethod
    def of_share(cls, *, dp: int, tp: int, pp: int, microbatch: int, share: int) -> Mesh:
        """The mesh for ``share`` sequences per replica, at least one micro-batch."""
        count, remainder = -(-share // microbatch), share % microbatch
        return cls(dp=dp, tp=tp, pp=pp, microbatch=microbatch, num_microbatches=count, remainder=remainder)

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.dp * self.tp * self.pp

    @property
    def num_sequences(self) -> int:
        """Sequences of one step over all replicas."""
        return self.dp * (self.num_alike * self.microbatch + self.remainder)

    @property
    def num_alike(self) -> int:
        """Number of micro-batches without a smaller last one."""
        return self.num_microbatches - (self.remainder > 0)

    @property
    def num_by_work(self) -> float:
        """Number of micro-batches, where a smaller last one counts as a fraction."""
        return self.num_alike + self.remainder / self.microbatch

    @property
    def label(self) -> str:
        """Text for explanations."""
        batches = microbatches_text(self.num_microbatches, self.microbatch, self.remainder)
        return f"{mesh_text(self.dp, self.tp, self.pp)}, {batches}"


def meshes(problem: Problem) -> Iterator[Mesh]:
    """The meshes that are searched first, in a fixed order: they obey the pins and use all devices, or to save money a
    divisor of them. Tensor parallelism stays within hosts unless it is pinned.
    """
    wide = _wide_degrees(problem)
    for num_devices in _usual_numbers(problem):
        yield from (mesh for mesh in meshes_over(problem, num_devices) if mesh.tp not in wide)


def later_meshes(problem: Problem) -> Iterator[list[Mesh]]:
    """The other possible meshes, in non-empty groups: tensor parallelism over several hosts, and then descending
    numbers of devices that leave some unused.
    """
    wide = _wide_degrees(problem)
    usual = (mesh for num_devices in _usual_numbers(problem) for mesh in meshes_over(problem, num_devices))
    yield from filter(None, [[mesh for mesh in usual if mesh.tp in wide]])
    for num_devices in fewer_devices(problem):
        yield from filter(None, [list(meshes_over(problem, num_devices))])


def all_meshes(problem: Problem) -> Iterator[Mesh]:
    """Every possible mesh."""
    yield from meshes(problem)
    for group in later_meshes(problem):
        yield from group


def _usual_numbers(problem: Problem) -> list[int]:
    is_money = problem.objective is Objective.COST
    most = problem.most_devices or problem.num_devices
    numbers = divisors(most) if is_money else [most]
    return [number for number in numbers if number >= (problem.min_devices or 1)]


def fewer_devices(problem: Problem) -> list[int]:
    """The other numbers of devices that a plan may use, descending."""
    fewest, usual = problem.min_devices, _usual_numbers(problem)
    if fewest is None:
        return []
    whole_hosts = 1 + np.flatnonzero(np.diff(problem.host_of(range(problem.num_devices))))
    many = [number for number in whole_hosts[::-1].tolist() if number > MOST_NUMBERED][:MOST_NUMBERED]
    few = range(min(problem.num_devices - 1, MOST_NUMBERED), 0, -1)
    most = problem.most_devices or problem.num_devices
    return [number for number in (*many, *few) if fewest <= number <= most and number not in usual]


def _wide_degrees(problem: Problem) -> tuple[int, ...]:
    """The degrees of tensor parallelism that need several hosts; none if one is pinned."""
    host_size = problem.hosts.count(problem.hosts[0]) if problem.hosts else 1
    return tuple(tp for tp in problem.tp_degrees if tp > host_size and problem.pinned.tp is None)


def meshes_over(problem: Problem, num_devices: int) -> Iterator[Mesh]:
    """Every mesh over ``num_devices`` devices."""
    imported = imported_schedule(problem.pinned)
    for dp, tp, pp in _degrees(problem, num_devices):
        for mesh in _microbatched(problem, dp, tp, pp):
            if imported is None or _suits(imported, mesh):
                yield mesh


def imported_schedule(pinned: ParallelismSpec) -> Schedule | None:
    """The pinned schedule if it is a list of actions, which fixes the pipeline's shape; else None."""
    spec = pinned.schedule
    return parsed_schedule(spec.text) if isinstance(spec, ScheduleSpec) and spec.text else None


@functools.lru_cache(maxsize=8)
def parsed_schedule(text: str) -> Schedule:
    """An imported schedule's text, parsed once."""
    return parse_schedule(text, "spec.parallelism.schedule")[0]


def runs_on_shards(pinned: ParallelismSpec) -> bool:
    """Whether ranks of several shards can run the pinned schedule; on these both actions of a pair start together."""
    spec = pinned.schedule
    return not (isinstance(spec, ScheduleSpec) and spec.text) or _can_join_text(spec.text)


@functools.lru_cache(maxsize=8)
def _can_join_text(text: str) -> bool:
    return can_join(parsed_schedule(text))


def _suits(schedule: Schedule, mesh: Mesh) -> bool:
    is_alike = not schedule.num_remainder_slices or mesh.remainder > 0
    return is_alike and (len(schedule.ranks), schedule.num_microbatches) == (mesh.pp, mesh.num_microbatches)


def _degrees(problem: Problem, num_devices: int) -> Iterator[tuple[int, int, int]]:
    pinned = problem.pinned
    for tp in divisors(num_devices):
        if (pinned.tp or tp) != tp or tp not in problem.tp_degrees:
            continue
        if tp > 1 and not runs_on_shards(pinned):
            continue
        for pp in divisors(num_devices // tp):
            dp = num_devices // (tp * pp)
            if (pinned.pp or pp) != pp or (pinned.dp or dp) != dp or problem.global_batch % dp:
                continue
            if _can_have_stages(problem, tp, pp):
                yield dp, tp, pp


def _can_have_stages(problem: Problem, tp: int, pp: int) -> bool:
    counts = stage_counts(problem.pinned, pp)
    if problem.pinned.stages is not None and imported_schedule(problem.pinned) is None:
        return len(problem.pinned.stages) in counts
    return min(counts) <= most_units(problem, tp)


def most_units(problem: Problem, tp: int) -> int:
    """The largest number of units of the model: more with a divided head, if that is pinned or the head is the largest
    unit by its products.
    """
    spec, pinned = problem.model, problem.pinned
    if pinned.head_parts is not None:
        return spec.divided(pinned.head_parts).num_units
    block_flops = (linear_flops_per_token(spec, kind) for kind in (UnitKind.ATTENTION, UnitKind.MLP))
    if linear_flops_per_token(spec, UnitKind.HEAD) <= max(block_flops):
        return spec.num_units
    most = problem.head_degrees(tp)[-1]
    return spec.num_units - 1 + (most if pinned.pp is not None else min(most, MOST_PARTS))


def stage_counts(pinned: ParallelismSpec, pp: int) -> tuple[int, ...]:
    """Possible numbers of stages on ``pp`` ranks, with the pinned schedule or else any."""
    if isinstance(pinned.schedule, str):
        num_stages = None if pinned.stages is None else len(pinned.stages)
        return (pp * find(pinned.schedule).per_rank(pp, num_stages),)
    return (pp,) if pp == 1 or pinned.schedule is not None else (pp, 2 * pp)


def zero_degrees(problem: Problem, dp: int) -> tuple[int, ...]:
    """Possible degrees of ZeRO for ``dp`` replicas: 0 if each has all of the optimizer state, 1 if they divide it. The
    pinned one, else both. For other software than penstock's it is pinned, or 0.
    """
    if dp == 1:
        return (0,)
    if problem.pinned.zero is not None:
        return (problem.pinned.zero,)
    is_penstock = dataclasses.replace(problem.software, recomputes_on_demand=False) == PENSTOCK
    return (0, 1) if is_penstock else (0,)


def _microbatched(problem: Problem, dp: int, tp: int, pp: int) -> Iterator[Mesh]:
    share = problem.global_batch // dp
    for microbatch in _sizes(problem, share):
        if microbatch <= share:
            yield Mesh.of_share(dp=dp, tp=tp, pp=pp, microbatch=microbatch, share=share)


def _sizes(problem: Problem, share: int) -> tuple[int, ...]:
    """The pinned size, the one that an imported schedule's number of micro-batches requires, or else several."""
    imported = imported_schedule(problem.pinned)
    if problem.pinned.micro_batch is not None:
        return (problem.pinned.micro_batch,)
    return microbatch_sizes(share) if imported is None else (-(-share // imported.num_microbatches),)
