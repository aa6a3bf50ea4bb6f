"""Plans, profiles, clusters, records and timelines survive their text form, and refuse what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.bubble import Lost
from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkOverride, LinkSpec
from penstock.core.errors import UserError
from penstock.core.layout import Operation, Precision
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.plan import Alternative, Plan, Prediction
from penstock.core.profile import digest
from penstock.core.records import LogLine, Progress, Record, RecordKind, StepMetrics
from penstock.core.remaking import Recompute, Remake, full_remakes, uniform_remakes
from penstock.core.schedule import CSV, ScheduleSpec
from penstock.core.serialization import yamltext
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.core.units import format_amount, format_bytes, format_seconds, to_nanoseconds, to_seconds
from tests.support.old_fields import OF_A_PLAN, unknown_fields
from tests.support.sample_run import confident_plan, explained_plan, sample_plan
from tests.support.small_plans import small_model, small_plan

MODEL = ModelSpec(family=Family.LLAMA, layers=2, hidden=8, heads=2, vocab=16)
LINK = LinkSpec(latency_seconds=1e-5, bytes_per_second=1e9)


PREDICTION = Prediction(
    step_seconds=1.0,
    compute_seconds=0.5,
    bubble_seconds=0.25,
    communication_seconds=0.125,
    reduction_seconds=0.0625,
    optimizer_seconds=0.0625,
    peak_bytes=(7, 8),
    slot_bytes=(1, 2),
)


def sound_plan(**changes: Any) -> Plan:
    """A plan for two ranks with everything set."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "precision": Precision.FP32,
        "pp": 2,
        "microbatch": 1,
        "num_microbatches": 2,
        "slices": (5, 3),
        "stages": ((0, 3), (3, 6)),
        "schedule": ScheduleSpec(generator="zb", text="AAAA"),
        "placement": (0, 1),
        "prediction": PREDICTION,
        "reasons": ("because",),
        "alternatives": (Alternative(label="other", step_seconds=None, peak_bytes=None, reason="no room"),),
    }
    return Plan(**(fields | changes))


@pytest.mark.parametrize("text", [json.dumps, yamltext.dump], ids=["json", "yaml"])
def test_a_plan_round_trips(text: Any) -> None:
    plan = sound_plan()
    read = Plan.from_manifest(yamltext.load(text(plan.to_manifest())))
    assert read == plan
    assert read.digest == plan.digest


def test_derived_values_of_a_plan() -> None:
    plan = sound_plan(dp=3, placement=(0, 1, 2, 3, 4, 5))
    assert (plan.num_ranks, plan.sequence_length, plan.global_batch) == (6, 8, 6)


def test_shards_have_the_devices_after_their_first() -> None:
    assert sound_plan(placement=(4, 1), tp=2).devices == (4, 5, 1, 2)
    assert sound_plan(placement=(4, 1)).devices == (4, 1)
    assert sound_plan(placement=(), tp=2).devices == ()


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"stages": ((0, 3), (4, 6))}, "stages[1]"),
        ({"stages": ((0, 3), (3, 5))}, "stages"),
        ({"stages": ((0, 6),)}, "stages"),
        ({"slices": (8, 0)}, "slices[1]"),
        ({"slices": ()}, "slices"),
        ({"receive_ahead": 2**70}, "receiveAhead"),
        ({"num_microbatches": 0}, "numMicrobatches"),
        ({"placement": (0,)}, "placement"),
        ({"placement": (1, 1)}, "placement"),
        ({"placement": (-1, 0)}, "placement"),
        ({"placement": (0, 1), "tp": 2}, "placement"),
        ({"placement": (0, 2, 4, 6), "tp": 2}, "placement"),
        ({"remainder": 1, "remainder_slices": (8,)}, "remainder"),
        ({"microbatch": 3, "remainder": 1, "remainder_slices": (8,), "num_microbatches": 1}, "remainder"),
        ({"microbatch": 3, "remainder_slices": (8,)}, "remainder"),
        ({"microbatch": 3, "remainder": 1}, "remainderSlices"),
        ({"microbatch": 3, "remainder": 1, "remainder_slices": (4, 3)}, "remainderSlices"),
        ({"microbatch": 3, "remainder": 1, "remainder_slices": (4, 3, 1)}, "remainderSlices"),
    ],
)
def test_an_impossible_plan_is_refused(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        sound_plan(**changes)
    assert caught.value.where == where


def test_the_last_micro_batch_may_be_smaller() -> None:
    alike = sound_plan(dp=2, placement=(), microbatch=3)
    plan = replace(alike, remainder=1, remainder_slices=(8,))
    assert (plan.global_batch, plan.num_sequences, plan.num_alike) == (8, 4, 1)
    assert [plan.size_of(each) for each in range(2)] == [3, 1]
    assert [plan.slices_of(each) for each in range(2)] == [(5, 3), (8,)]
    assert plan.microbatches_text == "1 micro-batch of 3 and one of 1"
    assert plan.slices_text == "5, 3; of the last micro-batch 8"
    assert Plan.from_manifest(plan.to_manifest()) == plan
    assert not {"remainder", "remainderSlices"} & alike.to_manifest().keys()


def test_ranks_of_0_1_0_read_the_plan_that_ranks_are_given() -> None:
    plan = confident_plan()
    assert unknown_fields(plan.to_manifest(), *OF_A_PLAN) == {"lowSeconds", "highSeconds", "warnings"}
    given = plan.for_ranks.to_manifest()
    assert unknown_fields(given, *OF_A_PLAN) == set()
    assert Plan.with_confidence(given, plan.confidence) == plan
    assert sample_plan().for_ranks == sample_plan()
    assert Plan.with_confidence(given, {}) == plan.for_ranks


def test_the_plan_for_ranks_has_no_explanation() -> None:
    plan = explained_plan()
    given = plan.for_ranks.to_manifest()
    assert unknown_fields(given, *OF_A_PLAN) == set()
    assert Plan.with_confidence(given, plan.confidence) == plan
    assert Plan.from_manifest(json.loads(json.dumps(plan.to_manifest()))) == plan


@pytest.mark.parametrize("given", [[], {}, {"prediction": []}, {"prediction": None}, None])
def test_fields_that_are_not_a_plan_are_refused(given: Any) -> None:
    with pytest.raises(UserError):
        Plan.with_confidence(given, {"lowSeconds": 1.0})


def test_a_prediction_names_bytes_of_the_same_ranks_twice() -> None:
    with pytest.raises(UserError) as caught:
        replace(PREDICTION, peak_bytes=(7,))
    assert caught.value.where == "peakBytes"
    written = sound_plan().to_manifest()
    written["prediction"]["peakBytes"] = [7]
    with pytest.raises(UserError) as caught:
        Plan.from_manifest(written)
    assert caught.value.where == "prediction.peakBytes"


def test_digests_do_not_depend_on_the_order_of_fields() -> None:
    assert digest({"a": 1, "b": [2.5]}) == digest({"b": [2.5], "a": 1}) != digest({"a": 1, "b": [2.25]})


def sound_cluster(**changes: Any) -> ClusterSpec:
    """Two nodes of four devices with one slow link."""
    fields: dict[str, Any] = {
        "name": "lab",
        "device": DeviceSpec(name="box", peak_flops=1e12, memory_bytes=3 * 2**30),
        "num_nodes": 2,
        "devices_per_node": 4,
        "intra_node": LINK,
        "inter_node": LINK,
        "links": (LinkOverride(source=0, target=1, link=LINK),),
    }
    return ClusterSpec(**(fields | changes))


def test_a_cluster_round_trips_and_numbers_devices_by_node() -> None:
    cluster = sound_cluster()
    assert ClusterSpec.from_manifest(yamltext.load(yamltext.dump(cluster.to_manifest()))) == cluster
    assert [cluster.node_of(device) for device in range(cluster.num_devices)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: sound_cluster(num_nodes=0),
        lambda: sound_cluster(links=(LinkOverride(source=0, target=2, link=LINK),)),
        lambda: LinkSpec(latency_seconds=0.0, bytes_per_second=0.0),
        lambda: DeviceSpec(name="x", peak_flops=1.0, memory_bytes=1, efficiency=((4, 0.5), (2, 0.6))),
        lambda: DeviceSpec(name="x", peak_flops=1.0, memory_bytes=1, efficiency=((4, 1.5),)),
        lambda: DeviceSpec(name="x", peak_flops=0.0, memory_bytes=1),
    ],
)
def test_impossible_hardware_is_refused(wrong: Any) -> None:
    with pytest.raises(UserError):
        wrong()


def test_a_timeline_sums_up_its_events() -> None:
    events = (
        Event(0, Activity.COMPUTE, "0F0.0", 0, 6),
        Event(1, Activity.WAIT, "1WAIT_RECV_F0.0", 0, 7),
        Event(1, Activity.COMPUTE, "1F0.0", 7, 10),
    )
    timeline = Timeline(source=Source.MEASURED, num_ranks=2, step_ns=10, events=events, peak_bytes=(1, 2), step=3)
    assert Timeline.from_manifest(json.loads(json.dumps(timeline.to_manifest()))) == timeline
    assert (timeline.busy_ns(0), timeline.busy_ns(1)) == (6, 3)
    assert timeline.bubble.mean == pytest.approx(1 - 9 / 20)
    assert timeline.bubble.worst == pytest.approx(0.7)
    assert timeline.bubble.rank == 1
    assert timeline.bubble.text == "55.0 % on average, 70.0 % on rank 1"


def test_equal_losses_of_all_ranks_are_stated_once() -> None:
    assert Lost.of([1, 1], 4).text == "25.0 % on every rank"
    assert (Lost.of([], 4), Lost.of([3], 0)) == (Lost(mean=0, worst=0, rank=0),) * 2


def test_an_event_cannot_end_before_it_begins() -> None:
    with pytest.raises(UserError, match="stops before it starts"):
        Event(0, Activity.COMPUTE, "0F0.0", 5, 4)


METRICS = StepMetrics(
    step=1,
    loss=2.5,
    step_seconds=0.5,
    tokens_per_second=8.0,
    learning_rate=1e-3,
    gradient_norm=1.5,
    peak_bytes=9,
)


@pytest.mark.parametrize(
    "content",
    [
        {"kind": RecordKind.METRICS, "metrics": METRICS},
        {"kind": RecordKind.PROGRESS, "progress": Progress(step=1, num_steps=2, phase="Running", last_checkpoint=1)},
        {"kind": RecordKind.LOG, "log": LogLine(rank=0, level="warning", message="slow")},
        {"kind": RecordKind.PROFILE, "profile_digest": "abc"},
    ],
)
def test_a_record_round_trips(content: dict[str, Any]) -> None:
    record = Record(uid="u", attempt=1, source="rank-0", sequence=4, recorded_at=1.5, **content)
    assert Record.from_manifest(json.loads(json.dumps(record.to_manifest()))) == record


@given(st.integers(0, 10**15))
def test_nanoseconds_round_trip_through_seconds(nanoseconds: int) -> None:
    assert to_nanoseconds(to_seconds(nanoseconds)) == nanoseconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (3.4, "3.4 s"),
        (0.00125, "1.25 ms"),
        (8.12e-7, "812 ns"),
        (0.9997, "1000 ms"),
        (125, "2 min 5 s"),
        (7260, "2 h 1 min"),
    ],
)
def test_seconds_are_shown_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1012 * 2**20, "1012 MiB"), (4 * 2**30, "4 GiB")],
)
def test_bytes_are_shown_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0.00"), (1234.5, "1,234.50"), (0.25, "0.25"), (0.00312, "0.0031"), (1e-9, "1e-09")]
)
def test_money_is_shown_for_people(amount: float, text: str) -> None:
    assert format_amount(amount) == text


# Recomputation


@pytest.mark.parametrize("pin", Recompute)
def test_a_plan_has_the_pin_of_its_recomputation(pin: Recompute) -> None:
    plan = small_plan(pp=2, head_parts=2)
    remakes = tuple(uniform_remakes(plan.model, stage, pin.operations) for stage in plan.stages)
    plan = replace(plan, recompute=remakes)
    assert [each for each in Recompute if plan.recomputes(each)] == [pin]
    assert plan.recompute_pin is pin
    assert Plan.from_manifest(plan.to_manifest()) == plan


def test_a_plan_whose_stages_differ_is_pinned_stage_by_stage() -> None:
    plan = small_plan(pp=2)
    policy = (uniform_remakes(plan.model, plan.stages[0], (Operation.NORM,)), ())
    plan = replace(plan, recompute=policy)
    assert plan.recompute_pin == policy
    assert replace(plan, recompute_inside=True).recompute_pin is None
    assert plan.recomputes(policy)
    assert not plan.recomputes((policy[0], policy[0]))
    assert not plan.recomputes(policy[:1])
    unpinnable = replace(small_plan(pp=2, head_parts=2), stages=((0, 7), (7, 9)))
    assert unpinnable.blocks is None
    remakes = (Remake(unit=UnitKind.MLP, count=1, operations=(Operation.NORM,)),)
    assert replace(unpinnable, recompute=(remakes, ())).recompute_pin is None


def test_stages_whose_schedule_recomputes_obey_every_pin() -> None:
    text = "0F0,0R0,0B0\n1F0,1B0\n"
    plan = small_plan(pp=2, slices=(12,), schedule=ScheduleSpec(generator=CSV, text=text))
    assert plan.recompute == (full_remakes(plan.model, plan.stages[0]), ())
    assert [each for each in Recompute if plan.recomputes(each)] == [Recompute.NONE]
    selective = uniform_remakes(plan.model, plan.stages[1], Recompute.SELECTIVE.operations)
    assert replace(plan, recompute=(plan.recompute[0], selective)).recompute_pin is Recompute.SELECTIVE


def test_remakes_of_other_stages_are_refused() -> None:
    plan = small_plan(pp=2)
    with pytest.raises(UserError, match="has entries for 1 stages, the plan has 2"):
        replace(plan, recompute=((),))
    with pytest.raises(UserError, match=r"recompute\[0\]\[0\].count: 3 attention units of a stage that has 2"):
        replace(plan, recompute=(uniform_remakes(plan.model, (0, plan.model.num_units), tuple(Operation)), ()))


def test_an_operation_is_named_once() -> None:
    plan = small_plan(pp=2)
    twice = Remake(unit=UnitKind.MLP, count=1, operations=(Operation.NORM, Operation.NORM))
    with pytest.raises(UserError, match=r"recompute\[0\]\[0\].operations: names an operation twice"):
        replace(plan, recompute=((twice,), ()))


def test_pins_are_of_layers_and_a_schedule_that_says_it_all_needs_none() -> None:
    """Not of the embedding, nor of parts of the head, whose activation would be a product with the vocabulary."""
    divided = small_model(Family.LLAMA).divided(2)
    of_pins = uniform_remakes(divided, (0, divided.num_units), tuple(Operation))
    assert {each.unit for each in of_pins} == {UnitKind.ATTENTION, UnitKind.MLP}
    assert {each.unit for each in full_remakes(divided, (0, divided.num_units))} == set(UnitKind)


def test_a_schedule_with_recomputation_but_no_policy_is_from_an_older_version() -> None:
    csv = ScheduleSpec(generator=CSV, text="0F0.0,0R0.0,0B0.0\n1F0.0,1B0.0\n")
    plan = small_plan(pp=2, slices=(4,))
    stages = plan.stages
    assert replace(plan, schedule=csv).lacks_recompute
    named = replace(plan, schedule=csv, recompute=(full_remakes(plan.model, stages[0]), ()))
    assert not named.lacks_recompute
    assert named.recompute_pin is None
    assert not plan.lacks_recompute


# The optimizer's state over replicas


def test_replicas_may_divide_the_state_of_the_optimizer() -> None:
    plan = small_plan(dp=2, zero=1)
    assert plan.to_manifest()["zero"] == 1
    assert Plan.from_manifest(plan.to_manifest()) == plan
    assert [pin for pin in (None, 0, 1) if plan.obeys_zero(pin)] == [None, 1]
    assert "zero" not in small_plan(dp=2).to_manifest()


def test_one_replica_divides_nothing() -> None:
    assert all(small_plan().obeys_zero(pin) for pin in (None, 0, 1))
    with pytest.raises(UserError, match="between replicas, of which there is one") as error:
        small_plan(zero=1)
    assert error.value.where == "zero"
    with pytest.raises(UserError, match="2 is not") as error:
        small_plan(dp=2, zero=2)
    assert error.value.where == "zero"
