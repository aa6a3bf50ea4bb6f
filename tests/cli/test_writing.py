"""Text and weights from the newest checkpoint of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.layout import Precision
from penstock.core.run.folder import RunDir
from penstock.core.serialization import yamltext
from penstock.trainer import checkpoint
from penstock.trainer.parameters import StageParameters
from penstock.trainer.prepare import prepare_data
from penstock.trainer.writing import continued, exported
from tests.support.command import tiny_job


def initialised(root: Path) -> RunDir:
    """A run directory with prepared data and a checkpoint of step 3 that holds a model's first weights."""
    run = RunDir(root / "run")
    run.create()
    job_path = tiny_job(root)
    manifest = yamltext.load(job_path.read_text())
    manifest["spec"]["data"]["source"] = str(root / "text")
    job = PipelineJob.from_manifest(manifest)
    run.job.write_text(yamltext.dump(job.to_manifest()))
    prepare_data(job, run)
    model = job.spec.model
    parameters = StageParameters(
        model, 0, model.num_units, precision=Precision.FP32, device=torch.device("cpu"), seed=1
    )
    checkpoint.save(run.checkpoints, 1, 3, {"weights": parameters.master}, model, Precision.FP32, keep=1)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    root = tmp_path_factory.mktemp("writing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        return initialised(root)


def test_text_goes_on_from_its_prompt(run: RunDir) -> None:
    written = continued(run, "def f", tokens=9, temperature=0.0, seed=0)
    assert written.text.startswith("def f")
    assert (written.prompt, written.step) == ("def f", 3)


def test_equal_seeds_give_equal_texts(run: RunDir) -> None:
    texts = [continued(run, "x", tokens=8, temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_an_empty_prompt_begins_a_document(run: RunDir) -> None:
    assert continued(run, "", tokens=5, temperature=0.0, seed=0).text


def test_weights_go_to_a_folder(run: RunDir, tmp_path: Path) -> None:
    assert exported(run, tmp_path / "out").step == 3
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 2
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0


def test_a_checkpoint_may_be_chosen(run: RunDir, tmp_path: Path) -> None:
    assert exported(run, tmp_path / "out", attempt=1, step=3).step == 3
    for attempt, step in ((1, 4), (2, 3), (2, None)):
        with pytest.raises(UserError) as found:
            exported(run, tmp_path / "none", attempt=attempt, step=step)
        assert found.value.remedy == "choose one of these: attempt 1 step 3"
    assert not (tmp_path / "none").exists()


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    empty = RunDir(tmp_path)
    empty.create()
    empty.job.write_text(tiny_job(tmp_path).read_text())
    with pytest.raises(UserError) as found:
        continued(empty, "x", tokens=1, temperature=0.0, seed=0)
    assert "no checkpoint" in found.value.what
    with pytest.raises(UserError):
        exported(empty, tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_named(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as found:
        exported(run, tmp_path / "file" / "out")
    assert str(tmp_path / "file") in found.value.where
