"""penstock against ``torch.distributed.pipelining`` on two CPU ranks: same model, weights and data, paired steps.

    ./dev bench torch_pipelining

Each contender takes a step in turn, round after round, in one process group, so that all meet the same machine. Forward
and backward only: neither side steps an optimizer, both clear gradients. Losses must agree.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.support import write_results

from penstock.trainer.launch import LaunchSpec, launch

RANKS = 2


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


def table(results: dict[str, object]) -> str:
    """The results as Markdown."""
    lines = [
        "# penstock against torch.distributed.pipelining",
        "",
        f"{results['model']}; {RANKS} CPU ranks, one thread each; {results['machine']}.",
        f"Medians of {results['rounds']} interleaved rounds of forward and backward.",
        "",
        "| sequences | contender | seconds | loss | penstock is faster by |",
        "|---|---|---|---|---|",
    ]
    cases = results["cases"]
    assert isinstance(cases, list)
    for case in cases:
        own = statistics.median(case["contenders"]["penstock"]["seconds"])
        for name, each in case["contenders"].items():
            seconds = statistics.median(each["seconds"])
            lines.append(
                f"| {case['sequences']} | {name} | {seconds:.3f} | {each['loss']:.6f} | {seconds / own:.2f}x |"
            )
        lines.append(
            f"| {case['sequences']} | *plan: {case['plan']}* | predicted {case['predicted_seconds']:.3f} | "
            f"| predicted {case['predicted_ratio']:.2f}x over 1F1B |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
