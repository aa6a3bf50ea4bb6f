"""Run folders that `penstock run` of version 0.1.0 left: they are reported, exported and resumed; nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from penstock.agent.probe import Identity
from penstock.agent.profiles import unfit
from penstock.cli.main import main
from penstock.core.records import RecordKind
from penstock.core.run.folder import RunDir
from penstock.core.run.outbox import read_records
from tests.support.command import Command, losses
from tests.support.old_runs import EVERY, FINISHED, KILLED, STEPS, restored

pytestmark = [pytest.mark.xdist_group("cli"), pytest.mark.timeout(600)]

NEAR = 1e-5
"""Losses of another machine: its kernels may add in another order."""


@dataclass
class Upgraded:
    """The folder with both runs, and what 0.1.0 had made of them."""

    folder: Path
    expected: dict[str, Any]

    def run(self, name: str) -> RunDir:
        return RunDir(self.folder / name)


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:
    folder = tmp_path_factory.mktemp("upgraded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield Upgraded(folder, restored(folder))


def test_what_finished_is_reported(upgraded: Upgraded, capsys: pytest.CaptureFixture[str]) -> None:
    run = upgraded.run(FINISHED)
    assert main(["report", str(run.root), "--output", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["phase"], told["attempt"], told["steps"]) == ("Succeeded", 1, STEPS)
    assert told["lastLoss"] == upgraded.expected[FINISHED][-1]
    assert told["sample"]
    assert "Succeeded" in run.report.read_text()
    assert losses(run) == upgraded.expected[FINISHED]


def test_what_finished_is_exported(upgraded: Upgraded) -> None:
    target = upgraded.folder / "exported"
    assert main(["export", str(upgraded.run(FINISHED).root), "--to", str(target)]) == 0
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 2
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.embed_tokens.weight").shape == (257, 8)


def test_what_finished_writes_on(upgraded: Upgraded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(upgraded.run(FINISHED).root), "--prompt", "def f", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("def f")


def test_what_finished_is_not_resumed(upgraded: Upgraded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(upgraded.run(FINISHED).root)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"is finished: its newest checkpoint is of step {STEPS} of {STEPS}" in said


def test_what_was_killed_is_reported_and_resumed(upgraded: Upgraded, capsys: pytest.CaptureFixture[str]) -> None:
    """By the plan of before, from its checkpoint, with no measurement; what no service has read stays in its outbox."""
    run = upgraded.run(KILLED)
    before = {path: path.read_bytes() for path in (run.plan, run.profile, run.outbox / "a1-rank-0.jsonl")}
    lines = run.metrics.read_text()
    assert losses(run) == upgraded.expected[KILLED]
    assert main(["report", str(run.root), "--output", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["phase"], told["steps"]) == ("Running", len(upgraded.expected[KILLED]))

    _, said = Command(upgraded.folder)("resume", run.root)
    assert f"attempt 2, from step {EVERY}" in said
    assert losses(run) == pytest.approx(upgraded.expected["resumed"], rel=NEAR)
    assert run.metrics.read_text().startswith(lines)
    assert {path: path.read_bytes() for path in before} == before
    assert not list(run.logs.glob("*profile*"))
    told_steps = [
        record.metrics.step
        for attempt in (1, 2)
        for record in read_records(run.outbox / f"a{attempt}-rank-0.jsonl")
        if record.kind is RecordKind.METRICS and record.metrics is not None
    ]
    assert told_steps == [*range(len(upgraded.expected[KILLED])), *range(EVERY, STEPS)]


def test_a_profile_of_another_machine_says_what_to_do(upgraded: Upgraded, capsys: pytest.CaptureFixture[str]) -> None:
    profile = upgraded.run(KILLED).profile
    assert main(["plan", str(upgraded.folder / "job.yaml"), "--profile", str(profile)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is of another machine: its host is node-1" in said
    assert "penstock profile JOB" in said


def test_a_profile_of_the_trainer_of_before_is_not_taken_for_this_one_s(upgraded: Upgraded) -> None:
    profile, spec = upgraded.run(KILLED).read_profile(), upgraded.run(KILLED).read_job().spec
    own = Identity(
        key=replace(profile.key, trainer="of this version"),
        model_digest=profile.model_digest,
        precision=profile.precision,
        num_ranks=profile.num_ranks,
    )
    now = profile.measured_at + 1.0
    assert unfit(profile, spec, own, now) == "was measured with another version of the trainer"
    assert unfit(profile, spec, replace(own, key=profile.key), now) is None
