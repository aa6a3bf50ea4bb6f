"""A whole training step on ``cuda:0``, without a GPU: devices, types, messages, kernels chosen, waits of the host."""

from __future__ import annotations

import pytest

from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.core.sharding import Sharding
from tests.support import fake_step
from tests.support.fake_step import Case, Step, all_cases, take_step
from tests.support.not_run import missing

CASES = list(all_cases())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_on_cuda_makes_the_calls_of_the_table(case: Case) -> None:
    """An unreviewed change fails, too: ``python -m tests.support.fake_step`` rewrites the table."""
    step = take_step(case)
    _check_whatever_the_version(case, step)
    if not fake_step.table_path().exists():
        missing("cuda-tables", f"no table for torch {fake_step.torch_minor()}: python -m tests.support.fake_step")
    assert list(step.lines(case)) == fake_step.expected_lines(case)


def _check_whatever_the_version(case: Case, step: Step) -> None:
    attention = "CudaFlash" if case.precision is Precision.BF16 else "PlainAttention"
    assert set(step.chosen) <= {attention, "FusedRmsNorm" if case.family is Family.LLAMA else "LayerNorm"}
    assert {"F", "START_REDUCE(norm)", "WAIT_REDUCE(norm)", "STEP"} < set(step.tallies)
    waits = {kind: tally.waits for kind, tally in step.tallies.items() if tally.waits}
    assert waits == {"STEP": 1}, "the host waits for the device once, at the end"
    for kind, tally in step.tallies.items():
        if kind not in (fake_step.BATCH, "STEP"):
            assert tally.on_host == 0, f"{kind} computes on the host"
        if kind.startswith(("SEND", "POST_RECV")):
            assert tally.types <= {"float32" if case.precision is Precision.FP32 else "bfloat16"}


def test_a_version_without_a_table_is_skipped_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_step, "torch_minor", lambda: "2.999")
    monkeypatch.delenv("PENSTOCK_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"NOT RUN: no table for torch 2\.999"):
        test_a_step_on_cuda_makes_the_calls_of_the_table(CASES[0])


def test_the_table_has_every_case_and_no_other() -> None:
    if not fake_step.table_path().exists():
        missing("cuda-tables", f"no table for torch {fake_step.torch_minor()}: python -m tests.support.fake_step")
    lines = fake_step.table_path().read_text().splitlines()
    assert [line.partition(": ")[0] for line in lines if line[0] not in "# "] == [str(case) for case in CASES]


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_actions_of_shards_on_cuda_never_wait_for_the_device(family: Family, sequence_parallel: bool) -> None:
    """The last of four shards holds fewer rows than there are, and the slices' tokens do not divide evenly."""
    for rank in range(fake_step.NUM_RANKS):
        case = fake_step.Case(family=family, precision=Precision.BF16, schedule="zb", rank=rank)
        tally = fake_step.take_actions(case, Sharding(4, sequence_parallel), shard=3)
        assert (tally.waits, tally.on_host) == (0, 0)
