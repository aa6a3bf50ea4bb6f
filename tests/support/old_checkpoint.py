"""A checkpoint of commit 16853cd, before checkpoints had a JSON index, and the job that it belongs to.

``tests/fixtures/checkpoint_16853cd`` was made from a work tree of that commit, with this file copied into it:

    python -m tests.support.old_checkpoint tests/fixtures/checkpoint_16853cd

It holds ``a1/step-6`` of two ranks, and ``expected.json``: the SHA-256 of every tensor as two ranks of that commit had
it in memory when they resumed, and the losses of the steps that followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.core.schedule import ScheduleSpec
from penstock.trainer import checkpoint
from penstock.trainer.parameters import StageParameters
from tests.support.training_run import losses, make_run, train, write_corpus

FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoint_16853cd"
STEP, STEPS = 6, 10
SLICES = (12, 12, 8)
PARTS = ("weights", "exp_avg", "exp_avg_sq")


def old_job(corpus: Path, resume_from: Path | None = None) -> PipelineJob:
    """A llama of two blocks of width 16 over bytes."""
    named = {} if resume_from is None else {"resumeFrom": str(resume_from)}
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "PipelineJob",
        "metadata": {"name": "old"},
        "spec": {
            "model": {"family": "llama", "layers": 2, "hidden": 16, "heads": 2, "kvHeads": 1, "vocab": 257},
            "data": {"source": str(corpus), "tokenizer": {"train": "bytes"}, "sequenceLength": sum(SLICES)},
            "training": {
                "globalBatch": 2,
                "steps": STEPS,
                "warmupSteps": 2,
                "optimizer": {"learningRate": 1e-2},
            },
            "checkpoint": {"everySteps": STEP, "keep": 10, **named},
        },
    }
    return PipelineJob.from_manifest(manifest)


def old_plan(job: PipelineJob) -> Plan:
    """Two stages."""
    return Plan(
        model=job.spec.model,
        precision=job.spec.training.precision,
        pp=2,
        microbatch=1,
        num_microbatches=2,
        slices=SLICES,
        stages=((0, 3), (3, 6)),
        schedule=ScheduleSpec(generator="1f1b"),
    )


def digests(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """The SHA-256 of every tensor's bytes."""
    return {
        f"{part}/{name}": hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        for part, named in sorted(tensors.items())
        for name, tensor in sorted(named.items())
    }


def loaded(folder: Path, job: PipelineJob) -> dict[str, dict[str, Tensor]]:
    """Everything that a checkpoint of the job holds."""
    import torch

    spec = job.spec.model
    options = {"precision": job.spec.training.precision, "device": torch.device("cpu"), "seed": 0}
    tensors = {part: StageParameters(spec, 0, spec.num_units, **options).master for part in PARTS}  # type: ignore[arg-type]
    checkpoint.load(folder, tensors, spec)
    return tensors


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        job = old_job(write_corpus(root / "corpus"))
        run = make_run(root / "run", job, old_plan(job))
        train(run)
        name = f"a1/step-{STEP}"
        shutil.copytree(run.checkpoints / name, folder / name)
        expected = {"tensors": digests(loaded(folder / name, job)), "losses": losses(run)[STEP:]}
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    _make(Path(sys.argv[1]))
