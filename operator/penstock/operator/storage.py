"""Check that the pods of an attempt share their output: the next attempt must be able to read it, on any node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.kubernetes_spec import AccessMode
from penstock.operator.podspec import OUT

WHERE = f"spec.kubernetes.volumes.{OUT}"
REMEDY = "name a claim with access mode ReadWriteMany, or a template of a storage class that offers it"


def require_shared_output(
    job: PipelineJob, num_pods: int, modes_of_claim: Callable[[str], Sequence[str] | None]
) -> None:
    """Raise `UserError` unless ``num_pods`` pods may all write the job's output.

    ``modes_of_claim`` returns the access modes of a claim; none if the claim does not exist yet. A missing claim is no
    error: the pods wait for it.
    """
    if num_pods < 2:
        return
    volume = job.spec.kubernetes.volumes.get(OUT)
    if volume is None:
        raise UserError(what=f"is missing, but {num_pods} pods have to share their output", where=WHERE, remedy=REMEDY)
    if volume.template is not None:
        modes: Sequence[str] | None = [mode.value for mode in volume.template.access_modes]
    else:
        modes = modes_of_claim(volume.claim or "")
    if modes is not None and AccessMode.READ_WRITE_MANY.value not in modes:
        what = f"offers {', '.join(modes) or 'no access mode'}, but {num_pods} pods have to write there"
        raise UserError(what=what, where=WHERE, remedy=REMEDY)
