"""Times the demonstration, from an empty cache to its summary, with the time of each phase and the final loss.

Run as ``python -m benchmarks.demo``. It writes ``benchmarks/results/demo.{md,json}`` and fails if the demonstration
takes too long. It does what `./dev demo` does after setup, with an empty cache, so data and profile are made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.support import write_results

ROOT = Path(__file__).parents[1]
JOB = "deploy/examples/stdlib-llama.yaml"
MOST_SECONDS = 300.0

PHASES = {
    "service": "attempts/1/claim.json",
    "data": "data.json",
    "profiling": "profile.json",
    "planning": "plan.json",
    "training": "result.json",
}
"""A phase ends when its file is written to the run directory. The report and the end of the service follow."""
ENDING = "report"


def demonstrate(folder: Path) -> dict[str, Any]:
    """Run one demonstration with all its files below ``folder``. Returns its phases and its summary."""
    command = [sys.executable, "-m", "penstock.cli", "demo", JOB, "--folder", str(folder / "demo"), "--output", "json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    began_at = time.time()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False)
    ended_at = time.time()
    if done.returncode != 0:
        raise SystemExit(f"the demonstration ended with code {done.returncode}")
    summary = json.loads(done.stdout)
    phases = phase_seconds(Path(summary["report"]).parent, began_at, ended_at)
    return {"job": JOB, "seconds": ended_at - began_at, "phases": phases, "summary": summary}


def phase_seconds(run: Path, began_at: float, ended_at: float) -> dict[str, float]:
    """Seconds of each phase, from the times at which files were written (seconds since the epoch)."""
    bounds = [began_at, *((run / name).stat().st_mtime for name in PHASES.values()), ended_at]
    return {phase: stop - start for phase, (start, stop) in zip((*PHASES, ENDING), pairwise(bounds), strict=True)}


def markdown(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    seconds, summary = results["seconds"], results["summary"]
    predicted, measured = summary["predictedStepSeconds"], summary["measuredStepSeconds"]
    return "\n".join(
        [
            "# The demonstration, end to end",
            "",
            f"{results['machine']}, load {results['load_before']:.1f} before. `penstock demo {results['job']}` with an "
            f"empty cache: {summary['steps']} steps, {summary['plan']}.",
            "",
            "| phase | s | share |",
            "|---|---:|---:|",
            *(f"| {phase} | {taken:.1f} | {taken / seconds:.0%} |" for phase, taken in results["phases"].items()),
            f"| all | {seconds:.1f} | |",
            "",
            "| | |",
            "|---|---:|",
            f"| loss of the first step, nats per token | {summary['firstLoss']:.3f} |",
            f"| of the last | {summary['lastLoss']:.3f} |",
            f"| validation loss | {summary['validationLoss']:.3f} |",
            f"| of the unigram distribution | {summary['unigramLoss']:.3f} |",
            f"| step, predicted | {predicted:.3f} s |",
            f"| step, measured | {measured:.3f} s |",
            f"| error of the prediction | {predicted / measured - 1:+.1%} |",
            f"| tokens per second | {summary['tokensPerSecond']:,.0f} |",
            "",
            f"Target: {MOST_SECONDS:.0f} s; {'met' if seconds <= MOST_SECONDS else 'not met'}.",
            "",
        ]
    )


def main() -> None:
    """Measure, write both files, and fail if the time exceeds the target."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        results = demonstrate(Path(folder))
    results["summary"].pop("report")  # its folder is deleted
    write_results("demo", json.dumps({"load_before": load, **results}), markdown)
    if results["seconds"] > MOST_SECONDS:
        raise SystemExit(f"the demonstration took {results['seconds']:.0f} s, more than {MOST_SECONDS:.0f}")


if __name__ == "__main__":
    main()
