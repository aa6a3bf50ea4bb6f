"""The command itself, in this process: what is printed where, and the exit code."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from penstock import core
from penstock.agent.probe import Identity
from penstock.cli.local.planning_commands import plan_lines
from penstock.cli.main import main
from penstock.core import limits
from penstock.core.bubble import Lost
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.plan import Cost, Plan, Prediction, RunTime
from penstock.core.run.folder import RunDir
from penstock.core.schedule import parse_schedule
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Source, Timeline
from tests.support.local_run import finished_run, local_identity, local_job, local_plan, local_profile
from tests.support.manifests import example
from tests.support.repository import ROOT

CLUSTER = """
name: four
device: {name: d, peakFlops: 1.0e13, memoryBytes: 8Gi}
numNodes: 2
devicesPerNode: 2
intraNode: {latencySeconds: 1.0e-6, bytesPerSecond: 1.0e10}
interNode: {latencySeconds: 1.0e-5, bytesPerSecond: 1.0e9}
"""
PINNED = {"pp": 2, "dp": 1, "microBatch": 1, "slices": 2, "schedule": "1f1b", "stages": [4, 4]}

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.cli.local.planning_commands.identify", _identify)


def _identify(spec: JobSpec) -> Identity:
    """The machine is the one that was measured, but for its name."""
    identity = local_identity(local_job())
    return dataclasses.replace(identity, key=dataclasses.replace(identity.key, host="here"))


def write_job(path: Path, **changes: Any) -> str:
    path.write_text(yamltext.dump(example(**changes)))
    return str(path)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return str(path)


# Help and mistakes in the command line itself


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {version('penstock-core')}\n"
    assert core.__version__ == version("penstock-core")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        getattr(core, "nonsense")  # noqa: B009


def test_help_lists_every_command(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    commands = "init doctor profile plan simulate rehearse run resume report generate export schedule"
    assert all(f" {command} " in shown for command in commands.split())


@pytest.mark.parametrize("arguments", [["nothing"], ["run"], ["plan", "job.yaml", "--no-such"], ["schedule", "x"]])
def test_a_wrong_command_line_is_the_users_mistake(arguments: list[str], capsys: Captured) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_an_error_names_place_and_remedy_on_stderr(tmp_path: Path, capsys: Captured) -> None:
    assert main(["plan", write_job(tmp_path / "job.yaml", model__heads=7)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "spec.model.heads" in captured.err
    assert "remedy" in captured.err
    assert "Traceback" not in captured.err


def test_every_mistake_of_a_manifest_is_shown_with_its_remedy(tmp_path: Path, capsys: Captured) -> None:
    job = write_job(tmp_path / "job.yaml", model__heads="four", training__steps=0, data__sequence=64)
    assert main(["plan", job]) == 2
    error = capsys.readouterr().err
    assert all(place in error for place in ("spec.model.heads", "spec.training.steps", "spec.data.sequence"))
    assert error.count("remedy ") == 3


def test_a_name_means_a_job_of_the_service_to_suspend_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for command in ("suspend", "resume"):
        assert main([command, "my-job"]) == 2
        assert "no service is configured" in capsys.readouterr().err
    assert main(["resume", "./my-job"]) == 2
    assert "my-job/job.yaml: cannot be read" in capsys.readouterr().err


def test_debug_shows_where_an_error_comes_from(tmp_path: Path, capsys: Captured) -> None:
    assert main(["--debug", "plan", str(tmp_path / "missing.yaml")]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_error_nobody_expected_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("penstock.cli.local.job_files.read_job", fail)
    assert main(["plan", "job.yaml"]) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError: of all things" in error
    assert "--debug" in error
    assert "Traceback" not in error


def test_a_missing_trainer_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def fail(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("penstock.cli.local.job_files.read_job", fail)
    assert main(["plan", "job.yaml"]) == 2
    assert "penstock.txt penstock-trainer" in capsys.readouterr().err


# init and doctor


def test_init_writes_a_job_that_is_one(tmp_path: Path, capsys: Captured) -> None:
    assert main(["init", "--name", "first"]) == 0
    job = PipelineJob.from_manifest(yamltext.load((tmp_path / "job.yaml").read_text()))
    assert job.metadata.name == "first"
    assert "penstock run job.yaml" in capsys.readouterr().err


def test_init_overwrites_only_when_told(tmp_path: Path, capsys: Captured) -> None:
    assert main(["init"]) == 0
    assert main(["init"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["init", "--force", "--name", "second"]) == 0
    assert "name: second" in (tmp_path / "job.yaml").read_text()


@pytest.mark.parametrize("arguments", [["--name", "No Name"], ["missing/job.yaml"]])
def test_init_refuses_what_cannot_be(arguments: list[str], capsys: Captured) -> None:
    assert main(["init", *arguments]) == 2
    assert "remedy" in capsys.readouterr().err


# plan


def test_planning_for_described_hardware(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    job = write_job(tmp_path / "job.yaml", resources__ranks=4)
    assert main(["plan", job, "--cluster", cluster, "--output", "json"]) == 0
    plan = Plan.from_manifest(json.loads(capsys.readouterr().out))
    assert plan.num_ranks == 4
    assert plan.prediction is not None


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"model__hidden": 2**30}, "spec.model.hidden"),
        ({"model__layers": 10**9}, "spec.model.layers"),
        ({"resources__ranks": 10**18}, "spec.resources.ranks"),
        ({"resources__memoryPerRank": "9" * 5_000}, "spec.resources.memoryPerRank"),
        ({"parallelism": {"slices": [1] * 65_537}}, "spec.parallelism.slices"),
        ({"training__steps": 16**5_000}, "spec.training.steps"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_beyond_a_maximum_is_a_mistake_with_its_place(
    tmp_path: Path, cluster: str, capsys: Captured, changes: dict[str, Any], where: str
) -> None:
    path = tmp_path / "job.yaml"
    manifest = example(**{name: value for name, value in changes.items() if name != "training__steps"})
    text = yamltext.dump(manifest)
    path.write_text(text.replace("steps: 200", f"steps: {changes.get('training__steps', 200):#x}"))
    assert main(["plan", str(path), "--cluster", cluster]) == 2
    error = capsys.readouterr().err
    assert where in error
    assert "Traceback" not in error
    assert len(error) < 600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(" * 9_000 + "0F0;0B0" + ")OVERLAP_F_B" * 9_000, "is not an action"),
        ("0F0," + "x" * 200_000, "is not CSV"),
        ("9" * 5_000 + "F0", "is not an action"),
    ],
    ids=["nested", "long cell", "digits"],
)
def test_a_csv_beyond_a_maximum_is_a_mistake(
    tmp_path: Path, cluster: str, capsys: Captured, text: str, message: str
) -> None:
    (tmp_path / "own.csv").write_text(text)
    job = write_job(tmp_path / "job.yaml", parallelism={"schedule": str(tmp_path / "own.csv")})
    assert main(["plan", job, "--cluster", cluster]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_search_that_takes_too_long_ends_with_a_remedy(
    tmp_path: Path, cluster: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    monkeypatch.setattr("penstock.planner.worker.searching.MOST_SECONDS", -1.0)
    assert main(["plan", write_job(tmp_path / "job.yaml"), "--cluster", cluster]) == 2
    error = capsys.readouterr().err
    assert "planning took over" in error
    assert "pin dp, pp or slices" in error
    assert children() <= before


def test_ctrl_c_ends_a_search(tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()

    def interrupt(seconds: float) -> None:
        assert children() - before
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.planner.worker.searching.time.sleep", interrupt)
    job = write_job(tmp_path / "job.yaml", model__layers=4_096, resources__ranks=64)
    assert main(["plan", job, "--cluster", cluster]) == 130
    assert children() <= before


def children() -> set[str]:
    """The processes of this one, those of fixtures such as a cluster among them."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_equal_inputs_give_equal_plans(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    job = write_job(tmp_path / "job.yaml", parallelism=PINNED)
    outputs = []
    for _ in range(2):
        assert main(["plan", job, "--cluster", cluster, "--output", "yaml"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert Plan.from_manifest(yamltext.load(outputs[0])).schedule.generator == "1f1b"


def test_a_plan_for_people_says_why(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    assert main(["plan", write_job(tmp_path / "job.yaml", parallelism=PINNED), "--cluster", cluster]) == 0
    shown = capsys.readouterr().out
    assert "units per stage: 2 x 9" in shown
    assert "predicted step" in shown
    assert re.search(
        r"predicted speed [\d,.]+ tokens/s per device, MFU [\d.]+ % \(.* causal pairs, of 10 TFLOP/s", shown
    )
    assert "pinned: dp 1, pp 2, microBatch 1, slices 2, schedule 1f1b, stages 4/4" in shown
    assert re.search(r"what if +step +tokens/s per device +MFU +gain +how", shown)
    assert re.search(r"links 10 % faster +[\d.]+ m?s +[\d,.]+ +[\d.]+ % +\+[\d.]+ % +same plan simulated", shown)
    assert "new search" not in shown
    assert "compute" in shown


def test_what_would_help_is_planned_on_request(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    """Every change is there, and says how it was computed; the plan itself is the same."""
    job = write_job(tmp_path / "job.yaml", resources__ranks=4)
    plans = []
    for options in ([], ["--what-if"]):
        assert main(["plan", job, "--cluster", cluster, *options, "--output", "json"]) == 0
        plans.append(Plan.from_manifest(json.loads(capsys.readouterr().out)))
    assert plans[0].program_digest == plans[1].program_digest
    timed = [each for each in plans[0].alternatives if each.step_seconds is not None]
    assert timed
    for each in timed:
        assert each.speed == plans[0].speed(each.step_seconds), "as many devices, and as many tokens"
    assert plans[1].prediction is not None
    assert plans[1].prediction.explanation is not None
    variations = plans[1].prediction.explanation.variations
    names = {each.change.partition(",")[0] for each in variations}
    assert names == {
        "links 10 % faster",
        "10 GiB more memory per device",
        "one node more",
        "one node fewer",
        "twice the micro-batches",
        "sequences twice as long",
    }
    assert all(each.step_seconds is not None or each.refusal for each in variations)
    assert main(["plan", job, "--cluster", cluster, "--what-if"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"one node more, 6 devices +[\d.]+ m?s .* new search: dp ", shown)
    assert re.search(r"considered +step +tokens/s per device +MFU +memory +why not", shown)


def test_a_plan_says_how_sure_its_prediction_is() -> None:
    plan = local_plan()
    assert plan.prediction is not None
    doubtful = dataclasses.replace(plan.prediction, low_seconds=0.125, high_seconds=0.5, warnings=("it was busy",))

    def plan_with(prediction: Prediction) -> Plan:
        return dataclasses.replace(plan, prediction=prediction)

    shown = "\n".join(map(str, plan_lines(plan_with(doubtful))))
    assert re.search(r"predicted step \S+ m?s \(125 ms to 500 ms\): ", shown)
    assert "warning: it was busy" in shown
    lost = {"waiting": Lost(mean=0.05, worst=0.1, rank=1), "bubble": Lost(mean=0.2, worst=0.3, rank=1)}
    shown = "\n".join(map(str, plan_lines(plan_with(dataclasses.replace(doubtful, **lost)))))  # type: ignore[arg-type]
    waiting = "predicted waiting for other ranks 5.0 % on average, 10.0 % on rank 1"
    assert f"{waiting}; bubble 20.0 % on average, 30.0 % on rank 1" in shown
    described = dataclasses.replace(plan.prediction, low_seconds=None, high_seconds=None)
    assert re.search(r"predicted step \S+ m?s: ", "\n".join(map(str, plan_lines(plan_with(described)))))


def test_a_plan_for_hardware_with_a_price_says_what_it_costs(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    """It can be simulated as it was printed."""
    Path(cluster).write_text(CLUSTER.replace("memoryBytes: 8Gi", "memoryBytes: 8Gi, pricePerHour: 1.25"))
    job = write_job(tmp_path / "job.yaml", parallelism=PINNED)
    assert main(["plan", job, "--cluster", cluster, "--output", "json"]) == 0
    printed = capsys.readouterr().out
    cost = Cost.from_manifest(json.loads(printed)["cost"])
    assert cost.per_hour == 2.5
    assert main(["plan", job, "--cluster", cluster]) == 0
    assert "predicted cost 2.50 an hour, " in capsys.readouterr().out
    (tmp_path / "plan.json").write_text(printed)
    assert main(["simulate", str(tmp_path / "plan.json"), "--cluster", cluster]) == 0


def test_the_frontier_is_a_table_and_data(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    """Rows by rising time and falling cost; the time of all steps is stated, too."""
    Path(cluster).write_text(CLUSTER.replace("memoryBytes: 8Gi", "memoryBytes: 8Gi, pricePerHour: 1.25"))
    job = write_job(tmp_path / "job.yaml", resources__ranks=4, parallelism={"dp": 1, "tp": 1, "slices": 1})
    assert main(["plan", job, "--cluster", cluster, "--frontier", "--output", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    points = printed["prediction"]["explanation"]["frontier"]["points"]
    assert len(points) > 1
    assert [point["runSeconds"] for point in points] == sorted(point["runSeconds"] for point in points)
    assert [point["cost"] for point in points] == sorted((point["cost"] for point in points), reverse=True)
    assert printed["runTime"]["seconds"] == pytest.approx(200 * printed["prediction"]["stepSeconds"])
    (tmp_path / "plan.json").write_text(json.dumps(printed))
    assert main(["simulate", str(tmp_path / "plan.json"), "--cluster", cluster]) == 0
    capsys.readouterr()
    assert main(["plan", job, "--cluster", cluster, "--frontier"]) == 0
    shown = capsys.readouterr().out
    assert "predicted time of all steps" in shown
    assert all(f"{point['numDevices']} x d" in shown for point in points)


def test_limits_that_no_plan_holds_are_refused(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    job = write_job(tmp_path / "job.yaml", parallelism=PINNED, deadlineSeconds=1)
    assert main(["plan", job, "--cluster", cluster]) == 2
    error = capsys.readouterr().err
    assert "spec.deadlineSeconds: no plan that was found ends all steps in 1 s: the fastest takes" in error
    assert "Traceback" not in error


def test_expected_interruptions_are_stated() -> None:
    shown = "\n".join(map(str, plan_lines(local_plan(), None, RunTime(seconds=7200.0))))
    assert "predicted time of all steps 2 h 0 min" in shown
    assert "interruptions" not in shown
    interrupted = RunTime(seconds=7200.0, interruptions=1.234, interruption_seconds=600.0)
    shown = "\n".join(map(str, plan_lines(local_plan(), None, interrupted)))
    assert "2 h 0 min, including 10 min 0 s for 1.23 expected interruptions" in shown


def test_a_plan_without_a_price_is_a_plan_alone(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    assert main(["plan", write_job(tmp_path / "job.yaml", parallelism=PINNED), "--cluster", cluster]) == 0
    assert "cost" not in capsys.readouterr().out.partition("considered")[0].partition("predicted step")[2]


def test_a_plan_can_be_laid_out_for_a_run(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    job = write_job(tmp_path / "job.yaml", parallelism=PINNED)
    arguments = ["plan", job, "--cluster", cluster, "--run-dir", str(tmp_path / "r"), "--output", "json"]
    assert main(arguments) == 0
    run = RunDir(tmp_path / "r")
    assert run.read_plan().to_manifest() == json.loads(capsys.readouterr().out)
    assert run.read_job().metadata.name == "stdlib-llama"
    assert not run.profile.exists()


def test_a_plan_does_not_replace_that_of_a_run(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    run = finished_run(tmp_path / "r")
    before = run.plan.read_text()
    job = write_job(tmp_path / "job.yaml", parallelism=PINNED)
    assert main(["plan", job, "--cluster", cluster, "--run-dir", str(run.root)]) == 2
    assert run.plan.read_text() == before
    assert "penstock resume" in capsys.readouterr().err


def test_hardware_is_named_once(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    job = write_job(tmp_path / "job.yaml")
    assert main(["plan", job, "--cluster", cluster, "--profile", "p.json"]) == 2
    assert "cannot be combined" in capsys.readouterr().err


# simulate


def test_simulating_a_run_a_plan_and_a_job(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    run = finished_run(tmp_path / "r")
    job = write_job(tmp_path / "job.yaml", parallelism=PINNED)
    targets: list[list[str]] = [[str(run.root)], [str(run.plan)], [job, "--cluster", cluster]]
    for target in targets:
        assert main(["simulate", *target, "--output", "json"]) == 0
        timeline = Timeline.from_manifest(json.loads(capsys.readouterr().out))
        assert timeline.source is Source.SIMULATED
        assert timeline.num_ranks == 2


def test_a_simulated_plan_takes_the_time_it_was_predicted(tmp_path: Path, capsys: Captured) -> None:
    run = finished_run(tmp_path / "r")
    assert main(["simulate", str(run.plan), "--output", "json"]) == 0
    timeline = Timeline.from_manifest(json.loads(capsys.readouterr().out))
    prediction = local_plan().prediction
    assert prediction is not None
    assert timeline.step_ns == round(prediction.step_seconds * 1e9)


def test_a_simulation_for_people_is_a_picture(tmp_path: Path, capsys: Captured) -> None:
    assert main(["simulate", str(finished_run(tmp_path / "r").root)]) == 0
    shown = capsys.readouterr().out
    assert "rank 0│" in shown
    assert "rank 1│" in shown
    assert "forward" in shown


def test_a_simulation_says_what_is_made_again(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    pins = {**PINNED, "recompute": "full"}
    assert main(["simulate", write_job(tmp_path / "job.yaml", parallelism=pins), "--cluster", cluster]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^recompute: [\d.]+ .s per rank  [\d.]+ % of it hidden$", shown, re.M)
    assert re.search(r"^ *rank +compute +of it recompute +of that hidden +other", shown, re.M)


def test_a_plan_without_hardware_cannot_be_simulated(tmp_path: Path, capsys: Captured) -> None:
    write_json(tmp_path / "plan.json", local_plan().to_manifest())
    assert main(["simulate", str(tmp_path / "plan.json")]) == 2
    assert "--cluster" in capsys.readouterr().err


def test_a_plan_too_large_to_draw_says_so(tmp_path: Path, cluster: str, capsys: Captured) -> None:
    write_json(tmp_path / "plan.json", {**local_plan().to_manifest(), "numMicrobatches": 40_000})
    assert main(["simulate", str(tmp_path / "plan.json"), "--cluster", cluster]) == 2
    assert "too many" in capsys.readouterr().err


# schedule show


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb", "zbv"])
def test_schedules_come_as_grid_csv_and_data(name: str, capsys: Captured) -> None:
    size = ["--ranks", "3", "--microbatches", "4", "--slices", "2"]
    assert main(["schedule", "show", name, *size]) == 0
    assert "rank 2" in capsys.readouterr().out
    assert main(["schedule", "show", name, *size, "--output", "csv"]) == 0
    text = capsys.readouterr().out
    schedule, _ = parse_schedule(text)
    assert (len(schedule.ranks), schedule.num_microbatches, schedule.num_slices) == (3, 4, 2)
    assert main(["schedule", "show", name, *size, "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == list(csv.reader(io.StringIO(text)))


def test_a_schedule_file_is_shown_too(tmp_path: Path, capsys: Captured) -> None:
    assert main(["schedule", "show", "1f1b", "--ranks", "2", "--output", "csv"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "mine.csv").write_text(text)
    assert main(["schedule", "show", "mine.csv", "--output", "csv"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("first", "is_for_one"),
    [("0F0,(0F1;0B0)OVERLAP_F_B,0B1", True), ("0F0,0F1,0F2,(0F3;0B0)OVERLAP_F_B,0B1,0B2,0B3", False)],
)
def test_overlaps_that_cannot_begin_together_are_for_tp_1(
    tmp_path: Path, first: str, is_for_one: bool, capsys: Captured
) -> None:
    second = (
        "1F0,1F1,1B0,1B1" if is_for_one else "1F0,(1F1;1B0)OVERLAP_F_B,(1B1;1F2)OVERLAP_F_B,(1F3;1B2)OVERLAP_F_B,1B3"
    )
    (tmp_path / "mine.csv").write_text(f"{first}\n{second}\n")
    assert main(["schedule", "show", "mine.csv"]) == 0
    assert ("with tp 1 only" in capsys.readouterr().out) == is_for_one


@pytest.mark.parametrize(("name", "content"), [("1f2b", ""), ("mine.csv", "0B0,0F0\n"), ("mine.csv", "nonsense\n")])
def test_a_schedule_that_cannot_run_is_refused(tmp_path: Path, name: str, content: str, capsys: Captured) -> None:
    (tmp_path / "mine.csv").write_text(content)
    assert main(["schedule", "show", name]) == 2
    assert "Traceback" not in capsys.readouterr().err


# report


def test_a_report_is_written_and_summed_up(tmp_path: Path, capsys: Captured) -> None:
    run = finished_run(tmp_path / "r")
    assert main(["report", str(run.root)]) == 0
    shown = capsys.readouterr().out
    assert "report.html" in shown
    assert "validation loss 2.500; guessing by token frequency gives 6.000" in shown
    assert "def f(x):" in shown
    assert "\x1b" not in shown
    assert run.report.read_text().startswith("<!doctype html>")
    assert json.loads((run.root / "trace.json").read_text())["traceEvents"]


def test_a_run_beyond_a_newer_limit_is_reported_and_not_resumed(tmp_path: Path, capsys: Captured) -> None:
    run = finished_run(tmp_path / "r")
    manifest = yamltext.load(run.job.read_text())
    manifest["spec"]["checkpoint"] = {"keep": limits.EXACT + 1}
    run.job.write_text(yamltext.dump(manifest))
    assert main(["report", str(run.root)]) == 0
    assert main(["resume", str(run.root)]) == 2
    assert "spec.checkpoint.keep" in capsys.readouterr().err


def test_a_report_as_data(tmp_path: Path, capsys: Captured) -> None:
    run = finished_run(tmp_path / "r")
    assert main(["report", str(run.root), "--output", "json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["phase"], summary["attempt"], summary["steps"]) == ("Succeeded", 2, 30)
    assert summary["measuredStepSeconds"] == 0.25
    assert summary["report"] == str(run.report)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: Captured) -> None:
    for command in (["report"], ["resume"], ["generate", "--prompt", "x"], ["export", "--to", "y"], ["simulate"]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_profiles_of_another_machine_are_refused(tmp_path: Path, capsys: Captured) -> None:
    write_json(tmp_path / "p.json", local_profile().to_manifest())
    assert main(["plan", write_job(tmp_path / "job.yaml"), "--profile", "p.json"]) == 2
    error = capsys.readouterr().err
    assert "host is build-7, on this one it is here" in error
    assert "penstock profile" in error


def test_an_unmeasured_machine_says_how_to_measure(tmp_path: Path, capsys: Captured) -> None:
    assert main(["plan", write_job(tmp_path / "job.yaml")]) == 2
    error = capsys.readouterr().err
    assert "penstock profile" in error
    assert "--cluster" in error


def test_the_example_of_a_large_model_is_planned(tmp_path: Path, capsys: Captured) -> None:
    """With a small batch, which is planned sooner."""
    folder = ROOT / "deploy" / "examples"
    manifest = yamltext.load((folder / "gpt3-175b.yaml").read_text())
    manifest["spec"]["training"]["globalBatch"] = 2
    (tmp_path / "job.yaml").write_text(yamltext.dump(manifest))
    assert main(["plan", "job.yaml", "--cluster", str(folder / "gpt3-175b-cluster.yaml"), "--output", "json"]) == 0
    plan = Plan.from_manifest(json.loads(capsys.readouterr().out))
    assert plan.num_ranks == 384
    assert plan.prediction is not None
    assert max(plan.prediction.peak_bytes) <= 80 * 10**9


def test_data_on_stdout_is_only_data(tmp_path: Path, capsys: Captured) -> None:
    """Also where people are told something meanwhile."""
    (tmp_path / "mine.csv").write_text("0UNSHARD,0F0,0B0\n")
    assert main(["schedule", "show", "mine.csv", "--output", "json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [["0F0.0", "0B0.0"]]
    assert "UNSHARD" in captured.err
