"""Container next to a pod's ranks that uploads their records to the service.

It starts before the container of the ranks and ends after it
(https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers), so that the last lines of ranks that the kernel
ended for their memory arrive too. If it is killed, the kubelet restarts it while the ranks run. Records that it cannot
deliver before the pod's end stay on the job's volume, and the reporters of the job's next attempt deliver them. The
same process is the pod's agent (`penstock.agent.endpoint`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.agent.endpoint import serving
from penstock.agent.pod_files import PodFolders, read_job
from penstock.agent.shipping import Requested, num_unsent, ship
from penstock.core.host.stopping import listening
from penstock.core.pod import ADDRESS_FILE, JOB_FILE
from penstock.core.run.folder import RunDir

POLL_SECONDS = 0.5
DRAIN_SECONDS = 30.0
"""Longest delay of a pod's end by a service that does not answer."""


def report(
    folders: PodFolders, attempt_files: Path, token_file: Path, say: Callable[[str], None], listen_at: str = ""
) -> bool:
    """Upload records until a stop request, then drain; return whether all were delivered. Without a service it only
    waits.

    Meanwhile the pod's agent answers at ``listen_at``, if there is one. Raises `RunError` or `UserError` if the pod's
    job cannot be read.
    """
    run = folders.run(read_job(attempt_files / JOB_FILE))
    with listening() as requests, serving(folders.served, listen_at, say):
        until = Requested(requests)
        while not (until.over or run.outbox.is_dir()):  # the ranks' container makes it, and reports its errors
            until.wait(POLL_SECONDS)
        address = attempt_files / ADDRESS_FILE
        if not run.outbox.is_dir() or not address.exists():
            return _waited(until)
        if ship(run, address, token_file, say, until, DRAIN_SECONDS, lambda: outboxes_before(folders, run)):
            return True
        say(
            f"{num_unsent(run.outbox)} records were not delivered: the service did not acknowledge them within"
            f" {DRAIN_SECONDS:.0f} s after the end; they stay in {run.outbox}, and the job's next attempt delivers them"
        )
        return False


def outboxes_before(folders: PodFolders, run: RunDir) -> list[Path]:
    """Return the outboxes of pods of earlier attempts of the job."""
    outboxes = []
    for path in run.root.parent.glob("a*/hosts/*/outbox"):
        number = path.parents[2].name.removeprefix("a")
        if number.isdecimal() and int(number) < folders.attempt:
            outboxes.append(path)
    return sorted(outboxes)


def _waited(until: Requested) -> bool:
    while not until.over:
        until.wait(POLL_SECONDS)
    return True
