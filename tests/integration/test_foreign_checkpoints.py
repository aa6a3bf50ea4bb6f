"""Checkpoints of an earlier version, and such as somebody else made, through the commands of a user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.run.folder import RunDir
from penstock.core.serialization import yamltext
from tests.support.command import Command
from tests.support.old_checkpoint import FOLDER, PARTS, digests, loaded, old_job, old_plan
from tests.support.planted import old_copy, plant
from tests.support.training_run import make_run, write_corpus

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("foreign")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield Command(folder)


@pytest.fixture(scope="module")
def corpus(command: Command) -> Path:
    return write_corpus(command.folder / "corpus")


def test_a_checkpoint_of_an_earlier_version_resumes(command: Command, corpus: Path) -> None:
    """Every tensor to the last bit; the losses as near as another machine's arithmetic may be."""
    expected = json.loads((FOLDER / "expected.json").read_text())
    folder = old_copy(command.folder / "kept")
    assert digests(loaded(folder, old_job(corpus))) == expected["tensors"]
    assert {name.split("/")[0] for name in expected["tensors"]} == set(PARTS)
    run = _resuming(command, corpus, folder, "resumed")
    command("run", command.folder / "resumed.yaml", "--run-dir", run.root)
    assert [entry.loss for entry in run.read_metrics()] == pytest.approx(expected["losses"], rel=1e-5)


def test_code_in_a_checkpoint_is_not_run_by_resuming(command: Command, corpus: Path) -> None:
    marker, folder = command.folder / "resumed-marker", old_copy(command.folder / "foreign")
    plant(folder, marker)
    run = _resuming(command, corpus, folder, "refused")
    _, told = command("run", command.folder / "refused.yaml", "--run-dir", run.root, code=2)
    assert not marker.exists()
    assert ".metadata names pathlib.Path.touch" in " ".join(told.split())


@pytest.mark.parametrize("arguments", [("export", "--to", "exported"), ("generate", "--prompt", "a")])
def test_code_in_a_checkpoint_is_not_run_by(command: Command, corpus: Path, arguments: tuple[str, ...]) -> None:
    name, *options = arguments
    marker, run = command.folder / f"{name}-marker", make_run(command.folder / name, old_job(corpus))
    plant(old_copy(run.checkpoints), marker)
    _, told = command(name, run.root, *options, code=2)
    assert not marker.exists()
    assert ".metadata names pathlib.Path.touch" in " ".join(told.split())


def _resuming(command: Command, corpus: Path, folder: Path, name: str) -> RunDir:
    """A job that begins from ``folder``, and its run directory with a plan, so that nothing is measured."""
    job = old_job(corpus, resume_from=folder)
    (command.folder / f"{name}.yaml").write_text(yamltext.dump(job.to_manifest()))
    return make_run(command.folder / name, job, old_plan(job))


def test_the_fixture_is_what_the_earlier_version_wrote() -> None:
    assert sorted(path.name for path in (FOLDER / "a1" / "step-6").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
    ]
