"""What `penstock serve` finds again at its next start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.api.settings import Settings
from penstock.cli.serving import executor_name


def test_an_executor_keeps_its_name_when_machine_and_folder_are_renamed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    settings = Settings(folder=tmp_path / "a", machine="first")
    name = executor_name(settings)
    assert name == f"first:{tmp_path / 'a'}"
    moved = (tmp_path / "a").rename(tmp_path / "b")
    assert executor_name(replace(settings, folder=moved, machine="second")) == name


def test_folders_have_executors_of_their_own(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    names = {executor_name(Settings(folder=tmp_path / name, machine="first")) for name in "ab"}
    assert len(names) == 2
