"""Corpora: which documents, in which order, which of them held out, and what is said about bad ones."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.job import STDLIB_CORPUS
from penstock.core.preparing import Reporter
from penstock.trainer.data.corpus import Corpus, Event, find_corpus, scan, split_events

# files are rewritten by every example
REWRITES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40)


class Listener(Reporter):
    def __init__(self) -> None:
        self.progresses: list[tuple[str, int, int]] = []
        self.warnings: list[str] = []

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self.progresses.append((stage, done_bytes, total_bytes))

    def warning(self, line: str) -> None:
        self.warnings.append(line)


def documents(events: Iterable[Event]) -> list[str]:
    """Join the pieces."""
    whole, pieces = [], list[str]()
    for event in events:
        if event is None:
            whole.append("".join(pieces))
            pieces = []
        else:
            pieces.append(event)
    assert not pieces
    return whole


def split(corpus: Corpus) -> tuple[list[str], list[str]]:
    events = list(split_events(corpus, scan(corpus)))
    train, validation = (documents(event for held_out, event in events if held_out is part) for part in (False, True))
    return train, validation


def write(folder: Path, files: dict[str, str | bytes]) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def write_jsonl(path: Path, texts: list[str], *, field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def test_documents_come_by_sorted_relative_path(tmp_path: Path) -> None:
    source = write(tmp_path, {"b.txt": "2", "a/z.txt": "1", "a.txt": "0", "c/a/b.md": "3", "empty.txt": ""})
    corpus = find_corpus(source)
    assert corpus.files == ("a.txt", "a/z.txt", "b.txt", "c/a/b.md", "empty.txt")
    assert documents(corpus.events(lambda _: True)) == ["0", "1", "2", "3"]
    assert scan(corpus).documents == 4


def test_hidden_binary_and_special_files_are_left_out(tmp_path: Path) -> None:
    source = write(
        tmp_path,
        {
            "a.txt": "text",
            ".hidden": "h",
            ".git/x": "g",
            "latin.txt": b"caf\xe9",
            "nul.txt": "a\0b",
            "cut.txt": b"\xc3",
        },
    )
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    listener = Listener()
    scanned = scan(find_corpus(source), listener)
    assert scanned.skipped == {"latin.txt", "nul.txt", "cut.txt"}
    assert scanned.documents == 1
    assert listener.warnings == [f"3 files of {source} are left out: not UTF-8 text, e.g. cut.txt"]


@pytest.mark.parametrize("count", [20, 39, 40, 61])
def test_every_twentieth_document_is_held_out(tmp_path: Path, count: int) -> None:
    texts = [f"document {number}" for number in range(count)]
    train, validation = split(find_corpus(write_jsonl(tmp_path / "corpus.jsonl", texts)))
    assert validation == texts[19::20]
    assert train == [text for text in texts if text not in validation]


def test_of_one_document_the_last_twentieth_is_held_out(tmp_path: Path) -> None:
    text = "0123456789" * 100
    train, validation = split(find_corpus(write(tmp_path, {"a.txt": text}) + "/a.txt"))
    assert train == [text[:950]]
    assert validation == [text[950:]]


def test_a_cut_between_two_documents_leaves_no_empty_one(tmp_path: Path) -> None:
    texts = ["a" * 95, "b" * 5]
    assert split(find_corpus(write_jsonl(tmp_path / "corpus.jsonl", texts))) == (texts[:1], texts[1:])


def test_a_cut_in_the_first_character_of_a_document_leaves_no_empty_one(tmp_path: Path) -> None:
    texts = ["a" * 94, "é" * 3]
    assert split(find_corpus(write_jsonl(tmp_path / "corpus.jsonl", texts))) == (texts[:1], texts[1:])


def test_a_cut_between_two_pieces_leaves_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.trainer.data.corpus.PIECE_CHARACTERS", 19)
    corpus = find_corpus(write(tmp_path, {"a.txt": "a" * 100}) + "/a.txt")
    events = list(split_events(corpus, scan(corpus)))
    assert events == [*[(False, "a" * 19)] * 5, (False, None), (True, "a" * 5), (True, None)]


@REWRITES
@given(texts=st.lists(TEXTS, min_size=1, max_size=19), piece_characters=st.integers(4, 50))
def test_of_few_documents_the_last_twentieth_of_the_text_is_held_out(
    tmp_path: Path, texts: list[str], piece_characters: int
) -> None:
    """For any pieces, text stays whole and in order, and the cut is within one character of the position."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.trainer.data.corpus.PIECE_CHARACTERS", piece_characters)
        train, validation = split(find_corpus(write_jsonl(tmp_path / "corpus.jsonl", texts)))
    assert "".join(train + validation) == "".join(texts)
    assert all(train + validation)
    num_bytes = len("".join(texts).encode())
    surplus = len("".join(validation).encode()) - num_bytes // 20
    assert 0 <= surplus < 4


@REWRITES
@given(text=TEXTS, piece_characters=st.integers(4, 9))
def test_characters_stay_whole_across_pieces(tmp_path: Path, text: str, piece_characters: int) -> None:
    source = write(tmp_path, {"a.txt": text})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.trainer.data.corpus.PIECE_CHARACTERS", piece_characters)
        pieces = list(find_corpus(source).events(lambda _: True))
    assert documents(pieces) == [text]
    assert all(len(piece.encode()) <= piece_characters + 3 for piece in pieces if piece is not None)


def test_line_ends_are_kept(tmp_path: Path) -> None:
    source = write(tmp_path, {"a.txt": "dos\r\nmac\runix\n"})
    assert documents(find_corpus(source).events(lambda _: True)) == ["dos\r\nmac\runix\n"]


@REWRITES
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), limit_bytes=st.integers(4, 300))
def test_a_limit_keeps_the_first_bytes(tmp_path: Path, texts: list[str], limit_bytes: int) -> None:
    source = write_jsonl(tmp_path / "corpus.jsonl", texts)
    corpus = find_corpus(source, limit_bytes=limit_bytes)
    kept = "".join(documents(corpus.events(lambda _: True)))
    whole = "".join(texts)
    assert whole.startswith(kept)
    assert min(limit_bytes, len(whole.encode())) - 3 <= len(kept.encode()) <= limit_bytes
    assert scan(corpus).num_bytes == len(kept.encode())


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    source = write(tmp_path, {"a.txt": "good text", "b.jsonl": "this line is never read"})
    assert scan(find_corpus(source, limit_bytes=9)).documents == 1
    with pytest.raises(UserError, match="is not JSON"):
        scan(find_corpus(source, limit_bytes=10))


def test_the_digest_covers_text_order_and_borders(tmp_path: Path) -> None:
    variants = [["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "d"], ["ab", "c", "c"]]
    digests = [
        scan(find_corpus(write_jsonl(tmp_path / f"{i}.jsonl", texts))).sha256 for i, texts in enumerate(variants)
    ]
    assert len(set(digests)) == len(variants)
    again = scan(find_corpus(write(tmp_path / "folder", {"1": "ab", "2": "c"})))
    assert again.sha256 == digests[0]


def test_jsonl_of_another_field_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"body": "one"}\n\n  \n{"body": "", "text": 3}\r\n{"body": "tw\\u00f6\\ud800"}')
    assert documents(find_corpus(str(path), text_field="body").events(lambda _: True)) == ["one", "twö?"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"title": "no"}', "has no text in field 'text'"),
        (b'{"text": null}', "has no text in field 'text'"),
        (b'{"text": ["a"]}', "has no text in field 'text'"),
        (b'"text"', "has no text in field 'text'"),
        (b'{"text": "a"', "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=reason) as refusal:
        scan(find_corpus(str(path)))
    assert refusal.value.where == f"{path}:3"
    assert refusal.value.remedy


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file or folder") as refusal:
        find_corpus(str(tmp_path / "nowhere"))
    assert refusal.value.where == "spec.data.source"


@pytest.mark.parametrize("files", [{}, {"empty.txt": ""}, {"image.png": b"\x89PNG\0"}])
def test_a_corpus_without_text_is_refused(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    with pytest.raises(UserError, match="holds no text"):
        scan(find_corpus(write(tmp_path, files)))


def test_progress_reaches_the_whole_corpus(tmp_path: Path) -> None:
    listener = Listener()
    scan(find_corpus(write(tmp_path, {"a": "1234", "b": "56"})), listener)
    assert listener.progresses == [("reading", 4, 6), ("reading", 6, 6)]


def test_the_standard_library_is_sources_without_tests() -> None:
    corpus = find_corpus(STDLIB_CORPUS)
    assert list(corpus.files) == sorted(corpus.files)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(corpus.files)
    assert all(name.endswith(".py") for name in corpus.files)
    folders = {part for name in corpus.files for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    scanned = scan(corpus)
    assert scanned.documents > 300
    assert scanned.num_bytes > 5_000_000
    assert scanned.python == platform.python_version()
    assert scanned == scan(find_corpus(STDLIB_CORPUS))


def test_a_python_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match="'python-stdlib' holds no text"):
        scan(find_corpus(STDLIB_CORPUS))
