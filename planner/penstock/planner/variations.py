"""Effects of changes to a job or its hardware, each simulated with the same plan or planned again.

A variation is a job and hardware that differ from the planned ones in one thing:

======================= ==========================================
change                  result with the existing plan
======================= ==========================================
links 10 % faster       a gain, and other plans may gain more
twice the micro-batches the same, if its schedule is a built-in one
10 GiB more memory      none: it needs the same memory
a node more or fewer    none: it is for another number of devices
sequences twice as long none: its slices have another length
======================= ==========================================

So every plan is simulated again for the first two, which costs two simulations. All changes are planned again only on
request, which costs a search each. If both were computed the faster one counts, since a search has a budget and may
miss the existing plan. Every `Variation` names its method.

Changes are compared by tokens per second per device: one more node always shortens the step, but not always by its
share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.errors import UserError
from penstock.core.explanation import Explanation, Method, Variation, most_helpful
from penstock.core.job import JobSpec
from penstock.core.kubernetes_spec import KubernetesSpec
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.speed import speed_of
from penstock.core.units import bytes_apart, format_count, to_seconds
from penstock.planner.candidate import Candidate
from penstock.planner.decide import decide
from penstock.planner.evaluate import Simulated
from penstock.planner.judge import Reporter
from penstock.planner.problem import Mesh
from penstock.planner.replay import candidate_of, placement_of
from penstock.planner.schedules.registry import BUILT_IN
from penstock.planner.subsets import Hardware, problem_for

FASTER = 1.1
MORE_BYTES = 10 * 2**30
MOST_ACTIONS = 500_000
"""Longer steps are not simulated again: that would take more than a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """A job and hardware that differ from the existing ones in one thing; ``detail`` is its number."""

    spec: JobSpec
    hardware: Hardware
    detail: str = ""


Change = Callable[[JobSpec, Hardware], Changed | None]
"""Returns None if the change is unknown or meaningless there; raises `UserError` for an impossible job."""


def faster_links(spec: JobSpec, hardware: Hardware) -> Changed:
    """All links have more bandwidth and the same latency. Measured reductions are unchanged."""
    if isinstance(hardware, Profile):
        links = tuple(
            dataclasses.replace(link, bytes_per_second=FASTER * link.bytes_per_second) for link in hardware.links
        )
        measured = dataclasses.replace(hardware, links=links)
        return Changed(spec=spec, hardware=measured, detail="reductions as measured")
    peer = hardware.intra_node_peer
    described = dataclasses.replace(
        hardware,
        intra_node=_faster(hardware.intra_node),
        inter_node=_faster(hardware.inter_node),
        intra_node_peer=None if peer is None else _faster(peer),
        links=tuple(dataclasses.replace(link, link=_faster(link.link)) for link in hardware.links),
    )
    return Changed(spec=spec, hardware=described)


def _faster(link: LinkSpec) -> LinkSpec:
    return dataclasses.replace(link, bytes_per_second=FASTER * link.bytes_per_second)


def twice_the_microbatches(spec: JobSpec, hardware: Hardware) -> Changed:
    """Every step has twice the sequences."""
    batch = 2 * spec.training.global_batch
    training = dataclasses.replace(spec.training, global_batch=batch)
    changed = dataclasses.replace(spec, training=training)
    return Changed(spec=changed, hardware=hardware, detail=f"globalBatch {batch}")


def more_memory(spec: JobSpec, hardware: Hardware) -> Changed:
    """Every device has more memory, which the job may use."""
    if isinstance(hardware, ClusterSpec):
        others = (dataclasses.replace(other, device=_with_more(other.device)) for other in hardware.other_devices)
        hardware = dataclasses.replace(hardware, device=_with_more(hardware.device), other_devices=tuple(others))
    resources = dataclasses.replace(spec.resources, memory_per_rank=spec.resources.memory_per_rank + MORE_BYTES)
    return Changed(spec=dataclasses.replace(spec, resources=resources), hardware=hardware)


def _with_more(device: DeviceSpec) -> DeviceSpec:
    return dataclasses.replace(device, memory_bytes=device.memory_bytes + MORE_BYTES)


def node_more(spec: JobSpec, hardware: Hardware) -> Changed | None:
    """The job has one more node's devices; None for a profile, which does not know such a node."""
    return None if isinstance(hardware, Profile) else _with_nodes(spec, hardware, 1)


def node_fewer(spec: JobSpec, hardware: Hardware) -> Changed | None:
    """The job has one node's devices fewer; None for a profile, or if it has at most one node."""
    if isinstance(hardware, Profile) or spec.resources.ranks <= hardware.devices_per_node:
        return None
    return _with_nodes(spec, hardware, -1)


def _with_nodes(spec: JobSpec, cluster: ClusterSpec, more: int) -> Changed:
    ranks = spec.resources.ranks + more * cluster.devices_per_node
    num_nodes = max(cluster.num_nodes, -(-ranks // cluster.devices_per_node))
    resources = dataclasses.replace(spec.resources, ranks=ranks, min_ranks=None)
    return Changed(
        spec=dataclasses.replace(spec, resources=resources, kubernetes=KubernetesSpec()),
        hardware=dataclasses.replace(cluster, num_nodes=num_nodes),
        detail=format_count(ranks, "device"),
    )


def next_length(spec: JobSpec, hardware: Hardware) -> Changed:
    """Sequences are twice as long, and gpt2 has as many positions. Raises `UserError` for a profile, which has no
    measurements of longer sequences than its own.
    """
    length = 2 * spec.data.sequence_length
    if isinstance(hardware, Profile):
        raise UserError(what=f"not measured: set data.sequenceLength to {length} and run penstock profile")
    data = dataclasses.replace(spec.data, sequence_length=length)
    model = dataclasses.replace(spec.model, positions=max(spec.model.positions, length))
    changed = dataclasses.replace(spec, data=data, model=model)
    return Changed(spec=changed, hardware=hardware, detail=f"{length:,} tokens")


SAME_PLAN: dict[str, Change] = {"links 10 % faster": faster_links, "twice the micro-batches": twice_the_microbatches}
"""Changes that the plan can run in, and may gain from."""

CHANGES: dict[str, Change] = {
    **SAME_PLAN,
    "10 GiB more memory per device": more_memory,
    "one node more": node_more,
    "one node fewer": node_fewer,
    "sequences twice as long": next_length,
}


def same_plan_variations(plan: Plan, spec: JobSpec, hardware: Hardware) -> tuple[Variation, ...]:
    """The gains of a predicted plan from changes that it can run in, best first."""
    variations = (
        _same_plan(plan, name, *_changed_or_refusal(change, spec, hardware)) for name, change in SAME_PLAN.items()
    )
    return _ordered(variation for variation in variations if variation is not None)


def searched_variations(
    plan: Plan, spec: JobSpec, hardware: Hardware, reporter: Callable[[str], Reporter | None] = lambda name: None
) -> tuple[Variation, ...]:
    """The gain of each change with a new plan, best first. ``reporter`` makes the reporter of a search by its name."""
    variations = []
    for name, change in CHANGES.items():
        changed, refusal = _changed_or_refusal(change, spec, hardware)
        same = _same_plan(plan, name, changed, refusal) if name in SAME_PLAN else None
        searched = _searched(plan, name, changed, refusal, reporter)
        variations.append(same if same is not None and _gain(same) >= _gain(searched) else searched)
    return _ordered(variation for variation in variations if variation is not None)


def with_variations(plan: Plan, variations: tuple[Variation, ...]) -> Plan:
    """The plan with the variations in its explanation and its reasons."""
    assert plan.prediction is not None, "a plan that was decided is predicted"
    explanation = dataclasses.replace(plan.prediction.explanation or Explanation(), variations=variations)
    prediction = dataclasses.replace(plan.prediction, explanation=explanation)
    return dataclasses.replace(plan, prediction=prediction, reasons=(*plan.reasons, *_reason(variations)))


def _reason(variations: tuple[Variation, ...]) -> tuple[str, ...]:
    computed = sum(variation.gain is not None for variation in variations)
    if not computed:
        return ()
    helpful = most_helpful(variations)
    if helpful is None:
        return (f"none of {computed} changes that were computed gives more tokens per second per device",)
    gain = f"{100 * (helpful.gain or 0.0):.1f} % more tokens per second per device"
    return (f"what helps most of {computed} changes: {helpful.change}, {gain} ({helpful.method.value})",)


def _changed_or_refusal(change: Change, spec: JobSpec, hardware: Hardware) -> tuple[Changed | None, str]:
    """The changed job, or why it is impossible; neither if the change is meaningless."""
    try:
        return change(spec, hardware), ""
    except UserError as mistake:
        return None, mistake.what


def _same_plan(plan: Plan, name: str, changed: Changed | None, refusal: str) -> Variation | None:
    """The plan simulated again; None if its step is too long, or its schedule is made for its micro-batches."""
    if changed is None:
        return Variation(change=name, method=Method.SAME_PLAN, refusal=refusal) if refusal else None
    candidate = _in_changed(plan, changed.spec)
    if candidate is None or candidate.num_actions > MOST_ACTIONS:
        return None
    problem = problem_for(changed.spec, changed.hardware)
    try:
        evaluation = Simulated(problem, plan.receive_ahead, placement_of(plan)).evaluate(candidate, in_full=True)
    except UserError as mistake:
        return Variation(change=_change_name(name, changed), method=Method.SAME_PLAN, refusal=mistake.what)
    peak, limit = max(evaluation.peak_bytes), problem.memory_limit_bytes
    if candidate.mesh.num_microbatches != plan.num_microbatches and peak > limit:
        needed, allowed = bytes_apart(peak, limit)
        refusal = f"this plan would need {needed} on a rank, of {allowed} allowed"
        return Variation(change=_change_name(name, changed), method=Method.SAME_PLAN, refusal=refusal)
    return _variation(plan, name, changed, Method.SAME_PLAN, plan, to_seconds(evaluation.step_ns))


def _in_changed(plan: Plan, spec: JobSpec) -> Candidate | None:
    candidate = candidate_of(plan)
    if spec.training.global_batch == plan.global_batch:
        return candidate
    if plan.schedule.generator not in BUILT_IN:
        return None
    degrees, share = {"dp": plan.dp, "tp": plan.tp, "pp": plan.pp}, spec.training.global_batch // plan.dp
    mesh = Mesh.of_share(**degrees, microbatch=plan.microbatch, share=share)
    remainder_slices = _fitting_slices(candidate, mesh.remainder)
    return dataclasses.replace(
        candidate, mesh=mesh, schedule=plan.schedule.generator, remainder_slices=remainder_slices
    )


def _fitting_slices(candidate: Candidate, remainder: int) -> tuple[int, ...]:
    """Slices of a last micro-batch of ``remainder`` sequences: its own, or those of the others if it has grown."""
    if not remainder:
        return ()
    return candidate.remainder_slices if remainder <= candidate.mesh.remainder else candidate.slices


def _searched(
    plan: Plan, name: str, changed: Changed | None, refusal: str, reporter: Callable[[str], Reporter | None]
) -> Variation | None:
    if changed is None:
        return Variation(change=name, method=Method.NEW_SEARCH, refusal=refusal) if refusal else None
    try:
        new = decide(problem_for(changed.spec, changed.hardware), reporter=reporter(name)).plan
    except UserError as mistake:
        return Variation(change=_change_name(name, changed), method=Method.NEW_SEARCH, refusal=mistake.what)
    assert new.prediction is not None, "a plan that was decided is predicted"
    return _variation(plan, name, changed, Method.NEW_SEARCH, new, new.prediction.step_seconds)


def _variation(plan: Plan, name: str, changed: Changed, method: Method, new: Plan, step_seconds: float) -> Variation:
    """``new``, a plan of the changed job, compared with ``plan``, of the existing one."""
    now = plan.speed()
    then = speed_of(
        plan.model,
        num_sequences=changed.spec.training.global_batch,
        sequence_length=changed.spec.data.sequence_length,
        num_devices=new.num_ranks,
        step_seconds=step_seconds,
        peak_flops=plan.prediction.peak_flops if plan.prediction else None,
    )
    if now is None or then is None:  # the numbers are so large that a step takes no time
        return Variation(change=_change_name(name, changed), method=method, step_seconds=step_seconds)
    return Variation(
        change=_change_name(name, changed),
        method=method,
        step_seconds=step_seconds,
        tokens_per_second_per_device=then.tokens_per_second_per_device,
        model_flops_utilization=then.model_flops_utilization,
        gain=then.tokens_per_second_per_device / now.tokens_per_second_per_device - 1,
        plan=candidate_of(new).label if method is Method.NEW_SEARCH else "",
    )


def _change_name(name: str, changed: Changed) -> str:
    return f"{name}, {changed.detail}" if changed.detail else name


def _gain(variation: Variation | None) -> float:
    return -math.inf if variation is None or variation.gain is None else variation.gain


def _ordered(variations: Iterable[Variation]) -> tuple[Variation, ...]:
    return tuple(sorted(variations, key=_gain, reverse=True))
