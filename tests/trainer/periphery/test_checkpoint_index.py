"""Indexes that lie, old ones that are more than data, and archives that are not what their index says."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.trainer import checkpoint, checkpoint_index
from penstock.trainer.checkpoint_index import Parts, StoredTensor, fill, read_index
from penstock.trainer.checkpoint_shards import Held
from penstock.trainer.collectives import FailedError
from tests.support.checkpoint_ranks import stored_tensors
from tests.support.old_checkpoint import FOLDER, STEP, old_job
from tests.support.planted import Planted, described, old_copy, rewrite, seal
from tests.support.small_plans import small_model

MODEL = small_model(Family.LLAMA, layers=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = stored_tensors(MODEL, [(0, MODEL.num_units)])
    return checkpoint.save(tmp_path, 1, 5, tensors, MODEL, Precision.FP32, keep=1).folder


@pytest.fixture
def job() -> PipelineJob:
    return old_job(Path("corpus.txt"))


def change_index(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    content = json.loads((folder / "index.json").read_text())
    change(content["tensors"])
    (folder / "index.json").write_text(json.dumps(content))
    seal(folder)


def refusal(folder: Path) -> str:
    with pytest.raises(checkpoint.CorruptError) as caught:
        checkpoint.read_weights(folder)
    return caught.value.what


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../step-5/__0_0.distcp"}, "where no file of it has so many bytes"),
        ({"file": "/etc/passwd"}, "where no file of it has so many bytes"),
        ({"offset": 10**15}, "where no file of it has so many bytes"),
        ({"numBytes": 10**15}, "where no file of it has so many bytes"),
        ({"shape": [10**9, 10**9]}, "where no file of it has so many bytes"),
        ({"shape": [1]}, "is not of the size that its index says"),
        ({"shape": [-1, -5]}, "negative size or place"),
        ({"offset": -1}, "negative size or place"),
        ({"offset": 7}, "cannot be read"),
        ({"dtype": "object"}, "as 'object', not one of float64"),
        ({"dtype": 3}, "dtype"),
        ({"color": "red"}, "unknown field"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    change_index(folder, lambda tensors: tensors[-1].update(change))
    assert message in refusal(folder)


def test_a_tensor_named_twice_is_refused(folder: Path) -> None:
    change_index(folder, lambda tensors: tensors.append(tensors[0]))
    assert "names a tensor twice" in refusal(folder)


def test_an_index_may_be_missing_or_nonsense(folder: Path) -> None:
    for content, message in (("[" * 10**5, "is no JSON"), ("{", "is no JSON"), ("[]", "a mapping of fields")):
        (folder / "index.json").write_text(content)
        seal(folder)
        assert message in refusal(folder)
    (folder / "index.json").unlink()
    rewrite(folder, {"files": [described(folder, "__0_0.distcp")]})
    assert "has no index.json" in refusal(folder)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/b", "", ".hidden", ".."])
def test_a_manifest_lists_only_files_of_its_folder(folder: Path, name: str) -> None:
    rewrite(folder, {"files": [{"name": name, "numBytes": 1, "sha256": ""}]})
    with pytest.raises(UserError, match="is no name of a file of a checkpoint"):
        checkpoint.verify(folder)


def test_a_file_that_is_none_is_not_waited_for(folder: Path) -> None:
    (folder / "index.json").unlink()
    os.mkfifo(folder / "index.json")
    assert "index.json is not what was written" in refusal(folder)


def test_sizes_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_index, "MAX_INDEX_BYTES", 1000)
    assert "index.json has more than 1000 B" in refusal(folder)
    monkeypatch.setattr(checkpoint, "MAX_MANIFEST_BYTES", 10)
    assert "manifest.json has more than 10 B" in refusal(folder)


def test_a_tensor_may_be_larger_than_a_piece(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_index, "_PIECE_BYTES", 52)
    expected = stored_tensors(MODEL, [(0, MODEL.num_units)])["weights"]
    weights = checkpoint.read_weights(folder)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_damage_within_a_tensor_is_noticed_where_no_digest_is(tmp_path: Path) -> None:
    torch.save(torch.arange(8.0), tmp_path / "x")
    content = bytearray((tmp_path / "x").read_bytes())
    content[content.index(torch.arange(8.0).numpy().tobytes()) + 9] ^= 1
    (tmp_path / "x").write_bytes(content)
    stored = StoredTensor(name="x", dtype="float32", shape=(8,), file="x", offset=0, num_bytes=len(content))
    with pytest.raises(FailedError, match="x cannot be read"):
        fill(tmp_path, stored, Held.whole(torch.empty(8)))


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(32))
    size = (tmp_path / "x").stat().st_size
    stored = StoredTensor(name="x", dtype="float32", shape=(8,), file="x", offset=0, num_bytes=size)
    with pytest.raises(FailedError, match="is not of the size"):
        fill(tmp_path, stored, Held.whole(torch.empty(8)))


# What version 0.1.0 wrote


def old_index(content: bytes, folder: Path) -> dict[str, Parts]:
    (folder / ".metadata").write_bytes(content)
    return read_index(folder, {".metadata": len(content), "__0_0.distcp": 10**6, "__1_0.distcp": 10**6})


@pytest.mark.parametrize(
    "function", [os.system, eval, pickle.loads, torch.load, torch.Tensor, torch.nn.Module, getattr, Path.touch]
)
def test_no_name_beyond_the_list_is_looked_up(tmp_path: Path, function: Callable[..., object]) -> None:
    with pytest.raises(FailedError, match=f"is refused: its .metadata names .*{function.__qualname__}"):
        old_index(pickle.dumps(function), tmp_path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_planted_code_is_refused_in_any_protocol_and_place(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    for content in (Planted(marker), {"state_dict_metadata": [Planted(marker)]}, (Planted(marker),)):
        with pytest.raises(FailedError, match="is refused"):
            old_index(pickle.dumps(content, protocol), tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"N.",
        b"\x80\x04r\xff\xff\xff\x7f.",  # a table of 2**31 places
        b"\x80\x05\x96" + (2**62).to_bytes(8, "little"),  # an array of 2**62 bytes
        b"\x80\x04\x95" + (2**62).to_bytes(8, "little"),  # a frame of 2**62 bytes
        b"(" * 10**5 + b".",
        b"P1\n.",  # a persistent name
        b"\x82\x01.",  # an extension
        pickle.dumps({"state_dict_metadata": {}}),
    ],
)
def test_invalid_metadata_is_corrupt(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(FailedError, match="is corrupt"):
        old_index(content, tmp_path)


@given(st.data())
def test_damaged_metadata_is_refused_or_has_the_same_content(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Reading any bytes has no effect besides the returned index."""
    original = (FOLDER / "a1" / f"step-{STEP}" / ".metadata").read_bytes()
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        index = old_index(bytes(content), tmp_path_factory.mktemp("damaged"))
    except FailedError:
        return
    assert all(isinstance(stored, StoredTensor) for parts in index.values() for stored in parts)


def test_records_have_no_attributes_of_the_classes_they_replace(tmp_path: Path) -> None:
    """An old index can set attributes of its records, but none of torch's classes."""
    content = (FOLDER / "a1" / f"step-{STEP}" / ".metadata").read_bytes()
    names = {name for code, name, _ in pickletools.genops(content) if code.name == "SHORT_BINUNICODE"}
    assert {"Metadata", "_StorageInfo", "PosixPath"} <= names
    index = old_index(content, tmp_path)
    assert len(index) == 45
    (stored,) = index["weights/head.weight"]
    assert stored.shape == (257, 16)


def test_an_old_checkpoint_is_rewritten_with_an_index(tmp_path: Path, job: PipelineJob) -> None:
    weights = checkpoint.read_weights(old_copy(tmp_path / "old"))
    saved = checkpoint.save(tmp_path, 1, 7, {"weights": weights}, job.spec.model, Precision.FP32, keep=1)
    assert not (saved.folder / ".metadata").exists()
    again = checkpoint.read_weights(saved.folder)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
