"""What launched ranks have the disk keep, and when: a power cut after any checkpoint leaves the steps before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.agent.launch import LaunchSpec, launch
from penstock.core.run.folder import RunDir
from tests.support.synced_rank import JOURNAL, Note, notes
from tests.support.training_run import finish, make_run, tiny_job, tiny_plan, write_corpus

RANKS, STEPS, EVERY = 2, 6, 2
COMMITS = STEPS // EVERY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that trained to its end; what its ranks noted lies in the file ``journal``."""
    folder = tmp_path_factory.mktemp("power")
    job = tiny_job(write_corpus(folder / "corpus"), every_steps=EVERY, steps=STEPS)
    made = make_run(folder / "runs" / "tiny" / "1", job, tiny_plan(job, RANKS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(JOURNAL, str(folder / "journal"))
        spec = LaunchSpec(
            module="tests.support.synced_rank",
            arguments=("train", "--run-dir", str(made.root), "--attempt", "1"),
            num_ranks=RANKS,
            threads_per_rank=1,
            log_folder=made.logs / "train",
            status_folder=made.status,
        )
        finish(launch(spec))
    return made


def noted(run: RunDir) -> list[Note]:
    """By the first rank, which writes what people and the service read."""
    return [note for note in notes(run.root.parents[2] / "journal") if note.rank == 0]


def synced_bytes(before: list[Note], path: Path) -> int:
    """How much of a file is on the disk for certain."""
    return max((note.num_bytes for note in before if note.what == "sync" and note.path == path), default=0)


def test_a_checkpoint_never_outlives_the_steps_before_it(run: RunDir) -> None:
    found, outbox = noted(run), run.outbox / "a1-rank-0.jsonl"
    commits = [place for place, note in enumerate(found) if note.what == "rename" and "step-" in note.path.name]
    assert len(commits) == COMMITS
    for number, place in enumerate(commits, start=1):
        steps = {}
        for path, name in ((run.metrics, "metrics"), (outbox, "outbox")):
            kept = path.read_bytes()[: synced_bytes(found[:place], path)].splitlines()
            entries = [json.loads(line) for line in kept]
            steps[name] = [entry.get("step", (entry.get("metrics") or {}).get("step")) for entry in entries]
        expected = list(range(number * EVERY))
        assert steps["metrics"] == expected
        assert [step for step in steps["outbox"] if step is not None] == expected


def test_all_is_kept_at_the_end_and_no_step_waits_for_the_disk(run: RunDir) -> None:
    found = noted(run)
    for path in (run.metrics, run.outbox / "a1-rank-0.jsonl"):
        syncs = [note for note in found if note.what == "sync" and note.path == path]
        assert syncs[-1].num_bytes == path.stat().st_size
        assert len(syncs) == COMMITS + 1


def test_new_files_keep_their_names(run: RunDir) -> None:
    """Those of metrics and records before a checkpoint is there, and then its own and its folders'."""
    found = noted(run)
    commits = [place for place, note in enumerate(found) if note.what == "rename" and "step-" in note.path.name]
    before = {note.path / name for note in found[: commits[0]] for name in note.names}
    assert {run.metrics, run.outbox, run.outbox / "a1-rank-0.jsonl"} <= before
    for place, following in zip(commits, [*commits[1:], len(found)], strict=True):
        kept = {note.path / name for note in found[place + 1 : following] for name in note.names}
        assert {found[place].path, run.checkpoints / "a1", run.checkpoints} <= before | kept
