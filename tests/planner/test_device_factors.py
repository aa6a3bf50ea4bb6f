"""Factors of devices from measured steps of plans with replicas and shards, of which every one is measured by itself.

A simulated step has the times of the slowest device of each pipeline rank. The oracle gives every other device its own
part of these times, as measurements do.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.layout import Precision
from penstock.core.plan import Plan
from penstock.core.profile import LinkRecord, Profile
from penstock.core.replanning import EQUAL_RATIO, Drift, corrected
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.planner.replanning import factors_of
from penstock.planner.replay import simulated
from tests.support.planning import profile, units_at
from tests.support.small_plans import small_plan

NUM_DEVICES = 8
MESHES = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (4, 1, 2)]
NOISE = st.lists(st.floats(0.97, 1.03), min_size=NUM_DEVICES, max_size=NUM_DEVICES)
DRIFTS = st.lists(st.sampled_from([0.3, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0]), min_size=NUM_DEVICES, max_size=NUM_DEVICES)
SLOWNESS = st.lists(st.floats(0.5, 2.0), min_size=NUM_DEVICES - 1, max_size=NUM_DEVICES - 1)


def plan_of(dp: int, tp: int, pp: int, placement: tuple[int, ...] = ()) -> Plan:
    plan = small_plan(
        dp=dp, pp=pp, slices=(16,), microbatch=1, num_microbatches=4 // dp, precision=Precision.FP32, layers=4
    )
    return dataclasses.replace(plan, tp=tp, placement=placement or tuple(range(0, plan.num_ranks * tp, tp)))


def measured_profile(slowness: tuple[float, ...] = (), *, together: float = 1.0) -> Profile:
    """Of devices that compute ``together`` times as long while all compute."""
    units = (
        dataclasses.replace(record, together_seconds=together * record.alone_seconds)
        for record in (*units_at(1), *units_at(2, share=0.5))
    )
    pairs = ((a, b) for a in range(NUM_DEVICES) for b in range(NUM_DEVICES) if a != b)
    links = tuple(
        LinkRecord(source=a, target=b, latency_seconds=1e-5, bytes_per_second=1e9, error=0.0) for a, b in pairs
    )
    return profile(tuple(units), links=links, num_ranks=NUM_DEVICES, slowness=slowness)


def measured_on(true: Profile, plan: Plan) -> Timeline:
    """A step of all ranks: each computes for its own device's part of the time of its pipeline rank."""
    step = simulated(plan, true).timeline
    slowness = np.array(true.slowness or (1.0,) * true.num_ranks)
    groups = slowness[np.array(plan.devices).reshape(plan.dp, plan.pp, plan.tp)]
    share = (groups / groups.max(axis=(0, 2), keepdims=True)).ravel()
    events: list[Event] = []
    for rank in range(plan.num_ranks):
        own = (event for event in step.events if event.rank == rank // plan.tp % plan.pp)
        for event in own:
            if event.activity is Activity.COMPUTE:
                length = round((event.duration_ns - event.collective_ns) * share[rank])
                stop = event.start_ns + length
                events.append(dataclasses.replace(event, rank=rank, stop_ns=stop, collective_ns=0))
    return Timeline(source=Source.MEASURED, num_ranks=plan.num_ranks, step_ns=step.step_ns, events=tuple(events))


def factors_from(before: Profile, plan: Plan, factors: list[float]) -> list[float]:
    """The factors that steps on devices with these true ``factors`` lead to."""
    return list(factors_of(before, plan, (measured_on(corrected(before, Drift(devices=tuple(factors))), plan),) * 3))


def with_unused(plan: Plan, drifts: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The drifts, where devices that the plan leaves unused count as the one that has changed least, if all have."""
    used = [drifts[device] for device in plan.devices]
    unused = min(max(1.0, min(used)), max(used))
    return np.array([drift if device in plan.devices else unused for device, drift in enumerate(drifts)])


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=10, deadline=None)
@given(drifts=DRIFTS, slowness=SLOWNESS)
def test_the_factor_of_every_device_is_recovered(
    mesh: tuple[int, int, int], drifts: list[float], slowness: list[float]
) -> None:
    """Also of devices that were unequal before, and of the faster ones of a group."""
    plan = plan_of(*mesh)
    expected = with_unused(plan, drifts)
    before = measured_profile((1.0, *slowness))
    assert factors_from(before, plan, expected.tolist()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=10, deadline=None)
@given(NOISE)
def test_noise_of_3_percent_is_no_drift(mesh: tuple[int, int, int], noise: list[float]) -> None:
    plan = plan_of(*mesh)
    assert max(noise) < EQUAL_RATIO
    factors = np.array(factors_from(measured_profile(), plan, noise))[list(plan.devices)]
    assert len(set(factors)) == 1
    assert min(noise) * 0.999 <= factors[0] <= max(noise) * 1.001


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=10, deadline=None)
@given(NOISE)
def test_noise_on_a_drift_of_one_device_stays_noise(mesh: tuple[int, int, int], noise: list[float]) -> None:
    plan = plan_of(*mesh)
    slow = plan.devices[-1]
    drifts = [2 * factor if device == slow else factor for device, factor in enumerate(noise)]
    factors = factors_from(measured_profile(), plan, drifts)
    assert factors[slow] == pytest.approx(2 * noise[slow], rel=1e-3)
    assert len({factors[device] for device in plan.devices if device != slow}) == 1


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=10, deadline=None)
@given(DRIFTS)
def test_devices_that_slow_each_other_down_have_the_factors_of_their_timelines(
    mesh: tuple[int, int, int], drifts: list[float]
) -> None:
    """A slower rank computes next to more work of others, so its time grows by a bit more or less than its factor."""
    plan = plan_of(*mesh)
    expected = with_unused(plan, drifts)
    before = measured_profile(together=1.5)
    assert factors_from(before, plan, expected.tolist()) == pytest.approx(expected, rel=0.02)


def test_factors_are_those_of_devices_and_not_of_ranks() -> None:
    plan = plan_of(2, 2, 2, placement=(6, 2, 4, 0))
    factors = [1.0, 1.0, 3.0, 1.0, 1.0, 0.5, 1.0, 1.0]
    assert factors_from(measured_profile(), plan, factors) == pytest.approx(factors, rel=1e-3)
