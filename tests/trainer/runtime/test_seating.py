"""Ranks sit on the devices of the plan, by the order in which devices are made visible to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.trainer.seating import seated


@given(st.integers(1, 6).flatmap(lambda count: st.permutations(range(count))))
def test_the_rth_visible_device_is_that_of_rank_r(placement: list[int]) -> None:
    names = [f"GPU-{number}" for number in range(8)]
    assert seated(placement, ",".join(names)).split(",") == [names[device] for device in placement]
    assert seated(placement, None).split(",") == [str(device) for device in placement]


def test_a_device_that_is_not_visible_is_refused() -> None:
    with pytest.raises(UserError, match="puts a rank on device 2, and CUDA_VISIBLE_DEVICES names 2"):
        seated((2, 0), "4,7")
