"""Stages that run some operations again: the same bits as if all had been kept, and nothing else is run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.layout import EVERY_OPERATION, HEAD_CHUNK_TOKENS, Operation, Precision, remaking
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.remaking import Remake, Remakes, full_remakes, uniform_remakes
from penstock.core.schedule import Kind
from penstock.core.sharding import Collective, Sharding
from penstock.trainer.stage import Stage
from penstock.trainer.units.activation import SigmoidGelu, SwiGlu
from penstock.trainer.units.backends import PlainAttention
from penstock.trainer.units.collectives import Pass
from penstock.trainer.units.embedding import Embedding
from penstock.trainer.units.linear import Linear, RowParallelLinear
from penstock.trainer.units.norm import BlockNorm
from tests.support.remaking import random_remakes
from tests.support.sharded_pipeline import ShardedPipeline
from tests.support.stage_pipeline import CPU, HandPipeline
from tests.trainer.units.test_shards import check_against_reference, strengthen
from tests.trainer.units.test_stage_gradients import sample

LLAMA = ModelSpec(family=Family.LLAMA, layers=2, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=2, hidden=16, heads=4, vocab=22, ffn_hidden=20, positions=12)
SPECS = [pytest.param(LLAMA, id="llama"), pytest.param(GPT2, id="gpt2")]
BY_TOKENS = Sharding(2)
FORWARD = tuple(operation for operation in Operation if operation is not Operation.BACKWARD)
BLOCK = FORWARD[1:]
"""What attention and MLP run."""


def check_same_bits(make: Callable[[bool | Sequence[Remakes]], ShardedPipeline], remakes: Sequence[Remakes]) -> None:
    """Losses and gradients of a step with recomputation, and without."""
    kept, remade = make(False), make(remakes)
    ids, labels = sample(kept.spec, 2 * kept.batch, kept.bounds[-1])
    losses, gradients = [], []
    for pipeline in (kept, remade):
        losses.append(pipeline.step(ids, labels, 0.1))
        gradients.append(pipeline.gradients)
    assert torch.equal(*losses)
    assert not any(gradient.isnan().any() for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@st.composite
def _cases(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[Remakes, ...]]:
    """A pipeline over a random model, partition and slicing, and what its stages run again."""
    tp = draw(st.sampled_from([1, 1, 2]))
    parts = draw(st.integers(1, 3))
    family = draw(st.sampled_from(Family))
    spec = ModelSpec(
        family=family,
        layers=draw(st.integers(1, 3)),
        hidden=8 * tp,
        heads=2 * tp,
        kv_heads=tp if family is Family.LLAMA else 0,
        vocab=draw(st.integers(tp * parts, tp * parts + 9)),
        ffn_hidden=draw(st.integers(1, 5)) * tp,
    ).divided(parts)
    length = draw(st.integers(2, 9))
    cuts = sorted({0, spec.num_units, *draw(st.lists(st.integers(1, spec.num_units - 1), max_size=3))})
    place = {
        "spec": spec,
        "sharding": Sharding(tp, draw(st.booleans())),
        "cuts": cuts,
        "bounds": sorted({0, length, *draw(st.lists(st.integers(1, length - 1), max_size=3))}),
        "batch": draw(st.integers(1, 3)),
        "inside": draw(st.sampled_from([None, Kind.B, Kind.I])),
    }
    return place, random_remakes(spec, list(pairwise(cuts)), draw(st.integers(0, 2**30)))


@settings(max_examples=40)
@given(_cases(), st.integers(0, 2**30))
def test_gradients_are_exact_whatever_is_run_again(case: tuple[dict[str, Any], tuple[Remakes, ...]], seed: int) -> None:
    place, remakes = case
    pipeline = ShardedPipeline(**place, recompute=remakes)
    strengthen(pipeline)
    check_against_reference(pipeline, seed)


@settings(max_examples=40)
@given(_cases(), st.sampled_from(Precision))
def test_bits_are_the_same_whatever_is_run_again(
    case: tuple[dict[str, Any], tuple[Remakes, ...]], precision: Precision
) -> None:
    place, remakes = case
    check_same_bits(lambda recompute: ShardedPipeline(**place, precision=precision, recompute=recompute), remakes)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sharding", [Sharding(1), BY_TOKENS, Sharding(2, sequence_parallel=False)])
@pytest.mark.parametrize("operations", [each for n in (1, 2) for each in itertools.combinations(FORWARD, n)])
def test_one_or_two_operations_of_all_units(
    spec: ModelSpec, sharding: Sharding, operations: tuple[Operation, ...]
) -> None:
    divided, cuts = spec.divided(2), [0, 3, 6, 7]
    remakes = [uniform_remakes(divided, stage, operations) for stage in pairwise(cuts)]
    check_same_bits(
        lambda recompute: ShardedPipeline(divided, sharding, cuts, [0, 5, 12], batch=2, recompute=recompute), remakes
    )


@pytest.mark.parametrize("operations", [(Operation.ACTIVATE,), (Operation.NORM, Operation.PROJECT)])
def test_parts_of_a_head_with_slices_longer_than_a_chunk(operations: tuple[Operation, ...]) -> None:
    """F has memory for the probabilities of one chunk if R recomputes them."""
    spec = ModelSpec(family=Family.LLAMA, layers=1, hidden=8, heads=4, kv_heads=2, vocab=7, ffn_hidden=8).divided(3)
    cuts, bounds = [0, 3, 6], [0, 300, 2 * HEAD_CHUNK_TOKENS]
    remakes = [(), (Remake(unit=UnitKind.HEAD, count=2, operations=operations),)]
    check_same_bits(lambda recompute: ShardedPipeline(spec, BY_TOKENS, cuts, bounds, recompute=recompute), remakes)


class Log:
    """What ran, as operations; wraps the methods that do them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[Operation] = []
        self._monkeypatch = monkeypatch
        for owner, operation in (
            (BlockNorm, Operation.NORM),
            (Linear, Operation.PROJECT),
            (PlainAttention, Operation.ATTEND),
            (SwiGlu, Operation.ACTIVATE),
            (SigmoidGelu, Operation.ACTIVATE),
            (Embedding, Operation.EMBED),
        ):
            self._wrap(owner, "forward", operation)
        self._wrap(RowParallelLinear, "forward_onto", Operation.OUTPUT)

    def _wrap(self, owner: type, name: str, operation: Operation) -> None:
        method = getattr(owner, name)

        def logged(*arguments: object, **named: object) -> object:
            self.ran.append(operation)
            return method(*arguments, **named)

        self._monkeypatch.setattr(owner, name, logged)


def _logged_recomputation(monkeypatch: pytest.MonkeyPatch, log: Log) -> list[Operation]:
    """Gathers what ran in R alone."""
    ran: list[Operation] = []
    recompute = Stage.recompute

    def logged(*arguments: Any, **named: Any) -> Pass[None]:
        log.ran.clear()
        yield from recompute(*arguments, **named)
        ran.extend(log.ran)

    monkeypatch.setattr(Stage, "recompute", logged)
    return ran


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", range(5))
def test_a_recomputation_runs_what_the_plan_names_in_order(
    monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, seed: int
) -> None:
    """But for the outputs that no backward reads: the stages' last ones and that before the head."""
    log = Log(monkeypatch)
    ran = _logged_recomputation(monkeypatch, log)
    cuts = [0, 4, 6]
    pipeline = HandPipeline(
        spec,
        cuts,
        [0, 12],
        recompute=random_remakes(spec, list(pairwise(cuts)), seed),
        backend=PlainAttention(CPU, torch.float64, 12),
    )
    pipeline.step(*sample(spec, 1), 1.0)
    expected: list[Operation] = []
    for stage, unread in (((4, 6), 4), ((0, 4), 3)):
        remade = dict(enumerate(pipeline.remade[cuts.index(stage[0])], start=stage[0]))
        for unit, operations in remade.items():
            own = operations - ({Operation.OUTPUT} if unit == unread else set())
            expected += [operation for operation in Operation if operation in own]
    assert ran == expected


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("operations", [each for n in range(1, 5) for each in itertools.combinations(BLOCK, n)])
def test_shards_meet_for_products_alone(spec: ModelSpec, operations: tuple[Operation, ...]) -> None:
    """The first one needs the norm of all tokens, the second one sums and scatters."""
    asked = []
    remakes = uniform_remakes(spec, (1, 4), operations)
    for recompute in ((), remakes):
        pipeline = ShardedPipeline(spec, BY_TOKENS, [0, 1, 4, 6], [0, 11], recompute=[(), recompute, ()])
        pipeline.step(*sample(spec, 1, 11), 1.0)
        asked.append(sorted(request.collective for request in pipeline.rank.members[0].requests))
    gathers = [Collective.GATHER] * 3 * (Operation.PROJECT in operations)
    scatters = [Collective.SCATTER] * 2 * (Operation.OUTPUT in operations)
    assert asked[1] == sorted([*asked[0], *gathers, *scatters])


def test_full_remakes_are_all_that_any_unit_runs() -> None:
    spec = LLAMA.divided(2)
    for remake in full_remakes(spec, (0, spec.num_units)):
        own = {operation for part in range(2) for operation in remaking(spec, remake.unit, part=part)}
        assert set(remake.operations) == own <= EVERY_OPERATION
