"""The fit against cost functions that are known."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.graphs import recorded_shares
from penstock.core.model import UnitKind
from penstock.core.moments import MomentType
from penstock.core.profile import CollectiveRecord, LinkRecord, MemoryRecord, OptimizerRecord, TransientRecord
from penstock.core.replicas import ReductionType
from penstock.core.schedule import Kind
from penstock.core.sharding import Collective
from penstock.planner.fit import MeasuredCost, fit_points, fit_records, measured_cost
from penstock.planner.work import Work
from tests.support.planning import measured, profile, units_at

Truth = Callable[[int, int, int], float]

GRID = [(b, n, c) for b in (1, 2) for n in (8, 16, 32, 64) for c in (0, 64 - n // 2, 128 - n)]
BETWEEN = [(1, 12, 40), (1, 24, 100), (2, 48, 30), (1, 33, 0)]


def records(unit: UnitKind, kind: Kind, truth: Truth, points: list[tuple[int, int, int]], held_out: bool = False):  # type: ignore[no-untyped-def]
    return [
        measured(unit, kind, batch=b, length=n, prefix=c, seconds=truth(b, n, c), held_out=held_out)
        for b, n, c in points
    ]


@settings(max_examples=60)
@given(st.floats(0, 1e-3), st.floats(1e-7, 1e-4), st.floats(1e-10, 1e-7), st.floats(0, 1e-8))
def test_affine_attention_is_recovered_between_and_beyond_the_measured_points(
    fixed: float, per_token: float, per_pair: float, per_square: float
) -> None:
    def truth(b: int, n: int, c: int) -> float:
        return fixed + per_token * b * n + per_pair * b * (n * c + n * (n + 1) / 2) + per_square * b * n * n

    fit = fit_records(records(UnitKind.ATTENTION, Kind.F, truth, GRID), together=False)
    for b, n, c in BETWEEN:
        assert float(fit.seconds(Work.of(b, n, c))) == pytest.approx(truth(b, n, c), rel=2e-3)
    growth = float(fit.seconds(Work.of(1, 32, 4096)) - fit.seconds(Work.of(1, 32, 2048)))
    assert growth == pytest.approx(per_pair * 32 * 2048, rel=2e-2)


def test_matrices_cost_the_same_after_any_prefix() -> None:
    fit = fit_records(records(UnitKind.ATTENTION, Kind.W, lambda b, n, c: 1e-6 * b * n + 1e-9 * c, GRID), False)
    assert float(fit.seconds(Work.of(1, 16, 0))) == float(fit.seconds(Work.of(1, 16, 100)))


def test_tokens_below_the_grid_lie_on_its_first_line_and_beyond_it_go_on_in_proportion() -> None:
    points = [(1, n, 0) for n in (8, 16, 64)]
    fit = fit_records(records(UnitKind.MLP, Kind.F, lambda b, n, c: 1e-5 + 1e-6 * n, points), together=False)
    assert float(fit.seconds(Work.of(1, 2, 0))) == pytest.approx(12e-6)
    assert float(fit.seconds(Work.of(4, 64, 0))) == pytest.approx(4 * 74e-6)


def test_concurrent_and_single_measurements_are_fitted_separately() -> None:
    found = [measured(UnitKind.MLP, Kind.F, length=n, slowdown=1.5) for n in (8, 16)]
    assert float(fit_records(found, together=True).seconds(Work.of(1, 12, 0))) == pytest.approx(18e-6)
    assert float(fit_records(found, together=False).seconds(Work.of(1, 12, 0))) == pytest.approx(12e-6)


def whole(attention: Truth, held_out: Truth | None = None, **changes: object) -> MeasuredCost:
    units = [measured(u, k) for u in UnitKind for k in (Kind.F, Kind.I, Kind.W) if (u, k) != ("attention", Kind.F)]
    units += records(UnitKind.ATTENTION, Kind.F, attention, GRID)
    if held_out is not None:
        units += records(UnitKind.ATTENTION, Kind.F, held_out, BETWEEN, held_out=True)
    return measured_cost(profile(tuple(units), **changes))


def affine(b: int, n: int, c: int) -> float:
    return 1e-5 + 1e-6 * b * n + 1e-8 * b * (n * c + n * (n + 1) / 2)


def test_the_report_has_the_error_on_held_out_points() -> None:
    cost = whole(affine, lambda b, n, c: 1.25 * affine(b, n, c))
    reports = {(report.unit, report.kind): report for report in cost.reports}
    attention, other = reports[UnitKind.ATTENTION, Kind.F], reports[UnitKind.MLP, Kind.F]
    assert attention.fitted_error < 0.01
    assert attention.held_out_error == pytest.approx(0.2, abs=0.01)
    assert attention.num_records == len(GRID) + len(BETWEEN)
    assert math.isnan(other.held_out_error)


def test_held_out_points_do_not_change_the_fit() -> None:
    kept, disturbed = whole(affine), whole(affine, lambda b, n, c: 99.0)
    for b, n, c in itertools.product((1, 2), (8, 50), (0, 60)):
        expected = kept.unit_seconds(UnitKind.ATTENTION, Kind.F, Work.of(b, n, c))
        assert disturbed.unit_seconds(UnitKind.ATTENTION, Kind.F, Work.of(b, n, c)) == expected


def test_the_slowdown_is_the_median_and_never_a_gain() -> None:
    ratios = {UnitKind.MLP: (1.2, 1.3, 9.0), UnitKind.HEAD: (0.8, 0.9, 1.0)}
    units = [measured(u, k) for u in UnitKind for k in (Kind.F, Kind.I, Kind.W) if u not in ratios]
    units += [measured(u, k, slowdown=r) for u in ratios for k in (Kind.F, Kind.I, Kind.W) for r in ratios[u]]
    cost = measured_cost(profile(tuple(units)))
    assert cost.slowdown(UnitKind.MLP, Kind.F) == pytest.approx(1.3)
    assert cost.slowdown(UnitKind.HEAD, Kind.F) == 1.0


@pytest.mark.parametrize("lost", [(UnitKind.ATTENTION, Kind.I), (UnitKind.HEAD, Kind.F), (UnitKind.EMBEDDING, Kind.W)])
def test_a_pass_without_measurement_is_refused_by_name(lost: tuple[UnitKind, Kind]) -> None:
    units = tuple(r for r in profile().units if (r.unit, r.kind) != lost)
    with pytest.raises(UserError, match=f"{lost[0]} {lost[1]}"):
        measured_cost(profile(units))
    held_out = measured(*lost, held_out=True)
    with pytest.raises(UserError, match=f"{lost[0]} {lost[1]}"):
        measured_cost(profile((*units, held_out)))


def test_a_time_of_zero_is_refused() -> None:
    with pytest.raises(UserError, match="no positive time"):
        measured_cost(profile((*profile().units, measured(UnitKind.MLP, Kind.F, seconds=0.0))))


def test_each_degree_of_tensor_parallelism_is_fitted_to_its_records() -> None:
    transients = tuple(
        TransientRecord(unit=UnitKind.MLP, kind=Kind.F, batch=1, length=16, prefix=0, num_bytes=1000 // tp, tp=tp)
        for tp in (1, 2)
    )
    memory = MemoryRecord(constant_bytes=7, transients=transients)
    both = profile((*units_at(1), *units_at(2, share=0.75)), memory=memory)
    one, two = measured_cost(both), measured_cost(both, 2)
    for unit, kind in itertools.product(UnitKind, (Kind.F, Kind.I, Kind.W)):
        alone = float(one.unit_seconds(unit, kind, Work.of(1, 16, 0)))
        assert float(two.unit_seconds(unit, kind, Work.of(1, 16, 0))) == pytest.approx(0.75 * alone)
    assert [cost.transient_bytes(UnitKind.MLP, Kind.F, 1, 16, 0) for cost in (one, two)] == [1000, 500]
    assert {report.tp for report in two.reports} == {2}
    assert [point.predicted_seconds for point in fit_points(both)] == pytest.approx(
        [record.together_seconds for record in both.units]
    )
    with pytest.raises(UserError, match=r"embedding F.* at tp 4"):
        measured_cost(both, 4)


def test_each_number_of_head_parts_is_fitted_to_its_records() -> None:
    """All else is the same in all of them; F is what a whole head's is not."""
    parts = tuple(
        measured(UnitKind.HEAD, kind, seconds=seconds * 1e-6, head_parts=2)
        for kind, seconds in ((Kind.F, 5), (Kind.I, 1), (Kind.W, 3))
    )
    transients = tuple(
        TransientRecord(
            unit=UnitKind.HEAD, kind=Kind.F, batch=1, length=16, prefix=0, num_bytes=1000 // count, head_parts=count
        )
        for count in (1, 2)
    )
    both = profile((*units_at(1), *parts), memory=MemoryRecord(constant_bytes=7, transients=transients))
    whole_head, divided = measured_cost(both), measured_cost(both, 1, 2)
    work = Work.of(1, 16, 0)
    of_parts = [float(divided.unit_seconds(UnitKind.HEAD, kind, work)) for kind in (Kind.F, Kind.I, Kind.W)]
    assert of_parts == pytest.approx([5e-6, 1e-6, 3e-6])
    assert float(whole_head.unit_seconds(UnitKind.HEAD, Kind.F, work)) == pytest.approx(16e-6)
    for unit, kind in itertools.product(set(UnitKind) - {UnitKind.HEAD}, (Kind.F, Kind.I, Kind.W)):
        assert float(divided.unit_seconds(unit, kind, work)) == float(whole_head.unit_seconds(unit, kind, work))
    assert [cost.transient_bytes(UnitKind.HEAD, Kind.F, 1, 16, 0) for cost in (whole_head, divided)] == [1000, 500]
    assert {report.head_parts for report in divided.reports if report.unit is UnitKind.HEAD} == {2}
    assert both.degrees == ((1, 1), (1, 2))
    assert [point.predicted_seconds for point in fit_points(both)] == pytest.approx(
        [record.together_seconds for record in both.units]
    )


@pytest.mark.parametrize("lost", [Kind.F, Kind.I, Kind.W])
def test_a_part_of_the_head_needs_all_its_passes(lost: Kind) -> None:
    parts = (measured(UnitKind.HEAD, kind, head_parts=2) for kind in (Kind.F, Kind.I, Kind.W) if kind is not lost)
    lacking = profile((*units_at(1), *parts))
    with pytest.raises(UserError, match=f"head {lost} at headParts 2"):
        measured_cost(lacking, 1, 2)
    with pytest.raises(UserError, match=r"at tp 2 and headParts 3"):
        measured_cost(lacking, 2, 3)


def test_passes_without_work_take_no_time() -> None:
    units = tuple(r for r in profile().units if (r.unit, r.kind) != (UnitKind.HEAD, Kind.W))
    assert measured_cost(profile(units)).unit_seconds(UnitKind.HEAD, Kind.W, Work.of(1, [4, 8], 0)).tolist() == [
        0.0,
        0.0,
    ]


def test_links_are_as_measured_and_others_as_the_slowest() -> None:
    links = tuple(
        LinkRecord(source=s, target=t, latency_seconds=s + 1.0, bytes_per_second=speed, error=0.0)
        for s, t, speed in ((0, 1, 8.0), (1, 0, 2.0), (1, 2, 4.0))
    )
    cost = measured_cost(profile(links=links))
    assert cost.transfer(0, 1) == pytest.approx((1.0, 1 / 8))
    for unmeasured_or_slowest in ((2, 1), (1, 0), (7, 0)):
        assert cost.transfer(*unmeasured_or_slowest) == pytest.approx((2.0, 1 / 2))
    latency, per_byte = cost.transfer([0, 1], [1, 2])
    assert (latency.tolist(), per_byte.tolist()) == ([1.0, 2.0], [1 / 8, 1 / 4])
    assert measured_cost(profile(links=())).transfer(0, 1) == pytest.approx((0.0, 0.0))


def test_sums_are_those_of_the_nearest_number_of_ranks() -> None:
    points = [(2, 100, 1.0), (2, 200, 2.0), (4, 100, 3.0)]
    found = tuple(CollectiveRecord(num_ranks=n, num_bytes=b, seconds=s, spread=0.0) for n, b, s in points)
    cost = measured_cost(profile(collectives=found))
    assert cost.all_reduce_seconds(150, [0, 1]) == pytest.approx(1.5)
    assert cost.all_reduce_seconds(400, [0, 1]) == pytest.approx(4.0)
    assert cost.all_reduce_seconds(1, [0, 1]) == pytest.approx(1.0)
    assert cost.all_reduce_seconds(100, range(8)) == cost.all_reduce_seconds(100, range(3)) == pytest.approx(3.0)
    assert cost.all_reduce_seconds(100, [0]) == 0.0
    assert measured_cost(profile()).all_reduce_seconds(100, [0, 1]) == 0.0


def test_each_half_of_a_sum_takes_half_its_time_where_sums_alone_were_measured() -> None:
    sums = tuple(CollectiveRecord(num_ranks=2, num_bytes=n, seconds=n / 100, spread=0.0) for n in (100, 200))
    cost = measured_cost(profile(collectives=sums))
    assert cost.reduce_scatter_seconds(150, [0, 1]) == cost.all_gather_seconds(150, [0, 1]) == pytest.approx(0.75)
    assert cost.reduce_scatter_seconds(150, [0]) == 0.0


def test_each_collective_takes_its_measured_time() -> None:
    records = tuple(
        CollectiveRecord(num_ranks=2, num_bytes=n, seconds=n * per_byte, spread=0.0, collective=collective)
        for collective, per_byte in ((Collective.SUM, 1.0), (Collective.SCATTER, 2.0), (Collective.GATHER, 3.0))
        for n in (100, 200)
    )
    cost = measured_cost(profile(collectives=records))
    calls = (cost.all_reduce_seconds, cost.reduce_scatter_seconds, cost.all_gather_seconds)
    assert [call(150, [0, 1]) for call in calls] == pytest.approx([150.0, 300.0, 450.0])
    assert [call(400, [0, 1]) for call in calls] == pytest.approx([400.0, 800.0, 1200.0])


def test_sums_of_gradients_take_what_was_measured_in_the_job_s_type() -> None:
    """Sums of other tensors stay fp32."""
    per_byte = {
        (Collective.SUM, ReductionType.FP32): 1.0,
        (Collective.SCATTER, ReductionType.FP32): 2.0,
        (Collective.SUM, ReductionType.BF16): 3.0,
        (Collective.SCATTER, ReductionType.BF16): 4.0,
    }
    records = tuple(
        CollectiveRecord(
            num_ranks=2, num_bytes=100, seconds=100 * one, spread=0.0, collective=collective, reduction_type=type_
        )
        for (collective, type_), one in per_byte.items()
    )
    for type_ in ReductionType:
        cost = measured_cost(profile(collectives=records), reduction_type=type_)
        for collective, scattered in ((Collective.SUM, False), (Collective.SCATTER, True)):
            seconds = cost.gradient_sum_seconds(100, [0, 1], scattered=scattered)
            assert seconds == pytest.approx(100 * per_byte[collective, type_])
        assert cost.all_reduce_seconds(100, [0, 1]) == pytest.approx(100.0)
        assert cost.gradient_sum_seconds(100, [0], scattered=False) == 0.0


def test_the_optimizer_goes_on_along_the_line_of_what_was_measured() -> None:
    found = tuple(OptimizerRecord(num_parameters=n, seconds=s, spread=0.0) for n, s in ((100, 1.0), (300, 2.0)))
    cost = measured_cost(profile(optimizer=found))
    for count, seconds in ((0, 0.5), (50, 0.75), (200, 1.5), (600, 3.5)):
        assert cost.optimizer_seconds(count) == pytest.approx(seconds)
    assert measured_cost(profile()).optimizer_seconds(100) == 0.0


def test_the_optimizer_takes_as_long_as_with_moments_of_the_job_s_type() -> None:
    measured = {MomentType.FP32: 2.0, MomentType.BF16: 3.0}
    found = tuple(
        OptimizerRecord(num_parameters=100, seconds=seconds, spread=0.0, moment_type=moment_type)
        for moment_type, seconds in measured.items()
    )
    for moment_type, seconds in measured.items():
        assert measured_cost(profile(optimizer=found), moment_type=moment_type).optimizer_seconds(50) == seconds / 2


@pytest.mark.parametrize("points", [[(100, 1.0)], [(100, 1.0), (200, 0.9)], [(100, 1.0), (200, 40.0)]])
def test_no_optimizer_is_predicted_to_take_less_than_nothing(points: list[tuple[int, float]]) -> None:
    """In the measurements a small buffer may take longer than a large one, or far less than its share."""
    found = tuple(OptimizerRecord(num_parameters=n, seconds=s, spread=0.0) for n, s in points)
    cost = measured_cost(profile(optimizer=found))
    seconds = [cost.optimizer_seconds(count) for count in (0, 1, 50, 200, 400, 10**11)]
    assert min(seconds) >= 0
    assert seconds[-2] <= 2 * points[-1][1] * 400 / (2 * points[-1][0]) + 1e-9


def test_transients_are_never_less_than_measured() -> None:
    points = [(1, 8, 0, 100), (1, 16, 0, 150), (1, 16, 16, 400)]
    found = tuple(
        TransientRecord(unit=UnitKind.MLP, kind=Kind.F, batch=b, length=n, prefix=c, num_bytes=size)
        for b, n, c, size in points
    )
    cost = measured_cost(profile(memory=MemoryRecord(constant_bytes=7, transients=found)))
    for (b, n, c), size in {(1, 4, 0): 100, (1, 8, 0): 100, (1, 9, 0): 150, (1, 8, 8): 400, (2, 16, 0): 300}.items():
        assert cost.transient_bytes(UnitKind.MLP, Kind.F, b, n, c) == size
    assert cost.transient_bytes(UnitKind.HEAD, Kind.F, 1, 8, 0) == 0
    assert (cost.constant_bytes, cost.action_overhead_seconds) == (7, 1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_launches_are_fitted_next_to_the_device(tp: int) -> None:
    def cost(host: float | None) -> MeasuredCost:
        units = tuple(dataclasses.replace(each, host_seconds=host, tp=tp) for each in profile().units)
        return measured_cost(profile(units), tp)

    def seconds(host: float | None) -> tuple[float, float]:
        work, own = Work.of(1, 16, 0), cost(host)
        passes = own.unit_seconds(UnitKind.MLP, Kind.F, work), own.launch_seconds(UnitKind.MLP, Kind.F, work)
        return float(passes[0]), float(passes[1])

    assert seconds(None)[1] == 0.0
    assert seconds(0.5)[0] == seconds(None)[0]
    assert seconds(0.5)[1] == pytest.approx(0.5)
    assert cost(0.5).slowdown(UnitKind.MLP, Kind.F) == 1.0
    assert cost(0.5).most_graph_bytes == (0 if tp == 1 else None), "passes of several shards are never recorded"


def test_graphs_take_the_bytes_of_the_nearest_measured_point() -> None:
    graphs = tuple(
        TransientRecord(unit=UnitKind.MLP, kind=Kind.W, batch=1, length=length, prefix=0, num_bytes=size)
        for length, size in ((8, 100), (16, 150))
    )
    memory = MemoryRecord(constant_bytes=7, graphs=graphs, most_graph_bytes=1000)
    cost = measured_cost(profile(memory=memory))
    assert cost.most_graph_bytes == 1000
    assert [cost.graph_bytes(UnitKind.MLP, Kind.W, 1, length, 0) for length in (4, 8, 16)] == [100, 100, 150]
    assert cost.graph_bytes(UnitKind.MLP, Kind.F, 1, 8, 0) == 0


def test_an_older_profile_counts_all_actions_of_one_shard_as_recorded() -> None:
    memory = MemoryRecord.from_manifest({"constantBytes": 7})
    assert (memory.graphs, memory.most_graph_bytes) == ((), 0)
    assert recorded_shares({16: 0}, memory.most_graph_bytes) == {16: 1.0}
