"""Compares penstock with ``torch.distributed.pipelining`` on two CPU ranks: same model, weights and data, paired steps.

    ./dev bench torch_pipelining

The contenders take steps in turn, round after round, in one process group, so that all see the same machine. Steps are
forward and backward only: neither side updates weights, both clear gradients. Losses must agree.

Two ranks that never wait would take half of the total time of the actions of whole sequences, each measured while the
other rank is idle. The additional time of penstock's step is split into parts. They follow from the times of its
actions in steps and alone (medians, means over the two ranks, measured in the same rounds). These rounds are separate
and come before the others, since a step between steps of other contenders finds the caches full of their data, which is
not part of the prediction.

- *contention*: the plan's actions in a step, minus the same actions alone;
- *slices*: the plan's actions alone, minus those of whole sequences alone;
- *dependencies*: the critical path (a simulated step of the plan's order with the actions' times in one step, the
  median over steps), minus the plan's actions in a step;
- *fixed*: the rest of a step beyond its critical path: reductions of gradients and norm, barriers, the start of
  actions, reading the loss.

The parts add up to the whole difference. Within the fixed part, *end of step* is the time in which the slower rank
computes the norm and clears gradients.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support import write_results

from penstock.agent.launch import LaunchSpec, launch

RANKS = 2
OWN, UNSLICED = "penstock", "penstock, 1F1B without slices"
"""Names of penstock's contenders."""


def main() -> int:
    """Run the comparison and write the tables."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "status").mkdir()
        result = root / "result.json"
        ranks = launch(
            LaunchSpec(
                module="benchmarks.torch_pipelining_rank",
                arguments=(str(result), str(root / "status")),
                num_ranks=RANKS,
                threads_per_rank=1,
                log_folder=root / "logs",
                status_folder=root / "status",
            )
        )
        outcome = ranks.wait()
        if outcome is None or outcome.exit_code:
            log = ranks.log_path(0)
            sys.stderr.write(f"{outcome}\n{log.read_text() if log else ''}\n")
            return 1
        write_results("torch_pipelining", result.read_text(), table)
    return 0


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# penstock against torch.distributed.pipelining",
        "",
        f"{results['model']}; {RANKS} CPU ranks, one thread each; {results['machine']}.",
        f"Medians of {results['rounds']} interleaved rounds of forward and backward; ratios are medians over rounds.",
        "",
        "| sequences | contender | seconds | loss | penstock is faster by |",
        "|---|---|---|---|---|",
    ]
    for case in results["cases"]:
        lines += _rows(case)
    lines += ["", *(f"- {_summary(case)}" for case in results["cases"])]
    lines += ["", *_distances(results["cases"])]
    return "\n".join(lines) + "\n"


def _rows(case: dict[str, Any]) -> Iterator[str]:
    for name, contender in case["contenders"].items():
        seconds = statistics.median(contender["seconds"])
        yield f"| {case['sequences']} | {name} | {seconds:.3f} | {contender['loss']:.6f} | {_ratio(case, name):.2f}x |"


def _distances(cases: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "Where penstock's steps lose against two ranks that never wait, in ms and as shares of the step:",
        "",
        f"| sequences | step | never waiting | {' | '.join(PARTS)} | end of step | critical path / step (target 98 %) "
        "| simulated / step (target 97 %) |",
        f"|---|---|---|{'---|' * len(PARTS)}---|---|---|",
    )
    for case in cases:
        parts = case["parts"]
        step = statistics.median(parts["step_seconds"])
        lost = (_share(seconds, step) for seconds in distance(parts, step).values())
        yield (
            f"| {case['sequences']} | {1000 * step:.0f} | {_share(_never_waiting(parts), step)} | {' | '.join(lost)} "
            f"| {_share(parts['closing_seconds'], step)} "
            f"| {_critical_share(parts):.1%} | {parts['simulated_seconds'] / step:.1%} |"
        )


PARTS = ("contention", "slices", "dependencies", "fixed")


def _never_waiting(parts: dict[str, Any]) -> float:
    """Seconds of a step of two ranks that never wait."""
    return float(parts["compute_seconds"]["whole, alone"])


def distance(parts: dict[str, Any], step: float) -> dict[str, float]:
    """Seconds of each of `PARTS`. They add up to ``step`` minus the step of two ranks that never wait."""
    compute, critical = parts["compute_seconds"], statistics.median(parts["critical_seconds"])
    seconds = (
        compute["slices"] - compute["slices, alone"],
        compute["slices, alone"] - _never_waiting(parts),
        critical - compute["slices"],
        step - critical,
    )
    return dict(zip(PARTS, seconds, strict=True))


def _critical_share(parts: dict[str, Any]) -> float:
    """Share of the critical path in a step, the median over steps."""
    steps = zip(parts["critical_seconds"], parts["step_seconds"], strict=True)
    return float(statistics.median(critical / step for critical, step in steps))


def _share(seconds: float, step: float) -> str:
    return f"{1000 * seconds:.0f} ({seconds / step:.1%})"


def _ratio(case: dict[str, Any], name: str) -> float:
    """Ratio of a contender's steps to penstock's of the same round."""
    rounds = zip(case["contenders"][name]["seconds"], case["contenders"][OWN]["seconds"], strict=True)
    return float(statistics.median(theirs / own for theirs, own in rounds))


def _summary(case: dict[str, Any]) -> str:
    """Summary of the plan, its prediction, and the best step of two ranks."""
    torch = {name: contender for name, contender in case["contenders"].items() if name.startswith("torch")}
    best = min(torch, key=lambda name: statistics.median(torch[name]["seconds"]))
    floor = _never_waiting(case["parts"])
    predicted = case["predicted_unsliced_seconds"] / case["predicted_seconds"]
    achieved = _ratio(case, UNSLICED)
    return (
        f"{case['sequences']}: {case['plan']}. Over 1F1B without slices predicted {predicted:.2f}x, achieved "
        f"{achieved:.2f}x ({100 * (achieved - 1) / (predicted - 1):.0f} % of the gain). Torch's best, {best}, took "
        f"{_ratio(case, best):.2f}x as long; two ranks that never wait would need {floor:.3f} s, and that best "
        f"{statistics.median(torch[best]['seconds']) / floor:.2f}x as long."
    )


if __name__ == "__main__":
    sys.exit(main())
