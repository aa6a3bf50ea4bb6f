"""Files of a pod of an attempt: its inputs, its outputs, and its attempt's run directory.

OUT/UID/                    all that the job leaves
checkpoints/aN/step-S   of every attempt: out://UID/N/S
data/                   prepared data, made by the first pod that needs it
aN/                     the run directory of attempt N, which its pods share
hosts/POD_UID/      written by one pod alone: logs and outbox
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from penstock.agent.pod_memory import CGROUPS
from penstock.core.errors import RunError, UserError
from penstock.core.job import PipelineJob
from penstock.core.pod import ADDRESS_FILE, BINDING_FILE, JOB_FILE, PLAN_FILE, STOP_FILE
from penstock.core.run.folder import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFiles:
    """The files in which a pod gets its input, and those of its answers."""

    attempt: Path
    pod: Path
    termination: Path
    cgroups: Path = CGROUPS

    @property
    def job(self) -> Path:
        """The manifest."""
        return self.attempt / JOB_FILE

    @property
    def plan(self) -> Path:
        """The plan of the attempt."""
        return self.attempt / PLAN_FILE

    @property
    def binding(self) -> Path:
        return self.pod / BINDING_FILE

    @property
    def stop(self) -> Path:
        """Not empty once the attempt is to stop."""
        return self.pod / STOP_FILE


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


def address_file(attempt: Path) -> Path:
    """Where the service answers, among an attempt's files."""
    return attempt / ADDRESS_FILE


def read_text(path: Path) -> str:
    """Empty if there is nothing."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def read_job(path: Path) -> PipelineJob:
    """The manifest that the pod was given; raises `RunError` if it is gone, `UserError` if it cannot be read."""
    try:
        job = PipelineJob.from_manifest(json.loads(path.read_text()))
    except FileNotFoundError:
        raise RunError(
            f"{path} is not there: the attempt's ConfigMap was deleted; the next attempt has its own"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(what=f"cannot be read: {error}", where=str(path), remedy="delete the attempt") from None
    if not job.metadata.uid:
        raise UserError(what="is missing", where="metadata.uid", remedy="let the cluster give the job one")
    return job
