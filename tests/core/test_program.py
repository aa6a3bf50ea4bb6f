"""A Program's manifest form: a whole one comes back the same, and a mistake in it has its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.core.errors import ProgramError, UserError
from penstock.core.invariants import prove
from penstock.core.program import Program
from penstock.core.serialization import yamltext
from tests.support.small_programs import SPLIT_BACKWARD, TWO_MICROBATCHES, lowered

PROGRAM = lowered(SPLIT_BACKWARD, slices=(3, 5), dp=True, tie=(0, 1))


@pytest.mark.parametrize("program", [PROGRAM, lowered(TWO_MICROBATCHES)], ids=["split", "full"])
@pytest.mark.parametrize("text", [json.dumps, yamltext.dump], ids=["json", "yaml"])
def test_a_program_round_trips(program: Program, text: Any) -> None:
    parsed = Program.from_manifest(yamltext.load(text(program.to_manifest())))
    assert parsed == program
    assert parsed.digest == program.digest
    assert prove(parsed) == prove(program)


def test_actions_are_written_as_their_text() -> None:
    for rank, written in zip(PROGRAM.ranks, PROGRAM.to_manifest()["ranks"], strict=True):
        assert [each["action"] for each in written["instructions"]] == [str(each.action) for each in rank.instructions]


MISTAKES = [("1X0.0", "write stage, kind, micro-batch and slice"), (7, "write an action's text")]


@pytest.mark.parametrize(("action", "remedy"), MISTAKES)
def test_an_invalid_action_is_refused_with_its_field(action: Any, remedy: str) -> None:
    manifest = PROGRAM.to_manifest()
    manifest["ranks"][1]["instructions"][0]["action"] = action
    with pytest.raises(UserError) as caught:
        Program.from_manifest(manifest)
    assert caught.value.where == "ranks[1].instructions[0].action"
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize("slot", [-1, 999])
def test_a_slot_that_the_rank_lacks_is_refused_by_the_proof(slot: int) -> None:
    manifest = PROGRAM.to_manifest()
    manifest["ranks"][1]["instructions"][0].setdefault("acquires", []).append(slot)
    with pytest.raises(ProgramError):
        prove(Program.from_manifest(manifest))
