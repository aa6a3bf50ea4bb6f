"""The outbox: numbers that go on, a bounded file, and lines that were cut short."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.records import LogLine, Progress, RecordKind
from penstock.core.run.outbox import LARGEST_BYTES, Outbox, read_records


def opened(folder: Path, largest: int = LARGEST_BYTES, *, attempt: int = 1) -> Outbox:
    ticks = itertools.count(100.0)
    identity: dict[str, Any] = {"uid": "u-1", "attempt": attempt, "source": "rank-0"}
    return Outbox(folder, **identity, clock=lambda: next(ticks), largest_bytes=largest)


def log(box: Outbox, message: str) -> None:
    box.put(RecordKind.LOG, log=LogLine(rank=0, level="info", message=message))


def path_of(folder: Path) -> Path:
    return folder / "a1-rank-0.jsonl"


def test_records_round_trip(tmp_path: Path) -> None:
    box = opened(tmp_path)
    log(box, "first\nsecond")
    box.put(RecordKind.PROGRESS, progress=Progress(step=3, num_steps=9, phase="Running", last_checkpoint=2))
    box.close()
    first, second = read_records(path_of(tmp_path))
    assert (first.uid, first.attempt, first.source, first.sequence, first.recorded_at) == ("u-1", 1, "rank-0", 0, 100.0)
    assert first.log == LogLine(rank=0, level="info", message="first\nsecond")
    assert second.progress == Progress(step=3, num_steps=9, phase="Running", last_checkpoint=2)


def test_sequence_numbers_continue_after_a_restart_and_start_at_zero_in_a_new_attempt(tmp_path: Path) -> None:
    for _ in range(3):
        box = opened(tmp_path)
        log(box, "hello")
        log(box, "world")
        box.close()
    assert [record.sequence for record in read_records(path_of(tmp_path))] == list(range(6))
    other = opened(tmp_path, attempt=2)
    log(other, "hello")
    other.close()
    assert [record.sequence for record in read_records(tmp_path / "a2-rank-0.jsonl")] == [0]


@settings(max_examples=30)
@given(st.data())
def test_a_truncated_line_loses_only_its_record(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("outbox")
    box = opened(folder)
    for message in ("one", "two", "three"):
        log(box, message)
    box.close()
    content = path_of(folder).read_bytes()
    end_of_second = content.rindex(b"\n", 0, len(content) - 1) + 1
    path_of(folder).write_bytes(content[: data.draw(st.integers(end_of_second, len(content) - 1))])
    assert [record.sequence for record in read_records(path_of(folder))] == [0, 1]
    box = opened(folder)
    log(box, "three again")
    box.close()
    found = read_records(path_of(folder))
    assert [(record.sequence, record.log.message) for record in found if record.log] == [
        (0, "one"),
        (1, "two"),
        (2, "three again"),
    ]


@settings(max_examples=20)
@given(st.integers(500, 3000), st.integers(1, 60), st.integers(0, 60))
def test_the_file_is_bounded_and_keeps_the_newest(
    tmp_path_factory: pytest.TempPathFactory, largest: int, count: int, restart_at: int
) -> None:
    folder = tmp_path_factory.mktemp("outbox")
    box = opened(folder, largest)
    for number in range(count):
        if number == restart_at:
            box.close()
            box = opened(folder, largest)
        assert box.sequence == number
        log(box, f"message {number}")
        assert path_of(folder).stat().st_size <= largest
    box.close()
    found = [record.sequence for record in read_records(path_of(folder))]
    assert found == list(range(found[0], count))


def test_a_record_larger_than_the_file_may_be_is_kept_alone(tmp_path: Path) -> None:
    box = opened(tmp_path, 400)
    log(box, "small")
    log(box, "x" * 1000)
    log(box, "small again")
    box.close()
    assert [record.sequence for record in read_records(path_of(tmp_path))][-1] == 2


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "missing.jsonl") == []
