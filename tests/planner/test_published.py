"""Published steps stay as near as `./dev bench published` found them: nothing in the descriptions is fitted to them."""

from __future__ import annotations

import pytest
from benchmarks import published

ROWS = published.rows_of(published.DATA / "a100_steps.csv")


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row["recompute"] == "none"],
    ids=lambda row: f"{row['name']} {row['schedule']} p{row['pp']} m{row['num_microbatches']} {row['remark']}",
)
def test_a_step_on_a100_is_within_the_worst_of_the_bar(row: dict[str, str]) -> None:
    found = published.a100_row(row)
    assert abs(found.error) <= published.BAR["paper worst"]
    assert abs(found.memory_error or 0.0) <= published.BAR["memory"]


def test_steps_on_a100_are_within_the_mean_of_the_bar() -> None:
    assert published.summary(list(published.a100_rows(published.DATA)))["mean"] <= published.BAR["paper mean"]


def test_a_layer_of_eight_shards_is_within_the_bar_with_and_without_sequence_parallelism() -> None:
    errors = published.summary(list(published.layer_rows(published.DATA)))
    assert errors["mean"] <= published.BAR["paper mean"]
    assert errors["worst"] <= published.BAR["paper worst"]


def test_slices_gain_what_terapipe_gained() -> None:
    """Setting 9: the speed-up, and how many slices; other schedules gain more in the same memory."""
    row = next(row for row in published.rows_of(published.DATA / "terapipe_v100.csv") if row["setting"] == "9")
    problem = published.terapipe_problem(row)
    plain = published.terapipe_step(problem, 1, (2048,))
    sliced, slices = published.best_slicing(problem)
    known = float(row["seconds_without"]) / float(row["seconds_with"])
    assert plain / sliced == pytest.approx(known, rel=published.BAR["speed-up"])
    assert 19 / 1.5 <= len(slices) <= 19 * 1.5
    assert min(published.rivals(problem, slices).values()) <= sliced / 1.1
