"""Grace period of a pod, in which it writes a checkpoint and ends, after a stop request or an eviction."""

from __future__ import annotations

from penstock.core.job import JobSpec
from penstock.core.layout import num_parameters
from penstock.core.status import JobStatus

LEAST_SECONDS = 60.0
TIMES = 2.0
MARGIN_SECONDS = 30.0

STATES = 3
"""Values that a checkpoint holds for each parameter: the weight, and AdamW's two moments."""

STORAGE_BYTES_PER_SECOND = 100e6
"""Lower bound of the storage's bandwidth for all ranks together: a file server at 1 Gbit/s."""


def grace_seconds(spec: JobSpec, status: JobStatus) -> float:
    """Return twice the time of a step and a checkpoint, plus a margin; a minute at least.

    The step time is the planned or the measured one, whichever is longer. A new attempt has no plan yet, but steps of
    earlier ones may have been measured.
    """
    predicted = status.plan.step_seconds if status.plan else None
    measured = status.progress.step_seconds if status.progress else None
    step_seconds = max(predicted or 0.0, measured or 0.0)
    return max(LEAST_SECONDS, TIMES * (step_seconds + checkpoint_seconds(spec)) + MARGIN_SECONDS)


def checkpoint_seconds(spec: JobSpec) -> float:
    """Seconds to write a checkpoint on slow storage."""
    state_bytes = num_parameters(spec.model) * STATES * spec.training.precision.accumulate_bytes
    return state_bytes / STORAGE_BYTES_PER_SECOND
