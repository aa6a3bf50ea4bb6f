"""Token files: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.trainer.data.tokens import (
    TokenWriter,
    chunked,
    header_path,
    open_tokens,
    read_header,
    read_npy,
    verify_tokens,
    write_tokens,
)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "tokens.bin", [np.arange(100), np.arange(50)], vocab=100)
    return tmp_path / "tokens.bin"


@given(chunks=st.lists(st.lists(st.integers(0, 99_999), max_size=20), max_size=5), data=st.data())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]], data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens.bin"
    ids = [id_ for chunk in chunks for id_ in chunk]
    vocab = data.draw(st.integers(max(ids, default=0) + 1, 200_000))
    header = write_tokens(path, (np.array(chunk, dtype=np.int64) for chunk in chunks), vocab=vocab)
    tokens = open_tokens(path)
    assert tokens.ids.tolist() == ids
    assert tokens.vocab == vocab
    assert header == read_header(path) == verify_tokens(path)
    assert header.dtype == ("uint16" if vocab <= 65_536 else "uint32")
    assert path.stat().st_size == header.num_bytes


def test_the_file_is_plain_little_endian(tmp_path: Path) -> None:
    write_tokens(tmp_path / "narrow.bin", [np.array([1, 258])], vocab=300)
    assert (tmp_path / "narrow.bin").read_bytes() == b"\x01\x00\x02\x01"
    write_tokens(tmp_path / "wide.bin", [np.array([65_536])], vocab=65_537)
    assert (tmp_path / "wide.bin").read_bytes() == b"\x00\x00\x01\x00"


def test_a_part_is_a_view(token_file: Path) -> None:
    tokens = open_tokens(token_file)
    part = tokens.part(10, 20)
    assert part.ids.tolist() == list(range(10, 20))
    assert np.shares_memory(part.ids, tokens.ids)


def test_chunks_cover_all_ids(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.trainer.data.tokens._CHUNK_TOKENS", 7)
    tokens = open_tokens(token_file)
    assert np.array_equal(np.concatenate(list(chunked(tokens))), tokens.ids)


@pytest.mark.parametrize(("limit_bytes", "count"), [(None, 150), (0, 0), (21, 10), (10**9, 150)])
def test_a_limit_in_bytes_is_whole_tokens(token_file: Path, limit_bytes: int | None, count: int) -> None:
    assert read_header(token_file).limit_count(limit_bytes) == count


def test_an_unfinished_file_is_refused(token_file: Path) -> None:
    with TokenWriter(token_file, vocab=100) as writer:
        writer.append(np.arange(3))
    with pytest.raises(UserError, match=r"tokens\.bin\.json: cannot be read: No such file"):
        open_tokens(token_file)


@pytest.mark.parametrize("bad", [-1, 100, 2**20])
def test_an_id_outside_the_vocabulary_is_not_written(tmp_path: Path, bad: int) -> None:
    with pytest.raises(UserError, match=f"token id {bad} lies outside the vocabulary of 100"):
        write_tokens(tmp_path / "tokens.bin", [np.array([5, bad])], vocab=100)


@pytest.mark.parametrize("change", [b"", b"x"])
def test_another_size_than_the_headers_is_refused(token_file: Path, change: bytes) -> None:
    data = token_file.read_bytes()
    token_file.write_bytes(data + change if change else data[:-1])
    with pytest.raises(UserError, match=r"holds \d+ bytes where its header says 300"):
        open_tokens(token_file)


def test_changed_content_is_noticed_by_verifying(token_file: Path) -> None:
    data = bytearray(token_file.read_bytes())
    data[40] ^= 1
    token_file.write_bytes(data)
    open_tokens(token_file)
    with pytest.raises(UserError, match="other content than its header's SHA-256"):
        verify_tokens(token_file)


def test_a_missing_file_is_refused(token_file: Path) -> None:
    token_file.unlink()
    with pytest.raises(UserError, match=r"tokens\.bin: cannot be read"):
        open_tokens(token_file)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', not one of uint16, uint32"),
        ({"vocab": -1}, "vocab is -1"),
        ({"count": "150"}, "count is '150'"),
        ({"count": True}, "count is True"),
        ({"sha256": 5}, "sha256 is not a string"),
        ({"extra": 1}, "unexpected keyword argument 'extra'"),
    ],
)
def test_a_malformed_header_is_refused(token_file: Path, changes: dict[str, Any], reason: str) -> None:
    header = json.loads(header_path(token_file).read_text())
    header_path(token_file).write_text(json.dumps(header | changes))
    with pytest.raises(UserError, match="is not a token file's header") as refusal:
        open_tokens(token_file)
    assert reason in refusal.value.what


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3", '"text"'])
def test_an_invalid_header_is_refused(token_file: Path, content: str) -> None:
    header_path(token_file).write_text(content)
    with pytest.raises(UserError, match="is not a token file's header"):
        open_tokens(token_file)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint64, ">i4"])
def test_npy_of_any_integers_is_read(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "ids.npy", np.array([3, 0, 7], dtype=dtype))
    tokens = read_npy(tmp_path / "ids.npy")
    assert tokens.ids.tolist() == [3, 0, 7]
    assert tokens.vocab == 8


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((2, 2), dtype=np.int64), r"int64 of shape \(2, 2\)"),
        (np.zeros(2), "float64"),
        (np.zeros(0, dtype=np.int64), r"shape \(0,\)"),
        (np.array([1, -4]), "token id -4"),
        (np.array({"a": 1}, dtype=object), "is not a .npy file"),
    ],
)
def test_npy_of_anything_else_is_refused(tmp_path: Path, array: Any, reason: str) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(UserError, match=reason):
        read_npy(tmp_path / "ids.npy")


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ids.npy").write_bytes(b"not an array")
    with pytest.raises(UserError, match=r"ids\.npy: is not a \.npy file"):
        read_npy(tmp_path / "ids.npy")
