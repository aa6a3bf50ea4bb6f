"""What users write, read: references resolved, mistakes named with their place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.local.job_files import read_job
from penstock.cli.manifests import read_cluster
from penstock.core.errors import MistakesError, UserError
from penstock.core.run.documents import read_plan, read_profile, read_timeline
from penstock.core.schedule import ScheduleSpec
from penstock.core.serialization import yamltext
from penstock.trainer.data.tokenizer import train_bpe
from tests.support.local_run import local_plan, local_profile
from tests.support.manifests import example
from tests.support.repository import ROOT

EXAMPLES = ROOT / "deploy" / "examples"
JOBS = sorted(path for path in EXAMPLES.glob("*.yaml") if "cluster" not in path.name)


def write(path: Path, manifest: Any) -> Path:
    path.write_text(yamltext.dump(manifest))
    return path


def silent(warning: str) -> None:
    pytest.fail(f"a warning nobody expected: {warning}")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_example_is_a_job_of_its_name(path: Path) -> None:
    assert read_job(path, silent).metadata.name == path.stem


def test_there_are_examples() -> None:
    assert {path.name for path in JOBS} >= {"stdlib-llama.yaml", "gpt3-175b.yaml", "pinned-plan.yaml"}


def test_the_example_cluster_is_one() -> None:
    cluster = read_cluster(EXAMPLES / "gpt3-175b-cluster.yaml")
    assert (cluster.num_devices, cluster.device.memory_bytes) == (384, 80 * 10**9)


def test_paths_are_relative_to_the_manifest(tmp_path: Path) -> None:
    manifest = example(data__source="text", checkpoint={"resumeFrom": "../old/step-5"})
    job = read_job(write(tmp_path / "job.yaml", manifest), silent)
    assert job.spec.data.source == str(tmp_path / "text")
    assert Path(job.spec.checkpoint.resume_from or "") == tmp_path / "../old/step-5"


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    """In several parts of the manifest and in one, of forms, of values and of missing fields."""
    manifest = example(training__globalBatch=0, training__steps=-1, model__layers="two", resources__memory="4Gi")
    del manifest["spec"]["data"]["sequenceLength"]
    with pytest.raises(MistakesError) as found:
        read_job(write(tmp_path / "job.yaml", manifest), silent)
    assert {mistake.where for mistake in found.value.errors} == {
        "spec.training.globalBatch",
        "spec.training.steps",
        "spec.model.layers",
        "spec.resources.memory",
        "spec.data.sequenceLength",
    }
    assert all(mistake.remedy for mistake in found.value.errors)
    assert str(found.value).count("remedy: ") == 5


def test_parts_that_do_not_fit_each_other_are_reported_together(tmp_path: Path) -> None:
    manifest = example(parallelism={"pp": 3, "stages": [1, 1]}, objective="cost")
    with pytest.raises(MistakesError) as found:
        read_job(write(tmp_path / "job.yaml", manifest), silent)
    assert [mistake.where for mistake in found.value.errors] == [
        "spec.parallelism",
        "spec.parallelism.stages",
        "spec.pricePerDeviceHour",
    ]


@pytest.mark.parametrize("source", ["python-stdlib", "data://corpus", "/absolute/text"])
def test_other_sources_stay(tmp_path: Path, source: str) -> None:
    job = read_job(write(tmp_path / "job.yaml", example(data__source=source)), silent)
    assert job.spec.data.source == source


def test_a_resolved_job_reads_the_same_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = read_job(write(tmp_path / "job.yaml", example(data__source="text")), silent)
    again = read_job(write(tmp_path / "elsewhere" / "job.yaml", first.to_manifest()), silent)
    assert again == first


def test_a_schedule_file_becomes_part_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,,0B0\n,1F0,1B0,\n")
    manifest = example(parallelism={"pp": 2, "schedule": "mine.csv"})
    job = read_job(write(tmp_path / "job.yaml", manifest), silent)
    assert job.spec.parallelism.schedule == ScheduleSpec(generator="csv", text="0F0.0,0B0.0\n1F0.0,1B0.0\n")


def test_what_a_schedule_lost_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0UNSHARD,0F0,0B0\n")
    warnings: list[str] = []
    read_job(write(tmp_path / "job.yaml", example(parallelism={"schedule": "mine.csv"})), warnings.append)
    assert len(warnings) == 1
    assert "UNSHARD" in warnings[0]


def test_the_vocabulary_comes_from_the_tokenizers_file(tmp_path: Path) -> None:
    tokenizer = train_bpe(iter(["def f(x): return x"] * 20), vocab=270)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    job = read_job(write(tmp_path / "job.yaml", example(data__tokenizer={"file": "tokenizer.json"})), silent)
    assert job.spec.model.vocab == tokenizer.vocab
    assert job.spec.data.tokenizer.file == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: [1", "line"),
        ("just words", ""),
        ("- 1\n", ""),
        ("", ""),
        ("apiVersion: v1\nkind: Pod\n", "apiVersion"),
        ("apiVersion: penstock.dev/v1alpha1\nkind: PipelineJob\nspec: 3\n", ""),
        ("apiVersion: penstock.dev/v1alpha1\nkind: PipelineJob\nmetadata: {name: a}\nspec: {data: 3}\n", "spec"),
    ],
)
def test_what_is_no_job_is_refused(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as found:
        read_job(path, silent)
    assert place in found.value.where
    assert found.value.remedy


@pytest.mark.parametrize("read", [lambda path: read_job(path, silent), read_cluster, read_profile, read_plan])
def test_a_missing_file_is_named(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(UserError) as found:
        read(tmp_path / "missing")
    assert found.value.where == str(tmp_path / "missing")
    assert "No such file" in found.value.what


@pytest.mark.parametrize("read", [read_profile, read_plan, read_timeline])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": 1}', b"\xff\xfe\x00", b"[" * 10**5])
def test_a_corrupt_file_is_named_with_a_remedy(tmp_path: Path, read: Callable[[Path], object], content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as found:
        read(path)
    assert str(path) in found.value.where
    assert found.value.remedy


@pytest.mark.parametrize(("read", "value"), [(read_profile, local_profile), (read_plan, local_plan)])
def test_what_was_written_is_read(tmp_path: Path, read: Callable[[Path], Any], value: Callable[[], Any]) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(value().to_manifest()))
    assert read(path) == value()
