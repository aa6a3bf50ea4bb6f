"""Durations, memory and speeds of steps, by the plans of jobs.

A plan never changes under its digest, and unpacking one takes longer than reading the rest of a job. So its figures
are cached by digest, with the speed of a step of one second: a step of s seconds is s times slower.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, select

from penstock.api.store.documents import unpack
from penstock.api.store.rows import in_parts
from penstock.api.store.schema import plans
from penstock.core.errors import UserError
from penstock.core.manifest import limits_lifted
from penstock.core.plan import Plan
from penstock.core.speed import Speed

MOST_REMEMBERED = 16_384
LEAST_SECONDS = 1e-9
"""Lower bound of a step's duration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """Figures of a step by a plan: its duration, the largest memory of any rank in bytes, and the speed of a step of
    one second. All are none for a plan that this version cannot read, the first two also without a prediction.
    """

    step_seconds: float | None = None
    peak_bytes: int | None = None
    of_a_second: Speed | None = None


StepPredictions = Mapping[str, StepPrediction]
_remembered: dict[str, StepPrediction] = {}
_lock = threading.Lock()


def step_predictions(connection: Connection, digests: Collection[str]) -> StepPredictions:
    """Return the figures of each plan with one of these digests."""
    with _lock:
        predictions = {digest: _remembered[digest] for digest in digests if digest in _remembered}
    missing = {*digests} - predictions.keys()
    for part in in_parts(missing):
        some = select(plans.c.digest, plans.c.body).where(plans.c.digest.in_(part))
        predictions.update((digest, _prediction(body)) for digest, body in connection.execute(some))
    _remember({digest: predictions[digest] for digest in sorted(missing & predictions.keys())})
    return predictions


def speed_of_step(predictions: StepPredictions, digest: str | None, step_seconds: float | None) -> Speed | None:
    """Return the speed of a step of the plan with this digest; none if plan or time is unknown."""
    prediction = predictions.get(digest or "", StepPrediction())
    if prediction.of_a_second is None or step_seconds is None or step_seconds < LEAST_SECONDS:
        return None
    return prediction.of_a_second.slowed(step_seconds)


def _prediction(body: bytes) -> StepPrediction:
    try:
        with limits_lifted():
            plan = Plan.from_manifest(unpack(body))
    except UserError:
        return StepPrediction()
    prediction = plan.prediction
    return StepPrediction(
        step_seconds=prediction.step_seconds if prediction else None,
        peak_bytes=max(prediction.peak_bytes) if prediction else None,
        of_a_second=plan.speed(1.0),
    )


def _remember(new: StepPredictions) -> None:
    """Cache the figures, and evict the oldest beyond the limit."""
    with _lock:
        _remembered.update(new)
        for digest in list(_remembered)[: max(0, len(_remembered) - MOST_REMEMBERED)]:
            del _remembered[digest]
