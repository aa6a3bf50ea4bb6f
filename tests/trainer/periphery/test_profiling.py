"""Links, tournaments, lines, and units on a clock that is wound by hand."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.layout import Precision
from penstock.core.model import Family, UnitKind
from penstock.core.profile import LinkRecord
from penstock.core.profile_matching import model_digest
from penstock.core.schedule import Kind
from penstock.core.sharding import Collective, Sharding, unit_collectives
from penstock.planner.fit import REQUIRED
from penstock.trainer.clock import HostTimer, Taken
from penstock.trainer.profiling.grid import Point
from penstock.trainer.profiling.links import (
    LEAST_BOUNDED_ERROR,
    LEAST_EXPLAINED,
    MESSAGE_BYTES,
    MOST_ATTEMPTS,
    ROW,
    SMALLEST_BYTES,
    fit_line,
    measured_link,
    message_sizes,
    tournament,
    undisturbed,
)
from penstock.trainer.profiling.machine import (
    MOST_NAME_CHARACTERS,
    Place,
    fullest_host,
    hosts_of,
    joined_name,
    machine_key,
    num_cores,
    this_place,
    trainer_digest,
)
from penstock.trainer.profiling.parts import Workload, choose_parts
from penstock.trainer.profiling.profile import divided_by, slowest_of_group, slowness_of_ranks
from penstock.trainer.profiling.units import STEADY, Key, UnitTimer, mean_and_spread, steady_rounds
from penstock.trainer.units.workspace import workspace_bytes
from tests.support.small_plans import small_model
from tests.support.thread_shards import ThreadShard, ThreadShards

CPU = torch.device("cpu")
BODY = {(unit, kind) for unit in (UnitKind.ATTENTION, UnitKind.MLP) for kind in (Kind.F, Kind.I)}
AGAIN = {(unit, Kind.R) for unit in (UnitKind.ATTENTION, UnitKind.MLP)}


@given(st.integers(1, 40))
def test_in_a_tournament_every_two_meet_once(num_ranks: int) -> None:
    rounds = list(tournament(num_ranks))
    met = Counter(pair for pairs in rounds for pair in pairs)
    assert met == Counter(itertools.combinations(range(num_ranks), 2))
    for pairs in rounds:
        players = [rank for pair in pairs for rank in pair]
        assert len(set(players)) == len(players)
    assert len(rounds) == num_ranks - 1 + num_ranks % 2


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=12))
def test_no_two_pairs_of_a_round_share_a_card(nodes: list[str]) -> None:
    for pairs in tournament(len(nodes)):
        rounds = undisturbed(pairs, nodes)
        assert sorted(pair for each in rounds for pair in each) == sorted(pairs)
        for each in rounds:
            used = [
                node for pair in each for node in {nodes[rank] for rank in pair} if len({nodes[r] for r in pair}) > 1
            ]
            assert len(used) == len(set(used))


def test_on_one_node_all_pairs_of_a_round_are_measured_at_once() -> None:
    pairs = [(0, 3), (1, 2)]
    assert undisturbed(pairs, ["a"] * 4) == [pairs]
    assert undisturbed(pairs, ["a", "a", "b", "b"]) == [[(0, 3)], [(1, 2)]]


def test_ranks_share_a_machine_by_its_boot_whatever_nodes_are_called() -> None:
    places = [Place("n1", "x"), Place("n2", "x"), Place("n3", "y"), Place("n1", "x")]
    assert hosts_of(places) == (0, 0, 1, 0)
    assert joined_name(places) == "n1,n2,n3"
    assert fullest_host((1, 0, 0, 1)) == 1
    assert fullest_host((0, 1, 1)) == 1


def test_many_names_differ_within_a_few_characters() -> None:
    names = [joined_name([Place(f"node-{k}-{salt}", "") for k in range(99)]) for salt in "ab"]
    assert all(len(name) <= MOST_NAME_CHARACTERS + 20 for name in names)
    assert names[0] != names[1]


@pytest.mark.parametrize(
    ("limit", "cores"),
    [(None, None), ("max 100000", None), ("50000 100000", 1), ("100000 100000", 1), ("99000000 100000", None)],
)
def test_a_container_s_limit_counts(tmp_path: Path, limit: str | None, cores: int | None) -> None:
    if limit is not None:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert num_cores(tmp_path / "cpu.max") == (cores or len(os.sched_getaffinity(0)))


def test_other_code_of_the_trainer_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "units").mkdir()
    (tmp_path / "units" / "linear.py").write_text("slow")
    (tmp_path / "notes.txt").write_text("no code")
    before = trainer_digest(tmp_path)
    (tmp_path / "notes.txt").unlink()
    assert trainer_digest(tmp_path) == before
    (tmp_path / "units" / "linear.py").write_text("fast")
    assert trainer_digest(tmp_path) != before
    (tmp_path / "units" / "linear.py").write_text("slow")
    (tmp_path / "units" / "linear.py").rename(tmp_path / "linear.py")
    assert trainer_digest(tmp_path) != before
    assert trainer_digest(tmp_path, ["penstock.agent.launch"]) != trainer_digest(tmp_path)
    assert trainer_digest() == machine_key(CPU, 1).trainer


def test_a_pod_is_known_by_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = this_place()
    monkeypatch.setenv("PENSTOCK_NODE_NAME", "node-7")
    assert this_place() == Place("node-7", alone.boot)
    assert alone.name != "node-7"


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7))
def test_a_line_is_recovered(latency: float, per_byte: float) -> None:
    found = fit_line(MESSAGE_BYTES, [latency + size * per_byte for size in MESSAGE_BYTES])
    assert found[0] == pytest.approx(latency, rel=1e-5, abs=1e-12)
    assert found[1] == pytest.approx(per_byte, rel=1e-5, abs=1e-16)


@given(st.lists(st.floats(1e-7, 1.0), min_size=len(MESSAGE_BYTES), max_size=len(MESSAGE_BYTES)))
def test_no_part_of_a_line_is_negative_and_none_would_be_better(seconds: list[float]) -> None:
    def error(latency: float, per_byte: float) -> float:
        return sum(((latency + n * per_byte) / s - 1) ** 2 for n, s in zip(MESSAGE_BYTES, seconds, strict=True))

    latency, per_byte = fit_line(MESSAGE_BYTES, seconds)
    assert latency >= 0
    assert per_byte >= 0
    for a, b in itertools.product((0.0, 0.9, 1.1), repeat=2):
        assert error(latency, per_byte) <= error(latency * a, per_byte * b) + 1e-9
    assert error(latency, per_byte) <= error(latency + 1e-7, per_byte + 1e-14) + 1e-6


class FakeChannel:
    """Link with a fake clock, whose exchanges take ``seconds`` (attempt, size, count)."""

    peer = 1

    def __init__(self, seconds: Callable[[int, int, int], float]) -> None:
        self._seconds, self._now, self.attempts, self.ended = seconds, 0.0, 0, False
        self.sizes: set[int] = set()

    def clock(self) -> float:
        return self._now

    def lead(self, size: int, count: int, times: int) -> Iterator[Callable[[], None]]:
        self.attempts += size == SMALLEST_BYTES
        self.sizes.add(size)

        def exchange() -> None:
            self._now += self._seconds(self.attempts, size, count)

        return iter([exchange] * times)

    def end(self) -> None:
        self.ended = True


def link(seconds: Callable[[int, int, int], float], largest: int = 0) -> tuple[LinkRecord, FakeChannel]:
    channel = FakeChannel(seconds)
    record = measured_link(channel, 0, channel.clock, message_sizes(largest))
    assert channel.ended
    return record, channel


@pytest.mark.parametrize(
    ("of_points", "slowness"),
    [
        ([[1.0]], ()),
        ([[1.0, 1.1], [1.0, 0.95], [1.0, 1.3]], ()),
        ([[1.0, 2.1], [1.0, 2.0], [1.0, 1.2]], (1.0, 2.0)),
        ([[1.0, 0.5, 0.9], [1.0, 0.4, math.nan]], (1.0, 0.45, 1.0)),
        ([[1.0, 1.0, math.nan], [1.0, 3.0, math.nan]], (1.0, 2.0, 1.0)),
        ([[1.0, 1.05, 2.0, 2.2, 2.1, 4.0]], (1.0, 1.0, 2.1, 2.1, 2.1, 4.0)),
    ],
)
def test_ranks_are_slow_by_the_median_over_points_and_alike_within_a_fifth(
    of_points: list[list[float]], slowness: tuple[float, ...]
) -> None:
    assert slowness_of_ranks(of_points) == pytest.approx(slowness)


@pytest.mark.parametrize(("rank", "tp", "slowest"), [(0, 1, 1.0), (1, 1, 2.0), (0, 2, 2.0), (3, 2, 3.0), (4, 4, 1.5)])
def test_shards_take_as_long_as_the_slowest_of_them(rank: int, tp: int, slowest: float) -> None:
    slowness = (1.0, 2.0, 1.0, 3.0, 1.5)
    assert slowest_of_group(slowness, rank, tp) == slowest
    assert slowest_of_group((), rank, tp) == 1.0


def test_times_of_a_rank_of_another_speed_count_as_those_of_the_first() -> None:
    """Else the mean over ranks would be of none of them."""
    samples = [((UnitKind.MLP, Kind.F), Taken(3.0, 1.0))]
    assert divided_by(samples, 2.0) == [((UnitKind.MLP, Kind.F), Taken(1.5, 0.5))]


def test_a_link_is_measured_once_if_it_makes_sense() -> None:
    record, channel = link(lambda _, size, count: 2e-4 + count * size / 1e9)
    assert (channel.attempts, record.bounded) == (1, False)
    assert record.bytes_per_second == pytest.approx(1e9, rel=0.02)
    assert record.latency_seconds == pytest.approx(1e-4, rel=0.05)


def test_a_link_whose_times_fall_is_remeasured() -> None:
    """It happens on a busy machine, where round trips took longer than rows of two MiB."""
    record, channel = link(lambda attempt, size, count: (5e-3 if attempt == 1 and count == 1 else 0) + size / 1e9)
    assert (channel.attempts, record.bounded) == (2, False)
    assert record.bytes_per_second < 1e10


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=8, max_size=8),
    st.sampled_from([0, 2**23, 2**26]),
)
def test_whatever_times_are_the_link_is_physical(noise: list[float], largest: int) -> None:
    """Any times, in any order: what is stored could be a link, and claims no speed that was far from reached."""
    steady = itertools.cycle(noise)
    taken: dict[tuple[int, int, int], float] = {}
    record, channel = link(lambda *series: taken.setdefault(series, next(steady)), largest)
    assert record.is_physical
    assert 1 <= channel.attempts <= MOST_ATTEMPTS
    assert channel.attempts == MOST_ATTEMPTS or not record.bounded
    reached = max(size * count / seconds for (_, size, count), seconds in taken.items())
    assert record.bytes_per_second <= reached / LEAST_EXPLAINED * 1.001
    if record.bounded:
        assert record.error >= LEAST_BOUNDED_ERROR


def test_a_line_that_never_makes_sense_is_bounded_by_its_largest_messages() -> None:
    record, channel = link(lambda attempt, size, count: 3e-3 + 1e-3 * attempt)
    assert (channel.attempts, record.bounded) == (MOST_ATTEMPTS, True)
    assert record.bytes_per_second == pytest.approx(ROW * MESSAGE_BYTES[-1] / 5e-3, rel=1e-4)
    assert record.latency_seconds == pytest.approx(2.5e-3)


@pytest.mark.parametrize(("speed", "largest"), [(1e12, 2**25), (1e7, MESSAGE_BYTES[-1])])
def test_messages_are_as_large_as_a_step_s_unless_that_takes_long(speed: float, largest: int) -> None:
    _, channel = link(lambda _, size, count: 1e-6 + count * size / speed, 2**25)
    assert max(channel.sizes) == largest


@given(st.integers(0, 2**32))
def test_sizes_reach_the_largest_message(largest: int) -> None:
    sizes = message_sizes(largest)
    assert sizes[: len(MESSAGE_BYTES)] == MESSAGE_BYTES
    assert max(sizes) == max(largest, MESSAGE_BYTES[-1])
    assert all(a < b <= max(4 * a, MESSAGE_BYTES[-1]) for a, b in itertools.pairwise(sizes))


@given(st.lists(st.floats(1e-6, 1e3), min_size=4, max_size=50))
def test_spread_is_the_interquartile_range_over_the_mean(samples: list[float]) -> None:
    mean, spread = mean_and_spread(samples)
    low, _, high = statistics.quantiles(samples, n=4)
    assert min(samples) * (1 - 1e-9) <= mean <= statistics.fmean(samples) * (1 + 1e-9)
    assert spread == pytest.approx((high - low) / mean)


ROUNDS = st.lists(st.lists(st.floats(1.0, STEADY), min_size=3, max_size=3), min_size=1, max_size=9)


@given(ROUNDS, st.data())
def test_rounds_during_which_something_else_used_the_machine_do_not_count(
    seconds: list[list[float]], data: st.DataObject
) -> None:
    """A burst slows any part of a round; the first round stays as it is."""
    slowed = data.draw(st.sets(st.integers(1, len(seconds) - 1))) if len(seconds) > 1 else set()
    for number in slowed:
        seconds[number][data.draw(st.integers(0, 2))] *= 2 * STEADY
    assert steady_rounds(seconds) == [number for number in range(len(seconds)) if number not in slowed]


def test_a_machine_that_is_slow_throughout_is_steady_and_idle_ranks_do_not_matter() -> None:
    assert steady_rounds([[3.0, 0.0], [3.1, 0.0], [2.9, 0.0]]) == [0, 1, 2]
    assert steady_rounds([[3.0, 0.0], [1.0, 0.0], [1.1, 0.0]]) == [1, 2]


@pytest.mark.parametrize(("count", "cut"), [(4, 0), (5, 1), (20, 1), (21, 2), (48, 3)])
def test_the_slowest_twentieth_does_not_count(count: int, cut: int) -> None:
    samples = [1.0] * (count - cut) + [100.0] * cut
    assert mean_and_spread(samples)[0] == 1.0
    assert mean_and_spread([*samples, 100.0, 100.0])[0] > 1.0


@pytest.mark.parametrize("samples", [[1.0], [1.0, 3.0], [1.0, 2.0, 3.0]])
def test_few_samples_spread_over_their_range(samples: list[float]) -> None:
    assert mean_and_spread(samples)[1] == (samples[-1] - samples[0]) / statistics.fmean(samples)


def timer(family: Family, points: list[Point], precision: Precision = Precision.FP32, layers: int = 2) -> UnitTimer:
    """On a clock that gains a second with every look."""
    ticks = itertools.count(0.0)
    spec = small_model(family, layers=layers)
    load = Workload(
        model=spec, precision=precision, sequence_length=32, timed=tuple(points), weighed=(Point(3, 32, 0),)
    )
    (part,) = choose_parts(load, 2**30)
    return UnitTimer(part, CPU, HostTimer(lambda: next(ticks)))


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_every_pass_of_every_unit_is_timed(family: Family, precision: Precision) -> None:
    points = [Point(1, 32, 0), Point(2, 8, 0), Point(1, 8, 24), Point(2, 5, 20, held_out=True)]
    units = timer(family, points, precision)
    for point in points:
        visit = units.visit(point)
        for _ in range(2):
            samples = visit()
            assert {taken for _, taken in samples} == {Taken(1.0, 1.0)}
            counts = Counter(key for key, _ in samples)
            assert counts.keys() == ({*REQUIRED, *AGAIN} if point.whole else BODY)
            assert all(counts[key] == (2 if key in BODY | AGAIN else counts[key]) for key in counts)


@pytest.mark.parametrize("family", Family)
def test_a_prefix_of_a_long_sequence_is_in_slices(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied twelve keys at a time, in the memory that is declared for it."""
    monkeypatch.setattr("penstock.trainer.profiling.parts.LONG_SEQUENCE", 32)
    monkeypatch.setattr("penstock.core.layout.KEYS_AT_ONCE", 12)
    monkeypatch.setattr("penstock.trainer.units.build.KEYS_AT_ONCE", 12)
    points = [Point(1, 32, 0), Point(1, 8, 24), Point(3, 5, 21), Point(2, 5, 20, held_out=True)]
    units = timer(family, points)
    assert all(len(units.visit(point)()) >= len(BODY) for point in points)
    for point in points:
        weighed = dict(units.transients(point))
        assert weighed.keys() == {(kind, Kind.F) for kind in UnitKind} | {key for key in BODY if key[1] is Kind.I}
        assert all(num_bytes > 0 for (kind, _), num_bytes in weighed.items() if kind is not UnitKind.EMBEDDING)


def test_blocks_are_few_even_in_deep_models() -> None:
    samples = timer(Family.LLAMA, [Point(1, 8, 0)], layers=9).visit(Point(1, 8, 0))()
    assert Counter(key for key, _ in samples)[UnitKind.MLP, Kind.F] == 4


def test_the_order_is_that_of_a_slice_s_visit() -> None:
    keys = [key for key, _ in timer(Family.LLAMA, [Point(1, 8, 0)]).visit(Point(1, 8, 0))()]
    body = [UnitKind.ATTENTION, UnitKind.MLP] * 2
    assert [unit for unit, kind in keys if kind is Kind.F] == [UnitKind.EMBEDDING, *body, UnitKind.HEAD]
    assert [unit for unit, kind in keys if kind is Kind.I] == body[::-1]
    assert [unit for unit, kind in keys if kind is Kind.W] == [*body[::-1], UnitKind.EMBEDDING]
    assert [unit for unit, kind in keys if kind is Kind.R] == body
    assert [kind for _, kind in keys] == sorted((kind for _, kind in keys), key=[Kind.F, Kind.I, Kind.W, Kind.R].index)


@pytest.mark.parametrize("family", Family)
def test_transients_hold_the_declared_workspace(family: Family) -> None:
    spec = small_model(family, layers=2)
    point = Point(3, 32, 0)
    found = dict(timer(family, [point]).transients(point))
    assert found.keys() == BODY | {(UnitKind.EMBEDDING, Kind.F), (UnitKind.HEAD, Kind.F)}
    by_kind = {unit.kind: workspace_bytes(spec, Precision.FP32, unit.index, unit.index + 1, 96) for unit in spec.units}
    assert all(num_bytes >= by_kind[unit] for (unit, _), num_bytes in found.items())


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("family", Family)
def test_shards_meet_in_the_passes_that_are_timed(family: Family, sequence_parallel: bool) -> None:
    """All collectives of all units, in their order; the head's own, one for each chunk, stand between its two."""
    sharding, point = Sharding(2, sequence_parallel), Point(3, 5, 0)
    load = Workload(
        model=small_model(family, layers=2),
        precision=Precision.FP32,
        sequence_length=32,
        timed=(point,),
        weighed=(point,),
        sharding=sharding,
    )
    (part,) = choose_parts(load, 2**30)

    def measured(member: ThreadShard) -> tuple[list[Key], list[Collective], dict[Key, int]]:
        ticks = itertools.count(0.0)
        units = UnitTimer(part, CPU, HostTimer(lambda: next(ticks)), shards=member, shard=member.index)
        keys = [key for key, _ in units.visit(point)()]
        requests = [request.collective for request in member.requests]
        return keys, requests, dict(units.transients(point))

    (keys, requests, transients), other = ThreadShards(2).run(measured)
    assert (keys, requests) == other[:2]
    assert set(keys) == {*REQUIRED, *AGAIN} | ({(UnitKind.EMBEDDING, Kind.I)} if sequence_parallel else set())
    expected = []
    for unit, kind in keys:
        collectives = list(unit_collectives(unit, kind, sharding))
        if unit is UnitKind.HEAD:
            collectives.insert(len(collectives) - 1, Collective.GATHER)
        expected += collectives
    assert requests == expected
    of_kind = {unit.kind: unit for unit in load.model.units}
    for (unit, kind), num_bytes in transients.items():
        declared = load.workspace_bytes(of_kind[unit], point) + load.exchange_bytes(of_kind[unit], kind, point)
        assert num_bytes >= declared > 0


@pytest.mark.parametrize("head_parts", [2, 3])
@pytest.mark.parametrize("sharding", [Sharding(), Sharding(2), Sharding(2, sequence_parallel=False)])
@pytest.mark.parametrize("family", Family)
def test_of_a_divided_head_the_first_part_and_the_last_are_measured(
    family: Family, sharding: Sharding, head_parts: int
) -> None:
    """Each with an F, an I and a W; what is weighed is the part that needs more."""
    model, points = small_model(family, layers=2).divided(head_parts), (Point(1, 7, 0), Point(3, 32, 0))
    load = Workload(
        model=model,
        precision=Precision.FP32,
        sequence_length=32,
        timed=points,
        weighed=points[1:],
        sharding=sharding,
    )
    (part,) = choose_parts(load, 2**30)
    assert [unit.part for unit in part.units] == [0, head_parts - 1]

    def measured(member: ThreadShard) -> tuple[list[Key], dict[Key, int]]:
        ticks = itertools.count(0.0)
        units = UnitTimer(part, CPU, HostTimer(lambda: next(ticks)), shards=member, shard=member.index)
        assert units.head_parts == head_parts
        for point in points:
            keys = [key for key, _ in units.visit(point)()]
        weighed: dict[Key, int] = {}
        for key, num_bytes in units.transients(points[1]):
            weighed[key] = max(num_bytes, weighed.get(key, 0))
        return keys, weighed

    found = ThreadShards(sharding.tp).run(measured)
    for keys, weighed in found:
        assert keys == [(UnitKind.HEAD, kind) for kind in (Kind.F, Kind.I, Kind.W) for _ in range(2)]
        assert weighed.keys() == {(UnitKind.HEAD, Kind.F), (UnitKind.HEAD, Kind.I)}
        declared = max(load.workspace_bytes(unit, points[1]) for unit in part.units)
        assert all(num_bytes >= declared for num_bytes in weighed.values())


def test_shards_on_the_host_keep_the_addends_of_the_others() -> None:
    """15 tokens are 8 rows of the other shard's floats; nothing where a pass only gathers."""
    model = small_model(Family.LLAMA, layers=2)
    load = Workload(
        model=model, precision=Precision.FP32, sequence_length=32, timed=(), weighed=(), sharding=Sharding(2)
    )
    units = {unit.kind: unit for unit in model.units}
    kept = {
        (kind, pass_): load.exchange_bytes(units[kind], pass_, Point(3, 5, 0)) for kind in UnitKind for pass_ in Kind
    }
    addends = 8 * model.hidden * 4
    assert kept[UnitKind.MLP, Kind.F] == kept[UnitKind.ATTENTION, Kind.I] == kept[UnitKind.EMBEDDING, Kind.F] == addends
    assert kept[UnitKind.MLP, Kind.W] == kept[UnitKind.EMBEDDING, Kind.I] == 0


def test_a_model_s_digest_knows_dimensions_but_no_depth() -> None:
    one, other = small_model(Family.LLAMA, layers=1), small_model(Family.LLAMA, layers=7)
    assert model_digest(one, 64) == model_digest(other, 64)
    assert model_digest(one, 64) != model_digest(one, 128)
    assert model_digest(one, 64) != model_digest(small_model(Family.GPT2, layers=1), 64)
