"""``penstock-operator check-policy``: the jobs on a cluster that its policy refuses. Nothing is changed.

It reads the operator's environment variables and the cluster's objects. Before an upgrade, or before a list is
shortened, it shows an administrator which jobs would be held: unfinished jobs, and jobs that measure for
ClusterProfiles.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.kube.allowing import refusals_on
from penstock.kube.resources import CLUSTER_PROFILES, JOBS
from penstock.kube.transport import unless_missing
from penstock.operator.cache import job_snapshot
from penstock.operator.cluster_profiles import read_profile
from penstock.operator.kube import Kube
from penstock.operator.measuring import measuring_job
from penstock.operator.settings import Settings
from penstock.operator.snapshots import UNREADABLE

NUM_CONNECTIONS = 2


def report(kube: Kube, settings: Settings) -> tuple[str, int]:
    """Return a report with a line for each reason and one on the consequences, and the exit code: 1 if a job is
    refused.

    Raises `KubeError` if the jobs cannot be listed.
    """
    jobs = [*_unfinished(kube, settings.namespace), *_measuring(kube, settings.measuring_namespace)]
    refused = [(name, reasons) for name, job in jobs if (reasons := refusals_on(kube, job, settings.policy_for(job)))]
    if not refused:
        return "the policy refuses no unfinished job", 0
    lines = [f"{name}: {reason}" for name, reasons in refused for reason in reasons]
    last = f"{len(refused)} refused: an attempt that runs goes on, and the next one is held until it is allowed"
    return "\n".join([*lines, last]), 1


def _unfinished(kube: Kube, namespace: str) -> Iterator[tuple[str, PipelineJob]]:
    """Jobs that have not ended. Those that cannot be read are left out: the operator's log names them."""
    for item in kube.list(JOBS, namespace).objects:
        try:
            snapshot = job_snapshot(item, 0.0)
        except UNREADABLE:
            continue
        if snapshot.job is not None and not snapshot.status.phase.terminal:
            yield f"{snapshot.namespace}/{snapshot.name} ({snapshot.status.phase})", snapshot.job


def _measuring(kube: Kube, namespace: str) -> Iterator[tuple[str, PipelineJob]]:
    """The jobs that measure for ClusterProfiles. Profiles that cannot be read are left out: their status says why."""
    listing = unless_missing(kube.list, CLUSTER_PROFILES)  # none in a cluster without the CRD
    for item in listing.objects if listing is not None else ():
        try:
            profile = read_profile(item)
        except UserError:
            continue
        yield f"ClusterProfile {profile.metadata.name}", measuring_job(profile, namespace)
