"""Files of a pod of an attempt: its input, its output, and the attempt's run directory.

    OUT/UID/                    all that the job leaves
      checkpoints/aN/step-S     of every attempt: out://UID/N/S
      data/                     prepared data, made by the first pod that needs it
      aN/                       the run directory of attempt N, which its pods share
        hosts/POD_UID/          written by one pod alone: logs and outbox

`penstock.core.pod` lists the input files and their writers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from penstock.agent.pod_memory import CGROUPS
from penstock.core.errors import RunError, UserError
from penstock.core.job import PipelineJob
from penstock.core.run.folder import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFiles:
    """Folders with the input files of an attempt and of a pod, and the files of the pod's reports."""

    attempt: Path
    pod: Path
    termination: Path
    cgroups: Path = CGROUPS


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFolders:
    """Identity and folders of a pod: ``out`` is shared by all pods, ``local`` is the pod's own, on its node."""

    uid: str
    attempt: int
    out: Path
    local: Path

    @property
    def served(self) -> Path:
        """The folder that the pod's agent serves."""
        return self.local / "agent"

    def run(self, job: PipelineJob) -> RunDir:
        """The run directory of the job's attempt."""
        root = self.out / job.metadata.uid / f"a{self.attempt}"
        return RunDir(root, root / "hosts" / self.uid, self.local)


def read_text(path: Path) -> str:
    """Return the content of the file; empty if it does not exist."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def read_job(path: Path) -> PipelineJob:
    """Return the job of the pod's manifest; raises `RunError` if it is gone, `UserError` if it cannot be read."""
    try:
        job = PipelineJob.from_manifest(json.loads(path.read_text()))
    except FileNotFoundError:
        raise RunError(
            f"{path} is missing: the attempt's ConfigMap was deleted; the next attempt gets a new one"
        ) from None
    except (OSError, ValueError) as error:
        remedy = "delete the attempt's JobSet: the next attempt gets a new ConfigMap"
        raise UserError(what=f"cannot be read: {error}", where=str(path), remedy=remedy) from None
    if not job.metadata.uid:
        remedy = "create the job with kubectl apply: the cluster assigns the uid"
        raise UserError(what="is missing", where="metadata.uid", remedy=remedy)
    return job
