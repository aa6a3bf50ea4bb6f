"""What of a run directory is shown and opened, and that nothing else ever is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.files.runfiles import artifacts, checkpoints, newest_checkpoint, open_artifact
from tests.support.run_files import FILES, PRIVATE, add_checkpoint, lay_out


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "runs" / "uid"
    lay_out(made)
    return made


def read(root: Path, name: str) -> bytes | None:
    file = open_artifact(root, name)
    if file is None:
        return None
    with file:
        return file.read()


def test_artifacts_are_listed_and_opened(root: Path) -> None:
    found = artifacts(root)
    assert [each.name for each in found] == sorted(FILES)
    assert {each.name: each.num_bytes for each in found} == {name: len(body) for name, body in FILES.items()}
    assert {each.name: read(root, each.name) for each in found} == FILES


def test_a_run_that_never_began_has_none(tmp_path: Path) -> None:
    assert artifacts(tmp_path / "none") == []
    assert checkpoints(tmp_path / "none") == []
    assert newest_checkpoint(tmp_path / "none") is None
    assert read(tmp_path / "none", "plan.json") is None


@pytest.mark.parametrize(
    "name",
    [
        *PRIVATE, "", ".", "..", "../uid/plan.json", "logs/../plan.json", "logs/../../../x", "/etc/passwd",
        "plan.json/",
        "./plan.json", "logs//a1/torchrun.log", "logs/a1", "exports", "exports/a1-step-4", "exports/a1-step-4/..",
        "exports/a1-step-4/../../job.yaml", "plan.json\0", "plan.json\n", "x" * 5000, "exports/a1-step-4/none",
    ],
)  # fmt: skip
def test_nothing_else_is_opened(root: Path, name: str) -> None:
    assert read(root, name) is None


@given(
    st.lists(st.sampled_from(["..", ".", "", "logs", "exports", "a1-step-4", "job.yaml", "a1", "status"]), max_size=6)
)
def test_no_path_leads_anywhere_else(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    root = tmp_path_factory.getbasetemp() / "shared" / "uid"
    if not root.exists():
        lay_out(root)
    assert read(root, "/".join(parts)) in (None, *FILES.values())


class TestLinks:
    """Ranks may make them; they lead nowhere."""

    def test_of_a_file(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        (root / "trace.json").symlink_to(tmp_path / "secret")
        (root / "profile.json").symlink_to(root / "job.yaml")
        assert [each.name for each in artifacts(root)] == sorted(FILES)
        assert read(root, "trace.json") is None
        assert read(root, "profile.json") is None

    def test_of_a_folder(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "x.log").write_text("secret")
        (root / "logs" / "linked").symlink_to(tmp_path / "elsewhere")
        assert [each.name for each in artifacts(root)] == sorted(FILES)
        assert read(root, "logs/linked/x.log") is None

    def test_of_the_runs_themselves_are_the_administrator_s(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(root.parent)
        assert read(tmp_path / "link" / "uid", "plan.json") == FILES["plan.json"]

    def test_what_is_no_file_is_not_waited_for(self, root: Path) -> None:
        os.mkfifo(root / "trace.json")
        (root / "profile.json").mkdir()
        assert read(root, "trace.json") is None
        assert read(root, "profile.json") is None
        assert [each.name for each in artifacts(root)] == sorted(FILES)


def test_checkpoints_newest_first(tmp_path: Path) -> None:
    for attempt, step, state in [
        (1, 20, "complete"), (1, 40, "complete"), (2, 40, "complete"), (2, 60, "removed"), (2, 80, "partial"),
    ]:  # fmt: skip
        add_checkpoint(tmp_path, attempt, step, state=state)
    (tmp_path / "checkpoints" / "a2" / "notes").mkdir()
    found = checkpoints(tmp_path)
    assert [(each.step, each.attempt, each.complete) for each in found] == [
        (80, 2, False), (60, 2, False), (40, 2, True), (40, 1, True), (20, 1, True),
    ]  # fmt: skip
    assert [each.num_bytes for each in found] == [100, 100, 102, 102, 102]
    assert newest_checkpoint(tmp_path) == found[2]
