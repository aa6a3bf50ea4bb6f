"""Compares plans for devices of several kinds with plans for one kind, for equal devices, and for money.

A problem has 2 to 64 devices of two or three kinds, which differ in speed, memory and price, and a job that may use
fewer devices. It depends only on the seed and its number. What must hold (`SLOWER` is 0.5 %):

- the plan for time is at most `SLOWER` slower than the best plan on the devices of any one kind. That plan is made as
  if there were no other devices;
- nor than the equal split: a plan as if all devices were like the slowest one, simulated on the devices as they are;
- on the frontier of time and money, times rise and costs per token fall;
- the plan for money costs no more per token than the plan for time;
- a job is not refused if one of the compared plans fits.

Times are those of all steps, with the interruptions of spot devices to be expected.

Kinds of devices count as different by one factor in everything (ADR 0060). For a problem whose kinds differ otherwise,
a plan on one kind is also simulated as a plan of the whole cluster, whose times have that factor. If the plan for time
is not slower than this, it is only reported.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkOverride, OtherDevices
from penstock.core.errors import UserError
from penstock.core.job import JobSpec, Metadata, Objective, PipelineJob
from penstock.core.layout import num_parameters
from penstock.core.plan import Plan
from penstock.core.units import to_seconds
from penstock.planner.choice import Choice, choose
from penstock.planner.device_order import Placement
from penstock.planner.evaluate import Simulated
from penstock.planner.pricing import run_time_of
from penstock.planner.problem import problem_from_cluster
from penstock.planner.replay import candidate_of, placement_of
from tests.support.random_plans import SLOWER_THAN_WITH_LESS, Sizes, full_pin, pin_text, random_cluster, random_job

Report = Callable[[str], None]

SLOWER = SLOWER_THAN_WITH_LESS

MIXED = Sizes(
    devices=(2, 2, 3, 3, 4, 4, 4, 6, 6, 6, 6, 8, 8, 8, 8, 12, 12, 16, 32, 64),
    models=((4, 512, 8), (8, 1024, 16), (12, 2048, 16), (16, 4096, 32)),
    tokens=(512, 1024, 2048, 4096),
    batches=(1, 2),
)
"""Mostly few devices: a problem takes about ten searches."""

BYTES_PER_PARAMETER = 16
"""Least bytes in mixed precision. Models that exceed the memory of the largest kind of devices are not drawn."""

FACTORS = (0.4, 0.6, 0.8, 1.25, 1.6, 2.5, 4.0)
"""How many times as long another kind of device takes."""

PRICES, SPOT_SHARES, INTERRUPTIONS = (0.5, 1.0, 2.0, 4.0), (0.3, 0.6), (0.0, 0.005, 0.05, 0.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedProblem:
    """A numbered job and its hardware. ``is_scaled``: kinds of devices differ by one factor in everything."""

    number: int
    spec: JobSpec
    cluster: ClusterSpec
    is_scaled: bool

    @property
    def text(self) -> str:
        """The problem in one line."""
        spec, cluster = self.spec, self.cluster
        kinds = ", ".join(
            f"{count * cluster.devices_per_node} x {device.memory_bytes / 1e9:.0f} GB "
            f"{device.peak_flops / 1e12:.0f} TFLOPS"
            for count, device in zip(nodes_of_kinds(cluster), cluster.device_kinds, strict=True)
        )
        spot = " spot" if spec.resources.spot else ""
        return (
            f"{num_parameters(spec.model) / 1e9:.1f}B, {kinds}{spot} in nodes of {cluster.devices_per_node}, "
            f"{spec.training.global_batch:,} x {spec.data.sequence_length:,} tokens"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A plan that the plan for time is compared with: seconds of all steps as planned, and on the whole cluster."""

    name: str
    plan: str
    seconds: float
    in_whole: float


def nodes_of_kinds(cluster: ClusterSpec) -> list[int]:
    """The number of nodes of each kind of device."""
    others = [other.num_nodes for other in cluster.other_devices]
    return [cluster.num_nodes - sum(others), *others]


def draw_problem(seed: int, number: int) -> MixedProblem:
    """The problem of this number: the first random one with memory for its model on the devices of one kind."""
    chance = random.Random(f"mixed {seed} {number}")
    while True:
        spec, plain = random_job(chance, MIXED)
        is_scaled = chance.random() < 0.5
        cluster = _of_kinds(chance, plain, is_scaled)
        memory = max(
            count * cluster.devices_per_node * device.memory_bytes
            for count, device in zip(nodes_of_kinds(cluster), cluster.device_kinds, strict=True)
        )
        if BYTES_PER_PARAMETER * num_parameters(spec.model) < memory:
            return MixedProblem(number=number, spec=_job(chance, spec, cluster), cluster=cluster, is_scaled=is_scaled)


def _job(chance: random.Random, spec: JobSpec, cluster: ClusterSpec) -> JobSpec:
    """A job of many steps for any number of the cluster's devices."""
    resources = dataclasses.replace(
        spec.resources,
        ranks=cluster.num_devices,
        min_ranks=1,
        memory_per_rank=max(device.memory_bytes for device in cluster.device_kinds),
        spot=chance.random() < 0.3,
    )
    checkpoint = dataclasses.replace(spec.checkpoint, every_steps=chance.choice((20, 100, 500)))
    training = dataclasses.replace(spec.training, steps=10_000)
    return dataclasses.replace(
        spec, resources=resources, training=training, checkpoint=checkpoint, price_per_device_hour=1.0
    )


def _of_kinds(chance: random.Random, plain: ClusterSpec, is_scaled: bool) -> ClusterSpec:
    """The cluster with two or three kinds of devices, and some links between nodes that differ."""
    per_node = plain.devices_per_node
    num_kinds = min(chance.choice((2, 3)), plain.num_devices)
    while plain.num_devices // per_node < num_kinds:
        per_node = max(per_node // 2, 1)
    num_nodes = plain.num_devices // per_node
    ends = sorted(chance.sample(range(1, num_nodes), num_kinds - 1))
    counts = [stop - first for first, stop in itertools.pairwise((0, *ends, num_nodes))]
    first, *others = (_device(chance, plain.device, kind, is_scaled) for kind in range(num_kinds))
    return dataclasses.replace(
        plain,
        device=first,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        other_devices=tuple(map(_nodes, others, counts[1:])),
        links=tuple(_links(chance, plain, num_nodes)),
        restart_seconds=chance.choice((60.0, 300.0)),
    )


def _nodes(device: DeviceSpec, count: int) -> OtherDevices:
    return OtherDevices(device=device, num_nodes=count)


def _device(chance: random.Random, like: DeviceSpec, kind: int, is_scaled: bool) -> DeviceSpec:
    """A device with prices: the first kind is ``like`` this one, others are slower or faster."""
    price = chance.choice(PRICES)
    times = chance.choice(FACTORS) if kind else 1.0
    scaled: dict[str, Any] = {
        "peak_flops": like.peak_flops / times,
        "memory_bandwidth": like.memory_bandwidth / times,
        "action_overhead_seconds": like.action_overhead_seconds * times,
    }
    device = random_cluster(chance, 1).device if kind and not is_scaled else dataclasses.replace(like, **scaled)
    return dataclasses.replace(
        device,
        name=f"kind-{kind}",
        memory_bytes=chance.choice((16, 24, 40, 80, 141)) * 10**9,
        price_per_hour=price,
        spot_price_per_hour=price * chance.choice(SPOT_SHARES),
        interruptions_per_hour=chance.choice(INTERRUPTIONS),
    )


def _links(chance: random.Random, cluster: ClusterSpec, num_nodes: int) -> Iterator[LinkOverride]:
    """Up to three links that are slower than the others."""
    pairs = list(itertools.combinations(range(min(num_nodes, 8)), 2))
    for source, target in chance.sample(pairs, min(len(pairs), chance.choice((0, 0, 1, 3)))):
        speed = cluster.inter_node.bytes_per_second / chance.choice((2, 5, 20))
        yield LinkOverride(
            source=source, target=target, link=dataclasses.replace(cluster.inter_node, bytes_per_second=speed)
        )


def compare_mixed(seed: int, *, first: int, count: int, report: Report) -> dict[str, Any]:
    """Check ``count`` problems from number ``first`` on, one after the other."""
    problems, violations, by_factor = list[dict[str, Any]](), list[str](), list[str]()
    jobs: dict[int, Any] = {}
    for number in range(first, first + count):
        problem, began = draw_problem(seed, number), time.process_time()
        record: dict[str, Any] = {"problem": number, "job": problem.text}
        try:
            figures, wrong, tolerated = check(problem)
            record |= figures
        except Exception as error:
            wrong, tolerated = [f"{type(error).__name__}: {error}"], []
        record["processorSeconds"] = round(time.process_time() - began, 1)
        command = f"./dev soak mixed --seed {seed} --first {number} --count 1"
        violations += [f"problem {number} ({problem.text}): {sentence}; {command}" for sentence in wrong]
        by_factor += [f"problem {number} ({problem.text}): {sentence}" for sentence in tolerated]
        if wrong:
            jobs[number] = _manifests(problem)
        problems.append(record)
        seconds = record.get("seconds")
        shown = "nothing fits" if seconds is None else f"{seconds:.4g} s"
        report(f"problem {number}: {shown}, {record['processorSeconds']} s{''.join(f'; {line}' for line in wrong)}")
    return {
        "first": first,
        "problems": problems,
        "violations": violations,
        "slowerByTheFactorOfAKind": by_factor,
        "jobs": jobs,
    }


def check(problem: MixedProblem) -> tuple[dict[str, Any], list[str], list[str]]:
    """Figures of a problem, a sentence for each violation, and one for each that is due to the factor of a kind."""
    free = _chosen(problem.spec, problem.cluster)
    rivals = [rival for rival in (*_of_one_kind(problem), _equal_split(problem)) if rival is not None]
    if free is None:
        return {}, [f"refused, but {rival.name} fits ({rival.plan})" for rival in rivals], []
    violated, tolerated = list[str](), list[str]()
    for rival in rivals:
        if free.seconds > SLOWER * rival.seconds:
            sentence = (
                f"{free.seconds:.5g} s ({plan_text(free.plan)}), {rival.name} {rival.seconds:.5g} s ({rival.plan}), "
                f"{free.seconds / rival.seconds - 1:.2%} slower; as a plan of the whole cluster {rival.in_whole:.5g} s"
            )
            is_due_to_factor = not problem.is_scaled and free.seconds <= SLOWER * rival.in_whole
            (tolerated if is_due_to_factor else violated).append(sentence)
    cheap, of_money = _checked_money(problem, free)
    figures = {
        "seconds": free.seconds,
        "plan": plan_text(free.plan),
        "compared": {rival.name: rival.seconds for rival in rivals},
        **cheap,
    }
    return figures, violated + of_money, tolerated


def plan_text(plan: Plan) -> str:
    """A plan in a line."""
    return f"{pin_text(full_pin(plan))}, placement {plan.placement[:8]}"


def _chosen(spec: JobSpec, cluster: ClusterSpec, *, frontier: bool = False) -> Choice | None:
    """The choice; None if the job is refused."""
    try:
        return choose(spec, cluster, frontier=frontier)
    except UserError:
        return None


def _of_one_kind(problem: MixedProblem) -> Iterator[Compared | None]:
    """The best plan on the devices of each kind, in a cluster that has no others."""
    spec, cluster, first_node = problem.spec, problem.cluster, 0
    for device, count in zip(cluster.device_kinds, nodes_of_kinds(cluster), strict=True):
        nodes = range(first_node, first_node + count)
        links = tuple(
            dataclasses.replace(link, source=link.source - first_node, target=link.target - first_node)
            for link in cluster.links
            if link.source in nodes and link.target in nodes
        )
        part = dataclasses.replace(cluster, device=device, num_nodes=count, other_devices=(), links=links)
        resources = dataclasses.replace(spec.resources, ranks=part.num_devices)
        choice = _chosen(dataclasses.replace(spec, resources=resources), part)
        first_device = first_node * cluster.devices_per_node
        first_node += count
        if choice is not None:
            yield Compared(
                name=f"{device.name} alone",
                plan=plan_text(choice.plan),
                seconds=choice.seconds,
                in_whole=_on_whole(problem, choice.plan, _moved(choice.plan, first_device)),
            )


def _moved(plan: Plan, by: int) -> Placement:
    """The plan's placement ``by`` that many devices further."""
    own = placement_of(plan)
    return lambda mesh: tuple(device + by for device in own(mesh))


def _equal_split(problem: MixedProblem) -> Compared | None:
    """The plan as if all devices were like the slowest with the least memory, with the better of two placements."""
    slowness = problem_from_cluster(problem.spec, problem.cluster).slowness
    kinds = problem.cluster.kinds_of(problem.cluster.num_devices)
    slowest = problem.cluster.device_kinds[kinds[max(range(len(kinds)), key=lambda device: slowness[device])]]
    memory = min(device.memory_bytes for device in problem.cluster.device_kinds)
    equal = dataclasses.replace(
        problem.cluster, device=dataclasses.replace(slowest, memory_bytes=memory), other_devices=()
    )
    choice = _chosen(problem.spec, equal)
    if choice is None:
        return None
    placements: Sequence[Placement | None] = (placement_of(choice.plan), None)
    seconds = min(_on_whole(problem, choice.plan, placement) for placement in placements)
    return Compared(name="the equal split", plan=plan_text(choice.plan), seconds=seconds, in_whole=seconds)


def _on_whole(problem: MixedProblem, plan: Plan, placement: Placement | None) -> float:
    """Seconds of all steps by ``plan`` on the whole cluster; without a placement its devices are ordered by speed."""
    judge = Simulated(problem_from_cluster(problem.spec, problem.cluster), plan.receive_ahead, placement)
    candidate = candidate_of(plan)
    step_seconds = to_seconds(judge.evaluate(candidate, in_full=True).step_ns)
    assert plan.prediction is not None, "a plan that was decided is predicted"
    there = dataclasses.replace(
        plan,
        placement=judge.placement(candidate.mesh),
        prediction=dataclasses.replace(plan.prediction, step_seconds=step_seconds),
    )
    run_time = run_time_of(there, problem.spec, problem.cluster)
    assert run_time is not None, "the plan is predicted"
    return run_time.seconds


def _checked_money(problem: MixedProblem, free: Choice) -> tuple[dict[str, Any], list[str]]:
    """Figures of the plan for money and of the frontier, and what does not hold."""
    choice = _chosen(dataclasses.replace(problem.spec, objective=Objective.COST), problem.cluster, frontier=True)
    if choice is None:
        return {}, ["the plan for money is refused, but the plan for time fits"]
    assert choice.cost is not None, "all devices have prices"
    assert free.cost is not None, "all devices have prices"
    violated = []
    if choice.cost.per_million_tokens > free.cost.per_million_tokens:
        violated.append(
            f"for money {choice.cost.per_million_tokens:.6g} per million tokens ({plan_text(choice.plan)}), for time "
            f"{free.cost.per_million_tokens:.6g} ({plan_text(free.plan)})"
        )
    prediction = choice.plan.prediction
    explanation = None if prediction is None else prediction.explanation
    assert explanation is not None, "the frontier was requested"
    assert explanation.frontier is not None, "the frontier was requested"
    points = [(point.run_seconds, point.cost_per_million_tokens) for point in explanation.frontier.points]
    for (seconds, cost), (later_seconds, later_cost) in itertools.pairwise(points):
        if later_seconds <= seconds or later_cost >= cost:
            violated.append(
                f"the frontier has {seconds:.5g} s for {cost:.6g}, then {later_seconds:.5g} s for {later_cost:.6g}"
            )
    return {"frontier": points, "costPerMillionTokens": choice.cost.per_million_tokens}, violated


def _manifests(problem: MixedProblem) -> dict[str, Any]:
    job = PipelineJob(metadata=Metadata(name=f"mixed-{problem.number}"), spec=problem.spec)
    return {"job": job.to_manifest(), "cluster": problem.cluster.to_manifest()}
