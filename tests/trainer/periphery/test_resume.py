"""Which checkpoint a run goes on from, in one process: the newest whole one, and what becomes of those passed over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import RunError, UserError
from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.trainer import checkpoint, resume
from penstock.trainer.checkpoint import MANIFEST
from penstock.trainer.resume import Restored, load_newest
from tests.support.checkpoint_ranks import PARTS, blank, spoil, stored_tensors
from tests.support.small_plans import small_model

MODEL = small_model(Family.LLAMA, layers=1)
STORED = stored_tensors(MODEL, [(0, MODEL.num_units)])


def save(root: Path, step: int, *, attempt: int = 1, keep: int = 9) -> Path:
    return checkpoint.save(root, attempt, step, STORED, MODEL, Precision.FP32, keep=keep).folder


def steps(root: Path) -> list[tuple[int, int]]:
    return [(found.attempt, found.step) for found in checkpoint.find_checkpoints(root)]


def restore(root: Path) -> Restored | None:
    """Restore the newest checkpoint; all values have to be the stored ones if and only if there is one."""
    tensors = blank(STORED)
    restored = load_newest(root, tensors, MODEL)
    whole = all(tensors[part][name].equal(STORED[part][name]) for part in PARTS for name in STORED[part])
    assert whole == (restored is not None)
    return restored


def test_without_checkpoints_nothing_is_restored(tmp_path: Path) -> None:
    assert restore(tmp_path) is None


def test_the_newest_is_taken(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    assert restore(tmp_path) == Restored(step=10)
    assert steps(tmp_path) == [(1, 10), (1, 5)]


@pytest.mark.parametrize("damaged", ["__0_0.distcp", "index.json", MANIFEST])
def test_corrupt_ones_are_passed_over_and_set_aside(tmp_path: Path, damaged: str) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    spoil(save(tmp_path, 10, attempt=2) / damaged)
    spoil(save(tmp_path, 15) / damaged)
    restored = restore(tmp_path)
    assert restored is not None
    assert restored.step == 10
    assert [text.partition(" is corrupt: ")[0] for text in restored.corrupt] == ["a1/step-15", "a2/step-10"]
    assert all(damaged in text for text in restored.corrupt)
    assert steps(tmp_path) == [(1, 10), (1, 5)]
    assert restore(tmp_path) == Restored(step=10), "the next attempt does not look at them"


def test_corrupt_ones_count_among_those_that_are_kept_no_more(tmp_path: Path) -> None:
    """Otherwise the next checkpoint, of an earlier step than the corrupt one, would be removed first."""
    save(tmp_path, 5)
    spoil(save(tmp_path, 20) / MANIFEST)
    restore(tmp_path)
    assert len(list((tmp_path / "a1").iterdir())) == 2
    save(tmp_path, 10, attempt=2, keep=1)
    assert steps(tmp_path) == [(2, 10)]
    assert list((tmp_path / "a1").iterdir()) == []


def test_the_same_one_may_be_set_aside_twice(tmp_path: Path) -> None:
    save(tmp_path, 5)
    for _ in range(2):
        spoil(save(tmp_path, 10) / MANIFEST)
        assert restore(tmp_path) is not None
    assert steps(tmp_path) == [(1, 5)]


def test_if_none_is_whole_all_are_named_and_stay(tmp_path: Path) -> None:
    for step in (5, 10):
        spoil(save(tmp_path, step) / "__0_0.distcp")
    with pytest.raises(UserError, match=r"none is whole: a1/step-10 is corrupt: .*; a1/step-5 is corrupt") as caught:
        restore(tmp_path)
    assert str(tmp_path) in caught.value.where
    assert f"remove {tmp_path}" in caught.value.remedy
    assert steps(tmp_path) == [(1, 10), (1, 5)]


def living_on(root: Path, monkeypatch: pytest.MonkeyPatch, num_times: int) -> None:
    """Attempt 1 goes on: each time a checkpoint is about to be read it commits the next, and so removes that one."""
    turns = iter(range(num_times))

    def read(folder: Path, *given: Any, **named: Any) -> checkpoint.CheckpointManifest:
        if (turn := next(turns, None)) is not None:
            save(root, 100 + turn, attempt=1, keep=1)
        return checkpoint.load(folder, *given, **named)

    monkeypatch.setattr(resume, "load", read)


def test_one_that_vanishes_makes_way_for_the_one_it_was_removed_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not corrupt, and the attempt that removed it did no wrong."""
    save(tmp_path, 10, keep=1)
    living_on(tmp_path, monkeypatch, 3)
    assert restore(tmp_path) == Restored(step=102)
    save(tmp_path, 103, attempt=2, keep=1)
    assert steps(tmp_path) == [(2, 103)]
    assert list((tmp_path / "a1").iterdir()) == [], "nothing was set aside"


def test_an_attempt_gives_up_if_checkpoints_keep_vanishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10, keep=1)
    living_on(tmp_path, monkeypatch, 99)
    with pytest.raises(RunError, match="vanish while they are read: another attempt works there"):
        restore(tmp_path)


def test_a_vanished_checkpoint_does_not_become_a_fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may hold half of it by then."""
    folder = save(tmp_path, 10)

    def read(*given: Any, **named: Any) -> checkpoint.CheckpointManifest:
        shutil.rmtree(folder)
        return checkpoint.load(*given, **named)

    monkeypatch.setattr(resume, "load", read)
    with pytest.raises(RunError, match="vanish"):
        load_newest(tmp_path, blank(STORED), MODEL)


def test_another_model_s_is_refused_and_none_older_is_tried(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    with pytest.raises(UserError, match=r"step-10: is of another model"):
        load_newest(tmp_path, blank(STORED), small_model(Family.LLAMA, layers=2))


def test_one_that_cannot_be_set_aside_ends_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5)
    spoil(save(tmp_path, 10) / MANIFEST)

    def refuse(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RunError, match=r"cannot be set aside: read-only"):
        restore(tmp_path)
