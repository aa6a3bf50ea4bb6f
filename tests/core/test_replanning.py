"""Drift, its cause, and the plan that pays, against brute force and closed forms."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.layout import Precision
from penstock.core.moments import MomentType
from penstock.core.plan import Plan
from penstock.core.plan_change import restart_reasons
from penstock.core.profile import Profile
from penstock.core.replanning import (
    CHANGE_SECONDS,
    DRIFTED_RATIO,
    EQUAL_RATIO,
    LEAST_GAIN,
    NUM_TIMELINES,
    SETTLED_RATIO,
    WINDOW,
    Drift,
    PlanOption,
    Replanning,
    as_equal,
    busy_ns_of_ranks,
    choose,
    corrected,
    device_factors,
    is_drifted,
    is_sampled,
)
from penstock.core.timeline import Activity, Event, Source, Timeline
from tests.support.planning import profile
from tests.support.sample_run import sample_plan
from tests.support.small_plans import small_plan

FACTORS = st.floats(0.3, 5.0)


@given(st.lists(st.floats(0.1, 10.0), max_size=2 * WINDOW), st.booleans())
def test_the_median_of_the_newest_steps_decides(steps: list[float], was_drifted: bool) -> None:
    newest = sorted(steps[-WINDOW:])
    limit = SETTLED_RATIO if was_drifted else DRIFTED_RATIO
    expected = False
    if len(steps) >= WINDOW:
        median = (newest[WINDOW // 2 - 1] + newest[WINDOW // 2]) / 2
        expected = median > limit or 1 / median > limit
    assert is_drifted(steps, 1.0, was_drifted=was_drifted) is expected


def test_one_slow_step_is_no_drift() -> None:
    assert not is_drifted([1.0] * (WINDOW - 1) + [100.0], 1.0, was_drifted=False)


def test_drift_ends_only_well_below_where_it_began() -> None:
    between = [(DRIFTED_RATIO + SETTLED_RATIO) / 2] * WINDOW
    assert not is_drifted(between, 1.0, was_drifted=False)
    assert is_drifted(between, 1.0, was_drifted=True)


@given(st.integers(0, 5000))
def test_a_long_drift_leaves_few_timelines(num_drifted: int) -> None:
    sampled = [number for number in range(num_drifted + 1) if is_sampled(number)]
    assert len(sampled) <= NUM_TIMELINES * (1 + max(num_drifted, 1).bit_length())
    assert sampled[:NUM_TIMELINES] == [number for number in (1, 2, 3) if number <= num_drifted]


@given(st.integers(4, 5000))
def test_new_timelines_come_before_the_drift_has_lasted_twice_as_long(num_drifted: int) -> None:
    assert any(is_sampled(number) for number in range(num_drifted, 2 * num_drifted + 1))


def timeline(busy: list[int], source: Source = Source.MEASURED, *, waits: list[int] | None = None) -> Timeline:
    """A step in which each rank computes once for so long, of which it waits for shards."""
    waits = waits or [0] * len(busy)
    events = tuple(
        Event(rank, Activity.COMPUTE, f"{rank}F0.0", 0, length + waits[rank], waits[rank])
        for rank, length in enumerate(busy)
    )
    return Timeline(source=source, num_ranks=len(busy), step_ns=max(busy), events=events)


@given(st.lists(FACTORS, min_size=8, max_size=8), st.permutations(range(4)))
def test_factors_are_the_ratio_of_compute_times_by_device(factors: list[float], order: list[int]) -> None:
    """Of 2 replicas of 2 ranks of 2 shards on the devices of a placement."""
    placement = tuple(2 * first for first in order)
    plan = dataclasses.replace(small_plan(dp=2, num_microbatches=2), tp=2, placement=placement)
    expected = [10**9, 3 * 10**9]
    busy = [round(expected[rank // 2 % 2] * factors[device]) for rank, device in enumerate(plan.devices)]
    waits = [7 * 10**8 * rank for rank in range(8)]
    measured = [timeline(busy, waits=waits), timeline([100 * each for each in busy]), timeline(busy)]
    simulated = timeline(expected, Source.SIMULATED)
    assert device_factors(plan, simulated, busy_ns_of_ranks(measured), 8) == pytest.approx(factors, rel=1e-8)


def test_unused_devices_count_as_measured() -> None:
    plan = small_plan(pp=2)
    simulated, measured = timeline([1000, 1000], Source.SIMULATED), timeline([3000, 500])
    assert device_factors(plan, simulated, busy_ns_of_ranks([measured]), 4) == (3.0, 0.5, 1.0, 1.0)


@given(st.lists(FACTORS, min_size=3, max_size=3), st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3))
def test_a_corrected_profile_gives_every_device_its_time(factors: list[float], slowness: list[float]) -> None:
    """The time of a pass on a device is that of the records times the device's slowness."""
    before = dataclasses.replace(profile(num_ranks=3), slowness=tuple(slowness))
    after = corrected(before, Drift(devices=tuple(factors)))
    for old, new in zip(times(before), times(after), strict=True):
        assert new == pytest.approx([time * factor for time, factor in zip(old, factors, strict=True)])
    for old, new in zip(optimizer_times(before), optimizer_times(after), strict=True):
        assert new == pytest.approx([time * factor for time, factor in zip(old, factors, strict=True)])
    assert Profile.from_manifest(after.to_manifest()) == after


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0), st.floats(0.5, 2.0))
def test_communication_and_the_rest_are_factors_of_links_and_collectives(
    communication: float, rest: float, device: float
) -> None:
    before = profile(num_ranks=2)
    after = corrected(before, Drift(devices=(device, device), communication=communication, rest=rest))
    for link, old in zip(after.links, before.links, strict=True):
        seconds = link.latency_seconds + 1e6 / link.bytes_per_second
        expected = communication * rest * (old.latency_seconds + 1e6 / old.bytes_per_second)
        assert seconds == pytest.approx(expected)
    for record, old_record in zip(after.collectives, before.collectives, strict=True):
        assert record.seconds == pytest.approx(communication * rest * old_record.seconds)
    assert times(after) == [pytest.approx([device * rest * time for time in row]) for row in times(before)]
    for step, old_step in zip(after.optimizer, before.optimizer, strict=True):
        assert step.seconds == pytest.approx(device * rest * old_step.seconds)
    assert after.action_overhead_seconds == pytest.approx(device * rest * before.action_overhead_seconds)


@given(st.lists(st.floats(0.1, 10.0), max_size=12))
def test_factors_that_are_about_equal_become_equal(factors: list[float]) -> None:
    """No factor changes by more than the ratio, and factors keep their order."""
    equal = as_equal(factors)
    order = sorted(range(len(factors)), key=lambda index: factors[index])
    assert [equal[index] for index in order] == sorted(equal)
    assert all(1 / EQUAL_RATIO < new / old < EQUAL_RATIO for new, old in zip(equal, factors, strict=True))
    if factors and max(factors) < EQUAL_RATIO * min(factors):
        assert len(set(equal)) == 1


def test_groups_of_factors_end_at_gaps() -> None:
    assert as_equal([1.0, 1.05, 2.0, 2.1, 0.99]) == (1.0, 1.0, 2.05, 2.05, 1.0)
    assert as_equal([1.0, 1.09, 1.09, 1.105]) == (1.0, 1.09, 1.09, 1.09)


def test_a_drift_names_its_causes() -> None:
    assert str(Drift(devices=(1.05, 1.0))) == "everything is about as fast as measured"
    assert str(Drift(devices=(1.0, 2.0), rest=1.2)) == (
        "device 1 takes 2.00 times as long as measured, and everything takes 1.20 times as long as measured"
    )
    assert str(Drift(devices=(1.0, 1.0), communication=3.0)) == "communication takes 3.00 times as long as measured"


def test_devices_that_are_all_slower_alike_have_no_slowness() -> None:
    before = profile(num_ranks=2)
    after = corrected(before, Drift(devices=(2.0, 2.0)))
    assert after.slowness == ()
    assert after.units[0].alone_seconds == 2 * before.units[0].alone_seconds
    assert corrected(before, Drift(devices=(1.0, 1.0))) == before


def times(measured: Profile) -> list[list[float]]:
    slowness = measured.slowness or (1.0,) * measured.num_ranks
    return [[record.together_seconds * slow for slow in slowness] for record in measured.units]


def optimizer_times(measured: Profile) -> list[list[float]]:
    """As the planner counts them: the record's time times the device's slowness."""
    slowness = measured.slowness or (1.0,) * measured.num_ranks
    return [[record.seconds * slow for slow in slowness] for record in measured.optimizer]


def option(step_seconds: float, *reasons: str) -> PlanOption:
    plan = sample_plan()
    assert plan.prediction is not None
    prediction = dataclasses.replace(plan.prediction, step_seconds=step_seconds)
    return PlanOption(plan=dataclasses.replace(plan, prediction=prediction), restart_reasons=reasons)


@given(st.lists(st.tuples(st.floats(0.1, 2.0), st.booleans()), max_size=3), st.integers(0, 2000), st.floats(0.0, 500.0))
def test_the_option_that_saves_most_is_chosen_if_it_pays(
    options: list[tuple[float, bool]], steps_left: int, restart_seconds: float
) -> None:
    replanning = Replanning(
        profile=profile(),
        drift=Drift(devices=(1.0, 2.0)),
        step_seconds=1.0,
        options=tuple(option(seconds, *(["the stages"] if is_restart else [])) for seconds, is_restart in options),
    )
    choice = choose(replanning, steps_left, restart_seconds)
    saved = [
        steps_left * (1.0 - seconds) - (restart_seconds if is_restart else CHANGE_SECONDS)
        for seconds, is_restart in options
        if seconds <= 1 - LEAST_GAIN
    ]
    if max(saved, default=-math.inf) <= 0:
        assert choice.option is None
        return
    assert choice.option is not None
    cost = restart_seconds if choice.option.restart_reasons else CHANGE_SECONDS
    assert steps_left * (1.0 - choice.option.step_seconds) - cost == pytest.approx(max(saved))


def test_a_choice_states_its_figures() -> None:
    replanning = Replanning(
        profile=profile(),
        drift=Drift(devices=(1.0, 2.0)),
        step_seconds=1.0,
        options=(option(0.5, "the stages"), option(0.9)),
    )
    assert choose(replanning, 1000, 30.0).reason == (
        "device 1 takes 2.00 times as long as measured. The other plan has a step of 500 ms instead of 1 s and saves "
        "7 min 50 s, after 30 s for the restart that it needs because it changes the stages"
    )
    assert choose(replanning, 40, 30.0).option == option(0.9)
    assert choose(replanning, 10, 30.0).reason == (
        "device 1 takes 2.00 times as long as measured. The best other plan has a step of 900 ms instead of 1 s, which "
        "does not save its cost in 10 more steps: 2 s for a change in the same processes"
    )


LAYOUT: dict[str, dict[str, Any]] = {
    "the precision": {"precision": Precision.FP32},
    "the type of moments": {"moment_type": MomentType.BF16},
    "the global batch": {"num_microbatches": 6},
    "the sequence length": {"slices": (4, 4)},
    "sequence parallelism": {"sequence_parallel": False},
    "zero": {"zero": 1},
    "the stages": {"stages": ((0, 3), (3, 8))},
    "the placement of ranks on devices": {"placement": (1, 0, 2, 3)},
    "the kind of device": {"late_receives": True},
}


@pytest.mark.parametrize("reason", LAYOUT)
def test_what_the_state_of_ranks_depends_on_needs_a_restart(reason: str) -> None:
    plan = small_plan(dp=2, num_microbatches=4)
    other = dataclasses.replace(plan, **LAYOUT[reason])
    assert restart_reasons(plan, (0, 1), other, (0, 1)) == (reason,)


def test_a_placement_in_order_is_none() -> None:
    plan = small_plan(dp=2, num_microbatches=4)
    assert restart_reasons(plan, (0, 1), dataclasses.replace(plan, placement=(0, 1, 2, 3)), (0, 1)) == ()


def test_another_mesh_or_other_ranks_of_stages_need_a_restart() -> None:
    plan = small_plan(pp=2, dp=2, num_microbatches=2)
    assert restart_reasons(plan, (0, 1), plan, (1, 0)) == ("the ranks of the stages",)
    other = small_plan(pp=4, dp=1, num_microbatches=4)
    assert restart_reasons(plan, (0, 1), other, (0, 1, 2, 3)) == ("dp", "pp", "the stages", "the ranks of the stages")


def test_all_else_can_change_in_the_same_processes() -> None:
    """Every field of a plan is in one of both sets, so a new one has to be considered."""
    plan = small_plan(microbatch=2, num_microbatches=4)
    other = dataclasses.replace(
        small_plan(schedule="zb-h1", slices=(6, 6), microbatch=3, num_microbatches=3),
        remainder=2,
        remainder_slices=(12,),
        receive_ahead=4,
        prefix_by_slice=True,
        split_slots=True,
        recompute=(),
        recompute_inside=True,
        recompute_ahead=1,
        profile_digest="a",
    )
    assert restart_reasons(plan, (0, 1), other, (0, 1)) == ()
    free = {"microbatch", "num_microbatches", "slices", "schedule", "receive_ahead", "prefix_by_slice", "split_slots"}
    free |= {"remainder", "remainder_slices", "recompute", "recompute_ahead", "recompute_inside"}
    free |= {"program_digest", "profile_digest", "prediction", "reasons", "alternatives"}
    bound = {"model", "precision", "moment_type", "dp", "tp", "sequence_parallel", "pp", "stages", "zero", "placement"}
    bound |= {"late_receives", "head_parts", "gradient_reduction_type"}
    assert {field.name for field in dataclasses.fields(Plan)} == free | bound
