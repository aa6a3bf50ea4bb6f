"""Explanation of a plan: the parts of its step in words, the next best plans, and the rejected ones with reasons."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.core.explanation import Explanation, SearchEnd
from penstock.core.job import Objective
from penstock.core.layout import Operation
from penstock.core.model import UnitKind
from penstock.core.plan import Alternative, slices_text
from penstock.core.remaking import Remake, pinned_operations, remakes_text
from penstock.core.schedule import CSV
from penstock.core.units import bytes_apart, format_bytes, format_count, format_seconds, to_seconds
from penstock.planner.candidate import Candidate, at_other_zero
from penstock.planner.device_order import devices_in_order, devices_of
from penstock.planner.floor import floor_ns, grid
from penstock.planner.judge import Evaluation
from penstock.planner.outlines import owners_of_stages
from penstock.planner.problem import Problem, all_meshes, imported_schedule
from penstock.planner.search import Result
from penstock.planner.stagecost import unit_counts
from penstock.planner.tables import recomputation_ns, resident_bytes

MOST_ALTERNATIVES = 5
MOST_REJECTED = 5
MOST_STAGES_LISTED = 3
"""Up to this number of different policies are listed stage by stage."""
LEAST_SHARE = 0.0005
"""Changes below this fraction of the step are not named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """The explanation of a plan: sentences and alternatives for people, and data for programs."""

    reasons: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    explanation: Explanation


def explained(problem: Problem, result: Result, chosen: Evaluation, place: int = 1) -> Explained:
    """The explanation of ``chosen``. ``place`` is its place by prediction; the best has 1."""
    floor = floor_seconds(problem, result.overview.head_parts)
    limits = (*_time_limit(chosen), _memory_limit(problem, result, chosen))
    pinned = pins(problem)
    sentences = (
        _step(problem, chosen),
        _parts(chosen),
        _slices(problem, chosen),
        *_speeds(problem, chosen),
        *_shards(problem, chosen),
        *_head(problem, result, chosen),
        _memory(problem, chosen),
        *_optimizer(problem, result, chosen),
        *_recomputation(problem, result, chosen),
        *_unused(problem, result, chosen),
        *limits,
        f"pinned: {', '.join(pinned)}" if pinned else "nothing is pinned",
        _effort(result, place),
        *(() if floor is None else (_floor(problem, chosen, floor),)),
    )
    search = SearchEnd(
        ending=result.ending.value,
        candidates=result.num_judged,
        outlines=result.num_outlines,
        floor_seconds=floor,
    )
    return Explained(
        reasons=sentences,
        alternatives=alternatives(problem, result, chosen),
        explanation=Explanation(parts=chosen.parts, limits=limits, pinned=pinned, search=search),
    )


def _step(problem: Problem, chosen: Evaluation) -> str:
    seconds = to_seconds(chosen.step_ns)
    speed = chosen.candidate.speed(problem, seconds)
    fast = "" if speed is None else f", {speed.text}"
    return f"{chosen.candidate.label}: {format_seconds(seconds)} per step{fast}"


def _parts(chosen: Evaluation) -> str:
    if chosen.parts is not None:
        shares = (f"{name} {lost.range_text}" for name, lost in chosen.parts.named if lost.worst)
        return f"parts of the step, mean over ranks (largest of one): {', '.join(shares)}"
    shares = (f"{name} {100 * part / chosen.step_ns:.1f} %" for name, part in _rank_ns(chosen).items() if part)
    return f"parts of the step, on the busiest rank: {', '.join(shares)}"


def _time_limit(chosen: Evaluation) -> tuple[str, ...]:
    """The largest part of the step, and the largest loss apart from compute."""
    if chosen.parts is None:
        return ()
    compute = chosen.parts.compute
    lost = {name: part for name, part in chosen.parts.named if name != "compute"}
    most = max(lost, key=lambda name: lost[name].mean)
    busy = f"rank {compute.rank} computes for {100 * compute.worst:.1f} % of the step"
    if not lost[most].worst:
        return (f"limited by compute: {busy}",)
    if lost[most].mean > compute.mean:
        return (f"limited by {most}, {lost[most].text}: {busy}",)
    return (f"limited by compute: {busy}, and the largest loss is {most}, {lost[most].text}",)


def _memory_limit(problem: Problem, result: Result, chosen: Evaluation) -> str:
    """Whether a simulated plan above the memory limit is faster."""
    limit = problem.memory_limit_bytes
    faster = [evaluation for evaluation in _too_large(problem, result) if evaluation.step_ns < chosen.step_ns]
    if faster:
        best = min(faster, key=lambda evaluation: evaluation.step_ns)
        gain = 100 * (1 - best.step_ns / chosen.step_ns)
        needed, allowed = bytes_apart(max(best.peak_bytes), limit)
        return f"memory is a limit: {best.candidate.label} is {gain:.1f} % faster, but needs {needed} of {allowed}"
    excluded = result.overview.num_too_large
    if excluded or result.shortages or result.too_large:
        before = f"{excluded:,} outlines need more in any case, and" if excluded else "some candidates do not fit, but"
        return f"memory excludes plans: {before} none that was simulated beyond the limit is faster"
    return "no plan was left out for lack of memory"


def _too_large(problem: Problem, result: Result) -> list[Evaluation]:
    """Evaluations above the problem's own limit, which may be higher than the search's."""
    return [evaluation for evaluation in result.too_large if max(evaluation.peak_bytes) > problem.memory_limit_bytes]


def pins(problem: Problem) -> tuple[str, ...]:
    """The pins of the job's ``parallelism``, in the manifest's spelling."""
    pins = []
    for name, value in problem.pinned.to_manifest().items():
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, Mapping):
            value = "imported" if value.get("generator") == CSV else value.get("generator", "imported")
        elif name == "recompute" and isinstance(value, list):
            value = "stage by stage"
        elif isinstance(value, list):
            value = "/".join(f"{part:g}" for part in value)
        pins.append(f"{name} {value}")
    return tuple(pins)


def _memory(problem: Problem, chosen: Evaluation) -> str:
    peak, limit = max(chosen.peak_bytes), problem.memory_limit_bytes
    return f"at most {format_bytes(peak)} on a rank, of {format_bytes(limit)} allowed"


def _unused(problem: Problem, result: Result, chosen: Evaluation) -> tuple[str, ...]:
    """Number of idle devices, and the reason."""
    num_devices = problem.num_devices
    unused = num_devices - chosen.candidate.mesh.num_devices
    if not unused or problem.most_devices is not None:
        return ()
    usage = f"{unused} of {num_devices} devices stay unused"
    evaluations = (result.best, *result.others)
    full = next(
        (evaluation for evaluation in evaluations if evaluation.candidate.mesh.num_devices == num_devices), None
    )
    if problem.objective is Objective.COST:
        return (f"{usage}: no plan that was found for more of them costs less",)
    if full is None:
        return (f"{usage}: no plan that was found uses all of them",)
    slower = _percent(full.step_ns / chosen.step_ns - 1)
    return (f"{usage}: the best plan found for all of them is {slower}, {full.candidate.label}",)


def _slices(problem: Problem, chosen: Evaluation) -> str:
    slices, num_ranks, num_stages = chosen.candidate.slices, chosen.candidate.mesh.pp, len(chosen.candidate.stages)
    origin = ", as pinned" if problem.pinned.slices is not None else ""
    if len(slices) > 1:
        remainder_slices = chosen.candidate.remainder_slices
        last = f" (the last micro-batch: {slices_text(remainder_slices)})" if remainder_slices else ""
        on_ranks = f" on {format_count(num_ranks, 'rank')}" if num_stages > num_ranks else ""
        over = f"{format_count(num_stages, 'stage')}{on_ranks}"
        return f"{len(slices)} slices of {slices_text(slices)} tokens{last}{origin}, over {over}"
    if origin:
        return "sequences are not sliced: pinned"
    if num_ranks == 1:
        return "sequences are not sliced: a single stage waits for no other"
    return "sequences are not sliced: no plan with slices that was simulated is better"


def _speeds(problem: Problem, chosen: Evaluation) -> tuple[str, ...]:
    """Ratio of the speeds of devices, and its effect on stages, if devices are unequal."""
    mesh = chosen.candidate.mesh
    if not problem.slowness:
        return ()
    slowness = problem.slowness_of(devices_of(devices_in_order(problem, mesh), mesh.tp))
    ratio = float(slowness.max() / slowness.min())
    if ratio - 1 < LEAST_SHARE:
        return ()
    effect = "all wait for the slowest" if mesh.pp == 1 else "stages have work in proportion to their ranks' speed"
    if mesh.pp > 1 and problem.pinned.stages is not None:
        effect = "pinned stages ignore the speed of their ranks"
    return (f"devices differ in speed by a factor of up to {ratio:.2f}: {effect}",)


def _shards(problem: Problem, chosen: Evaluation) -> tuple[str, ...]:
    """How tensor parallelism divides each rank's units, if it does."""
    tp = chosen.candidate.mesh.tp
    if tp == 1:
        return ()
    states = "hidden states by tokens" if problem.sequence_parallel else "hidden states are whole on each"
    return (f"tensor parallelism: each rank's units are divided over {tp} devices, {states}",)


def _head(problem: Problem, result: Result, chosen: Evaluation) -> tuple[str, ...]:
    """The ranks that share a divided head, and the gain compared with a whole head."""
    candidate = chosen.candidate
    if candidate.head_parts == 1:
        return ()
    first = problem.model.first_head_unit
    owners = owners_of_stages(problem, candidate.mesh, candidate.schedule)
    ranks = sorted({owner for owner, (_, stop) in zip(owners, candidate.stages, strict=True) if stop > first})
    sharing = "one rank" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    division = f"the head is in {candidate.head_parts} parts of the vocabulary, on {sharing}"
    if problem.pinned.head_parts is not None:
        return (f"{division}: pinned",)
    whole = next(
        (evaluation for evaluation in (result.best, *result.others) if evaluation.candidate.head_parts == 1), None
    )
    if whole is not None:
        slower = _percent(whole.step_ns / chosen.step_ns - 1)
        return (f"{division}: the best plan found with a whole head is {slower}, {whole.candidate.label}",)
    if 1 not in result.overview.head_parts:
        return (f"{division}: the stages need as many units",)
    if result.overview.whole_head_ns is None:
        return (f"{division}: with a whole head nothing fits",)
    slower = _percent(result.overview.whole_head_ns / chosen.step_ns - 1)
    return (f"{division}: the best plan with a whole head is estimated to be {slower}",)


def _optimizer(problem: Problem, result: Result, chosen: Evaluation) -> tuple[str, ...]:
    """Whether and why replicas divide the optimizer state, if there are several."""
    candidate, dp = chosen.candidate, chosen.candidate.mesh.dp
    if dp == 1:
        return ()
    state = f"optimizer state whole on each of {dp} replicas"
    if candidate.zero:
        spared = _spared_bytes(problem, candidate)
        saving = f", {format_bytes(spared)} less on a rank" if spared > 0 else ""
        state = f"optimizer state sharded over {dp} replicas (ZeRO-{candidate.zero}){saving}"
    if problem.pinned.zero is not None:
        return (f"{state}: pinned",)
    other = _at_other_zero(result, candidate)
    if other is None:
        return (state,) if candidate.zero else ()
    peak, limit = max(other.peak_bytes), problem.memory_limit_bytes
    slower = _percent(other.step_ns / chosen.step_ns - 1)
    if peak > limit:
        needed, allowed = bytes_apart(peak, limit)
        slower = f"{slower}, and a rank needs {needed} of {allowed}"
    return (f"{state}: {'sharded' if other.candidate.zero else 'without'}, the step is {slower}",)


def _spared_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes that sharding the optimizer state saves, on the rank where it saves most."""
    divided = problem.divided(candidate.head_parts)
    owners = owners_of_stages(problem, candidate.mesh, candidate.schedule)
    whole, sharded = (resident_bytes(divided, replace(candidate, zero=zero), owners) for zero in (0, 1))
    return int((whole - sharded).max())


def _at_other_zero(result: Result, candidate: Candidate) -> Evaluation | None:
    """The evaluation of the same plan at the other degree of ZeRO, if it was simulated."""
    counterpart = at_other_zero(candidate)
    evaluations = (result.best, *result.others, *result.too_large)
    return next((evaluation for evaluation in evaluations if evaluation.candidate == counterpart), None)


def _recomputation(problem: Problem, result: Result, chosen: Evaluation) -> tuple[str, ...]:
    """The recomputation of the stages, its reason and cost, and the best plan without it."""
    candidate, imported = chosen.candidate, imported_schedule(problem.pinned)
    if not any(candidate.recompute):
        return ()
    remakes = f"recomputation: {_recomputed_operations(problem, candidate)}"
    cost = f"{100 * _more_work(problem, candidate):.1f} % more work"
    if candidate.recompute_inside:
        cost += ", inside backwards" if isinstance(candidate.schedule, str) else ", inside backwards or in waits"
    elif candidate.recompute_ahead:
        cost += f", begun up to {format_count(candidate.recompute_ahead, 'action')} before its backward"
    elif not isinstance(candidate.schedule, str) and candidate.schedule != problem.pinned.schedule:
        cost += ", in earlier waits of its ranks than those for gradients"
    is_imported = imported is not None and bool(imported.recomputed_stages)
    if pinned_operations(problem.pinned.recompute):
        return (f"{remakes}: pinned{' and in the imported schedule' if is_imported else ''}, {cost}",)
    if is_imported:
        return (f"{remakes}: part of the imported schedule, {cost}",)
    limit = format_bytes(problem.memory_limit_bytes)
    return (f"{remakes}, which do not fit in {limit}: {cost}; {_keeping(result, chosen)}",)


def _keeping(result: Result, chosen: Evaluation) -> str:
    """The best plan without recomputation, as a clause."""
    best = next(
        (evaluation for evaluation in (result.best, *result.others) if not any(evaluation.candidate.recompute)), None
    )
    if best is None:
        return "no plan found without recomputation fits"
    slower = _percent(best.step_ns / chosen.step_ns - 1)
    return f"the best plan found without recomputation takes {format_seconds(to_seconds(best.step_ns))}, {slower}"


def _recomputed_operations(problem: Problem, candidate: Candidate) -> str:
    """The recomputation in words: stage by stage if there are few policies, else summed over all stages."""
    model, num_stages = problem.divided(candidate.head_parts).model, len(candidate.stages)
    texts = [
        remakes_text(model, *stage_remakes) for stage_remakes in zip(candidate.stages, candidate.recompute, strict=True)
    ]
    groups = [(text, [*run]) for text, run in itertools.groupby(range(num_stages), texts.__getitem__) if text]
    if len(groups) <= MOST_STAGES_LISTED:
        return "; ".join(f"{_stages(numbers, num_stages)} {text}" for text, numbers in groups)
    counts = Counter[tuple[UnitKind, tuple[Operation, ...]]]()
    for remake in itertools.chain.from_iterable(candidate.recompute):
        counts[remake.unit, remake.operations] += remake.count
    total = tuple(
        Remake(unit=unit, count=counts[unit, operations], operations=operations)
        for unit, operations in sorted(counts, key=lambda key: (list(UnitKind).index(key[0]), -len(key[1])))
    )
    with_any = sum(map(bool, texts))
    which = f"all {num_stages}" if with_any == num_stages else f"{with_any} of {num_stages}"
    return f"{which} stages recompute {remakes_text(model, (0, model.num_units), total)}"


def _stages(numbers: Sequence[int], num_stages: int) -> str:
    """A run of stages and the verb of a sentence: ``stage 0 recomputes``, ``stages 0 to 2 recompute``."""
    if len(numbers) == 1:
        return "the only stage recomputes" if num_stages == 1 else f"stage {numbers[0]} recomputes"
    which = f"all {num_stages} stages" if len(numbers) == num_stages else f"stages {numbers[0]} to {numbers[-1]}"
    return f"{which} recompute"


def _more_work(problem: Problem, candidate: Candidate) -> float:
    """Recomputed work of a micro-batch as a fraction of all other work of its units."""
    divided, mesh = problem.divided(candidate.head_parts), candidate.mesh
    recomputed_ns = sum(int(until[-1, : len(candidate.slices)].sum()) for until in recomputation_ns(divided, candidate))
    counts = unit_counts(divided.model, ((0, divided.model.num_units),))[0]
    seconds = divided.units(mesh.tp, mesh.microbatch, candidate.slices).seconds.sum(axis=(0, 2))
    return to_seconds(recomputed_ns) / float(counts @ seconds)


def _effort(result: Result, place: int) -> str:
    rank = "the best" if place == 1 else f"number {place} by prediction"
    judged, outlines = format_count(result.num_judged, "candidate"), format_count(result.num_outlines, "outline")
    return f"{rank} of {judged} of {outlines}, and {result.ending}"


def floor_seconds(problem: Problem, head_parts: Sequence[int]) -> float | None:
    """A lower bound of every step; None if the objective is cost."""
    if problem.objective is not Objective.TIME:
        return None
    return to_seconds(floor_ns(problem, all_meshes(problem), head_parts))


def _floor(problem: Problem, chosen: Evaluation, floor: float) -> str:
    """The distance of the step from its lower bound, as a sentence."""
    more, tokens = 100 * (to_seconds(chosen.step_ns) / max(floor, 1e-9) - 1), grid(problem)
    work = f"no plan with slices at multiples of {tokens} tokens is below {format_seconds(floor)}"
    return f"{work}, which the work alone takes; this one is {more:.1f} % above"


def alternatives(problem: Problem, result: Result, chosen: Evaluation) -> tuple[Alternative, ...]:
    """The next best of each kind of plan, candidates that a bound rules out, the fastest that did not fit, and outlines
    without stages that fit.
    """
    listed_labels = {chosen.candidate.label}
    listed: list[Alternative] = []
    others = [
        evaluation for evaluation in (result.best, *result.others) if evaluation.candidate.label not in listed_labels
    ]
    for other in _with_keeping(others, chosen):
        if other.candidate.label not in listed_labels and len(listed) < MOST_ALTERNATIVES:
            listed_labels.add(other.candidate.label)
            listed.append(_alternative(problem, other, _slower(other, chosen)))
    ruled_out = sorted(result.ruled_out, key=lambda ruled: ruled.bound_ns)
    for rejected in ruled_out:
        if rejected.candidate.label not in listed_labels and len(listed) < MOST_ALTERNATIVES:
            listed_labels.add(rejected.candidate.label)
            difference = _percent(rejected.bound_ns / chosen.step_ns - 1)
            order = "in the order made for it" if rejected.of_order else "whatever its order"
            reason = f"takes at least {format_seconds(to_seconds(rejected.bound_ns))} ({difference}), {order}"
            listed.append(
                Alternative(label=rejected.candidate.label, step_seconds=None, peak_bytes=None, reason=reason)
            )
    fitting = {evaluation.candidate for evaluation in (result.best, *result.others)}
    exceeding = [
        evaluation for evaluation in _too_large(problem, result) if at_other_zero(evaluation.candidate) not in fitting
    ]
    too_large = sorted(exceeding, key=lambda evaluation: evaluation.step_ns)[:MOST_REJECTED]
    listed += [_alternative(problem, evaluation, _excess(problem, evaluation, chosen)) for evaluation in too_large]
    lacking = {shortage.candidate.label: shortage for shortage in reversed(result.shortages)}
    for shortage in itertools.islice(reversed(lacking.values()), MOST_REJECTED):
        reason = f"no stages fit; those found lack {format_bytes(shortage.missing_bytes)} on a rank"
        listed.append(Alternative(label=shortage.candidate.label, step_seconds=None, peak_bytes=None, reason=reason))
    return tuple(listed)


def _with_keeping(others: list[Evaluation], chosen: Evaluation) -> list[Evaluation]:
    """The best of each label, from best to worst. If the chosen one recomputes, one of the first few does not."""
    by_label = {evaluation.candidate.label: evaluation for evaluation in reversed(others)}
    first = [evaluation for evaluation in others if by_label[evaluation.candidate.label] is evaluation]
    keeping = next((evaluation for evaluation in first if not any(evaluation.candidate.recompute)), None)
    if not any(chosen.candidate.recompute) or keeping is None or keeping in first[:MOST_ALTERNATIVES]:
        return first
    return [*first[: MOST_ALTERNATIVES - 1], keeping]


def _alternative(problem: Problem, evaluation: Evaluation, reason: str) -> Alternative:
    seconds = to_seconds(evaluation.step_ns)
    return Alternative(
        label=evaluation.candidate.label,
        step_seconds=seconds,
        peak_bytes=max(evaluation.peak_bytes),
        reason=reason,
        speed=evaluation.candidate.speed(problem, seconds),
    )


def _excess(problem: Problem, other: Evaluation, chosen: Evaluation) -> str:
    needed, allowed = bytes_apart(max(other.peak_bytes), problem.memory_limit_bytes)
    faster = f", though {_percent(other.step_ns / chosen.step_ns - 1)}" if other.step_ns < chosen.step_ns else ""
    return f"needs {needed} on a rank, of {allowed} allowed{faster}"


def _slower(other: Evaluation, chosen: Evaluation) -> str:
    """Comparison of another plan with the chosen one, and the parts of the step that make the difference."""
    if other.step_ns < chosen.step_ns:
        faster = f"{100 * (1 - other.step_ns / chosen.step_ns):.1f} % faster"
        devices, fewer = other.candidate.mesh.num_devices, chosen.candidate.mesh.num_devices
        if devices < fewer:
            return f"{faster}, which is too little to leave devices unused"
        return f"{faster}, but on {devices} devices, not {fewer}" if devices > fewer else faster
    if other.step_ns == chosen.step_ns:
        more = max(other.peak_bytes) > max(chosen.peak_bytes)
        return "equally fast, but takes more memory" if more else "equally fast, with as much memory"
    before, after = _rank_ns(chosen), _rank_ns(other)
    changes = {name: (after[name] - before[name]) / chosen.step_ns for name in before}
    slower = _percent(other.step_ns / chosen.step_ns - 1)
    listed = sorted((name for name in changes if abs(changes[name]) >= LEAST_SHARE), key=lambda name: -changes[name])
    differences = ", ".join(f"{name} {100 * changes[name]:+.1f} %" for name in listed)
    return f"{slower}: {differences}" if differences else slower


def _rank_ns(evaluation: Evaluation) -> dict[str, float]:
    """The parts of the step, which add up to it: means over ranks, or without them those of the busiest rank."""
    if evaluation.parts is not None:
        return {name: lost.mean * evaluation.step_ns for name, lost in evaluation.parts.named}
    return {
        "compute": evaluation.compute_ns,
        "waiting": evaluation.bubble_ns,
        "communication": evaluation.communication_ns,
        "reductions": evaluation.reduction_ns,
        "optimizer": evaluation.optimizer_ns,
    }


def _percent(change: float) -> str:
    """A change of a time: ``12.3 % slower``."""
    return f"{100 * abs(change):.1f} % {'slower' if change >= 0 else 'faster'}"
