"""One rank's training step on ``cuda:0``, without a GPU, a driver or a compiler: what every kind of action dispatches.

``python -m tests.support.fake_step`` writes the table of the installed torch, with which the tests compare.

Theory of operation. Under torch's FakeTensorMode a tensor has a shape, a type and a device, but no memory. Every
operation passes through the dispatcher as on a GPU, where its formula for shapes and types refuses what the kernel
would refuse. The process group is torch's ``fake`` one, which sends nothing. So the product's own code takes a step
for ``cuda:0``: it chooses its CUDA backends, and a wrong device, type or shape fails. A dispatch mode counts, and a
recorder, which the interpreter calls between two instructions, says on whose behalf.

The host waits for the device where a value is read (``item``, ``tolist``) and where memory that is not pinned is copied
from or to the device. A fake tensor has no values: zeros are read. Nor can it be pinned without a driver: here what
`penstock.trainer.memory.staging` gives counts as pinned, and nothing else does.

torch 2.11 takes the formula of ``addmm`` also for its overload with the type of a result, which has one argument more.
On a device it does what is right; here the overload gets a formula of its own.

Graphs need CUDA itself, so here no action is recorded: what is counted is what a graph of it would hold.

The counts depend on torch, which decides what a composite operation consists of: there is one table per minor version.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.core.job import TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.program import RankProgram
from penstock.core.schedule import Kind, ScheduleSpec
from penstock.core.sharding import Sharding
from penstock.planner.compile import program_of
from penstock.planner.schedules.registry import find
from penstock.trainer import executor, memory
from penstock.trainer.comm import GroupName, ProcessGroups, open_transport
from penstock.trainer.data.feed import BatchFeed
from penstock.trainer.executor import StageExecutor
from penstock.trainer.optimizer import AdamW
from penstock.trainer.optimizer_step import OptimizerStep
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stages import build_stages
from penstock.trainer.units.attention import Attention
from penstock.trainer.units.collectives import Request
from tests.support.small_plans import even_stages

CUDA = torch.device("cuda", 0)
PRECISIONS = (Precision.FP32, Precision.BF16)
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb", "zbv")
NUM_RANKS = 2
TABLES = Path(__file__).parents[1] / "trainer" / "cuda" / "tables"
BATCH = "batch"
"""What a step does before its first instruction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Which step: a model family, a precision, a schedule, and the rank of two that takes it. With ``zero`` 1 there are
    two replicas, which divide the optimizer's state, and it is the first one's.
    """

    family: Family
    precision: Precision
    schedule: str
    rank: int
    zero: int = 0

    def __str__(self) -> str:
        zero = " zero 1" if self.zero else ""
        return f"{self.family.value} {self.precision.value} {self.schedule} rank {self.rank}{zero}"


def all_cases() -> Iterator[Case]:
    """Every family, precision and schedule, on both ranks, and some with the optimizer's state divided."""
    for family in Family:
        for precision in PRECISIONS:
            for schedule in SCHEDULES:
                for rank in range(NUM_RANKS):
                    yield Case(family=family, precision=precision, schedule=schedule, rank=rank)
            yield Case(family=family, precision=precision, schedule="zbv", rank=0, zero=1)


@dataclass(slots=True)
class Tally:
    """What the actions of one kind did in a step.

    ``dispatches`` counts operations, ``on_host`` those that gave a tensor on the host, ``waits`` those for which the
    host waits for the device. ``types`` are those of the tensors on the device, ``messages`` what went to another rank.
    """

    actions: int = 0
    dispatches: int = 0
    on_host: int = 0
    waits: int = 0
    types: set[str] = field(default_factory=set)
    messages: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        types = ",".join(sorted(self.types)) or "-"
        messages = " ".join(f"{count}x{text}" for text, count in sorted(self.messages.items())) or "-"
        return f"{self.actions:>3} {self.dispatches:>5} {self.on_host:>3} {self.waits:>3}  {types}  {messages}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step that was taken: the implementations that the product chose, and a tally per kind of action."""

    chosen: tuple[str, ...]
    tallies: Mapping[str, Tally]

    def lines(self, case: Case) -> Iterator[str]:
        """The case's part of the table: the kinds that dispatch anything."""
        yield f"{case}: {' '.join(self.chosen)}"
        for kind, tally in self.tallies.items():
            if tally.dispatches or tally.waits:
                yield f"    {kind:<18} {tally}"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on behalf of the kind of action that the recorder named last."""

    def __init__(self, program: RankProgram) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally, {BATCH: Tally(actions=1)})
        self._kinds = [_kind(i.action.kind, i.action.group) for i in program.instructions]
        self._now = BATCH
        self._entered = False
        self._pinned: set[int] = set()

    def mark(self, position: int) -> None:
        """`penstock.trainer.interpreter.Recorder`: the instruction at ``position`` begins."""
        if position < len(self._kinds):
            self._now = self._kinds[position]
            self.tallies[self._now].actions += 1

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Stands for `penstock.trainer.memory.staging`."""
        tensor = torch.zeros(shape, dtype=dtype)
        self._pinned.add(_storage(tensor))
        return tensor

    def read(self, tensor: Tensor) -> None:
        """The host reads a tensor's values; building the stages does not count."""
        self.tallies[self._now].waits += self._entered and tensor.device == CUDA

    def __enter__(self) -> _Watch:
        self._entered = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._count(func, args, results)
        return results

    def _count(self, func: Any, args: Sequence[Any], results: Any) -> None:
        tally = self.tallies[self._now]
        tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        tally.dispatches += 1
        tally.on_host += any(tensor.device != CUDA for tensor in tensors)
        tally.types |= {_short(tensor) for tensor in tensors if tensor.device == CUDA}
        if func.namespace == "c10d":
            sent = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            tally.messages.update(f"{_short(tensor)}{_shape(tensor)}" for tensor in sent)
        elif func._schema.name in ("aten::copy_", "aten::_to_copy"):
            tally.waits += self._waits(args, results)

    def _waits(self, args: Sequence[Any], result: Tensor) -> bool:
        """Whether a copy crosses between device and pageable memory, for which the host waits."""
        tensors = [leaf for leaf in (*args[:2], result) if isinstance(leaf, Tensor)]
        host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        is_crossing = len({tensor.device.type for tensor in tensors}) > 1
        return is_crossing and not any(_storage(tensor) in self._pinned for tensor in host)


def _kind(kind: Kind, group: object) -> str:
    is_collective = kind in (Kind.START_REDUCE, Kind.WAIT_REDUCE, Kind.START_GATHER, Kind.WAIT_GATHER)
    return f"{kind.value}({group})" if is_collective else kind.value


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return "[" + ",".join(map(str, tensor.shape)) + "]"


def _storage(tensor: Tensor) -> int:
    """What a tensor and its views have in common."""
    return int(tensor.untyped_storage()._cdata)


class _FakeGroups(ProcessGroups):
    """Process groups that send nothing."""

    def _backend(self, name: GroupName) -> str:
        return "fake"

    def _options(self, name: GroupName) -> None:
        return None


def plan_of(case: Case) -> Plan:
    """A plan with every kind of stage, unequal slices, and grouped-query attention where the family has it."""
    model = ModelSpec(
        family=case.family,
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2 if case.family is Family.LLAMA else 0,
        vocab=512,
        positions=64,
    )
    num_stages = NUM_RANKS * find(case.schedule).stages_per_rank
    return Plan(
        model=model,
        precision=case.precision,
        dp=2 if case.zero else 1,
        zero=case.zero,
        pp=NUM_RANKS,
        microbatch=2,
        num_microbatches=2,
        slices=(40, 24),
        stages=even_stages(model.num_units, num_stages),
        schedule=ScheduleSpec(generator=case.schedule, version=find(case.schedule).version),
        late_receives=True,
    )


@contextmanager
def _fake_world(case: Case, watch: _Watch) -> Iterator[FakeTensorMode]:
    """FakeTensorMode with a process group that sends nothing, and zeros where the host reads a value."""

    def item(tensor: Tensor) -> float:
        watch.read(tensor)
        return 0.0

    def tolist(tensor: Tensor) -> list[float]:
        watch.read(tensor)
        return [0.0] * tensor.numel()

    num_ranks = plan_of(case).num_ranks
    dist.init_process_group("fake", rank=case.rank, world_size=num_ranks, store=fake_pg.FakeStore())
    try:
        with (
            mock.patch.object(FakeTensor, "item", item),
            mock.patch.object(FakeTensor, "tolist", tolist),
            mock.patch.object(memory, "staging", watch.staging),
            mock.patch.object(memory, "reset_peak", return_value=None),
            mock.patch.object(memory, "peak_bytes", return_value=1),
            mock.patch.object(executor, "can_record", return_value=False),
            torch.no_grad(),
            _right_formulas(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
        ):
            yield mode
    finally:
        dist.destroy_process_group()


def _right_formulas() -> AbstractContextManager[object]:
    """For the time of the context, the formula that an old torch has wrong."""
    plain, wide = torch.ops.aten.addmm.default, torch.ops.aten.addmm.dtype_out
    if decomposition_table[wide] is not decomposition_table[plain]:
        return nullcontext()

    @functools.wraps(decomposition_table[plain])  # FakeTensorMode asks for names of torch's own
    def addmm(bias: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor, **scales: float) -> Tensor:
        assert torch.mm(a, b).shape == bias.shape == out.shape
        assert bias.dtype == out.dtype == dtype
        return out

    return mock.patch.dict(decomposition_table, {wide: addmm})


def take_step(case: Case) -> Step:
    """Build a rank's stages on ``cuda:0`` and take one step, with every tensor fake: the second one, since only a step
    that follows another has parameters to gather.
    """
    plan = plan_of(case)
    program = program_of(plan)
    own = program.ranks[case.rank]
    watch = _Watch(own)
    with _fake_world(case, watch):
        stages = build_stages(plan, own, device=CUDA, seed=0)
        training = TrainingSpec(global_batch=plan.global_batch, steps=4)
        runtime = Runtime(
            plan,
            program,
            case.rank,
            stages=stages,
            optimizers={number: AdamW(stage.parameters, training) for number, stage in stages.items()},
            transport=open_transport(program, plan.mesh, case.rank, _FakeGroups(CUDA)),
            device=CUDA,
        )
        runtime.warm_up()
        shape = (plan.num_sequences, plan.sequence_length)
        feed = BatchFeed(lambda step: (np.zeros(shape, np.int64), np.zeros(shape, np.int64)), shape, CUDA)
        ids, labels = feed.take(0)
        runtime.train_step(0, Batch(token_ids=ids, labels=labels, num_valid_tokens=ids.numel()))
        with watch:
            batch = Batch(token_ids=ids, labels=labels, num_valid_tokens=ids.numel())
            runtime.train_step(1, batch, watch)
    blocks = [block for stage in stages.values() for block in stage._blocks.values()]
    attentions = [vars(block)["_attention"] for block in blocks if isinstance(block, Attention)]
    backends = [vars(attention)["_backend"] for attention in attentions]
    parts = [*backends, *(vars(vars(block)["_norm"])["_norm"] for block in blocks)]
    return Step(chosen=tuple(dict.fromkeys(type(part).__name__ for part in parts)), tallies=watch.tallies)


class _IdleShards:
    """The other shards of a rank, from which nothing comes."""

    def start(self, request: Request) -> _IdleShards:
        return self

    def wait(self) -> None:
        """Nothing is under way."""


def take_actions(case: Case, sharding: Sharding, shard: int) -> Tally:
    """What the compute actions of one shard of a rank do together, each shape once; slices have odd lengths."""
    plan = dataclasses.replace(
        plan_of(case), slices=(39, 25), tp=sharding.tp, sequence_parallel=sharding.sequence_parallel
    )
    own = program_of(plan).ranks[case.rank]
    watch = _Watch(own)
    with _fake_world(case, watch):
        stages = build_stages(plan, own, shard=shard, device=CUDA, seed=0)
        optimizer_step = cast(OptimizerStep, None)  # compute actions reduce nothing
        own_executor = StageExecutor(plan, own, stages, optimizer_step, device=CUDA, shards=_IdleShards())
        with watch:
            own_executor.warm_up(own.instructions)
    return watch.tallies[BATCH]


def table() -> str:
    """The table of every case, for the installed torch."""
    head = [
        f"# One training step on cuda:0 under FakeTensorMode, torch {torch_minor()}. Written by",
        "# python -m tests.support.fake_step; per kind of action: actions, dispatches, those on the host,",
        "# waits of the host for the device, types on the device, messages to other ranks.",
    ]
    return "\n".join([*head, *(line for case in all_cases() for line in take_step(case).lines(case))]) + "\n"


def torch_minor() -> str:
    """The installed torch's major and minor version."""
    major, minor, *_ = torch.__version__.split(".")
    return f"{major}.{minor}"


def table_path() -> Path:
    """Where the installed torch's table is, or belongs."""
    return TABLES / f"torch-{torch_minor()}.txt"


def expected_lines(case: Case) -> list[str]:
    """The case's part of the installed torch's table."""
    lines = [line for line in table_path().read_text().splitlines() if not line.startswith("#")]
    starts = [at for at, line in enumerate(lines) if not line.startswith(" ")] + [len(lines)]
    for start, stop in pairwise(starts):
        if lines[start].startswith(f"{case}: "):
            return lines[start:stop]
    return []


def main() -> None:
    """Write the table."""
    TABLES.mkdir(exist_ok=True)
    table_path().write_text(table())
    sys.stdout.write(f"wrote {table_path()}\n")


if __name__ == "__main__":
    main()
