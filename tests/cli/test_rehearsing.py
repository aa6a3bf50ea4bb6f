"""How many processes a rehearsal takes; that they play is seen in `tests/integration/test_cli.py`."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.cli.local.rehearsing import MOST_RANKS, ranks_of
from penstock.core.errors import UserError
from tests.support.small_plans import small_plan


def test_every_place_in_every_pipeline_is_a_process() -> None:
    assert ranks_of(small_plan(pp=2, dp=3)) == 6


def test_tensor_parallel_peers_are_one_process() -> None:
    assert ranks_of(dataclasses.replace(small_plan(pp=2, dp=3), tp=4)) == 6


def test_more_than_a_machine_bears_are_refused_before_any_starts() -> None:
    assert ranks_of(small_plan(pp=2, dp=MOST_RANKS // 2)) == MOST_RANKS
    with pytest.raises(UserError, match=r"needs 66 processes(.|\n)*remedy: .*penstock simulate"):
        ranks_of(small_plan(pp=2, dp=MOST_RANKS // 2 + 1))
