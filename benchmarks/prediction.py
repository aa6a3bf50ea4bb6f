"""Compares predicted and measured step time and memory of many plans, and the planner's choice with the other plans.

    ./dev bench prediction

Every round measures a profile like `penstock profile`, and then runs a block of steps of each plan, so that profiles
and steps see the same drift of the machine. A reference kernel runs before and after each step. The step counts only if
both runs took the same time. Plans are made from the first profiles. The prediction by the medians of all profiles
is compared with the median of all steps. Memory is measured separately, with new processes for every plan.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.prediction_rank import STEPS_PER_VISIT
from benchmarks.quiet import MOST_DRIFT, typical_profile
from benchmarks.support import write_results

from penstock.agent.launch import LaunchSpec, Ranks, launch
from penstock.api.http.reruns import pinned
from penstock.core.job import ParallelismSpec, PipelineJob
from penstock.core.plan import Plan, Prediction
from penstock.core.profile import Profile
from penstock.core.run.folder import RunDir
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import write_json
from penstock.core.units import MEBIBYTE, format_count
from penstock.planner.decide import decide, decision_of
from penstock.planner.evaluate import Simulated
from penstock.planner.judge import Evaluation
from penstock.planner.measured import problem_from_profile
from penstock.trainer.prepare import prepare_data

EXAMPLE = Path(__file__).parents[1] / "deploy" / "examples" / "stdlib-llama.yaml"
RANKS, SEQUENCES = 2, 2
FIRST_PROFILES = 2
FINALISTS = 2
STEPS_PER_PLAN, MOST_ROUNDS = 20, 15

CHOICE = "the planner's choice"
UNSTEADY = "the machine's speed keeps drifting: end what else runs on it, and try again"

PINNED = {
    "1 slice": ParallelismSpec(pp=2, slices=1, schedule="1f1b", micro_batch=1),
    "4 slices": ParallelismSpec(pp=2, slices=4, schedule="1f1b", micro_batch=1),
    "16 slices": ParallelismSpec(pp=2, slices=16, schedule="1f1b", micro_batch=1),
    "flush of 2": ParallelismSpec(pp=2, slices=8, schedule="gpipe", micro_batch=2),
    "flush of 1": ParallelismSpec(pp=2, slices=4, schedule="gpipe", micro_batch=1),
    "zero bubble": ParallelismSpec(pp=2, slices=3, schedule="zb", micro_batch=1),
    "H1": ParallelismSpec(pp=2, slices=2, schedule="zb-h1", micro_batch=1),
    "V of 2": ParallelismSpec(pp=2, slices=2, schedule="zbv", micro_batch=1),
    "V of 4": ParallelismSpec(pp=2, slices=4, schedule="zbv", micro_batch=1),
    "unequal stages": ParallelismSpec(pp=2, slices=4, schedule="1f1b", micro_batch=2, stages=(4.5, 3.5)),
    "unequal slices": ParallelismSpec(pp=2, slices=(400, 344, 280), schedule="zb", micro_batch=2),
    "replicas": ParallelismSpec(dp=2, pp=1, micro_batch=1),
}


@dataclass
class Contender:
    """A plan and its measurements."""

    name: str
    plan: Plan
    prediction: Prediction
    step_seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    @property
    def measured_seconds(self) -> float:
        """Median of all steps."""
        return statistics.median(self.step_seconds)

    @property
    def error(self) -> float:
        """Predicted time divided by measured time, minus 1."""
        return self.prediction.step_seconds / self.measured_seconds - 1


def example_job() -> PipelineJob:
    """The demonstration's job with few sequences per step and nothing pinned."""
    example = PipelineJob.from_manifest(yamltext.load(EXAMPLE.read_text(), str(EXAMPLE)))
    training = replace(example.spec.training, global_batch=SEQUENCES)
    return replace(example, spec=replace(example.spec, training=training, parallelism=ParallelismSpec()))


class Bench:
    """Tries plans for a job on this machine, and keeps the machine's profiles."""

    def __init__(self, root: Path, job: PipelineJob) -> None:
        self._root = root
        self.job = job
        self._run = self._prepared(self.job)
        self._profiles: list[Profile] = []

    def _prepared(self, job: PipelineJob) -> RunDir:
        run = RunDir(self._root)
        run.create()
        run.job.write_text(yamltext.dump(job.to_manifest()))
        prepare_data(job, run)
        return run

    @property
    def num_profiles(self) -> int:
        """Number of profiles of the machine."""
        return len(self._profiles)

    @property
    def profile(self) -> Profile:
        """Medians of all profiles so far."""
        return typical_profile(self._profiles)

    def measure(self) -> None:
        """Measure another profile of the machine."""
        self._launch("penstock.trainer", "profile", "--run-dir", str(self._run.root))
        self._profiles.append(self._run.read_profile())
        sys.stderr.write(f"profile {len(self._profiles)}: {_unit_seconds(self._profiles[-1]):.2f} s\n")

    def pinned(self, pinned: Mapping[str, ParallelismSpec]) -> list[Contender]:
        """Plans with these pins."""
        plans = {name: self._decide(self._pinned(pins))[0] for name, pins in pinned.items()}
        return [Contender(name, plan, _prediction(plan)) for name, plan in plans.items()]

    def contenders(self) -> list[Contender]:
        """Pinned plans, the planner's choice, and the next plans of its ranking."""
        plans = {contender.name: contender.plan for contender in self.pinned(PINNED)}
        choice, others = self._decide(self._pinned(ParallelismSpec()))
        plans = {name: plan for name, plan in plans.items() if plan.program_digest != choice.program_digest}
        plans |= {CHOICE: choice, **{f"its alternative {i + 1}": plan for i, plan in enumerate(others)}}
        return [Contender(name, plan, _prediction(plan)) for name, plan in plans.items()]

    def _pinned(self, pins: ParallelismSpec) -> PipelineJob:
        return self.job.with_spec(parallelism=pins)

    def _decide(self, job: PipelineJob) -> tuple[Plan, list[Plan]]:
        problem = problem_from_profile(job.spec, self.profile)
        decision = decide(problem)
        judge = Simulated(problem)
        others = [
            self._plan_of(judge, decision.result, evaluation) for evaluation in decision.result.others[:FINALISTS]
        ]
        return decision.plan, others

    def _plan_of(self, judge: Simulated, result: Any, evaluation: Evaluation) -> Plan:
        return decision_of(judge, replace(result, best=evaluation, others=()), judge.problem).plan

    def predict(self, contenders: list[Contender]) -> None:
        """Predict all plans again by the medians of all profiles."""
        for contender in contenders:
            again, _ = self._decide(pinned(self.job, contender.plan))
            assert again.program_digest == contender.plan.program_digest, contender.name
            contender.prediction = _prediction(again)

    def visit(self, contenders: list[Contender], enough: int = STEPS_PER_PLAN) -> int:
        """Run steps of contenders that have fewer than ``enough``. Returns the number of rejected steps."""
        waiting = [contender for contender in contenders if len(contender.step_seconds) < enough]
        write_json(
            self._run.root / "visits.json", {contender.name: contender.plan.to_manifest() for contender in waiting}
        )
        steps_of = self._task("visits")["steps"]
        for contender in waiting:
            contender.step_seconds += steps_of[contender.name]
        return sum(STEPS_PER_VISIT - len(steps) for steps in steps_of.values())

    def fill(self, contenders: list[Contender], enough: int = STEPS_PER_PLAN, most_rounds: int = MOST_ROUNDS) -> int:
        """Run rounds, each with a profile, until every plan has ``enough`` steps. Returns the number of rejected steps.

        Ends the program if that takes more than ``most_rounds``.
        """
        rejected = 0
        for _ in range(most_rounds):
            rejected += self.visit(contenders, enough)
            self.measure()
            if all(len(contender.step_seconds) >= enough for contender in contenders):
                return rejected
        raise SystemExit(UNSTEADY)

    def weigh(self, contenders: list[Contender]) -> None:
        """Measure the memory of all contenders."""
        for contender in contenders:
            write_json(self._run.plan, contender.plan.to_manifest())
            contender.peak_bytes = _by_pipeline_rank(contender.plan, self._task("memory")["peak_bytes"])
            sys.stderr.write(f"{_line(contender)}\n")

    def _task(self, name: str) -> Mapping[str, Any]:
        self._launch("benchmarks.prediction_rank", str(self._run.root), name)
        result: Mapping[str, Any] = json.loads((self._run.root / "found.json").read_text())
        return result

    def _launch(self, module: str, *arguments: str) -> None:
        logs = self._run.logs / str(time.monotonic_ns())
        spec = LaunchSpec(
            module=module,
            arguments=arguments,
            device=self.job.spec.resources.device,
            num_ranks=self.job.spec.resources.ranks,
            threads_per_rank=1,
            log_folder=logs,
            status_folder=self._run.status,
        )
        ranks = launch(spec)
        self._launched(ranks)
        outcome = ranks.wait()
        if outcome is None or outcome.failure is not None:
            raise SystemExit(str(outcome))

    def _launched(self, ranks: Ranks) -> None:
        """Called with ranks that have just been launched."""


def main() -> int:
    """Measure, plan, visit, and write the tables."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), example_job())
        for _ in range(FIRST_PROFILES):
            bench.measure()
        contenders = bench.contenders()
        rejected = bench.fill(contenders)
        bench.predict(contenders)
        bench.weigh(contenders)
        results = {
            "model": described(contenders[0].plan),
            "rejected": rejected,
            "profiles": bench.num_profiles,
            "constant_bytes": bench.profile.memory.constant_bytes,
            "plans": [_result(contender) for contender in contenders],
        }
        write_results("prediction", json.dumps(results), table)
    return 0


def _prediction(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def _unit_seconds(profile: Profile) -> float:
    return sum(unit.together_seconds for unit in profile.units)


def _by_pipeline_rank(plan: Plan, peak_bytes: list[int]) -> list[int]:
    """Peak bytes of every pipeline rank: the maximum over replicas and shards."""
    mesh = plan.mesh
    fullest = [0] * plan.pp
    for rank, peak in enumerate(peak_bytes):
        place = mesh.pipeline_rank(rank)
        fullest[place] = max(fullest[place], peak)
    return fullest


def _line(contender: Contender) -> str:
    p = contender.prediction
    memory = [f"{a / 2**20:.0f}/{b / 2**20:.0f}" for a, b in zip(p.peak_bytes, contender.peak_bytes, strict=True)]
    seconds = f"{p.step_seconds:.3f}"
    if contender.step_seconds:
        seconds += f"/{contender.measured_seconds:.3f} s {contender.error:+.1%}"
    return f"{contender.name}: {seconds} {memory} MiB"


def described(plan: Plan) -> str:
    """Description of the plan's model and batch."""
    model = plan.model
    return (
        f"{model.family.value}, {model.layers} layers of width {model.hidden}, {plan.sequence_length} tokens, "
        f"{plan.global_batch} sequences per step, {plan.precision.value}"
    )


COMPARED = ("predicted", "measured")


def compared(contender: Contender, described_as: str) -> dict[str, Any]:
    """A contender's steps and memory, in the form that `compared_line` reads."""
    prediction = contender.prediction
    return {
        "plan": described_as,
        "predicted_seconds": prediction.step_seconds,
        "measured_seconds": contender.measured_seconds,
        "step_seconds": contender.step_seconds,
        "predicted_bytes": prediction.peak_bytes,
        "measured_bytes": contender.peak_bytes,
    }


def compared_line(name: str, row: Mapping[str, Any]) -> str:
    """Name, plan, seconds predicted and measured, error, and MiB of every rank predicted and measured."""
    sizes = (" and ".join(f"{size / MEBIBYTE:.0f}" for size in row[f"{what}_bytes"]) for what in COMPARED)
    error = row["predicted_seconds"] / row["measured_seconds"] - 1
    times = f"{row['predicted_seconds']:.3f} | {row['measured_seconds']:.3f} | {error:+.1%}"
    return f"| {name} | {row['plan']} | {times} | {' | '.join(sizes)} |"


def _result(contender: Contender) -> dict[str, Any]:
    return {
        "name": contender.name,
        "plan": _describe(contender.plan),
        "predicted_seconds": contender.prediction.step_seconds,
        "measured_seconds": contender.measured_seconds,
        "step_seconds": contender.step_seconds,
        "predicted_peak_bytes": contender.prediction.peak_bytes,
        "measured_peak_bytes": contender.peak_bytes,
        "slot_bytes": contender.prediction.slot_bytes,
    }


def _describe(plan: Plan) -> str:
    batches = f"{format_count(plan.num_microbatches, 'micro-batch', 'micro-batches')} of {plan.microbatch}"
    schedule = plan.schedule.generator or "imported"
    mesh = f"dp {plan.dp} x {f'tp {plan.tp} x ' if plan.tp > 1 else ''}pp {plan.pp}"
    return f"{mesh}, {batches}, {format_count(len(plan.slices), 'slice')}, {schedule}"


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    yield from (
        "# Predicted against measured",
        "",
        f"{results['model']}; {RANKS} CPU ranks, one thread each; {results['machine']}.",
        f"The medians of {results['profiles']} profiles, and of at least "
        f"{min(len(plan['step_seconds']) for plan in results['plans'])} steps of each plan, "
        f"in blocks of {STEPS_PER_VISIT}, plans in turn; "
        f"{results['rejected']} more did not count, because a reference kernel took over {MOST_DRIFT:.0%} more or less "
        "time after such a step than before it.",
        "",
        "| plan | predicted s | measured s | error | predicted MiB | measured MiB | error | above the constant |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    )
    rows = [_Row(plan_result, results["constant_bytes"]) for plan_result in results["plans"]]
    yield from (row.text for row in rows)
    best = min(rows, key=lambda row: row.measured)
    choice = next(row for row in rows if row.name == CHOICE)
    yield from (
        "",
        f"Mean absolute error of step time {statistics.mean(abs(row.time_error) for row in rows):.1%} (target 5 %). "
        f"Memory between {min(row.memory_error for row in rows):+.1%} and {max(row.memory_error for row in rows):+.1%} "
        f"(target -2 % to +5 %), above the constant at most "
        f"{max(abs(row.above_error) for row in rows):.1%} off (target 10 %).",
        f"The planner's choice took {choice.measured / best.measured - 1:+.1%} of the best plan's time "
        f"({best.name}; target 3 %).",
    )


class _Row:
    """A row of the table for a plan. Memory is that of the rank with the largest error."""

    def __init__(self, plan: dict[str, Any], constant: int) -> None:
        self.name = plan["name"]
        self.measured, predicted = plan["measured_seconds"], plan["predicted_seconds"]
        self.time_error = predicted / self.measured - 1
        pairs = list(zip(plan["predicted_peak_bytes"], plan["measured_peak_bytes"], strict=True))
        guess, real = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
        self.memory_error = guess / real - 1
        self.above_error = max(((a - constant) / (b - constant) - 1 for a, b in pairs), key=abs)
        times = (f"{self.name}: {plan['plan']}", f"{predicted:.3f}", f"{self.measured:.3f}", f"{self.time_error:+.1%}")
        memory = (
            f"{guess / 2**20:.0f}",
            f"{real / 2**20:.0f}",
            f"{self.memory_error:+.1%}",
            f"{self.above_error:+.1%}",
        )
        self.text = f"| {' | '.join((*times, *memory))} |"


if __name__ == "__main__":
    sys.exit(main())
