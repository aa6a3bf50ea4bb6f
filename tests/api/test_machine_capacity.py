"""What this machine has, as the service counts it."""

from __future__ import annotations

import os

import pytest

from penstock.api.executor.machine_capacity import devices_in, this_machine


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, 0, ()),
        (None, 2, ("0", "1")),
        ("", 2, ()),
        ("1", 2, ("1",)),
        ("3, 1", 4, ("3", "1")),
        ("1,1", 2, ("1",)),
        ("0,-1,1", 2, ("0",)),
        ("0,7,1", 2, ("0",)),
        ("GPU-8932f937,MIG-1/2/3", 2, ("GPU-8932f937", "MIG-1/2/3")),
        ("0", 0, ()),
    ],
)
def test_devices_are_those_that_cuda_would_see(visible: str | None, count: int, expected: tuple[str, ...]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices_in(environment, count) == expected


def test_this_machine_has_cores_and_memory() -> None:
    found = this_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 2**28
    assert found.devices == ()
