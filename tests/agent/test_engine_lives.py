"""The engine's table of lives on the backend of ``penstock run``, whose workers follow scripts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from penstock.core.errors import UserError
from penstock.core.lifecycle import Phase
from tests.support.engine_cases import IN_PROCESS, Case, End, Outcome, expected
from tests.support.fake_workers import FakeWorkers
from tests.support.running_locally import Bench
from tests.support.scripted_supervisor import SCRIPTS

NUM_STEPS = 3


def local_outcome(case: Case, root: Path) -> Outcome:
    """Run the case's job; its user suspends it by Ctrl-C."""
    policy = {f"runPolicy__{name}": value for name, value in case.policy.items()}
    bench = Bench(root, FakeWorkers(scripts=[SCRIPTS[end] for end in case.ends]), **policy)
    pending = [True]

    def meanwhile() -> None:
        if pending and len(bench.show.steps) >= NUM_STEPS:
            pending.clear()
            bench.now += case.passes_seconds
            bench.ahead_seconds += case.jump_seconds
            if case.suspends:
                bench.requests(signal.SIGINT)

    bench.meanwhile = meanwhile
    try:
        state = bench.execute()
    except UserError:
        state = bench.state
    life = tuple((change.phase, change.reason) for change in bench.show.phases)
    return Outcome(life=life, started=tuple(number for number, _ in bench.show.launches), failures=state.failures)


@pytest.mark.parametrize("case", IN_PROCESS, ids=lambda case: case.name)
def test_the_life_of_a_run(case: Case, tmp_path: Path) -> None:
    assert local_outcome(case, tmp_path) == expected(case)


def test_the_table_has_a_life_for_every_end_but_that_of_a_supervisor() -> None:
    ends = {end for case in IN_PROCESS for end in case.ends}
    assert ends == set(End) - {End.VANISHES}
    assert {case.life[-1][0] for case in IN_PROCESS} == {Phase.SUCCEEDED, Phase.FAILED, Phase.SUSPENDED}
