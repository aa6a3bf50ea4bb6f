"""Following metrics.jsonl while it grows."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.agent.metrics import MetricsFollower
from penstock.core.records import StepMetrics
from penstock.core.run.folder import metrics_line
from tests.support.fake_workers import fake_metrics


def test_nothing_before_there_is_a_file(tmp_path: Path) -> None:
    assert MetricsFollower(tmp_path / "metrics.jsonl").new() == []


def test_what_was_there_already_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics_line(fake_metrics(0)))
    follower = MetricsFollower(path)
    assert follower.new() == []
    with path.open("a") as file:
        file.write(metrics_line(fake_metrics(1)))
    assert [entry.step for entry in follower.new()] == [1]


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_line_that_was_left_unfinished_comes_whole(cut: int, tmp_path: Path) -> None:
    path, (old, unfinished, new) = tmp_path / "metrics.jsonl", (metrics_line(fake_metrics(step)) for step in range(3))
    path.write_text(old + unfinished[:cut])
    follower = MetricsFollower(path)
    with path.open("a") as file:
        file.write(unfinished[cut:])
    assert [entry.step for entry in follower.new()] == [1]
    with path.open("a") as file:
        file.write(new)
    assert [entry.step for entry in follower.new()] == [2]


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_line_that_is_cut_away_is_no_matter(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics_line(fake_metrics(0)) + metrics_line(fake_metrics(7))[:cut])
    follower = MetricsFollower(path)
    path.write_text(metrics_line(fake_metrics(0)) + metrics_line(fake_metrics(1)))
    assert [entry.step for entry in follower.new()] == [1]


@given(st.lists(st.integers(1, 40), max_size=40))
def test_every_entry_comes_once_however_it_is_written(sizes: list[int]) -> None:
    """Writers may be cut anywhere, also inside a line."""
    text = "".join(metrics_line(fake_metrics(step)) for step in range(3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        follower, seen, start = MetricsFollower(path), list[StepMetrics](), 0
        for size in [*sizes, len(text)]:
            with path.open("a") as file:
                file.write(text[start : start + size])
            start += size
            seen += follower.new()
        assert seen == [fake_metrics(step) for step in range(3)]
