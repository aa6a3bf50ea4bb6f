"""Graph of a unit's buffers: which buffers exist, their inputs, and the operations that recompute them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.layout import (
    GRADIENT,
    INPUT,
    TOKENS,
    Operation,
    Precision,
    SlotKind,
    aligned,
    remaking,
    stage_slot_bytes,
    unit_graph,
)
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.sharding import WHOLE, Sharding

LLAMA = ModelSpec(family=Family.LLAMA, layers=2, hidden=16, heads=4, kv_heads=2, vocab=23, ffn_hidden=12)
GPT2 = ModelSpec(family=Family.GPT2, layers=2, hidden=16, heads=4, vocab=23, positions=12)
SPECS = st.sampled_from([LLAMA, GPT2])
ORDER = list(Operation)


@given(SPECS, st.sampled_from(UnitKind), st.integers(1, 3), st.integers(1, 7))
def test_every_buffer_is_computed_from_earlier_buffers(
    spec: ModelSpec, kind: UnitKind, batch: int, tokens: int
) -> None:
    """Names are unique, and inputs are given, of an earlier operation, or of the same one in backward."""
    graph = unit_graph(spec, kind, batch, tokens)
    by_name = {saved.buffer.name: saved for saved in graph}
    assert len(by_name) == len(graph)
    for saved in graph:
        assert saved.inputs
        for name in saved.inputs:
            if name not in (INPUT, TOKENS, GRADIENT):
                before, after = ORDER.index(by_name[name].operation), ORDER.index(saved.operation)
                assert before < after or saved.operation is Operation.BACKWARD
    for saved in graph:
        seen: set[str] = set()
        pending = list(saved.inputs)
        while pending:
            name = pending.pop()
            assert name != saved.buffer.name, "is made from itself"
            if name in by_name and name not in seen:
                seen.add(name)
                pending += by_name[name].inputs


@given(SPECS, st.sampled_from(Precision), st.sampled_from(SlotKind), st.integers(1, 3), st.integers(1, 7))
def test_the_bytes_of_a_slot_are_those_of_the_graph(
    spec: ModelSpec, precision: Precision, slot: SlotKind, batch: int, tokens: int
) -> None:
    """But for the hidden states that pass between stages, and a last output that is one of them."""
    for unit in spec.units:
        graph = unit_graph(spec, unit.kind, batch, tokens)
        declared = [saved.buffer for saved in graph if saved.slot is slot]
        if unit.index + 1 < spec.num_units:
            declared = [buffer for buffer in declared if buffer.name != "y"]
        found = stage_slot_bytes(spec, precision, unit.index, unit.index + 1, slot, batch, tokens)
        if declared:
            assert found == sum(aligned(buffer.num_bytes(precision)) for buffer in declared)


def _bytes_of(sharding: Sharding) -> dict[str, int]:
    """Of every buffer of a block and the embedding."""
    graph = [saved.buffer for kind in UnitKind for saved in unit_graph(GPT2, kind, 2, 4, sharding)]
    return {buffer.name: buffer.num_bytes(Precision.BF16) for buffer in graph}


def test_without_sequence_parallelism_hidden_states_and_norms_are_on_every_shard() -> None:
    """Megatron-LM, arXiv 1909.08053, section 3."""
    alone, shared = _bytes_of(WHOLE), _bytes_of(Sharding(2, sequence_parallel=False))
    whole = {name for name, num_bytes in shared.items() if num_bytes == alone[name]}
    assert whole == {"y", "dy", "normed", "rstd", "mean"}
    assert all(2 * num_bytes == alone[name] for name, num_bytes in shared.items() if name not in whole)


def test_with_sequence_parallelism_a_shard_has_its_part_of_all_but_what_is_gathered() -> None:
    """Hidden states by tokens (arXiv 2205.05198, section 4.2); ``dy`` is gathered in place."""
    alone, shared = _bytes_of(WHOLE), _bytes_of(Sharding(2))
    assert {name for name, num_bytes in shared.items() if num_bytes == alone[name]} == {"dy"}
    assert all(2 * num_bytes == alone[name] for name, num_bytes in shared.items() if name != "dy")


NORM, PROJECT, ATTEND, ACTIVATE, OUTPUT = (
    Operation.NORM,
    Operation.PROJECT,
    Operation.ATTEND,
    Operation.ACTIVATE,
    Operation.OUTPUT,
)


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_the_operations_that_recompute_a_unit(spec: ModelSpec) -> None:
    """All operations of F if the output is needed. The head keeps no buffer, so none is recomputed."""
    expected = {
        UnitKind.EMBEDDING: (Operation.EMBED,),
        UnitKind.ATTENTION: (NORM, PROJECT, ATTEND, OUTPUT),
        UnitKind.MLP: (NORM, PROJECT, ACTIVATE, OUTPUT),
        UnitKind.HEAD: (),
    }
    assert {kind: remaking(spec, kind) for kind in UnitKind} == expected
    without = {kind: operations[:-1] for kind, operations in expected.items()}
    assert {kind: remaking(spec, kind, with_output=False) for kind in UnitKind} == without
