"""A hand-made report: the hand-made run of `tests.support.sample_run` as pages and pictures show it."""

from __future__ import annotations

from penstock.core.curves import curves_of
from penstock.core.timeline import Source
from penstock.view.data import ReportData, Sample
from tests.support.sample_run import (
    UNIT_NS,
    sample_fit,
    sample_memory,
    sample_metrics,
    sample_plan,
    sample_profile,
    sample_schedule,
    sample_timeline,
)


def sample_report() -> ReportData:
    plan, profile = sample_plan(), sample_profile()
    schedule = sample_schedule(2, plan.num_microbatches, len(plan.slices))
    predicted = sample_timeline(
        schedule, unit_ns=UNIT_NS, peak_bytes=plan.prediction.peak_bytes if plan.prediction else ()
    )
    memory = sample_memory(plan)
    measured = sample_timeline(
        schedule,
        source=Source.MEASURED,
        unit_ns=UNIT_NS,
        noise=0.045,
        seed=8,
        peak_bytes=tuple(rank.measured_bytes or 0 for rank in memory),
    )
    return ReportData(
        job="stdlib-llama",
        phase="Succeeded",
        command="penstock run deploy/examples/stdlib-llama.yaml --run-dir runs/stdlib-llama",
        plan=plan,
        profile=profile,
        run=curves_of(sample_metrics()),
        unigram_loss=6.41,
        predicted=predicted,
        measured=measured,
        memory=memory,
        memory_limit_bytes=4 * 2**30,
        fit=sample_fit(profile),
        samples=(
            Sample(
                prompt="def ",
                text="def _get_value(self, name, default=None):\n    if name not in self._values:\n"
                "        return default\n    return self._values[name]\n",
            ),
            Sample(
                prompt="class ",
                text='class _Reader(object):\n    """Return the next line of the file."""\n\n'
                "    def __init__(self, stream, encoding=None):\n        self.stream = stream\n",
            ),
        ),
        versions=(("penstock", "0.1.0"), ("Python", "3.11.7"), ("torch", "2.14.1+cpu"), ("tokenizers", "0.22.1")),
    )
