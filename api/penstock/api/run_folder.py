"""Where the files of a job lie: in the folder of the executor that launched it.

Several services may share a database, each with a folder of its own. One that answers for a job of another must not say
that there are no files.
"""

from __future__ import annotations

from pathlib import Path

from penstock.api.problems import Problem
from penstock.api.settings import Settings
from penstock.api.store.jobs import StoredJob


def elsewhere(settings: Settings, job: StoredJob) -> str | None:
    """Who has the job's files, if they are not here."""
    if job.cluster:
        return f"cluster {job.cluster}"
    others = job.executor not in (None, settings.executor)
    return job.executor if others and not (settings.runs / job.uid).is_dir() else None


def run_folder(settings: Settings, job: StoredJob) -> Path:
    """The job's run directory, whether it is there yet or not; raises `Problem` if it is at another service."""
    executor = elsewhere(settings, job)
    if executor is None:
        return settings.runs / job.uid
    if job.cluster:
        remedy = "read them from the claim of its out root"
        raise Problem(kind="elsewhere", detail="the files of this job are on its cluster's storage", remedy=remedy)
    raise Problem(
        kind="elsewhere",
        detail=f"the files of this job are with the executor {executor}",
        remedy="ask the service with that name in FOLDER/executor; if its folder is lost, submit the job anew",
    )
