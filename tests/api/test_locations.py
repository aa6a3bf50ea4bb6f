"""What a job may name over REST."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.run.locations import Locations
from penstock.core.schedule import CSV
from penstock.planner.schedules.registry import BUILT_IN
from tests.support.service import job_manifest

UID, OTHER = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"


@pytest.fixture
def locations(tmp_path: Path) -> Locations:
    """A root with a file, a link within and a link out; a run with one complete checkpoint and one that is not."""
    corpus, runs = tmp_path / "corpus", tmp_path / "runs"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "deep" / "a.txt").write_text("text")
    (corpus / "within").symlink_to(corpus / "deep")
    (tmp_path / "secret").write_text("secret")
    (corpus / "out").symlink_to(tmp_path / "secret")
    (corpus / "round").symlink_to(corpus / "round")
    for step in (10, 20):
        (runs / UID / "checkpoints" / "a1" / f"step-{step}").mkdir(parents=True)
    shutil.copytree(runs / UID, runs / OTHER)
    for uid in (UID, OTHER):
        (runs / uid / "checkpoints" / "a1" / "step-10" / "manifest.json").write_text("{}")
    return Locations(data_roots={"corpus": corpus}, runs=runs, schedules=frozenset({*BUILT_IN, CSV, "mine"}))


def resolved(locations: Locations, wanted: PipelineJob, *, readable: bool = True) -> PipelineJob:
    return locations.resolved(wanted, lambda uid: readable and uid == UID)


def job(**spec: Any) -> PipelineJob:
    manifest = job_manifest()
    for part, changes in spec.items():
        manifest["spec"][part] = {**manifest["spec"].get(part, {}), **changes}
    return PipelineJob.from_manifest(manifest)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("python-stdlib", "python-stdlib"),
        ("data://corpus", "corpus"),
        ("data://corpus/", "corpus"),
        ("data://corpus/deep/a.txt", "corpus/deep/a.txt"),
        ("data://corpus//deep", "corpus/deep"),
        ("data://corpus/within/a.txt", "corpus/deep/a.txt"),
        ("data://corpus/deep/../deep", "corpus/deep"),
    ],
)
def test_what_lies_below_a_root_is_found(locations: Locations, tmp_path: Path, uri: str, path: str) -> None:
    found = resolved(locations, job(data={"source": uri})).spec.data.source
    assert found == (path if uri == path else str(tmp_path / path))


@pytest.mark.parametrize(
    "uri",
    [
        "/etc/passwd",
        "corpus/deep",
        "./corpus",
        "file:///etc/passwd",
        "data://",
        "data://other/x",
        "data:///etc/passwd",
        "data://corpus/none",
        "data://corpus/..",
        "data://corpus/../secret",
        "data://corpus/deep/../../secret",
        "data://corpus/out",
        "data://corpus/round",
        "data://corpus/a\0b",
        "data://corpus/" + "x" * 5000,
        "DATA://corpus/deep",
        "out://" + UID + "/1/10",
    ],
)
def test_everything_else_is_refused_with_its_field(locations: Locations, uri: str) -> None:
    with pytest.raises(UserError) as caught:
        resolved(locations, job(data={"source": uri}))
    assert caught.value.where == "spec.data.source"
    assert caught.value.remedy
    with pytest.raises(UserError) as caught:
        resolved(locations, job(data={"tokenizer": {"file": uri}}, model={"vocab": 300}))
    assert caught.value.where == "spec.data.tokenizer.file"


def test_where_there_are_other_roots_is_said_as_it_is_there(tmp_path: Path) -> None:
    volumes = Locations(data_roots={}, runs=tmp_path, place="the job's volumes", remedy="name its claim")
    with pytest.raises(UserError, match="is not below a root of the job's volumes") as caught:
        resolved(volumes, job(data={"source": "data://corpus/deep"}))
    assert caught.value.remedy == "write python-stdlib; name its claim"


def test_a_tokenizer_is_found(locations: Locations, tmp_path: Path) -> None:
    found = resolved(locations, job(data={"tokenizer": {"file": "data://corpus/deep/a.txt"}}))
    assert found.spec.data.tokenizer.file == str(tmp_path / "corpus/deep/a.txt")


def test_a_complete_checkpoint_is_found(locations: Locations, tmp_path: Path) -> None:
    found = resolved(locations, job(checkpoint={"resumeFrom": f"out://{UID}/1/10"}))
    assert found.spec.checkpoint.resume_from == str(tmp_path / "runs" / UID / "checkpoints/a1/step-10")


@pytest.mark.parametrize(
    "uri",
    [
        f"out://{UID}/1/20",
        f"out://{UID}/2/10",
        f"out://{OTHER}/1/10",
        "out://../1/10",
        f"out://{UID}/1",
        f"out://{UID}/x/10",
        "/tmp/x",
    ],
)
def test_any_other_checkpoint_is_refused(locations: Locations, uri: str) -> None:
    with pytest.raises(UserError) as caught:
        resolved(locations, job(checkpoint={"resumeFrom": uri}))
    assert caught.value.where == "spec.checkpoint.resumeFrom"


def test_a_checkpoint_of_others_is_as_good_as_not_there(locations: Locations) -> None:
    said = set()
    for step in (10, 20, 30):
        with pytest.raises(UserError) as caught:
            resolved(locations, job(checkpoint={"resumeFrom": f"out://{UID}/1/{step}"}), readable=False)
        said.add((caught.value.what.replace(f"/{step}", ""), caught.value.remedy))
    assert len(said) == 1


@pytest.mark.parametrize("name", ["zb", "mine"])
def test_schedules_that_are_listed(locations: Locations, name: str) -> None:
    assert resolved(locations, job(parallelism={"schedule": name})).spec.parallelism.schedule == name


@pytest.mark.parametrize("name", ["theirs", "/tmp/x.csv", "x.csv"])
def test_schedules_that_are_not(locations: Locations, name: str) -> None:
    with pytest.raises(UserError, match="is not allowed here"):
        resolved(locations, job(parallelism={"schedule": name}))
    with pytest.raises(UserError, match="is not allowed here"):
        resolved(locations, job(parallelism={"schedule": {"generator": name}}))
