"""Implements the parts of the battery, each of which runs in a separate process.

    python -m benchmarks.gpu.measure PART FOLDER DEVICE [small]

A part writes ``answer.json`` to the folder: whether it passed, and its measurements. It measures with the product's own
code, as `penstock profile` and training do, and with the code of other benchmarks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import torch
from benchmarks.prediction import Bench
from benchmarks.torch_model import Part as TorchModel
from benchmarks.torch_model import token_loss
from benchmarks.torch_pipelining_rank import batch_of, runtime_of
from torch import Tensor

from penstock.agent.launch import LaunchSpec, launch
from penstock.core.devices import cluster_of, device_kind, device_kinds
from penstock.core.job import ParallelismSpec, PipelineJob
from penstock.core.layout import Precision, parameters
from penstock.core.mesh import Mesh
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.plan import Plan
from penstock.core.profile import UnitRecord
from penstock.core.remaking import SELECTIVE, Recompute
from penstock.core.run.folder import RunDir
from penstock.core.schedule import Kind, ScheduleSpec
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import write_json
from penstock.planner.compile import program_of
from penstock.planner.cost import CostModel
from penstock.planner.decide import decide
from penstock.planner.fit import measured_cost
from penstock.planner.measured import problem_from_profile
from penstock.planner.problem import problem_from_cluster
from penstock.planner.work import Work
from penstock.trainer.clock import device_clock
from penstock.trainer.dtypes import compute_dtype
from penstock.trainer.local_transport import Fabric
from penstock.trainer.memory import bytes_outside_allocator
from penstock.trainer.parameters import initial_value
from penstock.trainer.prepare import prepare_data
from penstock.trainer.runtime import Runtime
from penstock.trainer.stages import build_stages

ROOT = Path(__file__).parents[2]
PARITY_TESTS = "tests/trainer/units/test_gpu.py"
DEVICE_SHARE = 0.9
"""Share of a device's memory that one rank may take."""

MOST_LOSS_ERROR = 0.02
"""Largest relative difference of losses in bf16 that are computed in another order."""

Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Folder and device of a part. ``small`` if the part only has to run."""

    folder: Path
    device: torch.device
    small: bool

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return 32 if self.small else 2048

    @property
    def rounds(self) -> int:
        """Number of steps of each contender."""
        return 2 if self.small else 20

    @property
    def precision(self) -> Precision:
        """Bf16 on devices with tensor cores."""
        return Precision.BF16 if self.device.type == "cuda" else Precision.FP32

    def model(self, family: Family = Family.LLAMA, hidden: int = 2048) -> ModelSpec:
        """A model of a few hundred million parameters, or a tiny one."""
        hidden, layers, vocab = (64, 2, 512) if self.small else (hidden, 8, 32_000)
        return ModelSpec(
            family=family,
            layers=layers,
            hidden=hidden,
            heads=max(hidden // 128, 4),
            kv_heads=2 if family is Family.LLAMA else 0,
            vocab=vocab,
            positions=self.length,
        )


def parity(case: Case) -> Answer:
    """Run the tests of CUDA kernels, units and whole steps."""
    report = case.folder / "parity.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", PARITY_TESTS]
    done = subprocess.run(command, cwd=ROOT, check=False)
    tests = {test.attrib["name"]: _outcome(test) for test in ET.parse(report).iter("testcase")}
    return {"passed": done.returncode == 0 and set(tests.values()) == {"passed"}, "tests": tests}


def _outcome(test: ET.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if test.find(kind) is not None), "passed")


def memory(case: Case) -> Answer:
    """Compare predicted and measured peaks, with each plan in a separate process."""
    pins = {
        "1 slice": ParallelismSpec(slices=1, micro_batch=1, schedule="1f1b"),
        "4 slices": ParallelismSpec(slices=4, micro_batch=1, schedule="1f1b"),
        "2 sequences": ParallelismSpec(slices=1, micro_batch=2, schedule="gpipe"),
    }
    bench = Bench(case.folder / "run", _job(case, ranks=1))
    bench.measure()
    contenders = bench.pinned(pins)
    bench.weigh(contenders)
    peaks = {
        contender.name: {"predicted": contender.prediction.peak_bytes[0], "measured": contender.peak_bytes[0]}
        for contender in contenders
    }
    return {"passed": True, "constant_bytes": bench.profile.memory.constant_bytes, "peak_bytes": peaks}


def units(case: Case) -> Answer:
    """Measure the profile of one rank, and the error of each pass's fit at held-out points."""
    bench = Bench(case.folder / "run", _job(case, ranks=1))
    bench.measure()
    reports = measured_cost(bench.profile).reports
    errors = {f"{report.unit.value} {report.kind.value}": _or_none(report.held_out_error) for report in reports}
    return {"passed": True, "held_out_errors": errors, "profile": bench.profile.to_manifest()}


def _or_none(figure: float) -> float | None:
    return None if math.isnan(figure) else figure


def slices(case: Case) -> Answer:
    """Time steps with increasing numbers of slices, in turn, without a pipeline that would benefit from them."""
    steps = _sliced_steps(case, case.model())
    efficiency = {count: steps[1].step_seconds / step.step_seconds for count, step in steps.items()}
    return {"passed": True, "tokens": case.length, "efficiency": efficiency, "steps": _plain(steps)}


def host(case: Case) -> Answer:
    """The same for a model that is so narrow that the host limits the step."""
    return {"passed": True, "tokens": case.length, "steps": _plain(_sliced_steps(case, case.model(hidden=512)))}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicedStep:
    """Medians of a step. ``launch_seconds`` is the time until the host has launched all of it. ``graph_bytes`` is the
    device memory beyond tensors that the warm-up took: graphs of all actions, and for the first plan also kernels.
    """

    num_actions: int
    launch_seconds: float
    step_seconds: float
    launch_seconds_per_action: float
    warm_up_seconds: float
    graph_bytes: int


def _sliced_steps(case: Case, model: ModelSpec) -> dict[int, SlicedStep]:
    counts = (1, 2, 4) if case.small else (1, 2, 4, 8, 16)
    plans = {count: _plan(case, model, count) for count in counts}
    runtimes, warm_ups = {}, {}
    for count, plan in plans.items():
        begin, bytes_before = time.perf_counter(), _graph_bytes(case)
        runtimes[count] = _runtime(case, plan)
        warm_ups[count] = time.perf_counter() - begin, _graph_bytes(case) - bytes_before
    batch = batch_of(torch.randint(model.vocab, (2, case.length + 1)))
    taken: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    for _ in range(case.rounds):
        for count, runtime in runtimes.items():
            launched: list[float] = []
            begin = time.perf_counter()
            runtime.train_step(0, batch, meanwhile=partial(_mark, launched))
            taken[count].append((launched[0] - begin, time.perf_counter() - begin))
    return {count: _sliced_step(plans[count], times, *warm_ups[count]) for count, times in taken.items()}


def _graph_bytes(case: Case) -> int:
    """Bytes of graphs; 0 on the CPU, which has none."""
    return bytes_outside_allocator(case.device) if case.device.type == "cuda" else 0


def _mark(marks: list[float]) -> None:
    marks.append(time.perf_counter())


def _sliced_step(plan: Plan, times: list[tuple[float, float]], warm_up_seconds: float, graph_bytes: int) -> SlicedStep:
    launch_seconds, step_seconds = map(statistics.median, zip(*times, strict=True))
    num_actions = sum(instruction.action.is_compute for instruction in program_of(plan).ranks[0].instructions)
    return SlicedStep(
        num_actions=num_actions,
        launch_seconds=launch_seconds,
        step_seconds=step_seconds,
        launch_seconds_per_action=launch_seconds / num_actions,
        warm_up_seconds=warm_up_seconds,
        graph_bytes=graph_bytes,
    )


def _plain(steps: Mapping[int, SlicedStep]) -> dict[int, Any]:
    return {count: dataclasses.asdict(step) for count, step in steps.items()}


def pair(case: Case) -> Answer:
    """A job over two ranks that share the device, from its profile on; then the same on one rank."""
    job = _job(case, ranks=2)
    two = _prepared(case.folder / "two", job)
    _launch(two, "profile", num_ranks=2)
    pinned = job.with_spec(parallelism=ParallelismSpec(pp=2))
    decision = decide(problem_from_profile(pinned.spec, two.read_profile()))
    resources = dataclasses.replace(job.spec.resources, ranks=1)
    one = _prepared(case.folder / "one", job.with_spec(resources=resources))
    losses = {2: _train(two, decision.plan), 1: _train(one, _plan(case, job.spec.model, 1))}
    error = max(_difference(ours, theirs) for ours, theirs in zip(losses[2], losses[1], strict=True))
    assert decision.plan.prediction is not None
    return {
        "passed": error <= MOST_LOSS_ERROR,
        "plan": decision.plan.reasons[0],
        "predicted_seconds": decision.plan.prediction.step_seconds,
        "measured_seconds": statistics.median(entry.step_seconds for entry in two.read_metrics()),
        "loss_error": error,
        "losses": losses,
    }


def user_run(case: Case) -> Answer:
    """`penstock run` on one rank with no, selective and full recomputation, and a resumed run."""
    job, half = _job(case, ranks=1), case.rounds // 2
    checkpoint = {"everySteps": half, "keep": 3}
    runs = {
        policy.value: _user_run(
            case, job, policy.value, {"parallelism": {"recompute": policy.value}, "checkpoint": checkpoint}
        )
        for policy in Recompute
    }
    middle = case.folder / Recompute.NONE.value / "checkpoints" / "a1" / f"step-{half}"
    resumed = _user_run(case, job, "resumed", {"checkpoint": {"everySteps": 1000, "resumeFrom": str(middle)}})
    kept = runs[Recompute.NONE.value]["losses"]
    error = max(
        _difference(ours, theirs)
        for losses, expected in (*((run["losses"], kept) for run in runs.values()), (resumed["losses"], kept[half:]))
        for ours, theirs in zip(losses, expected, strict=True)
    )
    return {"passed": error <= MOST_LOSS_ERROR, "loss_error": error, "runs": {**runs, "resumed": resumed}}


def _user_run(case: Case, job: PipelineJob, name: str, changes: Mapping[str, Any]) -> Answer:
    """Figures of the closing summary, and every loss."""
    manifest = job.to_manifest()
    path, folder = case.folder / f"{name}.yaml", case.folder / name
    path.write_text(yamltext.dump({**manifest, "spec": {**manifest["spec"], **changes}}))
    command = [sys.executable, "-m", "penstock.cli", "run", str(path), "--run-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    run = RunDir(folder)
    metrics, prediction = run.read_metrics(), run.read_plan().prediction
    assert prediction is not None
    return {
        "predicted_seconds": prediction.step_seconds,
        "measured_seconds": statistics.median(entry.step_seconds for entry in metrics),
        "predicted_bytes": max(prediction.peak_bytes),
        "measured_bytes": max(entry.peak_bytes for entry in metrics),
        "losses": [entry.loss for entry in metrics],
    }


def described(case: Case) -> Answer:
    """Measured times of llama-8B's units on the device, divided by those of the described device kind."""
    kind, rows_of_length = _kind(case), {}
    for length in (case.length, 4 * case.length):
        job = _job(case, ranks=1, model=_wide(case, length))
        bench = Bench(case.folder / str(length), job)
        bench.measure()
        cost = problem_from_cluster(job.spec, cluster_of(device_kind(kind), 1)).cost_of(1)
        rows_of_length[length] = [_compared(record, job.spec.model, cost) for record in bench.profile.units]
    rows = [row for rows in rows_of_length.values() for row in rows]
    return {"passed": True, "kind": kind, "ratios": ratios(rows, case.length // 4), "units": rows_of_length}


def ratios(rows: Sequence[Mapping[str, Any]], fewest_tokens: int) -> Answer:
    """By pass, median, minimum and maximum of measured over described time, over points with enough tokens."""
    ratios_of: dict[str, list[float]] = {}
    for row in rows:
        batch, length, _ = row["point"]
        if batch * length >= fewest_tokens:
            ratios_of.setdefault(row["unit"], []).append(row["measured"] / row["described"])
    return {unit: (statistics.median(values), min(values), max(values)) for unit, values in ratios_of.items()}


def _kind(case: Case) -> str:
    """Described kind of the device; an arbitrary one if the part only has to run."""
    if case.small:
        return "h100"
    device = torch.cuda.get_device_name(case.device)
    kinds = [name for name in device_kinds() if device_kind(name).reported_name == device]
    if not kinds:
        raise SystemExit(f"no kind of device is described for {device}: penstock cluster list shows those there are")
    return kinds[0]


def _wide(case: Case, length: int) -> ModelSpec:
    """Two layers of llama-8B."""
    if case.small:
        return dataclasses.replace(case.model(), positions=length)
    return ModelSpec(
        family=Family.LLAMA,
        layers=2,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn_hidden=14336,
        vocab=32_000,
        positions=length,
    )


def _compared(record: UnitRecord, model: ModelSpec, cost: CostModel) -> Answer:
    work = Work.of(record.batch, record.length, record.prefix)
    if record.kind is Kind.R:
        operations = SELECTIVE if record.unit is UnitKind.MLP else SELECTIVE[:1]
        seconds = sum(cost.operation_seconds(model, record.unit, operation, work) for operation in operations)
    else:
        seconds = cost.unit_seconds(record.unit, record.kind, work)
    return {
        "unit": f"{record.unit.value} {record.kind.value}",
        "point": (record.batch, record.length, record.prefix),
        "measured": record.alone_seconds,
        "described": float(seconds),
    }


def _train(run: RunDir, plan: Plan) -> list[float]:
    """Loss of every step."""
    write_json(run.plan, plan.to_manifest())
    _launch(run, "train", "--attempt", "1", num_ranks=plan.num_ranks)
    return [entry.loss for entry in run.read_metrics()]


def _difference(one: float, other: float) -> float:
    """Relative difference; absolute if one of the losses is zero."""
    return abs(one - other) / (abs(other) or 1.0)


def compare_torch(case: Case) -> Answer:
    """Compare forward and backward of gpt2 with plain modules, autograd and torch's fused attention, in turn."""
    model, clock = case.model(Family.GPT2), device_clock(case.device)
    ids = torch.randint(model.vocab, (2, case.length + 1))
    contenders = {
        "penstock, 1 slice": _own_step(case, model, 1, ids),
        "penstock, 4 slices": _own_step(case, model, 4, ids),
        "torch": _torch_step(case, model, ids),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for _ in range(case.rounds + 1):
        for name, step in contenders.items():
            begin = clock()
            losses[name] = step()
            seconds[name].append(clock() - begin)
    error = max(_difference(loss, losses["torch"]) for loss in losses.values())
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    return {"passed": error <= MOST_LOSS_ERROR, "step_seconds": medians, "losses": losses, "loss_error": error}


def _own_step(case: Case, model: ModelSpec, num_slices: int, ids: Tensor) -> Callable[[], float]:
    runtime, batch = _runtime(case, _plan(case, model, num_slices)), batch_of(ids)
    return lambda: runtime.train_step(0, batch).loss_sum / batch.num_valid_tokens


def _torch_step(case: Case, model: ModelSpec, ids: Tensor) -> Callable[[], float]:
    module = TorchModel(model, 0, model.layers)
    module.load({p.name: initial_value(model, p, 0) for unit in model.units for p in parameters(model, unit)})
    module = module.to(case.device, compute_dtype(case.precision))
    batch = ids.to(case.device)

    def step() -> float:
        with torch.enable_grad():
            loss = token_loss(module(batch[:, :-1]).float(), batch[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
        module.zero_grad(set_to_none=False)
        return float(loss)

    return step


def _plan(case: Case, model: ModelSpec, num_slices: int) -> Plan:
    """Plan with one rank and two micro-batches of one sequence."""
    return Plan(
        model=model,
        precision=case.precision,
        pp=1,
        microbatch=1,
        num_microbatches=2,
        slices=(case.length // num_slices,) * num_slices,
        stages=((0, model.num_units),),
        schedule=ScheduleSpec(generator="1f1b"),
    )


def _runtime(case: Case, plan: Plan) -> Runtime:
    program = program_of(plan)
    stages = build_stages(plan, program.ranks[0], device=case.device, seed=0)
    runtime = runtime_of(plan, program, 0, stages, Fabric(program, Mesh(dp=1, pp=1)).transport(0), case.device)
    runtime.warm_up()
    return runtime


def _job(case: Case, ranks: int, model: ModelSpec | None = None) -> PipelineJob:
    """Job with two sequences per step of generated text, as bytes, as long as the model has positions."""
    model = model or case.model()
    total = torch.cuda.get_device_properties(0).total_memory if case.device.type == "cuda" else 8 * 2**30
    text = case.folder / "text" / "text.py"
    text.parent.mkdir(exist_ok=True)
    text.write_text("".join(f"turbine_{number} = {number * number}\n" for number in range(20_000)))
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "PipelineJob",
        "metadata": {"name": "gpu"},
        "spec": {
            "model": {name: value for name, value in model.to_manifest().items() if value},
            "data": {"source": str(text.parent), "tokenizer": {"train": "bytes"}, "sequenceLength": model.positions},
            "training": {"globalBatch": 2, "steps": case.rounds, "precision": case.precision.value},
            "resources": {"device": case.device.type, "ranks": ranks, "memoryPerRank": int(total * DEVICE_SHARE)},
            "checkpoint": {"everySteps": 1000},
        },
    }
    return PipelineJob.from_manifest(manifest)


def _prepared(root: Path, job: PipelineJob) -> RunDir:
    run = RunDir(root)
    run.create()
    run.job.write_text(yamltext.dump(job.to_manifest()))
    prepare_data(job, run)
    return run


def _launch(run: RunDir, command: str, *arguments: str, num_ranks: int) -> None:
    """Launch ranks of the product that share the device."""
    spec = LaunchSpec(
        module="benchmarks.gpu.shared_device",
        arguments=(command, "--run-dir", str(run.root), *arguments),
        device=run.read_job().spec.resources.device,
        num_ranks=num_ranks,
        threads_per_rank=1,
        log_folder=run.logs / command,
        status_folder=run.status,
    )
    outcome = launch(spec).wait()
    if outcome is None or outcome.failure is not None:
        raise SystemExit(str(outcome))


MEASURES: dict[str, Callable[[Case], Answer]] = {
    "parity": parity,
    "memory": memory,
    "units": units,
    "slices": slices,
    "host": host,
    "pair": pair,
    "torch": compare_torch,
    "run": user_run,
    "described": described,
}


def main(name: str, folder: str, device: str, *rest: str) -> None:
    """Run one part and write its answer. Data is cached in the folder and deleted with it."""
    os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
    case = Case(folder=Path(folder), device=torch.device(device), small=bool(rest))
    torch.set_num_threads(1)  # like a rank
    with torch.no_grad():
        answer = MEASURES[name](case)
    (case.folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
