"""Variations of a plan: the gain of each change, or the reason why it has none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.core.cluster import ClusterSpec
from penstock.core.explanation import Explanation, Method, Variation, most_helpful
from penstock.core.job import JobSpec
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.planner import variations
from penstock.planner.decide import decide
from penstock.planner.subsets import problem_for
from penstock.planner.variations import (
    FASTER,
    same_plan_variations,
    searched_variations,
    with_variations,
)
from tests.support.planning import TINY_GPT2, cluster, job, profile

FIXED: dict[str, Any] = {"pp": 2, "dp": 1, "micro_batch": 1, "slices": (8, 8), "schedule": "1f1b", "stages": (2, 2)}


def planned(spec: JobSpec, hardware: ClusterSpec | Profile) -> Plan:
    return decide(problem_for(spec, hardware)).plan


def by_change(found: tuple[Variation, ...]) -> dict[str, Variation]:
    return {each.change.partition(",")[0]: each for each in found}


@pytest.mark.parametrize("hardware", [cluster(), profile()], ids=["described", "measured"])
def test_the_same_plan_is_simulated_where_links_are_faster(hardware: ClusterSpec | Profile) -> None:
    spec = job(**FIXED)
    plan = planned(spec, hardware)
    found = by_change(same_plan_variations(plan, spec, hardware))["links 10 % faster"]
    changed = variations.faster_links(spec, hardware)
    assert plan.prediction is not None
    new = planned(spec, changed.hardware).prediction
    assert new is not None
    assert found.method is Method.SAME_PLAN
    assert found.step_seconds == new.step_seconds < plan.prediction.step_seconds
    assert found.gain == pytest.approx(plan.prediction.step_seconds / new.step_seconds - 1)


def test_faster_links_are_all_links() -> None:
    described = cluster(intra_node_peer=cluster().intra_node)
    changed = variations.faster_links(job(), described).hardware
    assert isinstance(changed, ClusterSpec)
    for before, after in (
        (described.intra_node, changed.intra_node),
        (described.inter_node, changed.inter_node),
        (described.intra_node_peer, changed.intra_node_peer),
    ):
        assert before is not None
        assert after is not None
        assert after.bytes_per_second == FASTER * before.bytes_per_second
        assert after.latency_seconds == before.latency_seconds


def test_no_change_gives_the_predicted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a gain comes from the change alone, for generated and for recorded schedules."""
    monkeypatch.setattr(variations, "FASTER", 1.0)
    for schedule in ("1f1b", "zb", "zbv"):
        spec = job(ranks=4, global_batch=4, pp=4, schedule=schedule)
        plan = planned(spec, cluster())
        assert plan.prediction is not None
        found = by_change(same_plan_variations(plan, spec, cluster()))["links 10 % faster"]
        assert found.step_seconds == plan.prediction.step_seconds
        assert found.gain == 0.0


def test_twice_the_microbatches_fill_the_pipeline_once() -> None:
    spec = job(**FIXED)
    plan = planned(spec, cluster())
    found = by_change(same_plan_variations(plan, spec, cluster()))["twice the micro-batches"]
    assert plan.prediction is not None
    assert found.step_seconds is not None
    assert found.change.endswith(", globalBatch 4")
    assert plan.prediction.step_seconds < found.step_seconds < 2 * plan.prediction.step_seconds
    assert found.gain == pytest.approx(2 * plan.prediction.step_seconds / found.step_seconds - 1)


def test_a_variation_that_exceeds_memory_is_marked() -> None:
    fixed = FIXED | {"schedule": "gpipe", "slices": 1}
    plan = planned(job(**fixed), cluster())
    assert plan.prediction is not None
    spec = job(memory=max(plan.prediction.peak_bytes), **fixed)
    found = by_change(same_plan_variations(planned(spec, cluster()), spec, cluster()))["twice the micro-batches"]
    assert found.step_seconds is None
    assert "this plan would need " in found.refusal


def test_every_variation_is_planned_on_request() -> None:
    spec = job(ranks=4, global_batch=4)
    plan = planned(spec, cluster())
    found = searched_variations(plan, spec, cluster())
    assert set(by_change(found)) == set(variations.CHANGES)
    gains = [each.gain for each in found if each.gain is not None]
    assert gains == sorted(gains, reverse=True)
    for each in found:
        assert each.method is Method.NEW_SEARCH or each.change.partition(",")[0] in variations.SAME_PLAN
        assert (each.step_seconds is None) == bool(each.refusal)
    more = by_change(found)["one node more"]
    assert more.change == "one node more, 6 devices"
    assert "x pp" in more.plan


def test_a_search_that_finds_less_than_the_plan_at_hand_gives_way_to_it() -> None:
    spec = job(ranks=4, global_batch=4)
    plan = planned(spec, cluster())
    searched = by_change(searched_variations(plan, spec, cluster()))
    for name, same in by_change(same_plan_variations(plan, spec, cluster())).items():
        assert same.gain is not None
        assert (searched[name].gain or -1.0) >= same.gain


@pytest.mark.parametrize(
    ("spec", "hardware", "change", "refusal"),
    [
        (job(slices=(8, 8)), cluster(), "sequences twice as long", "slices"),
        (job(dp=2), cluster(devices_per_node=1), "one node more", ""),
        (job(), profile(), "sequences twice as long", "run penstock profile"),
    ],
)
def test_an_impossible_variation_has_a_reason(
    spec: JobSpec, hardware: ClusterSpec | Profile, change: str, refusal: str
) -> None:
    found = by_change(searched_variations(planned(spec, hardware), spec, hardware))[change]
    assert found.step_seconds is None
    assert refusal in found.refusal
    assert found.refusal


def test_longer_sequences_are_planned_with_as_many_positions() -> None:
    spec = job(model=TINY_GPT2, sequence_length=64)
    found = by_change(searched_variations(planned(spec, cluster()), spec, cluster()))["sequences twice as long"]
    assert found.change.endswith(", 128 tokens")
    assert found.step_seconds is not None


def test_there_is_no_variation_for_nodes_that_were_not_measured() -> None:
    found = by_change(searched_variations(planned(job(), profile()), job(), profile()))
    assert not {"one node more", "one node fewer"} & found.keys()
    one = cluster(num_nodes=1)
    assert "one node fewer" not in by_change(searched_variations(planned(job(), one), job(), one))


def test_the_reasons_name_the_best_variation() -> None:
    spec = job(**FIXED)
    plan = planned(spec, cluster())
    found = same_plan_variations(plan, spec, cluster())
    explained = with_variations(plan, found)
    assert explained.prediction is not None
    assert explained.prediction.explanation is not None
    assert explained.prediction.explanation.variations == found
    assert Explanation.from_manifest(explained.prediction.explanation.to_manifest()) == explained.prediction.explanation
    best = most_helpful(found)
    assert best is not None
    assert explained.reasons[-1].startswith(f"what helps most of 2 changes: {best.change}, ")
    assert explained.reasons[-1].endswith(f"({best.method.value})")
    worse = tuple(dataclasses.replace(each, gain=-0.1) for each in found)
    assert with_variations(plan, worse).reasons[-1].startswith("none of 2 changes")
    assert with_variations(plan, ()).reasons == plan.reasons
