"""`penstock plan --trial`: the best plans are run here for a few steps, and the fastest is kept."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.local import planning_commands, trials
from penstock.cli.local.trials import ENDLESS, FEWEST_STEPS, MOST_STEPS, fastest
from penstock.cli.main import main
from penstock.core.errors import RunError, UserError
from penstock.core.host.stopping import StopRequestedError
from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.core.records import WARM_UP_STEPS
from penstock.core.run.folder import RunDir, metrics_line
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import write_json
from penstock.core.speed import speed_columns
from penstock.planner.budget import Budget
from penstock.planner.decide import best_plans, decide
from penstock.planner.measured import problem_from_profile
from tests.support.fake_workers import FakeRanks, FakeWorkers, Script, fake_metrics, killed, refused
from tests.support.local_run import local_identity, local_job, local_profile
from tests.support.manifests import example

Captured = pytest.CaptureFixture[str]


class Timed(FakeWorkers):
    """Ranks whose steps take as long as ``seconds`` says, a number for each plan in turn; 0 means that they fail."""

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__()
        self.seconds = list(seconds)
        self.jobs: list[PipelineJob] = []
        self.plans: list[Plan] = []
        self.folders: list[Path] = []

    def train(self, job: PipelineJob, run: RunDir, attempt: int, num_ranks: int, metrics_port: int | None) -> FakeRanks:
        seconds, done = self.seconds.pop(0), 0
        self.jobs.append(run.read_job())
        self.plans.append(run.read_plan())
        self.folders.append(run.root)

        def step() -> bool:
            nonlocal done
            slow = 10.0 if done < WARM_UP_STEPS else 1.0
            with run.metrics.open("a") as file:
                file.write(metrics_line(dataclasses.replace(fake_metrics(done), step_seconds=slow * seconds)))
            done += 1
            return True

        def fail() -> bool:
            return False

        script = Script() if seconds else Script(end=killed())
        self.ranks.append(FakeRanks(script, step if seconds else fail, lambda _: None))
        return self.ranks[-1]


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, ...]:
    problem = problem_from_profile(local_job().spec, local_profile())
    found = tuple(best_plans(problem, decide(problem, Budget(candidates=12, neighbours=4, moves=0)), 3))
    assert len(found) == 3
    return found


def test_the_fastest_measured_plan_is_kept(plans: tuple[Plan, ...], capsys: Captured) -> None:
    workers = Timed([0.25, 0.125, 0.5])
    kept = fastest(local_job(), plans, workers)
    assert kept.program_digest == plans[1].program_digest
    assert kept.prediction is not None
    assert kept.prediction.explanation is not None
    told = kept.prediction.explanation.trials
    assert [trial.measured_seconds for trial in told] == [0.25, 0.125, 0.5], "without the steps of warm-up"
    assert [trial.steps for trial in told] == [8, 16, FEWEST_STEPS], "for two seconds, and five steps at least"
    assert [trial.spread for trial in told] == [0.0, 0.0, 0.0]
    assert [trial.chosen for trial in told] == [False, True, False]
    predicted = [plan.prediction.step_seconds for plan in plans if plan.prediction]
    assert [trial.predicted_seconds for trial in told] == predicted
    speeds = [plan.speed(seconds) for plan, seconds in zip(plans, (0.25, 0.125, 0.5), strict=True)]
    assert [trial.measured_speed for trial in told] == speeds
    assert [trial.predicted_speed for trial in told] == [plan.speed() for plan in plans]
    first_speed, kept_speed, _ = (speed.text for speed in speeds if speed is not None)
    step = f"125 ms per step, {kept_speed}"
    assert kept.reasons[-1].startswith(f"the fastest of 3 plans that were run here: {step}, 50.0 % faster")
    assert workers.plans == list(plans)
    labels = {plan.reasons[0].partition(": ")[0]: plan for plan in plans}
    reasons = {each.label: each.reason for each in kept.alternatives if each.label in labels}
    first = next(iter(labels))
    assert reasons[first].startswith(f"measured 250 ms ({first_speed}), 100.0 % slower, predicted ")
    shown = capsys.readouterr().err
    assert shown.count("measured") == 3
    assert f"measured 125 ms ({kept_speed}), spread 0%" in shown
    speed_cells = speed_columns([kept.prediction.explanation.trials[1].measured_speed]).rows[0]
    assert speed_cells[0] in "\n".join(shown_lines(kept))


def shown_lines(plan: Plan) -> list[str]:
    """The plan as `penstock plan` prints it."""
    console = Console(file=io.StringIO(), width=300)
    console.print(*planning_commands.plan_lines(plan), sep="\n")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_steps_that_are_very_short_are_counted(plans: tuple[Plan, ...]) -> None:
    kept = fastest(local_job(), plans[:1], Timed([0.001]))
    assert kept.prediction is not None
    assert kept.prediction.explanation is not None
    assert kept.prediction.explanation.trials[0].steps == MOST_STEPS


def test_a_gain_within_the_spread_is_called_chance(plans: tuple[Plan, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statistics.quantiles", lambda seconds, n: (0.1, 0.1, 0.15))
    kept = fastest(local_job(), plans[:2], Timed([0.26, 0.25]))
    told = "which may be chance: the next is 4.0% slower, and steps of a plan spread by 20.0%"
    assert kept.reasons[-1].endswith(told)


def test_a_trial_saves_and_validates_nothing_and_leaves_nothing(plans: tuple[Plan, ...]) -> None:
    workers = Timed([0.25, 0.125, 0.5])
    fastest(local_job(), plans, workers)
    for job in workers.jobs:
        assert job.spec.training.steps == job.spec.checkpoint.every_steps == ENDLESS
        assert job.spec.training.validate_every == 0
        assert job.spec.checkpoint.resume_from is None
    assert not workers.alive
    assert all(ranks.killed for ranks in workers.ranks)
    assert not any(folder.exists() for folder in workers.folders)


def test_the_best_by_prediction_may_be_the_fastest(plans: tuple[Plan, ...]) -> None:
    kept = fastest(local_job(), plans, Timed([0.1, 0.2, 0.2]))
    step = "100 ms per step, 20,480 tokens/s per device"
    assert kept.reasons[-1] == f"the fastest of 3 plans that were run here: {step}, also the best by prediction"


def test_a_plan_that_fails_is_passed_over_and_says_why(plans: tuple[Plan, ...], capsys: Captured) -> None:
    kept = fastest(local_job(), plans, Timed([0, 0.2, 0.4]))
    assert kept.program_digest == plans[1].program_digest
    assert kept.reasons[-1].endswith("while the best by prediction failed")
    assert kept.prediction is not None
    assert kept.prediction.explanation is not None
    failed = kept.prediction.explanation.trials[0]
    assert failed.measured_seconds is None
    assert "was killed" in failed.failure
    assert "failed: rank 1" in capsys.readouterr().err
    assert "was killed" in trials_shown(kept)[0]


def trials_shown(plan: Plan) -> list[str]:
    assert plan.prediction is not None
    assert plan.prediction.explanation is not None
    rows = map(planning_commands.trial_row, plan.prediction.explanation.trials)
    return [" ".join([*before, *after]) for before, _, after in rows]


def test_nothing_that_ran_is_a_failure(plans: tuple[Plan, ...]) -> None:
    with pytest.raises(RunError, match="none of 3 plans could be measured: rank 1"):
        fastest(local_job(), plans, Timed([0, 0, 0]))


def test_a_mistake_in_the_data_ends_all_trials(plans: tuple[Plan, ...]) -> None:
    def unsuited() -> None:
        raise UserError(what="too short", where="spec.data.source")

    workers = Timed([1.0] * 3)
    workers.prepare_with = unsuited
    with pytest.raises(UserError, match="too short"):
        fastest(local_job(), plans, workers)
    assert not workers.ranks


def test_ctrl_c_leaves_no_rank_and_no_folder(plans: tuple[Plan, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Timed([0.25, 0.125, 0.5])
    monkeypatch.setattr(trials, "step_text", lambda seconds, speed: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(StopRequestedError):
        fastest(local_job(), plans, workers)
    assert len(workers.ranks) == 1
    assert not workers.alive
    assert not workers.folders[0].exists()


# The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job and a measurement of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.cli.local.planning_commands.identify", lambda spec: local_identity(local_job()))
    (tmp_path / "job.yaml").write_text(yamltext.dump(example()))
    measured = dataclasses.replace(local_profile(), measured_at=time.time())
    write_json(tmp_path / "profile.json", measured.to_manifest())
    return tmp_path


def test_the_command_lays_out_the_plan_that_it_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    workers = Timed([0.25, 0.125, 0.5])
    monkeypatch.setattr(trials, "LocalWorkers", lambda devices: workers)
    arguments = ["plan", "job.yaml", "--profile", "profile.json", "--trial", "3", "--run-dir", "r"]
    assert main([*arguments, "--output", "json"]) == 0
    printed = Plan.from_manifest(json.loads(capsys.readouterr().out))
    assert printed == RunDir(here / "r").read_plan()
    assert printed.program_digest == workers.plans[1].program_digest
    assert len({plan.program_digest for plan in workers.plans}) == 3


def test_trials_are_a_table_for_people(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    workers = Timed([0.25, 0.125])
    monkeypatch.setattr(trials, "LocalWorkers", lambda devices: workers)
    assert main(["plan", "job.yaml", "--profile", "profile.json", "--trial", "2"]) == 0
    shown = capsys.readouterr().out
    assert "tried" in shown
    rows = [line for line in shown.splitlines() if line.rstrip().endswith("kept")]
    assert len(rows) == 1
    assert " 125 ms " in rows[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster", "cluster.yaml"], "plans for described hardware"),
        (["--profile", "profile.json", "--what-if"], "cannot be combined"),
        (["--profile", "profile.json", "--frontier"], "--trial and --frontier cannot be combined"),
        (["--server", "http://127.0.0.1:1"], "uses this machine, but the service makes the plan"),
    ],
)
def test_what_cannot_be_tried_is_refused(here: Path, options: list[str], said: str, capsys: Captured) -> None:
    (here / "cluster.yaml").write_text(
        "{name: c, device: {name: d, peakFlops: 1.0e13, memoryBytes: 8Gi}, numNodes: 1, devicesPerNode: 2,"
        " intraNode: {latencySeconds: 1.0e-6, bytesPerSecond: 1.0e10},"
        " interNode: {latencySeconds: 1.0e-5, bytesPerSecond: 1.0e9}}"
    )
    assert main(["plan", "job.yaml", "--trial", "2", *options]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "remedy" in shown


def test_a_device_that_is_not_here_is_named(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def missing(spec: object) -> None:
        raise UserError(
            what="2 ranks need a device each, but this machine has 0", where="spec.resources.ranks", remedy="fewer"
        )

    monkeypatch.setattr("penstock.cli.local.planning_commands.identify", missing)
    assert main(["plan", "job.yaml", "--profile", "profile.json", "--trial", "2"]) == 2
    assert "need a device each" in capsys.readouterr().err


def test_a_number_of_plans_is_at_least_two(here: Path, capsys: Captured) -> None:
    assert main(["plan", "job.yaml", "--trial", "1"]) == 2
    assert "--trial" in capsys.readouterr().err


def test_ranks_that_refuse_are_named(plans: tuple[Plan, ...]) -> None:
    class Refusing(Timed):
        def train(
            self, job: PipelineJob, run: RunDir, attempt: int, num_ranks: int, metrics_port: int | None
        ) -> FakeRanks:
            self.ranks.append(FakeRanks(Script(end=refused("does not fit", "use less")), lambda: False, lambda _: None))
            return self.ranks[-1]

    with pytest.raises(RunError, match="does not fit"):
        fastest(local_job(), plans, Refusing([]))
