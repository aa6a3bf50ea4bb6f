"""Published steps stay as near as `./dev bench published` found them: nothing in the descriptions is fitted to them."""

from __future__ import annotations

import pytest
from benchmarks import published, published_shards
from benchmarks.published_rows import rows_of, summary

ROWS = rows_of(published.DATA / "a100_steps.csv")


@pytest.mark.parametrize(
    "row",
    ROWS,
    ids=lambda row: f"{row['name']} {row['schedule']} p{row['pp']} m{row['num_microbatches']} {row['remark']}",
)
def test_a_step_on_a100_is_within_the_worst_of_the_bar(row: dict[str, str]) -> None:
    found = published.a100_row(row)
    assert abs(found.error) <= published.BAR["paper worst"]
    assert abs(found.memory_error or 0.0) <= published.BAR["memory"]


@pytest.mark.parametrize("paper", published.PAPERS.values())
def test_a_papers_steps_on_a100_are_within_the_mean_of_the_bar(paper: str) -> None:
    rows = [row for row in published.a100_rows(published.DATA) if row.paper == paper]
    assert summary(rows)["mean"] <= published.BAR["paper mean"]


SHARDED = rows_of(published.DATA / "a100_shards.csv")


@pytest.mark.parametrize("row", SHARDED, ids=lambda row: f"{row['name']} {row['recompute']}")
def test_a_step_of_eight_shards_is_within_the_worst_of_the_bar(row: dict[str, str]) -> None:
    """The plan also fits the devices of the paper."""
    step = published_shards.step_row(row)
    assert abs(step.error) <= published.BAR["paper worst"]
    assert step.predicted_gib is not None
    assert step.predicted_gib <= 80e9 / 2**30


def test_steps_of_eight_shards_are_within_the_mean_of_the_bar() -> None:
    assert summary(list(published_shards.step_rows(published.DATA)))["mean"] <= published.BAR["paper mean"]


def test_a_layer_of_eight_shards_is_within_the_bar_with_and_without_sequence_parallelism() -> None:
    errors = summary(list(published_shards.layer_rows(published.DATA)))
    assert errors["mean"] <= published.BAR["paper mean"]
    assert errors["worst"] <= published.BAR["paper worst"]


def test_slices_gain_what_terapipe_gained() -> None:
    """Setting 9: the speed-up, and how many slices; other schedules gain more in the same memory."""
    row = next(row for row in rows_of(published.DATA / "terapipe_v100.csv") if row["setting"] == "9")
    problem = published.terapipe_problem(row)
    plain = published.terapipe_step(problem, 1, (2048,))
    sliced, slices = published.best_slicing(problem)
    known = float(row["seconds_without"]) / float(row["seconds_with"])
    assert plain / sliced == pytest.approx(known, rel=published.BAR["speed-up"])
    assert 19 / 1.5 <= len(slices) <= 19 * 1.5
    assert min(published.rivals(problem, slices).values()) <= sliced / 1.1
