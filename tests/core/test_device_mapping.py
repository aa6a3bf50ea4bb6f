"""Ranks sit on the devices of the plan, by the order in which devices are made visible to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.device_mapping import ranks_of_devices, require_shards_in_pods, visible_devices
from penstock.core.errors import UserError


@given(st.integers(1, 6).flatmap(lambda count: st.permutations(range(count))))
def test_the_rth_visible_device_is_that_of_rank_r(placement: list[int]) -> None:
    names = [f"GPU-{number}" for number in range(8)]
    assert visible_devices(placement, ",".join(names)).split(",") == [names[device] for device in placement]
    assert visible_devices(placement, None).split(",") == [str(device) for device in placement]


def test_a_device_that_is_not_visible_is_refused() -> None:
    with pytest.raises(UserError, match="puts a rank on device 2, but CUDA_VISIBLE_DEVICES names only 2"):
        visible_devices((2, 0), "4,7")


@given(st.integers(1, 8).flatmap(lambda count: st.permutations(range(count))), st.data())
def test_over_hosts_every_device_has_a_rank_and_the_plan_s_are_where_it_says(
    order: list[int], data: st.DataObject
) -> None:
    placement = order[: data.draw(st.integers(0, len(order)))]
    ranks = ranks_of_devices(placement, len(order))
    assert sorted(ranks) == list(range(len(order)))
    assert [ranks[device] for device in placement] == list(range(len(placement)))


def test_over_hosts_devices_without_work_follow_in_order() -> None:
    assert ranks_of_devices((3, 1), 5) == (2, 1, 3, 0, 4)


def test_over_hosts_a_missing_device_is_refused() -> None:
    with pytest.raises(UserError, match=r"plan.placement: puts a rank on device 4, but there are only 4"):
        ranks_of_devices((0, 4), 4)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_shards_in_order_are_in_one_pod_or_refused(num_groups: int, tp: int, ranks_per_pod: int) -> None:
    pods = [{rank // ranks_per_pod for rank in range(group * tp, group * tp + tp)} for group in range(num_groups)]
    if all(len(of_group) == 1 for of_group in pods):
        require_shards_in_pods(num_groups * tp, tp, ranks_per_pod)
        return
    with pytest.raises(UserError, match=r"plan.tp: puts ranks \d+ to \d+, the \d+ shards of one pipeline rank"):
        require_shards_in_pods(num_groups * tp, tp, ranks_per_pod)
