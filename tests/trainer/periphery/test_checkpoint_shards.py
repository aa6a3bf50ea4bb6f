"""Checkpoints of divided tensors: any number of shards reads what any other wrote, and reads no more than it needs."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.layout import Parameter, Precision, num_parameters
from penstock.core.model import Family, ModelSpec
from penstock.core.sharding import Block
from penstock.trainer import checkpoint, checkpoint_index
from penstock.trainer.checkpoint_index import StoredTensor, _pieces, _Section, fill
from penstock.trainer.checkpoint_shards import Box, HeldShard
from penstock.trainer.collectives import FailedError
from tests.support.checkpoint_ranks import blank, cut, save_divided, shard_of, stored_tensors, stored_value
from tests.support.planted import seal
from tests.support.small_plans import small_model

MODEL = small_model(Family.LLAMA, layers=1)
ALL = [(0, MODEL.num_units)]
FIRST_OF_TWO = shard_of(MODEL, ALL, 2, 0)
WEIGHTS = ("weights",)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Grouped heads or not, a vocabulary that few numbers divide."""
    family = draw(st.sampled_from(Family))
    kv_heads, group = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * group
    return ModelSpec(
        family=family,
        layers=1,
        hidden=heads * 2,
        heads=heads,
        kv_heads=kv_heads if family is Family.LLAMA else 0,
        ffn_hidden=heads * draw(st.integers(1, 3)),
        vocab=draw(st.integers(16, 40)),
        positions=8,
    )


def degrees(model: ModelSpec) -> list[int]:
    return [tp for tp in range(1, model.heads + 1) if model.can_be_sharded(tp)]


def index_of(folder: Path) -> list[dict[str, Any]]:
    tensors: list[dict[str, Any]] = json.loads((folder / "index.json").read_text())["tensors"]
    return tensors


@settings(max_examples=40)
@given(models(), st.data())
def test_any_number_of_shards_reads_checkpoints_of_any_other(
    tmp_path_factory: pytest.TempPathFactory, model: ModelSpec, data: st.DataObject
) -> None:
    written_by, read_by = (data.draw(st.sampled_from(degrees(model))) for _ in range(2))
    folder = save_divided(tmp_path_factory.mktemp("divided"), model, written_by, WEIGHTS)
    whole = [(0, model.num_units)]
    for shard in range(read_by):
        expected = stored_tensors(model, whole, read_by, shard, WEIGHTS)
        tensors = blank(expected)
        checkpoint.load(folder, tensors, model, shard=shard_of(model, whole, read_by, shard))
        assert all(torch.equal(tensors["weights"][name], value) for name, value in expected["weights"].items())
    expected = stored_tensors(model, whole, kinds=WEIGHTS)
    weights = checkpoint.read_weights(folder)
    assert weights.keys() == expected["weights"].keys()
    assert all(torch.equal(weights[name], value) for name, value in expected["weights"].items())
    stored = [StoredTensor.from_manifest(entry) for entry in index_of(folder)]
    assert sum(part.content_bytes for part in stored) == 4 * num_parameters(model), "each element is there once"


def test_a_shard_of_a_joint_projection_holds_its_heads_of_each() -> None:
    """The example of the module: 12 rows of q, 6 of k and 6 of v."""
    qkv = Parameter(name="qkv", shape=(24, 2), decay=True, blocks=(Block(12, 6), Block(6, 3), Block(6, 3)))
    rows = torch.arange(24.0)[:, None].expand(24, 2)
    own = cut(qkv, rows, 2, 1)
    held = HeldShard({"qkv": qkv}, 2, 1).held("qkv", own)
    assert own[:, 0].tolist() == [*range(6, 12), 15, 16, 17, 21, 22, 23]
    common = {tuple(box.rows): values_rc[:, 0].tolist() for box, values_rc in held.common(Box.of((24, 2), 0, 4, 22))}
    assert common == {tuple(range(6, 12)): [*range(6, 12)], (15, 16, 17): [15, 16, 17], (21,): [21]}


def test_one_shard_writes_the_same_files_as_whole_tensors(tmp_path: Path) -> None:
    """To the last byte: an index that divides nothing is that of earlier versions."""
    tensors = stored_tensors(MODEL, ALL)
    folders = [
        checkpoint.save(tmp_path / name, 1, 5, tensors, MODEL, Precision.FP32, keep=1, shard=shard).folder
        for name, shard in (("whole", None), ("one", shard_of(MODEL, ALL)))
    ]
    for name in ("index.json", "__0_0.distcp"):
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second
    assert not any("part" in entry for entry in index_of(folders[0]))


def test_parts_have_the_whole_tensor_s_name_and_shape(tmp_path: Path) -> None:
    named: dict[str, list[dict[str, Any]]] = {}
    for entry in index_of(save_divided(tmp_path, MODEL, 4)):
        assert entry.keys() - {"part"} == {"name", "dtype", "shape", "file", "offset", "numBytes"}
        named.setdefault(entry["name"], []).append(entry)
    out = named["exp_avg/layers.0.attention.out.weight"]
    assert [entry["shape"] for entry in out] == [[16, 16]] * 4
    assert [entry["part"] for entry in out] == [{"axis": 1, "start": 4 * i, "stop": 4 * i + 4} for i in range(4)]
    qkv = named["weights/layers.0.attention.qkv.weight"]
    starts = [entry["part"]["start"] for entry in qkv]
    assert starts == [0, 4, 8, 12, 16, 20, 24, 28], "two key/value heads, each held by two shards, are written once"
    (norm,) = named["weights/layers.0.mlp.norm.weight"]
    assert "part" not in norm


# What is read


class Counted(_Section):
    """Counts the bytes that are read of any file."""

    num_bytes = 0

    def readinto(self, buffer: Any) -> int:
        """Read and count."""
        num_bytes = super().readinto(buffer)
        Counted.num_bytes += num_bytes
        return num_bytes


HEADERS = 8 * 1024
"""More than the index and header of an archive with one tensor take."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    monkeypatch.setattr(checkpoint_index, "_Section", Counted)

    def taken() -> int:
        num_bytes, Counted.num_bytes = Counted.num_bytes, 0
        return num_bytes

    taken()
    return taken


def matrix_of(folder: Path, shape: tuple[int, int]) -> StoredTensor:
    """An archive of one matrix."""
    torch.save(stored_value("weights", "matrix", shape), folder / "matrix")
    size = (folder / "matrix").stat().st_size
    return StoredTensor(name="matrix", dtype="float32", shape=shape, file="matrix", offset=0, num_bytes=size)


def filled(folder: Path, stored: StoredTensor, parameter: Parameter, tp: int, shard: int) -> None:
    """Read a shard's part, and find it right."""
    expected = cut(parameter, stored_value("weights", "matrix", parameter.shape), tp, shard)
    own = torch.full_like(expected, torch.nan)
    fill(folder, stored, HeldShard({"matrix": parameter}, tp, shard).held("matrix", own))
    assert torch.equal(own, expected)


def test_of_rows_no_more_is_read_than_a_shard_holds(tmp_path: Path, counted: Callable[[], int]) -> None:
    shape = (1024, 256)
    stored = matrix_of(tmp_path, shape)
    parameter = Parameter(name="matrix", shape=shape, decay=True, blocks=(Block(512), Block(512)))
    for shard in range(4):
        filled(tmp_path, stored, parameter, 4, shard)
        assert counted() <= 1024 * 256 * 4 // 4 + HEADERS


def test_of_columns_that_are_far_apart_no_more_is_read_than_a_shard_holds(
    tmp_path: Path, counted: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (256, 1024)
    stored = matrix_of(tmp_path, shape)
    parameter = Parameter(name="matrix", shape=shape, decay=True, axis=1, blocks=(Block(1024),))
    filled(tmp_path, stored, parameter, 4, 2)
    assert counted() > 1024 * 256 * 4 // 2, "what lies between is read along where it is little"
    monkeypatch.setattr(checkpoint_index, "_GAP_BYTES", 1000)
    filled(tmp_path, stored, parameter, 4, 2)
    assert counted() <= 1024 * 256 * 4 // 4 + HEADERS


@pytest.mark.parametrize("axis", [0, 1])
def test_reading_a_part_takes_no_second_copy(tmp_path: Path, axis: int) -> None:
    """32 MiB, of which a shard reads half; Python's memory is what is counted, which pieces of files pass through."""
    shape = (2048, 4096)
    stored = matrix_of(tmp_path, shape)
    parameter = Parameter(name="matrix", shape=shape, decay=True, axis=axis, blocks=(Block(shape[axis]),))
    tracemalloc.start()
    filled(tmp_path, stored, parameter, 2, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * checkpoint_index._PIECE_BYTES


ranges = st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda pair: range(pair[0], pair[0] + pair[1]))


@given(ranges, ranges, st.integers(0, 9), st.sampled_from([1, 8]), st.integers(1, 200), st.integers(0, 200))
def test_pieces_are_a_box_once_in_the_order_of_the_file(
    rows: range, columns: range, beyond: int, itemsize: int, most: int, gap: int
) -> None:
    width = columns.stop + beyond
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_index, "_PIECE_BYTES", most)
        patch.setattr(checkpoint_index, "_GAP_BYTES", gap)
        pieces = list(_pieces(Box(rows, columns), width, itemsize))
    cells = [(row, column) for piece in pieces for row in piece.rows for column in piece.columns]
    assert sorted(cells) == [(row, column) for row in rows for column in columns]
    firsts = [piece.rows.start * width + piece.columns.start for piece in pieces]
    assert firsts == sorted(firsts)
    for piece in pieces:
        span = (len(piece.rows) - 1) * width + len(piece.columns)
        assert span * itemsize <= max(most, itemsize)


# Indexes that lie


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_divided(tmp_path, MODEL, 2, WEIGHTS)


NAME = "weights/layers.0.mlp.down.weight"
"""[16, 24], in two parts of twelve columns."""


def parts_of(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in tensors if entry["name"] == NAME]


def _change(tensors: list[dict[str, Any]], number: int, **changes: Any) -> dict[str, Any]:
    entry = parts_of(tensors)[number]
    entry.update(changes)
    return entry


def _part(tensors: list[dict[str, Any]], number: int, **changes: Any) -> dict[str, Any]:
    entry = parts_of(tensors)[number]
    return _change(tensors, number, part=entry["part"] | changes)


def _whole_too(tensors: list[dict[str, Any]]) -> None:
    added = {**parts_of(tensors)[0], "offset": 0, "numBytes": 16 * 24 * 4}
    del added["part"]
    tensors.append(added)


LIES: list[tuple[Callable[[list[dict[str, Any]]], object], str]] = [
    (lambda ts: ts.remove(parts_of(ts)[0]), f"its index lacks columns 0 to 12 of {NAME}"),
    (lambda ts: ts.remove(parts_of(ts)[1]), f"its index lacks columns 12 to 24 of {NAME}"),
    (lambda ts: ts.append(parts_of(ts)[1]), f"its index has columns 12 to 24 of {NAME} twice"),
    (lambda ts: _part(ts, 1, start=8), f"its index has columns 8 to 12 of {NAME} twice"),
    (lambda ts: _part(ts, 1, start=13), f"its index lacks columns 12 to 13 of {NAME}"),
    (lambda ts: _part(ts, 1, stop=25), f"holds columns 12 to 25 of {NAME}, which has 24"),
    (lambda ts: _part(ts, 1, stop=12), f"holds columns 12 to 12 of {NAME}, which has 24"),
    (lambda ts: _part(ts, 0, start=-1), f"holds columns -1 to 12 of {NAME}, which has 24"),
    (lambda ts: _part(ts, 0, axis=2), f"divides {NAME} along axis 2, of 2"),
    (lambda ts: _part(ts, 0, axis=-1), f"divides {NAME} along axis -1, of 2"),
    (lambda ts: _part(ts, 0, axis=0), f"its index names a tensor twice, {NAME}"),
    (_whole_too, f"its index names a tensor twice, {NAME}"),
    (lambda ts: _change(ts, 0, dtype="bfloat16"), f"its index gives {NAME} two types or shapes"),
    (lambda ts: _change(ts, 0, numBytes=700), "where no file of it has so many bytes"),
    (lambda ts: _change(ts, 0, shape=[16, 25]), f"its index gives {NAME} two types or shapes"),
    (lambda ts: [_change(ts, number, shape=[10**9, 24]) for number in (0, 1)], "where no file of it has so many bytes"),
    (
        lambda ts: [_change(ts, number, shape=[16, 10**9]) for number in (0, 1)],
        f"lacks columns 24 to {10**9} of {NAME}",
    ),
    (lambda ts: [_part(ts, 0, stop=9), _part(ts, 1, start=9)], f"{NAME} is not of the size that its index says"),
    (lambda ts: _part(ts, 0, color="red"), "unknown field"),
    (lambda ts: _part(ts, 0, start="0"), "start"),
    (lambda ts: _change(ts, 0, part=[0, 0, 12]), "part"),
    (lambda ts: ts.extend({**ts[0], "name": f"weights/{number}"} for number in range(999)), "than its files hold"),
]


@pytest.mark.parametrize(("change", "message"), LIES)
def test_parts_that_do_not_make_up_a_tensor_are_refused(
    folder: Path, change: Callable[[list[dict[str, Any]]], object], message: str
) -> None:
    content = json.loads((folder / "index.json").read_text())
    change(content["tensors"])
    (folder / "index.json").write_text(json.dumps(content))
    seal(folder)
    for read in (
        lambda: checkpoint.read_weights(folder),
        lambda: checkpoint.load(folder, stored_tensors(MODEL, ALL, 2, 0, WEIGHTS), MODEL, shard=FIRST_OF_TWO),
    ):
        with pytest.raises(checkpoint.CorruptError) as caught:
            read()
        assert message in caught.value.what
        assert "\n" not in caught.value.what


def test_damage_within_a_part_is_noticed(folder: Path) -> None:
    data = folder / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(checkpoint.CorruptError, match=r"__0_0\.distcp is not what was written"):
        checkpoint.read_weights(folder)


# Replicas that divide the optimizer's state


def stretches(
    model: ModelSpec, stages: list[tuple[int, int]], tp: int, bounds: list[int]
) -> list[tuple[dict[str, dict[str, torch.Tensor]], HeldShard]]:
    """Return the tensors of each rank, if replicas divide every tensor of every shard at these bounds, in percent."""
    held = []
    for shard in range(tp):
        tensors, of_shard = stored_tensors(model, stages, tp, shard, WEIGHTS), shard_of(model, stages, tp, shard)
        for first, last in pairwise((0, *sorted(bounds), 100)):
            own, starts = {}, {}
            for name, tensor in tensors["weights"].items():
                start, stop = tensor.numel() * first // 100, tensor.numel() * last // 100
                if start < stop:
                    own[name], starts[name] = tensor.flatten()[start:stop].clone(), start
            held.append(({"weights": own}, dataclasses.replace(of_shard, starts=starts)))
    return held


@settings(max_examples=40)
@given(models(), st.data())
def test_any_replicas_and_shards_read_checkpoints_of_any_others(
    tmp_path_factory: pytest.TempPathFactory, model: ModelSpec, data: st.DataObject
) -> None:
    """Stretches begin and end anywhere in a row; written parts have every element once."""
    whole, cuts = [(0, model.num_units)], st.lists(st.integers(1, 99), max_size=4)
    written_by, read_by = (data.draw(st.sampled_from(degrees(model))) for _ in range(2))
    folder = tmp_path_factory.mktemp("stretches")
    writers = stretches(model, whole, written_by, data.draw(cuts))
    parts: dict[str, list[StoredTensor]] = {}
    for number, (tensors, shard) in enumerate(writers):
        for name, tensor in tensors["weights"].items():
            for box, memory_rc in shard.held(name, tensor).owned():
                file = f"{number}-{name}-{box.rows.start}-{box.columns.start}"
                stored = _stored(folder / file, shard.declared[name], box, memory_rc)
                parts.setdefault(name, []).append(stored)
    parts = {name: list(checkpoint_index._in_order(each)) for name, each in parts.items()}
    for tensors, shard in stretches(model, whole, read_by, data.draw(cuts)):
        for name, expected in tensors["weights"].items():
            own = torch.full_like(expected, torch.nan)
            for stored in parts[name]:
                fill(folder, stored, shard.held(name, own))
            assert torch.equal(own, expected)
    name, some = max(parts.items(), key=lambda item: len(item[1]))
    if len(some) > 1:
        chosen = data.draw(st.integers(0, len(some) - 1))
        with pytest.raises(FailedError, match=f"lacks .* of {name}"):
            checkpoint_index._in_order([*some[:chosen], *some[chosen + 1 :]])
        with pytest.raises(FailedError, match=f"of {name} twice"):
            checkpoint_index._in_order([*some, some[chosen]])


def _stored(path: Path, parameter: Parameter, box: Box, memory_rc: torch.Tensor) -> StoredTensor:
    """Write a part to a separate file, as the index describes it."""
    offsets, sizes = box.chunk(parameter.shape)
    torch.save(memory_rc.reshape(sizes).clone(), path)
    part = checkpoint_index.part_of(parameter.shape, offsets, sizes)
    size = path.stat().st_size
    return StoredTensor(
        name=parameter.name, dtype="float32", shape=parameter.shape, part=part, file=path.name, offset=0, num_bytes=size
    )
