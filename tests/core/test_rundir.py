"""The run directory: what is read back, what is passed over, and what is refused by its place."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.records import StepMetrics
from penstock.core.run.folder import RunDir, metrics_line
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import append_lines, complete_lines, write_atomically, write_json
from tests.support.manifests import example
from tests.support.sample_run import sample_plan, sample_profile
from tests.support.small_plans import small_plan

DOCUMENTED = {"step", "loss", "step_seconds", "tokens_per_second", "learning_rate", "gradient_norm", "peak_bytes"}


def metrics(step: int, *, loss: float = 1.0, attempt: int = 1, validation_loss: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        step_seconds=0.25,
        tokens_per_second=4096.0,
        learning_rate=1e-3,
        gradient_norm=0.5,
        peak_bytes=1 << 28,
        validation_loss=validation_loss,
        attempt=attempt,
    )


def written(run: RunDir, *entries: StepMetrics) -> None:
    with append_lines(run.metrics) as file:
        file.writelines(map(metrics_line, entries))


def test_a_line_holds_exactly_the_documented_fields() -> None:
    assert json.loads(metrics_line(metrics(3))).keys() == {*DOCUMENTED, "attempt"}
    assert json.loads(metrics_line(metrics(3, validation_loss=2.0)))["validation_loss"] == 2.0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 10)), max_size=30))
def test_the_newest_entry_of_a_step_counts(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[int, float]]
) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    for attempt, (step, loss) in enumerate(entries):
        written(run, metrics(step, loss=loss, attempt=attempt))
    newest = dict(entries)
    assert [(each.step, each.loss) for each in run.read_metrics()] == sorted(newest.items())


def test_hosts_that_share_a_run_write_apart(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run", tmp_path / "run" / "hosts" / "a", tmp_path / "disk")
    run.create()
    assert {path.relative_to(tmp_path).as_posix() for path in (run.logs, run.outbox, run.status)} == {
        "run/hosts/a/logs",
        "run/hosts/a/outbox",
        "disk/status",
    }
    assert all(path.is_dir() for path in (run.logs, run.outbox, run.status))
    assert run.metrics == RunDir(tmp_path / "run").metrics


def test_writers_at_the_same_time_leave_one_of_their_texts(tmp_path: Path) -> None:
    """Two hosts may give their processes the same number, so that is no name for what is not whole yet."""
    texts = [str(number) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_atomically(tmp_path / "file", text), texts * 8))
    assert (tmp_path / "file").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        write_atomically(tmp_path / "file", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_metrics_yet(tmp_path: Path) -> None:
    assert RunDir(tmp_path).read_metrics() == []


@pytest.mark.parametrize("kept", range(1, 40))
def test_a_truncated_line_is_skipped_and_the_following_are_read(tmp_path: Path, kept: int) -> None:
    run = RunDir(tmp_path)
    written(run, metrics(0), metrics(1))
    with run.metrics.open("a") as file:
        file.write(metrics_line(metrics(2))[:kept])
    assert [each.step for each in run.read_metrics()] == [0, 1]
    written(run, metrics(2, attempt=2), metrics(3, attempt=2))
    assert [(each.step, each.attempt) for each in run.read_metrics()] == [(0, 1), (1, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize("line", [b"{}", b"[]", b"7", b"nonsense", b'{"step": 1, "colour": "red"}', b"\xff\x00"])
def test_a_damaged_line_loses_only_its_step_and_is_reported(tmp_path: Path, line: bytes) -> None:
    """A bit that flips on the disk must not cost the report of a run that trained to its end."""
    run = RunDir(tmp_path)
    written(run, metrics(0))
    with run.metrics.open("ab") as file:
        file.write(line + b"\n")
    written(run, metrics(2))
    assert [each.step for each in run.read_metrics()] == [0, 2]
    (damaged,) = run.damaged_metrics()
    assert re.search(r"metrics.jsonl:2 is no entry, and is left out", damaged)


def test_a_flipped_bit_counts_as_damage(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    line = metrics_line(metrics(0))
    run.metrics.write_text(line.replace("attempt", "attumpt") + line.replace('"step": 0', '"step": "0"'))
    assert run.read_metrics() == []
    assert len(run.damaged_metrics()) == 2


@given(
    st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r")), max_size=5), st.text()
)
def test_complete_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[str], rest: str) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    rest = rest.encode(errors="ignore").decode().replace("\n", "").replace("\r", "")
    path.write_text("".join(f"{line}\n" for line in lines) + rest)
    assert complete_lines(path) == lines
    append_lines(path).close()
    assert path.read_text() == "".join(f"{line}\n" for line in lines)


def test_files_round_trip(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.job.write_text(yamltext.dump(example()))
    write_json(run.plan, sample_plan().to_manifest())
    write_json(run.profile, sample_profile().to_manifest())
    assert run.read_job() == PipelineJob.from_manifest(example())
    assert run.read_plan() == sample_plan()
    assert run.read_profile() == sample_profile()
    assert not list(run.root.glob(".*"))


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_file_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    order: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.rpartition(".")[0] or "folder")
        sync(descriptor)

    def replaced(source: Path, target: Path) -> Path:
        order.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_atomically(tmp_path / "file", "text", durable=durable)
    assert order == ([".file", "rename", "folder"] if durable else ["rename"])


def test_a_second_write_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("long and old", "new"):
        write_atomically(path, text)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for read, path in ((run.read_job, run.job), (run.read_plan, run.plan), (run.read_profile, run.profile)):
        with pytest.raises(UserError, match="No such file") as caught:
            read()
        assert caught.value.where == str(path)
        path.write_bytes(b"\xff\xfe{")
        with pytest.raises(UserError) as caught:
            read()
        assert caught.value.where.startswith(str(path))
    run.plan.write_text("{")
    with pytest.raises(UserError, match=r"plan.json: is corrupt"):
        run.read_plan()


def test_a_broken_field_is_named_with_its_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    manifest = small_plan().to_manifest()
    write_json(run.plan, {**manifest, "slizes": []})
    with pytest.raises(UserError, match=r"plan.json: slizes: ") as caught:
        run.read_plan()
    assert caught.value.remedy


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_a_run_directory_that_cannot_be_created_is_an_error(tmp_path: Path, obstacle: str) -> None:
    blocked = tmp_path / "blocked"
    if obstacle == "file":
        blocked.touch()
    root = blocked / "run" if obstacle == "file" else Path("/proc/run")
    with pytest.raises(UserError, match="cannot be written") as caught:
        RunDir(root).create()
    assert str(root) in caught.value.where
    assert "--run-dir" in caught.value.remedy


def test_creating_twice_is_fine(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "deep" / "run")
    run.create()
    run.create()
    assert all(path.is_dir() for path in (run.checkpoints, run.logs, run.outbox, run.status))


def test_every_path_lies_in_the_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    paths = [getattr(run, name) for name, value in vars(RunDir).items() if isinstance(value, property)]
    assert len(set(paths)) == len(paths)
    assert all(path.parent == tmp_path for path in paths)
