"""Why this plan: its parts in words, the next best, and what was turned down and why."""

from __future__ import annotations

import itertools

from penstock.core.job import Objective
from penstock.core.plan import Alternative, slices_text
from penstock.core.units import format_bytes, format_seconds, to_seconds
from penstock.planner.floor import floor_ns, grid
from penstock.planner.problem import Problem, meshes
from penstock.planner.search import Evaluation, Result

MOST_ALTERNATIVES = 5
MOST_REJECTED = 5


def reasons(problem: Problem, result: Result, chosen: Evaluation) -> tuple[str, ...]:
    """The choice in a few sentences, for people."""
    candidate = chosen.candidate
    return (
        f"{candidate.label}: {format_seconds(to_seconds(chosen.step_ns))} per step",
        _parts(chosen),
        _slices(problem, chosen),
        _memory(problem, chosen),
        _effort(result),
        *_floor(problem, chosen),
    )


def _parts(chosen: Evaluation) -> str:
    shares = {
        "compute": chosen.compute_ns,
        "waiting for other ranks": chosen.bubble_ns,
        "communication": chosen.communication_ns,
        "reductions": chosen.reduction_ns,
        "optimizer": chosen.optimizer_ns,
    }
    told = (f"{100 * share / chosen.step_ns:.1f} % {name}" for name, share in shares.items() if share)
    of_all = (
        "" if chosen.waiting is None or not chosen.waiting.worst else f"; over ranks, waiting is {chosen.waiting.text}"
    )
    return f"the busiest rank's step: {', '.join(told)}{of_all}"


def _memory(problem: Problem, chosen: Evaluation) -> str:
    peak, limit = max(chosen.peak_bytes), problem.memory_limit_bytes
    return f"at most {format_bytes(peak)} on a rank, of {format_bytes(limit)} allowed"


def _slices(problem: Problem, chosen: Evaluation) -> str:
    slices, stages = chosen.candidate.slices, chosen.candidate.mesh.pp
    origin = ", as pinned" if problem.pinned.slices is not None else ""
    if len(slices) > 1:
        return f"{len(slices)} slices of {slices_text(slices)} tokens{origin}, over {stages} stages"
    if origin:
        return "sequences are not sliced: pinned"
    if stages == 1:
        return "sequences are not sliced: a single stage waits for no other"
    return "sequences are not sliced: no plan with slices that was simulated is better"


def _effort(result: Result) -> str:
    return f"the best of {result.num_judged} candidates of {result.num_outlines} outlines, and {result.ending}"


def _floor(problem: Problem, chosen: Evaluation) -> tuple[str, ...]:
    """How far the step is above the floor; there is none for what a plan costs."""
    if problem.objective is not Objective.TIME:
        return ()
    least = floor_ns(problem, meshes(problem))
    more, tokens = 100 * (chosen.step_ns / max(least, 1) - 1), grid(problem)
    work = f"no plan with slices at multiples of {tokens} tokens is below {format_seconds(to_seconds(least))}"
    return (f"{work}, which the work alone takes; this one is {more:.1f} % above",)


def alternatives(problem: Problem, result: Result, chosen: Evaluation) -> tuple[Alternative, ...]:
    """The next best of each kind of plan, those that their bounds rule out, the fastest that did not fit, and outlines
    without room.
    """
    seen = {chosen.candidate.label}
    found: list[Alternative] = []
    for other in result.others:
        if other.candidate.label not in seen and len(found) < MOST_ALTERNATIVES:
            seen.add(other.candidate.label)
            found.append(_alternative(other, _slower(other, chosen)))
    ruled_out = sorted(result.ruled_out, key=lambda each: each.bound_ns)
    for out in ruled_out:
        if out.candidate.label not in seen and len(found) < MOST_ALTERNATIVES:
            seen.add(out.candidate.label)
            reason = f"takes at least {format_seconds(to_seconds(out.bound_ns))}, whatever its order"
            found.append(Alternative(label=out.candidate.label, step_seconds=None, peak_bytes=None, reason=reason))
    too_large = [each for each in result.too_large if max(each.peak_bytes) > problem.memory_limit_bytes]
    too_large = sorted(too_large, key=lambda each: each.step_ns)[:MOST_REJECTED]
    found += [_alternative(each, f"needs {format_bytes(max(each.peak_bytes))} on a rank") for each in too_large]
    lacking = {each.candidate.label: each for each in reversed(result.shortages)}
    for shortage in itertools.islice(reversed(lacking.values()), MOST_REJECTED):
        reason = f"no stages fit; those found lack {format_bytes(shortage.missing_bytes)} on a rank"
        found.append(Alternative(label=shortage.candidate.label, step_seconds=None, peak_bytes=None, reason=reason))
    return tuple(found)


def _alternative(evaluation: Evaluation, reason: str) -> Alternative:
    return Alternative(
        label=evaluation.candidate.label,
        step_seconds=to_seconds(evaluation.step_ns),
        peak_bytes=max(evaluation.peak_bytes),
        reason=reason,
    )


def _slower(other: Evaluation, chosen: Evaluation) -> str:
    if other.step_ns < chosen.step_ns:
        faster = f"{100 * (1 - other.step_ns / chosen.step_ns):.1f} % faster"
        devices, fewer = other.candidate.mesh.num_devices, chosen.candidate.mesh.num_devices
        return f"{faster}, but on {devices} devices, not {fewer}" if devices > fewer else faster
    if other.step_ns == chosen.step_ns:
        more = max(other.peak_bytes) > max(chosen.peak_bytes)
        return "equally fast, but takes more memory" if more else "equally fast"
    parts = {
        "compute": other.compute_ns - chosen.compute_ns,
        "waiting": other.bubble_ns - chosen.bubble_ns,
        "communication": other.communication_ns - chosen.communication_ns,
        "reductions": other.reduction_ns - chosen.reduction_ns,
    }
    most = max(parts, key=lambda name: parts[name])
    return f"{100 * (other.step_ns / chosen.step_ns - 1):.1f} % slower, mostly {most}"
