"""Location of a job's files: in the folder of the executor that launched it, or on its cluster's storage.

Several services may share a database, each with its own folder. A service must not report that another service's job
has no files.
"""

from __future__ import annotations

from pathlib import Path

from penstock.api.http.problems import Problem
from penstock.api.settings import Settings
from penstock.api.store.jobs import StoredJob


def elsewhere(settings: Settings, job: StoredJob) -> str | None:
    """Return the place of the job's files, if this service does not have them."""
    if job.cluster:
        return "on its cluster's storage"
    others = job.executor not in (None, settings.executor)
    return f"with the executor {job.executor}" if others and not (settings.runs / job.uid).is_dir() else None


def run_folder(settings: Settings, job: StoredJob) -> Path:
    """Return the job's run directory, which may not exist yet; raises `Problem` if another service has it."""
    place = elsewhere(settings, job)
    if place is None:
        return settings.runs / job.uid
    remedy = (
        "send the request to the service whose FOLDER/executor has that name; without that folder, submit the job again"
    )
    if job.cluster:
        remedy = "read them from the volume claim of its root out: kubectl get pvc"
    raise Problem(kind="elsewhere", detail=f"the files of this job are {place}", remedy=remedy)
