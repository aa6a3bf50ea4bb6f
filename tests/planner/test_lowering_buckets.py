"""Where reductions in buckets stand, and what they spare: simulated steps against closed forms."""

from __future__ import annotations

import dataclasses
import math

import pytest

from penstock.core.buckets import stage_buckets
from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.invariants import prove
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.schedule import Group, Kind, Part
from penstock.planner.compile import program_of
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster
from penstock.planner.replay import simulated
from tests.support.planning import job
from tests.support.small_plans import small_plan
from tests.support.small_programs import actions, lowered

ONE = "0F0,0F1,0B0,0B1\n"
PARTS = (Part(3, 5), Part(1, 3), Part(0, 1))


def test_a_bucket_starts_after_its_part_of_the_last_backward() -> None:
    row = actions(lowered(ONE, dp=True, buckets=(PARTS,)), 0)
    assert row == [
        *("0F0.0", "0F1.0", "0B0.0"),
        *("0B1.0[3:5]", "0START_REDUCE(dp)[3:5]", "0B1.0[1:3]", "0START_REDUCE(dp)[1:3]", "0B1.0[0]"),
        *("0START_REDUCE(dp)[0]", "0WAIT_REDUCE(dp)[3:5]", "0WAIT_REDUCE(dp)[1:3]", "0WAIT_REDUCE(dp)[0]"),
        *("0START_REDUCE(norm)", "0WAIT_REDUCE(norm)", "0STEP"),
    ]


def test_messages_of_a_backward_in_parts_follow_its_last_part() -> None:
    row = actions(lowered("0F0,0I0,0W0\n1F0,1B0\n", dp=True, buckets=((), (Part(1, 3), Part(0, 1)))), 1)
    first = row.index("1B0.0[1:3]")
    assert row[first : first + 5] == [
        *("1B0.0[1:3]", "1START_REDUCE(dp)[1:3]", "1B0.0[0]", "1SEND_B0.0", "1WAIT_SEND_B0.0"),
    ]
    assert row[first + 5] == "1START_REDUCE(dp)[0]"


def test_shards_are_summed_in_the_same_buckets_first() -> None:
    row = actions(lowered(ONE, dp=True, tp=True, buckets=((PARTS[0], Part(0, 3)),)), 0)
    first = row.index("0B1.0[3:5]")
    assert row[first + 1 : first + 5] == [
        *("0START_REDUCE(tp)[3:5]", "0WAIT_REDUCE(tp)[3:5]", "0START_REDUCE(dp)[3:5]", "0B1.0[0:3]"),
    ]


def test_devices_with_places_and_copies_of_a_tied_matrix_have_no_buckets() -> None:
    buckets = ((Part(2, 4), Part(0, 2)), (Part(3, 5), Part(0, 3)))
    text = "0F0,0B0\n1F0,1B0\n"
    late = lowered(text, dp=True, late_receives=True, buckets=buckets)
    assert late.digest == lowered(text, dp=True, late_receives=True).digest
    tied = lowered(text, dp=True, tie=(0, 1), buckets=buckets)
    assert "1B0.0" in actions(tied, 1)
    assert actions(tied, 0)[-11:] == [
        *("0START_REDUCE(dp)[2:4]", "0B0.0[0:2]", "0WAIT_SEND_F0.0", "0START_REDUCE(tie)", "0WAIT_REDUCE(tie)"),
        *("0START_REDUCE(dp)[0:2]", "0WAIT_REDUCE(dp)[2:4]", "0WAIT_REDUCE(dp)[0:2]"),
        *("0START_REDUCE(norm)", "0WAIT_REDUCE(norm)", "0STEP"),
    ]


@pytest.mark.parametrize("zero", [0, 1])
def test_a_plan_has_the_buckets_of_its_model_and_is_proved_with_all_units(zero: int) -> None:
    plan = dataclasses.replace(small_plan(pp=1, dp=2, zero=zero), model=WIDE, stages=((0, WIDE.num_units),))
    (expected,) = stage_buckets(WIDE, plan.stages, plan.precision, 1)
    program = program_of(plan)
    starts = [i.action for i in program.ranks[0].instructions if i.action.kind is Kind.START_REDUCE]
    assert [action.part for action in starts if action.group is Group.DP] == list(expected)
    assert len(expected) > 1
    prove(program, num_trained=[WIDE.num_units])
    alone = dataclasses.replace(plan, dp=1, zero=0)
    assert all(i.action.part is None for i in program_of(alone).ranks[0].instructions)


# What they spare

WIDE = ModelSpec(family=Family.LLAMA, layers=8, hidden=256, heads=4, vocab=256)
SLOW = DeviceSpec(name="slow", peak_flops=1e12, memory_bytes=2**34, action_overhead_seconds=0.0)


def cluster(bytes_per_second: float, num_devices: int = 2) -> ClusterSpec:
    """One device per node, whose links have no latency."""
    link = LinkSpec(latency_seconds=0.0, bytes_per_second=bytes_per_second)
    return ClusterSpec(
        name="slow", device=SLOW, num_nodes=num_devices, devices_per_node=1, intra_node=link, inter_node=link
    )


def planned(
    described: ClusterSpec, *, pp: int, microbatches: int, schedule: str = "1f1b", slices: int = 1, zero: int = 0
) -> Plan:
    """Two replicas of a model with a few blocks per stage."""
    spec = job(
        model=WIDE,
        sequence_length=256,
        global_batch=2 * microbatches,
        ranks=2 * pp,
        memory=2**34,
        dp=2,
        tp=1,
        pp=pp,
        micro_batch=1,
        slices=slices,
        schedule=schedule,
        zero=zero,
    )
    return decide(problem_from_cluster(spec, described)).plan


def reduction_ns(plan: Plan, described: ClusterSpec) -> int:
    """The longest reduction of a rank's gradients as one."""
    serial = simulated(dataclasses.replace(plan, late_receives=True, program_digest=""), described)
    return max(event.duration_ns for event in serial.timeline.events if event.action.endswith("START_REDUCE(dp)"))


def test_a_first_forward_waits_for_one_bucket_after_the_other() -> None:
    text = "0F0,2F0,2I0,2W0,0I0,0W0\n1F0,3F0,3B0,1B0\n"
    buckets = ((Part(2, 4), Part(0, 2)), (), (), ())
    row = actions(lowered(text, dp=True, zero=1, buckets=buckets), 0)
    assert row[:3] == ["0START_GATHER(dp)[0:2]", "0START_GATHER(dp)[2:4]", "2START_GATHER(dp)"]
    start = row.index("0WAIT_GATHER(dp)[0:2]")
    assert row[start : start + 5] == [
        *("0WAIT_GATHER(dp)[0:2]", "0F0.0[0:2]", "0WAIT_GATHER(dp)[2:4]", "0F0.0[2:4]"),
        "0SEND_F0.0",
    ]
    late = lowered(text, dp=True, zero=1, buckets=buckets, late_receives=True)
    assert actions(late, 0)[0] == "0START_GATHER(dp)"


def backward_ns(plan: Plan, described: ClusterSpec) -> int:
    """The longest B of a micro-batch."""
    serial = simulated(dataclasses.replace(plan, late_receives=True, program_digest=""), described)
    return max(event.duration_ns for event in serial.timeline.events if "B0" in event.action.split("_")[0])


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (1, 4), (2, 4), (4, 8)])
def test_half_of_a_reduction_as_long_as_a_backward_is_hidden(pp: int, microbatches: int, zero: int) -> None:
    """All apart from compute, less in buckets, is at least half of all apart from compute, less without any. With a
    divided state there are gathers, too, which are as long as its reductions.
    """
    fast = cluster(1e15, 2 * pp)
    plan = planned(fast, pp=pp, microbatches=microbatches, zero=zero)
    backward, at_once = backward_ns(plan, fast), reduction_ns(plan, cluster(1e9, 2 * pp))
    described = cluster(1e9 * at_once / backward, 2 * pp)
    assert math.isclose(reduction_ns(plan, described), backward, rel_tol=0.01)
    serial = simulated(dataclasses.replace(plan, late_receives=True, program_digest=""), described).makespan_ns
    alone = dataclasses.replace(plan, dp=1, zero=0, placement=(), program_digest="", prediction=None)
    without = simulated(alone, described).makespan_ns
    assert serial - simulated(plan, described).makespan_ns >= (serial - without) / 2
