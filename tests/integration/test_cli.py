"""The commands one after the other as a user types them, in real processes, on a tiny job."""

from __future__ import annotations

import json
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.api.schemas.bodies import EXAMPLE_CLUSTER
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.run.documents import read_plan
from penstock.core.run.folder import RunDir
from penstock.core.timeline import Source, Timeline
from tests.support.command import LENGTH, STEPS, Command, laid_out, losses, tiny_job
from tests.support.not_run import missing

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def measured(command: Command) -> Profile:
    """The machine, measured for the tiny job and kept in the cache."""
    out, told = command("profile", tiny_job(command.folder), "--output", "json")
    assert "wrote the profile to" in told
    return Profile.from_manifest(json.loads(out))


@pytest.fixture(scope="module")
def finished(command: Command, measured: Profile) -> RunDir:
    """The tiny job, planned from that measurement and trained for two stages."""
    run = RunDir(command.folder / "finished")
    job = tiny_job(command.folder, parallelism={"pp": 2, "slices": 2, "schedule": "1f1b"})
    out, told = command("run", job, "--run-dir", run.root, "--output", "json")
    summary = json.loads(out)
    assert (summary["phase"], summary["steps"], summary["attempt"]) == ("Succeeded", STEPS, 1)
    assert "measure" not in told, "the kept profile is fresh"
    return run


def test_a_measurement_holds_every_unit_and_link(measured: Profile) -> None:
    assert {record.unit.value for record in measured.units} == {"embedding", "attention", "mlp", "head"}
    assert {(link.source, link.target) for link in measured.links} == {(0, 1), (1, 0)}
    assert measured.memory.constant_bytes > 0


def test_planning_from_the_measurement(command: Command, measured: Profile) -> None:
    plan = printed_plan(command, tiny_job(command.folder))
    assert plan.num_ranks == 2
    assert plan.profile_digest == measured.digest


def test_a_run_learns_and_leaves_its_files(finished: RunDir) -> None:
    names = {path.name for path in finished.root.iterdir()}
    expected = [
        "job.yaml",
        "profile.json",
        "plan.json",
        "metrics.jsonl",
        "timeline.json",
        "checkpoints",
        "report.html",
        "trace.json",
    ]
    assert names >= set(expected)
    values = losses(finished)
    assert len(values) == STEPS
    assert values[-1] < 0.8 * values[0]
    result = json.loads(finished.result.read_text())
    assert result["validation_loss"] < result["unigram_loss"]


def test_the_report_compares_predicted_and_measured(command: Command, finished: RunDir) -> None:
    out, _ = command("report", finished.root, "--output", "json")
    summary = json.loads(out)
    assert summary["predictedStepSeconds"] > 0
    assert summary["measuredStepSeconds"] > 0
    assert summary["sample"]


def test_memory_is_as_predicted(command: Command, finished: RunDir) -> None:
    """Almost all is what a process holds without a model: ranks that profile must hold what those that train do."""
    out, _ = command("report", finished.root, "--output", "json")
    summary = json.loads(out)
    assert -0.05 < summary["measuredPeakBytes"] / summary["predictedPeakBytes"] - 1 < 0.02


def test_no_rank_exceeds_its_plan_from_start_to_end(command: Command) -> None:
    """A model that takes tens of MiB: loading, checkpoints, resuming and the sample count, not only the steps."""
    folder, root = command.folder / "larger", command.folder / "larger-run"
    job = tiny_job(
        folder,
        model={"family": "llama", "layers": 4, "hidden": 384, "heads": 4, "kvHeads": 2},
        training={"globalBatch": 2, "steps": 4, "optimizer": {"learningRate": 1e-3}},
        parallelism={"pp": 2, "slices": 1, "schedule": "1f1b"},
        checkpoint={"everySteps": 2, "keep": 1},
    )
    command("run", job, "--run-dir", root, "--prompt", "the old turbine")
    run = RunDir(root)
    prediction, result = run.read_plan().prediction, json.loads(run.result.read_text())
    assert prediction is not None
    assert len(result["peak_bytes"]) == 2
    assert result["prompt"] == "the old turbine"
    assert result["sample"].startswith("the old turbine")
    for measured, predicted in zip(result["peak_bytes"], prediction.peak_bytes, strict=True):
        assert measured < 1.02 * predicted


def test_the_model_writes(command: Command, finished: RunDir) -> None:
    arguments = ("generate", finished.root, "--prompt", "def f", "--tokens", "12", "--temperature", "0")
    first, _ = command(*arguments, "--output", "json")
    written = json.loads(first)
    assert written["text"].startswith("def f")
    assert len(written["text"]) > len("def f")
    assert written["step"] == STEPS
    plain, told = command(*arguments)
    assert plain.rstrip("\n") == written["text"].rstrip("\n")
    assert told == ""


def test_weights_are_exported(command: Command, finished: RunDir) -> None:
    folder = command.folder / "exported"
    _, told = command("export", finished.root, "--to", folder)
    assert f"step {STEPS}" in told
    assert (folder / "model.safetensors").exists()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_a_step_is_simulated_and_rehearsed(command: Command, finished: RunDir) -> None:
    out, _ = command("simulate", finished.root)
    assert "rank 1│" in out
    out, _ = command("rehearse", finished.root, "--output", "json")
    rehearsed = Timeline.from_manifest(json.loads(out))
    assert (rehearsed.source, rehearsed.num_ranks) == (Source.REHEARSED, 2)


def test_a_plan_with_tensor_parallelism_is_rehearsed_by_one_rank_for_all_peers(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps(EXAMPLE_CLUSTER))
    model = {"family": "llama", "layers": 2, "hidden": 32, "heads": 2, "vocab": 257}
    pinned = {"dp": 1, "tp": 2, "pp": 2, "slices": 2, "schedule": "1f1b"}
    job = tiny_job(tmp_path, model=model, parallelism=pinned, resources={"ranks": 4, "memoryPerRank": "2Gi"})
    out, told = command("rehearse", job, "--cluster", tmp_path / "cluster.json", "--output", "json")
    assert Timeline.from_manifest(json.loads(out)).num_ranks == 2
    assert "each rank stands for 2 tensor parallel devices" in told


def test_the_machine_is_examined(command: Command) -> None:
    out, _ = command("doctor", "--output", "json")
    names = {finding["name"] for finding in json.loads(out)}
    assert names >= {"python", "memory", "torch", "processor", "cuda"}


# Mistakes: one message with place and remedy, no traceback, exit code 2


def refused(command: Command, *arguments: str | Path) -> str:
    """What the command says when it refuses."""
    out, told = command(*arguments, code=2)
    assert out == ""
    assert "remedy" in told
    assert "Traceback" not in told
    return told


FULL_SHARED_MEMORY = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=4k,nr_inodes=2 tmpfs /dev/shm && exec "$0" "$@"',
)


def test_a_machine_whose_shared_memory_is_full_is_refused_once(command: Command, tmp_path: Path) -> None:
    if subprocess.run([*FULL_SHARED_MEMORY, "true"], capture_output=True, check=False).returncode:
        missing("namespaces", "nothing may be mounted in a namespace of one's own here")
    full = replace(command, wrapper=FULL_SHARED_MEMORY)
    told = refused(full, "run", tiny_job(tmp_path), "--run-dir", tmp_path / "r")
    assert "/dev/shm: cannot be used: No space left on device" in told
    assert "attempt 2" not in told


def test_an_unknown_field_is_refused(command: Command, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, resource={"ranks": 2})
    told = refused(command, "run", job, "--run-dir", tmp_path / "r")
    assert "spec.resource" in told
    assert "did you mean resources?" in told


def test_a_sequence_longer_than_the_data_is_refused(command: Command, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, data={"source": "text", "tokenizer": {"train": "bytes"}, "sequenceLength": 1_000_000})
    assert "spec.data.sequenceLength" in refused(command, "run", job, "--run-dir", tmp_path / "r")


def test_an_empty_corpus_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    data = {"source": "empty", "tokenizer": {"train": "bytes"}, "sequenceLength": LENGTH}
    told = refused(command, "run", tiny_job(tmp_path, data=data), "--run-dir", tmp_path / "r")
    assert "holds no text" in told


def test_a_directory_that_cannot_be_written_is_refused(command: Command, tmp_path: Path) -> None:
    told = refused(command, "run", tiny_job(tmp_path), "--run-dir", "/proc/penstock")
    assert "/proc/penstock" in told
    assert "--run-dir" in told


def test_a_taken_port_is_refused(command: Command, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        told = refused(command, "run", tiny_job(tmp_path), "--run-dir", tmp_path / "r", "--metrics-port", str(port))
    assert str(port) in told


def test_cuda_is_refused_where_it_is_absent(command: Command, tmp_path: Path) -> None:
    """Also on a machine that has a device: there it is hidden."""
    hidden = Command(command.folder, {"CUDA_VISIBLE_DEVICES": ""})
    job = tiny_job(tmp_path, resources={"device": "cuda", "ranks": 2})
    assert "spec.resources.device" in refused(hidden, "run", job, "--run-dir", tmp_path / "r")


def test_a_pinned_plan_that_does_not_match_the_layers_is_refused(command: Command, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, parallelism={"stages": [4, 4]})
    assert "spec.parallelism.stages" in refused(command, "run", job, "--run-dir", tmp_path / "r")


def test_too_little_memory_is_refused(command: Command, measured: Profile, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, resources={"ranks": 2, "memoryPerRank": "64Mi"})
    told = refused(command, "run", job, "--run-dir", tmp_path / "r")
    assert "spec.resources.memoryPerRank" in told
    assert "allow" in told


def test_a_pinned_plan_that_does_not_fit_is_refused(command: Command, measured: Profile, tmp_path: Path) -> None:
    """Where another one fits: it is the plan that takes too much, not the process."""
    pinned = {"pp": 2, "microBatch": 2, "slices": 1, "schedule": "gpipe", "stages": [1, 1]}
    limit = peak_bytes(command, tiny_job(tmp_path, parallelism=pinned)) - 1
    resources = {"ranks": 2, "memoryPerRank": limit}
    assert peak_bytes(command, tiny_job(tmp_path, resources=resources)) <= limit
    job = tiny_job(tmp_path, resources=resources, parallelism=pinned)
    assert "spec.resources.memoryPerRank" in refused(command, "plan", job)


def printed_plan(command: Command, job: Path) -> Plan:
    """The plan that the command prints, read as the other commands read it."""
    printed = command.folder / "printed-plan.json"
    printed.write_text(command("plan", job, "--output", "json")[0])
    return read_plan(printed)


def peak_bytes(command: Command, job: Path) -> int:
    """What the plan for the job takes on the rank that takes most."""
    prediction = printed_plan(command, job).prediction
    assert prediction is not None
    return max(prediction.peak_bytes)


def test_a_corrupt_profile_is_refused(command: Command, tmp_path: Path) -> None:
    run = laid_out(tmp_path / "r")
    run.plan.unlink()
    run.profile.write_text("{")
    assert str(run.profile) in refused(command, "run", tiny_job(tmp_path), "--run-dir", run.root)


def test_a_profile_of_another_machine_is_refused(command: Command, measured: Profile, tmp_path: Path) -> None:
    manifest = measured.to_manifest()
    manifest["key"]["host"] = "elsewhere"
    (tmp_path / "p.json").write_text(json.dumps(manifest))
    told = refused(command, "plan", tiny_job(tmp_path), "--profile", tmp_path / "p.json")
    assert "host is elsewhere" in told
