"""Checkpoints of one process: what counts as whole, what is refused, and what is removed when."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import RunError, UserError
from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.trainer import checkpoint
from penstock.trainer.checkpoint import MANIFEST, Checkpoint
from tests.support.checkpoint_ranks import PARTS, blank, stored_tensors
from tests.support.small_plans import small_model

MODEL = small_model(Family.LLAMA, layers=1)
ALL = [(0, MODEL.num_units)]


def save(root: Path, *, attempt: int = 1, step: int = 5, keep: int = 2) -> Path:
    tensors = stored_tensors(MODEL, ALL)
    return checkpoint.save(root, attempt, step, tensors, MODEL, Precision.FP32, keep=keep).folder


def steps(root: Path) -> list[tuple[int, int]]:
    return [(found.attempt, found.step) for found in checkpoint.find_checkpoints(root)]


def test_a_checkpoint_restores_every_bit(tmp_path: Path) -> None:
    folder = save(tmp_path)
    expected = stored_tensors(MODEL, ALL)
    tensors = blank(expected)
    manifest = checkpoint.load(folder, tensors, MODEL)
    assert (manifest.step, manifest.model, manifest.precision) == (5, MODEL, Precision.FP32)
    assert all(torch.equal(tensors[part][name], expected[part][name]) for part in PARTS for name in expected[part])
    assert checkpoint.verify(folder) == manifest


def test_part_of_a_checkpoint_may_be_read(tmp_path: Path) -> None:
    folder = save(tmp_path)
    tensors = blank({"weights": {"head.norm.weight": torch.empty(MODEL.hidden)}})
    checkpoint.load(folder, tensors, MODEL)
    assert not tensors["weights"]["head.norm.weight"].isnan().any()
    assert checkpoint.read_weights(folder).keys() == stored_tensors(MODEL, ALL)["weights"].keys()


def test_only_folders_with_a_manifest_count(tmp_path: Path) -> None:
    save(tmp_path, step=5)
    (tmp_path / "a1" / "step-9").mkdir()
    (tmp_path / "a1" / ".partial-step-10").mkdir()
    (tmp_path / "a1" / ".partial-step-10" / MANIFEST).touch()
    (tmp_path / "axe" / "step-3").mkdir(parents=True)
    (tmp_path / "axe" / "step-3" / MANIFEST).touch()
    assert checkpoint.find_checkpoints(tmp_path) == [Checkpoint(5, 1, tmp_path / "a1" / "step-5")]
    assert checkpoint.find_checkpoints(tmp_path / "nowhere") == []


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def watched(content: object, file: object, **options: object) -> None:
        seen.append({path.name for path in (tmp_path / "a1").rglob("*") if path.stat().st_size})
        raise OSError("no more")

    monkeypatch.setattr("penstock.trainer.checkpoint.json.dump", watched)
    with pytest.raises(RunError, match=r"step 5 was not written .*no more"):
        save(tmp_path)
    assert {"__0_0.distcp", "index.json"} <= seen[0]
    assert list((tmp_path / "a1").iterdir()) == []


def test_a_partial_folder_of_a_dead_process_is_written_over(tmp_path: Path) -> None:
    partial = tmp_path / "a1" / ".partial-step-5"
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_text("half")
    (partial / "__3_0.distcp").write_text("of a rank that is no more")
    folder = save(tmp_path)
    checkpoint.verify(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["__0_0.distcp", "index.json", MANIFEST]


def test_the_same_step_can_be_saved_twice(tmp_path: Path) -> None:
    checkpoint.verify(save(tmp_path))
    checkpoint.verify(save(tmp_path))
    assert steps(tmp_path) == [(1, 5)]


@given(st.data())
def test_any_flipped_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("flip") / "copy"
    shutil.copytree(reference(tmp_path_factory), folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    before = _meaning(content)
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    if path.name == MANIFEST and _meaning(content) == before:
        return  # white space between the manifest's values
    with pytest.raises(UserError, match=r"is corrupt|was written by another version"):
        checkpoint.verify(folder)


def _meaning(content: bytearray) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return content


_references: list[Path] = []


def reference(factory: pytest.TempPathFactory) -> Path:
    """One checkpoint for all examples of a property."""
    if not _references:
        _references.append(save(factory.mktemp("reference")))
    return _references[0]


@pytest.mark.parametrize("name", ["__0_0.distcp", "index.json"])
def test_missing_and_truncated_files_are_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path) / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"{name} is not what was written") as caught:
        checkpoint.verify(path.parent)
    assert str(path.parent) in caught.value.where
    assert caught.value.remedy
    path.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        checkpoint.load(path.parent, {}, MODEL)
    with pytest.raises(UserError, match=f"{name} is missing"):
        checkpoint.read_weights(path.parent)


def test_a_folder_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no readable manifest.json \(No such file or directory\)"):
        checkpoint.verify(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="is no JSON"):
        checkpoint.verify(tmp_path)
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(UserError, match=r"manifest.json is not what was written"):
        checkpoint.verify(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 2}, "its layers is 1, here it is 2"),
        ({"heads": 2}, "its heads is 4, here it is 2"),
        ({"rope_theta": 5e5}, r"its ropeTheta is 10000.0, here it is 500000.0"),
        ({"family": Family.GPT2, "kv_heads": 4}, "its family is llama, here it is gpt2"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = save(tmp_path)
    with pytest.raises(UserError, match=message):
        checkpoint.load(folder, {}, dataclasses.replace(MODEL, **change))  # type: ignore[arg-type]


def test_a_llama_may_continue_with_longer_sequences(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert checkpoint.load(folder, {}, dataclasses.replace(MODEL, positions=128)).step == 5


def test_another_type_or_name_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path)
    norm = torch.zeros(MODEL.hidden, dtype=torch.float64)
    with pytest.raises(
        UserError, match=r"holds weights/head.norm.weight as torch.float32, this run uses torch.float64"
    ):
        checkpoint.load(folder, {"weights": {"head.norm.weight": norm}}, MODEL)
    with pytest.raises(UserError, match=r"holds no weights/head.nerve of shape \[16\]"):
        checkpoint.load(folder, {"weights": {"head.nerve": norm}}, MODEL)


def test_moments_of_another_type_are_converted(tmp_path: Path) -> None:
    """A job may go on with another `momentType`."""
    folder = save(tmp_path)
    moment = stored_tensors(MODEL, ALL)["exp_avg"]["head.norm.weight"]
    held = torch.full_like(moment, torch.nan, dtype=torch.bfloat16)
    checkpoint.load(folder, {"exp_avg": {"head.norm.weight": held}}, MODEL)
    assert torch.equal(held, moment.bfloat16())
    tensors = {**stored_tensors(MODEL, ALL), "exp_avg": {"head.norm.weight": held}}
    folder = checkpoint.save(tmp_path / "narrow", 1, 5, tensors, MODEL, Precision.FP32, keep=2).folder
    wide = torch.full_like(moment, torch.nan)
    checkpoint.load(folder, {"exp_avg": {"head.norm.weight": wide}}, MODEL)
    assert torch.equal(wide, moment.bfloat16().float())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path, step=step)
    assert steps(tmp_path) == [(1, 15), (1, 10)]


def test_an_attempt_prunes_earlier_checkpoints_only_after_it_committed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        save(tmp_path, attempt=1, step=step)
    unfinished = tmp_path / "a1" / ".partial-step-15"
    unfinished.mkdir()
    with monkeypatch.context() as broken:
        broken.setattr("penstock.trainer.checkpoint.json.dump", _raise)
        with pytest.raises(RunError):
            save(tmp_path, attempt=2, step=15)
    assert steps(tmp_path) == [(1, 10), (1, 5)]
    assert unfinished.exists()
    save(tmp_path, attempt=2, step=15)
    assert steps(tmp_path) == [(2, 15), (1, 10)]
    assert not unfinished.exists()


def _raise(*arguments: object, **named: object) -> None:
    raise OSError("disk on fire")


def test_an_earlier_attempt_that_lives_on_leaves_later_ones_alone(tmp_path: Path) -> None:
    save(tmp_path, attempt=2, step=5, keep=1)
    (tmp_path / "a2" / ".partial-step-9").mkdir()
    save(tmp_path, attempt=1, step=20, keep=1)
    assert steps(tmp_path) == [(1, 20), (2, 5)]
    assert (tmp_path / "a2" / ".partial-step-9").exists()


def test_an_earlier_attempt_that_lives_on_and_is_ahead_takes_nothing_from_a_later_one(tmp_path: Path) -> None:
    """They take turns: whatever the earlier one commits, the newest of the later one is there and whole."""
    save(tmp_path, attempt=1, step=5)
    for turn in range(4):
        save(tmp_path, attempt=1, step=100 + turn)
        latest = save(tmp_path, attempt=2, step=10 + turn)
        save(tmp_path, attempt=1, step=200 + turn)
        assert checkpoint.verify(latest).step == 10 + turn
    assert [found for found in steps(tmp_path) if found[0] == 2] == [(2, 13)]


def test_an_earlier_attempt_whose_unfinished_checkpoint_was_removed_says_who_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one commits, and prunes, while the earlier one writes."""
    commit = checkpoint._commit
    latest: list[Path] = []

    def overtaken(*arguments: Any) -> None:
        if not latest:
            latest.append(tmp_path / "a2" / "step-10")
            assert save(tmp_path, attempt=2, step=10) == latest[0]
        commit(*arguments)

    monkeypatch.setattr(checkpoint, "_commit", overtaken)
    with pytest.raises(RunError, match=r"step 20 was not written to .* \(attempt 2 has taken over this job\); earlier"):
        save(tmp_path, attempt=1, step=20)
    assert steps(tmp_path) == [(2, 10)]
    assert checkpoint.verify(latest[0]).step == 10


def test_a_partly_removed_checkpoint_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, step=5, keep=1)
    monkeypatch.setattr("penstock.trainer.checkpoint.shutil.rmtree", lambda *_, **__: None)
    save(tmp_path, step=10, keep=1)
    assert (tmp_path / "a1" / "step-5" / "__0_0.distcp").exists()
    assert steps(tmp_path) == [(1, 10)]
