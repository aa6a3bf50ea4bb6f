"""Where the files of a job lie: in the folder of the executor that launched it, or on its cluster's storage.

Several services may share a database, each with a folder of its own. One that answers for a job of another must not say
that there are no files.
"""

from __future__ import annotations

from pathlib import Path

from penstock.api.http.problems import Problem
from penstock.api.settings import Settings
from penstock.api.store.jobs import StoredJob


def elsewhere(settings: Settings, job: StoredJob) -> str | None:
    """Where the job's files are, if they are not here."""
    if job.cluster:
        return "on its cluster's storage"
    others = job.executor not in (None, settings.executor)
    return f"with the executor {job.executor}" if others and not (settings.runs / job.uid).is_dir() else None


def run_folder(settings: Settings, job: StoredJob) -> Path:
    """The job's run directory, whether it is there yet or not; raises `Problem` if it is elsewhere."""
    place = elsewhere(settings, job)
    if place is None:
        return settings.runs / job.uid
    remedy = "call the service with that name in FOLDER/executor; if its folder is lost, submit the job again"
    if job.cluster:
        remedy = "read them from the claim of its out root"
    raise Problem(kind="elsewhere", detail=f"the files of this job are {place}", remedy=remedy)
