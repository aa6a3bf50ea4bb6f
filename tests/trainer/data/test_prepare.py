"""Preparation: equal inputs give equal bytes, once, whatever happens to the cache meanwhile."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import UserError
from penstock.core.job import DataSpec, TokenizerSpec
from penstock.core.preparing import Reporter
from penstock.trainer.data import cache as cache_module
from penstock.trainer.data.prepare import prepare
from penstock.trainer.data.prepared import Prepared, check_prepared, open_prepared
from penstock.trainer.data.tokenizer import SEPARATOR
from penstock.trainer.data.tokens import header_path, write_tokens
from penstock.trainer.data.unigram import unigram_cross_entropy

BYTES = TokenizerSpec(train="bytes")
BPE = TokenizerSpec(train="bpe", vocab=400)


class Listener(Reporter):
    def __init__(self) -> None:
        self.stages: dict[str, tuple[int, int]] = {}
        self.warnings: list[str] = []

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self.stages[stage] = (done_bytes, total_bytes)

    def warning(self, line: str) -> None:
        self.warnings.append(line)


def document(number: int) -> str:
    return f"document {number} of the corpus says naïvely: {' '.join(str(number * k) for k in range(60))}\n"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(45):
        (folder / f"{number:02}.txt").write_text(document(number), encoding="utf-8")
    return str(folder)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def spec(source: str, tokenizer: TokenizerSpec = BPE, **settings: Any) -> DataSpec:
    return DataSpec(source=source, sequence_length=16, tokenizer=tokenizer, **settings)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def text(prepared: Prepared, split: str) -> str:
    assert prepared.tokenizer is not None
    return prepared.tokenizer.decode(getattr(prepared, split).ids.tolist())


@pytest.mark.parametrize("tokenizer", [BYTES, BPE])
def test_documents_are_tokenised_whole_and_separated(corpus: str, cache: Path, tokenizer: TokenizerSpec) -> None:
    prepared = prepare(spec(corpus, tokenizer), cache)
    held_out = (19, 39)
    assert text(prepared, "validation") == "".join(document(number) + SEPARATOR for number in held_out)
    assert text(prepared, "train") == "".join(document(n) + SEPARATOR for n in range(45) if n not in held_out)
    assert prepared.origin["documents"] == 45


def test_a_tokenizer_never_sees_held_out_text(corpus: str, cache: Path) -> None:
    before = prepare(spec(corpus), cache).folder
    (Path(corpus) / "19.txt").write_text("something quite different, quite different, quite different")
    after = prepare(spec(corpus), cache).folder
    assert before != after
    assert contents(before)["tokenizer.json"] == contents(after)["tokenizer.json"]
    assert contents(before)["train.bin"] == contents(after)["train.bin"]


@pytest.mark.parametrize("tokenizer", [BYTES, BPE])
def test_two_preparations_are_byte_identical(corpus: str, tmp_path: Path, tokenizer: TokenizerSpec) -> None:
    first, second = (prepare(spec(corpus, tokenizer), tmp_path / name).folder for name in ("one", "two"))
    assert first.name == second.name
    assert contents(first) == contents(second)


def test_batching_does_not_show(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(spec(corpus), tmp_path / "whole").folder
    monkeypatch.setattr("penstock.trainer.data.tokenise._BATCH_CHARACTERS", 1)
    assert contents(prepare(spec(corpus), tmp_path / "single").folder) == contents(whole)


def test_a_tokenizer_is_trained_on_a_bounded_sample(corpus: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.trainer.data.tokenise.TOKENIZER_BYTES", 3000)
    listener = Listener()
    prepared = prepare(spec(corpus), cache, reporter=listener)
    done_bytes, total_bytes = listener.stages["training the tokenizer"]
    assert 1000 < done_bytes <= total_bytes == 3000
    assert text(prepared, "validation").startswith(document(19))


def test_progress_ends_at_the_end(corpus: str, cache: Path) -> None:
    listener = Listener()
    prepared = prepare(spec(corpus), cache, reporter=listener)
    num_bytes = prepared.origin["bytes"]
    assert list(listener.stages) == ["reading", "training the tokenizer", "tokenising"]
    assert listener.stages["tokenising"] == (num_bytes, num_bytes)
    assert listener.warnings == []


def test_prepared_data_is_reused_and_opened_by_folder(corpus: str, cache: Path) -> None:
    first = prepare(spec(corpus), cache)
    listener = Listener()
    again = prepare(spec(corpus), cache, reporter=listener)
    assert again.folder == first.folder
    assert list(listener.stages) == ["reading"]
    opened = open_prepared(first.folder)
    assert np.array_equal(opened.train.ids, first.train.ids)
    assert np.array_equal(opened.validation.ids, first.validation.ids)


def test_everything_that_matters_changes_the_key(corpus: str, cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    same = prepare(spec(str(other)), cache).folder
    assert same == prepare(spec(corpus), cache).folder
    (other / "00.txt").write_text("changed")
    specs = [spec(corpus), spec(corpus, BYTES), spec(corpus, TokenizerSpec(train="bpe", vocab=401))]
    specs += [spec(corpus, limit_bytes=1000), spec(str(other))]
    assert len({prepare(each, cache).folder for each in specs}) == len(specs)


def test_an_existing_tokenizer_is_taken_along(corpus: str, cache: Path, tmp_path: Path) -> None:
    trained = prepare(spec(corpus), cache)
    shutil.copy(trained.folder / "tokenizer.json", tmp_path / "mine.json")
    loaded = prepare(spec(corpus, TokenizerSpec(file=str(tmp_path / "mine.json"))), cache)
    (tmp_path / "mine.json").unlink()
    assert np.array_equal(loaded.train.ids, trained.train.ids)
    assert text(open_prepared(loaded.folder), "validation") == text(trained, "validation")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def fewer_tokens(path: Path) -> None:
    record = json.loads(path.read_text())
    record["train"]["stop"] -= 1
    path.write_text(json.dumps(record))


def smaller_vocab(path: Path) -> None:
    header = json.loads(path.read_text())
    path.write_text(json.dumps(header | {"vocab": header["vocab"] - 1}))


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "train.bin.json", "tokenizer.json", "prepared.json"])
@pytest.mark.parametrize("harm", [cut, Path.unlink, lambda path: path.write_bytes(b"")])
def test_damage_is_noticed_and_mended(corpus: str, cache: Path, name: str, harm: Callable[[Path], None]) -> None:
    check_mended(corpus, cache, name, harm)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("train.bin", flip),
        ("validation.bin", flip),
        ("tokenizer.json", lambda path: path.write_text(path.read_text() + "\n")),
        ("prepared.json", fewer_tokens),
        ("prepared.json", flip),
        ("train.bin.json", smaller_vocab),
        ("prepared.json", lambda path: path.write_text("[1]")),
    ],
)
def test_subtle_damage_is_noticed_and_mended(corpus: str, cache: Path, name: str, harm: Callable[[Path], None]) -> None:
    check_mended(corpus, cache, name, harm)


def check_mended(corpus: str, cache: Path, name: str, harm: Callable[[Path], None]) -> None:
    folder = prepare(spec(corpus), cache).folder
    whole = contents(folder)
    harm(folder / name)
    with pytest.raises(UserError):
        check_prepared(folder)
    listener = Listener()
    prepare(spec(corpus), cache, reporter=listener)
    assert contents(folder) == whole
    (warning,) = listener.warnings
    assert warning.startswith("prepared data is damaged and is prepared again: ")


def test_files_of_a_killed_preparation_are_no_obstacle(corpus: str, cache: Path, tmp_path: Path) -> None:
    folder = prepare(spec(corpus), cache).folder
    whole = contents(folder)
    folder.rename(folder.with_name(folder.name + ".tmp"))
    (folder.with_name(folder.name + ".tmp") / "train.bin").write_bytes(b"half")
    assert contents(prepare(spec(corpus), cache).folder) == whole
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]


SCRIPT = """
import sys
from pathlib import Path
from penstock.core.job import DataSpec, TokenizerSpec
from penstock.trainer.data import cache as cache_module
from penstock.trainer.data.prepare import prepare
from penstock.core.preparing import Reporter

class Printer(Reporter):
    stages = set()
    def progress(self, stage, done_bytes, total_bytes):
        self.stages.add(stage)
    def warning(self, line):
        print(line, flush=True)

printer = Printer()
tokenizer = TokenizerSpec(train="bpe", vocab=400)
print("ready", flush=True)
sys.stdin.readline()
data = DataSpec(source=sys.argv[1], sequence_length=16, tokenizer=tokenizer)
prepared = prepare(data, Path(sys.argv[2]), reporter=printer)
print("built" if "tokenising" in printer.stages else "found", flush=True)
"""


def start(corpus: str, cache: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, corpus, str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate("", timeout=120)
    assert process.returncode == 0
    return output.splitlines()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_of_two_processes_at_once_one_prepares(corpus: str, cache: Path, tmp_path: Path) -> None:
    both = [start(corpus, cache) for _ in range(2)]
    for process in both:
        go(process)
    assert sorted(finish(process)[-1] for process in both) == ["built", "found"]
    expected = prepare(spec(corpus), tmp_path / "alone").folder
    assert contents(cache / expected.name) == contents(expected)


def test_a_process_waits_for_the_one_that_prepares(corpus: str, cache: Path, tmp_path: Path) -> None:
    expected = prepare(spec(corpus), tmp_path / "alone").folder
    cache.mkdir()
    with (cache / f"{expected.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = start(corpus, cache)
        go(waiting)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "another process prepares the same data; waiting for it\n"
        shutil.copytree(expected, cache / expected.name)
    assert finish(waiting) == ["found"]


def test_a_host_that_lost_the_lock_uses_the_data_of_another_host(
    corpus: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens when the connection to the file server breaks for a while."""
    expected = prepare(spec(corpus), tmp_path / "alone").folder
    build = cache_module._put

    def late(built: Path, folder: Path, check: Callable[[Path], None]) -> None:
        shutil.copytree(expected, folder)
        build(built, folder, check)

    monkeypatch.setattr(cache_module, "_put", late)
    found = prepare(spec(corpus), cache).folder
    assert contents(found) == contents(expected)
    assert sorted(path.name for path in cache.iterdir()) == [found.name, f"{found.name}.lock"]


def test_a_process_whose_unfinished_data_another_removes_uses_the_data_of_that_one(cache: Path) -> None:
    """It lost its lock to a process that takes its folder for that of a killed one."""
    cache.mkdir()
    listener = Listener()

    def build(folder: Path) -> None:
        shutil.rmtree(folder)
        (cache / "key").mkdir()
        (folder / "tokens").write_text("")

    found = cache_module.cached(cache, "key", build=build, check=lambda folder: None, reporter=listener)
    assert found == cache / "key"
    assert listener.warnings == ["another process removed the unfinished data, and prepares it itself"]


def test_an_unwritable_cache_is_refused(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="prepared data cannot be written: Not a directory") as refusal:
        prepare(spec(corpus), tmp_path / "file" / "cache")
    assert refusal.value.where.startswith(str(tmp_path / "file"))


def test_a_full_disk_is_named_and_leaves_nothing(corpus: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("penstock.trainer.data.tokens.TokenWriter.append", full)
    with pytest.raises(UserError, match="No space left on device") as refusal:
        prepare(spec(corpus), cache)
    assert refusal.value.where == str(cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_read_only_cache_serves_its_content(corpus: str, cache: Path) -> None:
    folder = prepare(spec(corpus), cache).folder
    lock = folder.with_name(folder.name + ".lock")
    lock.unlink()
    lock.mkdir()  # in the way of a lock even for a superuser
    assert prepare(spec(corpus), cache).folder == folder
    flip(folder / "train.bin")
    with pytest.raises(UserError, match="prepared data cannot be written"):
        prepare(spec(corpus), cache)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE])
@pytest.mark.parametrize(
    "meddle",
    [lambda path: path.write_text("more text than before" * 100), Path.unlink, lambda path: path.write_bytes(b"\xff")],
)
def test_a_corpus_that_changes_meanwhile_is_refused(
    corpus: str, cache: Path, tokenizer: TokenizerSpec, meddle: Callable[[Path], None]
) -> None:
    class Meddler(Listener):
        def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
            if stage == "reading" and done_bytes == total_bytes:
                meddle(Path(corpus) / "05.txt")

    with pytest.raises(UserError, match="changed while it was read"):
        prepare(spec(corpus, tokenizer), cache, reporter=Meddler())
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_jsonl_and_text_with_the_same_documents_share_a_result(corpus: str, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"body": document(number)}) + "\n" for number in range(45)))
    assert prepare(spec(str(path), text_field="body"), cache).folder == prepare(spec(corpus), cache).folder


def test_the_standard_library_beats_a_uniform_guess(cache: Path) -> None:
    prepared = prepare(spec("python-stdlib", limit_bytes=400_000), cache)
    assert prepared.origin["python"] is not None
    assert prepared.origin["bytes"] == pytest.approx(400_000, abs=3)
    nats = unigram_cross_entropy(prepared.train, prepared.validation)
    assert 2 < nats < math.log(prepared.train.vocab)


def token_file(path: Path, first: int, count: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tokens(path, [np.arange(first, first + count)], vocab=1000)
    return path


def test_a_token_file_is_referred_to_and_its_tail_held_out(cache: Path, tmp_path: Path) -> None:
    path = token_file(tmp_path / "mine.bin", 0, 200)
    prepared = prepare(spec(str(path)), cache)
    assert prepared.train.ids.tolist() == list(range(190))
    assert prepared.validation.ids.tolist() == list(range(190, 200))
    assert prepared.train.path == path
    assert prepared.train.vocab == 1000
    assert prepared.tokenizer is None
    assert not list(cache.rglob("*.bin"))


def test_a_folder_of_token_files_has_validation_data(cache: Path, tmp_path: Path) -> None:
    token_file(tmp_path / "data" / "train.bin", 0, 100)
    only_train = prepare(spec(str(tmp_path / "data")), cache)
    assert len(only_train.train) == 95
    token_file(tmp_path / "data" / "validation.bin", 500, 50)
    both = prepare(spec(str(tmp_path / "data")), cache)
    assert both.train.ids.tolist() == list(range(100))
    assert both.validation.ids.tolist() == list(range(500, 550))
    limited = prepare(spec(str(tmp_path / "data"), limit_bytes=20), cache)
    assert limited.train.ids.tolist() == list(range(10))
    assert limited.validation.ids.tolist() == list(range(500, 510))


def test_a_npy_file_is_imported(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(100)[::-1])
    prepared = prepare(spec(str(path)), cache)
    assert prepared.train.ids.tolist() == list(range(99, 4, -1))
    assert prepared.validation.ids.tolist() == [4, 3, 2, 1, 0]
    assert prepared.train.vocab == 100
    flip(prepared.train.path)
    listener = Listener()
    again = prepare(spec(str(path)), cache, reporter=listener)
    assert len(listener.warnings) == 1
    assert np.array_equal(again.train.ids, np.arange(99, 4, -1))


def test_tokens_keep_the_tokenizer_they_were_made_with(corpus: str, cache: Path) -> None:
    text_folder = prepare(spec(corpus), cache).folder
    named = TokenizerSpec(file=str(text_folder / "tokenizer.json"))
    assert text(prepare(spec(str(text_folder), named), cache), "train").startswith(document(0))
    as_bytes = prepare(spec(corpus, BYTES), cache).folder
    assert text(prepare(spec(str(as_bytes), BYTES), cache), "train").startswith(document(0))


def test_a_replaced_token_file_is_noticed(cache: Path, tmp_path: Path) -> None:
    path = token_file(tmp_path / "mine.bin", 0, 200)
    before = prepare(spec(str(path)), cache)
    token_file(path, 7, 200)
    after = prepare(spec(str(path)), cache)
    assert after.folder != before.folder
    assert after.train.ids[0] == 7


def test_a_damaged_token_file_is_refused_not_rebuilt(cache: Path, tmp_path: Path) -> None:
    path = token_file(tmp_path / "mine.bin", 0, 200)
    flip(path)
    with pytest.raises(UserError, match=r"mine\.bin: has other content"):
        prepare(spec(str(path)), cache)
    header_path(path).unlink()
    with pytest.raises(UserError, match=r"mine\.bin\.json: cannot be read"):
        prepare(spec(str(path)), cache)
    assert list(cache.glob("*/")) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}', '{"format": "penstock-data-1"}'])
def test_a_folder_that_is_not_prepared_data_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "prepared.json").write_text(content)
    with pytest.raises(UserError, match="is not prepared data"):
        open_prepared(tmp_path)
