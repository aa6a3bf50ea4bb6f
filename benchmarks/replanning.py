"""A run on two CPU ranks, one of which gets only half a core from some step on: it is planned again while it trains.

    ./dev bench replanning

`penstock run` trains the demonstration's model in fp64. First it trains undisturbed. Then, from step `SLOWED_AT` on,
the second rank may run for half of every 4 ms, also after a restart. The benchmark reports the time from then until the
ranks run another plan, the predicted and the measured step of that plan, and the largest difference of the losses of
both runs. Needs root, for control groups.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.prediction import example_job
from benchmarks.support import measured_under_quota, write_results

from penstock.core.job import PipelineJob
from penstock.core.layout import Precision
from penstock.core.plan import Plan
from penstock.core.records import WARM_UP_STEPS
from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import read_status, status_path
from penstock.core.serialization import yamltext
from tools.cpu_quota import PERIOD_MICROSECONDS, CpuQuota, cpu_quota

STEPS, SLOWED_AT = 1200, 200
POLL_SECONDS = 0.2
SLOW_RANK, SHARE = 1, 0.5
MOST_ERROR, MOST_DIFFERENCE = 0.06, 1e-10
MOST_SECONDS = 1800.0


def benchmark_job() -> PipelineJob:
    """The demonstration's model, smaller, in fp64, and with `replanOnDrift`."""
    job = example_job()
    spec = job.spec
    training = dataclasses.replace(spec.training, steps=STEPS, precision=Precision.FP64)
    return job.with_spec(
        model=dataclasses.replace(spec.model, layers=6, hidden=96, ffn_hidden=256, heads=4, kv_heads=2, vocab=512),
        data=dataclasses.replace(
            spec.data, tokenizer=dataclasses.replace(spec.data.tokenizer, vocab=512), sequence_length=128
        ),
        training=training,
        parallelism=dataclasses.replace(spec.parallelism, dp=1, tp=1, pp=2),
        run_policy=dataclasses.replace(spec.run_policy, replan_on_drift=True),
        checkpoint=dataclasses.replace(spec.checkpoint, every_steps=1000),
    )


class Run:
    """A run of the job by the command; a slowed rank is limited again after each restart.

    ``changed_step`` is the last step before the last change of plan, and ``changed_at`` the time of the first one.
    """

    def __init__(self, root: Path, job: PipelineJob, quota: CpuQuota | None) -> None:
        self.dir = RunDir(root)
        self._quota, self._limited = quota, 0
        self.slowed_step, self.slowed_at = 0, 0.0
        self.changed_step, self.changed_at = STEPS - 1, 0.0
        path = root.with_suffix(".yaml")
        path.write_text(yamltext.dump(job.to_manifest()))
        command = [sys.executable, "-m", "penstock.cli", "run", str(path), "--run-dir", str(root)]
        self.log = root.with_suffix(".log")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._plan: Plan | None = None

    def finish(self) -> None:
        """Follow the run to its end."""
        deadline = time.monotonic() + MOST_SECONDS
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self._process.terminate()
            self._follow()
            time.sleep(POLL_SECONDS)
        if self._process.returncode:
            raise SystemExit(f"the run failed with code {self._process.returncode}:\n{self.log.read_text()[-3000:]}")

    def _follow(self) -> None:
        status = read_status(status_path(self.dir.status, SLOW_RANK))
        if self._quota is None or status is None or status.step < SLOWED_AT:
            return
        if self._limited != status.pid:
            self._limit(status.pid, status.step)
        plan = self.dir.read_plan()
        if self._plan is not None and plan != self._plan:
            self.changed_step = status.step
            self.changed_at = self.changed_at or time.monotonic()
        self._plan = plan

    def _limit(self, pid: int, step: int) -> None:
        assert self._quota is not None
        self._quota.add(pid)
        self._limited = pid
        if not self.slowed_at:
            self.slowed_step, self.slowed_at = step, time.monotonic()


def measured(folder: Path) -> dict[str, Any]:
    """Run the job undisturbed and slowed; return the measured values of both."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    job = benchmark_job()
    undisturbed = Run(folder / "undisturbed", job, None)
    undisturbed.finish()
    with cpu_quota("penstock-replanning", 1.0) as quota:
        quota.set(SHARE)
        run = Run(folder / "slowed", job, quota)
        run.finish()
    notes = [line.strip() for line in run.log.read_text().splitlines() if "plan" in line]
    sys.stderr.write(run.log.read_text())
    return {
        "before_seconds": _median(run, WARM_UP_STEPS, run.slowed_step),
        "slowed_step": run.slowed_step,
        "replanned_after_seconds": run.changed_at - run.slowed_at if run.changed_at else None,
        "notes": notes,
        **_after(run),
        "undisturbed_seconds": _median(undisturbed, WARM_UP_STEPS, STEPS),
        "difference": _difference(undisturbed, run),
        "attempts": max(entry.attempt for entry in run.dir.read_metrics()),
    }


def _after(run: Run) -> dict[str, Any]:
    """Step times between the slowdown and the change of plan, and of the last plan."""
    plan = run.dir.read_plan()
    assert plan.prediction is not None
    seconds = [entry.step_seconds for entry in run.dir.read_metrics()]
    drifted = seconds[run.slowed_step + 2 : run.changed_step]
    return {
        "drifted_seconds": statistics.median(drifted),
        "predicted_seconds": plan.prediction.step_seconds,
        "measured_seconds": statistics.median(seconds[run.changed_step + WARM_UP_STEPS :]),
        "stages": plan.stages,
        "slices": plan.slices,
    }


def _median(run: Run, first: int, stop: int) -> float:
    return statistics.median(entry.step_seconds for entry in run.dir.read_metrics()[first:stop])


def _difference(run: Run, other: Run) -> float:
    pairs = zip(run.dir.read_metrics(), other.dir.read_metrics(), strict=True)
    return max(abs(entry.loss - loss.loss) for entry, loss in pairs)


def error(results: dict[str, Any]) -> float:
    """Error of the prediction of the last plan."""
    return float(results["predicted_seconds"] / results["measured_seconds"] - 1)


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = (
        "# Planned again while it trains",
        "",
        f"Two CPU ranks, one thread each, fp64; {results['machine']}. From step {results['slowed_step']} on the second "
        f"rank runs for {SHARE:.0%} of every {PERIOD_MICROSECONDS / 1000:g} ms.",
        "",
        "| step | seconds |",
        "|---|---:|",
        f"| before | {results['before_seconds']:.3f} |",
        f"| slowed, by the first plan | {results['drifted_seconds']:.3f} |",
        f"| predicted, by the last plan | {results['predicted_seconds']:.3f} |",
        f"| measured, by the last plan | {results['measured_seconds']:.3f} |",
        "",
        f"The prediction's error is {error(results):+.1%}. Ranks ran by another plan after "
        f"{results['replanned_after_seconds'] or float('nan'):.0f} s, with {results['attempts']} attempts in all. "
        f"Losses differ from those of an undisturbed run by {results['difference']:.1e} at most.",
        "",
        *(f"- {note}" for note in results["notes"]),
    )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure and write the table; 1 if the prediction or the losses miss their targets."""
    results = measured_under_quota(measured)
    if results is None:
        return 2
    write_results("replanning", json.dumps(results), table)
    is_replanned = results["replanned_after_seconds"] is not None
    return int(not is_replanned or abs(error(results)) > MOST_ERROR or results["difference"] > MOST_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
