"""What runs beside a pod's ranks, in a container of its own: it brings what they record to the service.

Its container starts before theirs and is ended after it (https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers),
so that the last lines of ranks that the kernel ended for their memory arrive too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.cli.pod_files import PodFolders, address_file, read_job
from penstock.cli.shipping import Requested, ship
from penstock.cli.stopping import listening
from penstock.core.pod import JOB_FILE

LOOK_SECONDS = 0.5
DRAIN_SECONDS = 30.0
"""What a service that does not answer may hold a pod up at its end."""


def report(folders: PodFolders, attempt_files: Path, token_file: Path, say: Callable[[str], None]) -> bool:
    """Until it is asked to stop, and what is left then; whether all arrived. Without a service nothing is to be done.

    Raises `RunError` or `UserError` if nobody can know what the pod is for.
    """
    run = folders.run(read_job(attempt_files / JOB_FILE))
    with listening() as requests:
        until = Requested(requests)
        while not (until.over or run.outbox.is_dir()):  # the ranks' container makes it, and says what is in its way
            until.wait(LOOK_SECONDS)
        if not run.outbox.is_dir() or not address_file(attempt_files).exists():
            return _waited(until)
        return ship(run, address_file(attempt_files), token_file, say, until, DRAIN_SECONDS)


def _waited(until: Requested) -> bool:
    while not until.over:
        until.wait(LOOK_SECONDS)
    return True
