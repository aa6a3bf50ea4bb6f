"""Jobs on a real cluster whose pods train nothing (`tests.support.stub_pod`). The test plays the service, to which such
pods report nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.kube.names import PROFILE_FILE, UID_LABEL
from penstock.kube.resources import CONFIG_MAPS
from tests.support.cluster_jobs import ClusterJob
from tests.support.installed import Installed
from tests.support.repository import ROOT
from tools.lab.console import plain_environ

MEASURED = "stub-measured"
PATH = {"name": "PATH", "value": f"{ROOT / 'tests' / 'support' / 'stub_trainer'}:/usr/bin:/bin"}
"""A variable of the job's pods, which start the stub by it."""


@contextmanager
def measurement(on: Installed, measured: ClusterJob) -> Iterator[None]:
    """Stub jobs can use the profile of ``measured``, a job with two ranks that has ended."""
    profile = measured.status().profile
    assert profile is not None
    original = on.cluster.get(CONFIG_MAPS, profile.ref, on.namespace)
    data = {PROFILE_FILE: original["binaryData"][PROFILE_FILE]}
    copy = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": MEASURED}, "binaryData": data}
    on.cluster.create(on.namespace, copy)
    try:
        yield
    finally:
        on.kubectl("delete", "configmap", MEASURED)


def report_progress(job: ClusterJob, attempt: int, **progress: Any) -> None:
    """Report for the attempt that it has measured, and how far it has trained."""
    patch = json.dumps({"status": {"progress": {"attempt": attempt, "profileRef": MEASURED, **progress}}})
    job.on.kubectl("patch", "pj", job.name, "--subresource=status", "--type=merge", "--patch", patch)


@contextmanager
def watched_jobsets(on: Installed, path: Path) -> Iterator[Path]:
    """A file to which kubectl writes a line for every change of a JobSet: its name, its uid and its job's uid."""
    columns = f"NAME:.metadata.name,UID:.metadata.uid,JOB:.metadata.labels.{UID_LABEL.replace('.', chr(92) + '.')}"
    words = ["--namespace", on.namespace, "get", "jobsets", "--watch", "--no-headers", "--output"]
    command = [on.cluster.program, "--kubeconfig", str(on.cluster.kubeconfig), *words, f"custom-columns={columns}"]
    with path.open("w") as out:
        watch = subprocess.Popen(command, env=plain_environ(), stdout=out)
    try:
        yield path
    finally:
        watch.kill()
        watch.wait()


def jobset_uids(watched: Path, job: ClusterJob) -> dict[str, set[str]]:
    """The uids that the job's JobSets of each name had, in the order of their creation."""
    uids: dict[str, set[str]] = {}
    for line in watched.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            name, uid, job_uid = line.split()
            if job_uid == job.uid:
                uids.setdefault(name, set()).add(uid)
    return uids
