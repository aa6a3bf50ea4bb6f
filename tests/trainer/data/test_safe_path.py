"""A folder of data is read without what lies outside of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import UserError
from penstock.core.job import DataSpec, TokenizerSpec
from penstock.trainer.data.corpus import find_corpus, scan, split_events
from penstock.trainer.data.prepare import prepare


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a text file, next to a secret."""
    (tmp_path / "secret.txt").write_text("secret")
    made = tmp_path / "folder"
    made.mkdir()
    (made / "a.txt").write_text("text")
    return made


@pytest.mark.parametrize("name", ["b.txt", "b.jsonl", "deep/b.txt"])
def test_a_link_out_of_a_folder_is_refused(folder: Path, name: str) -> None:
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(folder.parent / "secret.txt")
    with pytest.raises(UserError, match="leads out of the folder") as caught:
        scan(find_corpus(str(folder)))
    assert caught.value.where == str(link)
    assert "secret" not in str(caught.value)


def test_a_link_that_comes_later_is_refused(folder: Path) -> None:
    corpus = find_corpus(str(folder))
    scanned = scan(corpus)
    (folder / "a.txt").unlink()
    (folder / "a.txt").symlink_to(folder.parent / "secret.txt")
    with pytest.raises(UserError, match="leads out of the folder"):
        list(split_events(corpus, scanned))


def test_a_folder_of_links_out_is_not_entered(folder: Path) -> None:
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "c.txt").write_text("secret")
    (folder / "other").symlink_to(folder.parent / "other")
    assert find_corpus(str(folder)).files == ("a.txt",)


def test_links_within_a_folder_are_followed(folder: Path) -> None:
    (folder / "b.txt").symlink_to(folder / "a.txt")
    assert scan(find_corpus(str(folder))).documents == 2


def test_the_named_path_may_be_a_symbolic_link(folder: Path) -> None:
    named = {"folder": folder, "secret.txt": folder.parent / "secret.txt"}
    for name, meant in named.items():
        link = folder.parent / f"link-to-{name}"
        link.symlink_to(meant)
        assert scan(find_corpus(str(link))).documents == 1


def test_token_files_are_not_linked_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(64))
    (folder / "train.bin").symlink_to(tmp_path / "tokens.bin")
    data = DataSpec(source=str(folder), tokenizer=TokenizerSpec(train="bytes"), sequence_length=8)
    with pytest.raises(UserError, match="leads out of the folder"):
        prepare(data, tmp_path / "cache")
