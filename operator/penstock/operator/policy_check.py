"""``penstock-operator check-policy``: the jobs of a cluster that the policy for jobs refuses. Nothing is changed.

It reads what the operator reads, from the same variables, so that an administrator sees before an upgrade, or before a
list is shortened, which jobs would be held.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.errors import UserError
from penstock.kube.allowing import refusals_on
from penstock.kube.resources import JOBS
from penstock.operator.cache import SeenJob, see_job
from penstock.operator.kube import Kube
from penstock.operator.seen import UNREADABLE
from penstock.operator.settings import Settings

NUM_CONNECTIONS = 2


def refused(kube: Kube, settings: Settings) -> Iterator[tuple[SeenJob, list[UserError]]]:
    """Every unfinished job that the policy refuses, with all reasons; raises `KubeError` if none can be read."""
    for found in kube.list(JOBS, settings.namespace).objects:
        try:
            seen = see_job(found, 0.0)
        except UNREADABLE:
            continue  # the operator's log names it
        if seen.job is None or seen.status.phase.terminal:
            continue
        if reasons := refusals_on(kube, seen.job, settings.policy_for(seen.job)):
            yield seen, reasons


def report(kube: Kube, settings: Settings) -> tuple[str, int]:
    """A line for each reason, and what happens to such jobs; with 1 if there are any, for a process to exit with."""
    found = list(refused(kube, settings))
    if not found:
        return "the policy refuses no unfinished job", 0
    lines = [f"{seen.namespace}/{seen.name} ({seen.status.phase}): {each}" for seen, told in found for each in told]
    last = f"{len(found)} refused: an attempt that runs goes on, and the next one is held until it is allowed"
    return "\n".join([*lines, last]), 1
