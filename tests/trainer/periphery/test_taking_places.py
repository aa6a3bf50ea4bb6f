"""Which device a rank's process takes, or which rank the process of a device: before it joins the others."""

from __future__ import annotations

import dataclasses
import os

import pytest

from penstock.core.device_mapping import VISIBLE
from penstock.core.plan import Plan
from penstock.trainer.__main__ import _set_visible_devices, _take_rank
from tests.support.small_plans import small_plan

PLACED = dataclasses.replace(small_plan(pp=2), tp=2, placement=(4, 0))
"""Shards of the first stage on devices 4 and 5, of the second on 0 and 1."""


def test_visible_devices_are_put_in_the_order_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "a,b,c,d,e,f")
    _set_visible_devices(PLACED)
    assert os.environ[VISIBLE] == "e,f,a,b"


@pytest.mark.parametrize("plan", [PLACED, dataclasses.replace(PLACED, placement=())])
def test_the_process_of_a_device_takes_the_rank_that_runs_there(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    taken = []
    for device in range(6):
        monkeypatch.setenv("RANK", str(device))
        monkeypatch.setenv("WORLD_SIZE", "6")
        taken.append(_take_rank(plan))
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(taken[-1]), "4")
    assert taken == ([2, 3, 4, 5, 0, 1] if plan.placement else [0, 1, 2, 3, 4, 5])
