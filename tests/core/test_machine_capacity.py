"""Capacity of the machine, as launches and the service count it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.core.host.machine_capacity import addresses_of, devices_in, this_machine


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


# One name for a device

INFORMATION = (
    "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 17\nGPU UUID: \t {}\nBus Type: \t PCIe\nDevice Minor: \t {}\n"
)


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Write the driver's list of three devices, without details of the last."""
    for minor, (address, uuid) in enumerate([("0000:19:00.0", "GPU-aa11"), ("0000:03:00.0", "GPU-bb22")]):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(INFORMATION.format(uuid, minor))
    (tmp_path / "0000:5d:00.0").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("0", "1", "2"), ("0000:03:00.0", "0000:19:00.0", "0000:5d:00.0")),
        (("GPU-aa11",), ("0000:19:00.0",)),
        (("GPU-bb",), ("0000:03:00.0",)),
        (("7", "GPU-cc", "MIG-1/2"), ("7", "GPU-cc", "MIG-1/2")),
        ((), ()),
    ],
)
def test_a_device_has_one_address_by_number_and_by_uuid(
    driver: Path, names: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert addresses_of(names, driver) == expected


def test_without_a_driver_device_names_are_kept(tmp_path: Path) -> None:
    assert addresses_of(("0", "GPU-aa11"), tmp_path / "none") == ("0", "GPU-aa11")
