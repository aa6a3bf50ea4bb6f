"""The prediction that a plan states: a simulated step in seconds, and its confidence interval."""

from __future__ import annotations

import dataclasses

from penstock.core.plan import Prediction
from penstock.core.units import to_seconds
from penstock.planner.judge import Evaluation
from penstock.planner.problem import Confidence

CONTINUED = "the step has {:,} actions: it was simulated with fewer micro-batches and extrapolated linearly"


def prediction_of(evaluation: Evaluation) -> Prediction:
    """The evaluation's step, its parts in seconds and its bytes."""
    return Prediction(
        step_seconds=to_seconds(evaluation.step_ns),
        compute_seconds=to_seconds(evaluation.compute_ns),
        bubble_seconds=to_seconds(evaluation.bubble_ns),
        communication_seconds=to_seconds(evaluation.communication_ns),
        reduction_seconds=to_seconds(evaluation.reduction_ns),
        optimizer_seconds=to_seconds(evaluation.optimizer_ns),
        peak_bytes=evaluation.peak_bytes,
        slot_bytes=evaluation.slot_bytes,
        bubble=evaluation.bubble,
        waiting=evaluation.waiting,
        warnings=() if evaluation.is_exact else (CONTINUED.format(evaluation.candidate.num_actions),),
    )


def with_interval(prediction: Prediction, confidence: Confidence | None) -> Prediction:
    """The prediction with a confidence interval for errors of all measurements in the same direction."""
    if confidence is None:
        return prediction
    margin = (
        confidence.computing * (prediction.compute_seconds + prediction.bubble_seconds)
        + confidence.transfers * prediction.communication_seconds
        + confidence.reductions * prediction.reduction_seconds
        + confidence.optimizer * prediction.optimizer_seconds
    )
    return dataclasses.replace(
        prediction,
        low_seconds=max(prediction.step_seconds - margin, 0.0),
        high_seconds=prediction.step_seconds + margin,
        warnings=(*prediction.warnings, *confidence.warnings),
    )
