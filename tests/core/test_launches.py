"""Launches on one machine: which fit next to others, what they hold, and what is left of those that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.capacity import Demand, Machine
from penstock.core.errors import UserError
from penstock.core.host.launches import Holding, InUseError, Launches

GIBIBYTE = 2**30
MACHINE = Machine(cores=4, memory_bytes=16 * GIBIBYTE)
DEVICES = Machine(cores=16, memory_bytes=16 * GIBIBYTE, devices=("0", "1", "2"))
CPUS = range(4)
HOLD = """
import sys
from pathlib import Path
from penstock.core.capacity import Demand, Machine
from penstock.core.host.launches import Launches

launches = Launches(Path(sys.argv[1]), Machine(cores=4, memory_bytes=2**40), cpus=range(4))
with launches.held("run directory /elsewhere", Demand(cores=3)):
    print("held", flush=True)
    sys.stdin.read()
"""


def names(devices: Iterable[str]) -> tuple[str, ...]:
    """Devices that have no other name."""
    return tuple(devices)


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "launches", MACHINE, CPUS)


@pytest.fixture
def on_devices(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "launches", DEVICES, range(16), names)


def refusal(launches: Launches, demand: Demand, devices: tuple[str, ...] | None = None) -> InUseError:
    with pytest.raises(InUseError) as caught, launches.held("this one", demand, devices=devices):
        pass
    return caught.value


# Cores and memory


def test_launches_go_on_side_by_side_while_they_fit(launches: Launches) -> None:
    with launches.held("one", Demand(cores=2, memory_bytes=8 * GIBIBYTE)) as devices:
        assert devices == ()
        with launches.held("two", Demand(cores=2, memory_bytes=8 * GIBIBYTE)):
            assert sorted(holding.what for holding in launches.holdings()) == ["one", "two"]
    assert launches.holdings() == []


def test_the_refusal_of_a_launch_names_the_missing_resources_and_their_holders(launches: Launches) -> None:
    with launches.held("run directory /r", Demand(cores=3, memory_bytes=12 * GIBIBYTE)):
        mistake = refusal(launches, Demand(cores=2, memory_bytes=6 * GIBIBYTE))
    assert mistake.where == "this machine"
    assert mistake.what == (
        "this launch needs 2 cores of which 1 of 4 are free and 6 GiB of memory of which 4 GiB of 16 GiB are free: "
        f"process {os.getpid()} (run directory /r) holds 3 cores and 12 GiB of memory"
    )
    assert "wait" in mistake.remedy


def test_a_single_launch_may_request_more_than_the_machine_has(launches: Launches) -> None:
    with launches.held("one", Demand(cores=8, memory_bytes=64 * GIBIBYTE)):
        refusal(launches, Demand(cores=1))


def test_many_holders_are_counted(launches: Launches) -> None:
    with ExitStack() as stack:
        for number in range(4):
            stack.enter_context(launches.held(f"number {number}", Demand(cores=1)))
        assert "1 more hold" in refusal(launches, Demand(cores=1)).what


def test_launches_on_other_processors_leave_cores_alone(tmp_path: Path) -> None:
    """Cores are limited as by taskset; memory is shared by all launches."""
    one, other = (Launches(tmp_path, Machine(cores=2, memory_bytes=GIBIBYTE), cpus) for cpus in ((0, 1), (2, 3)))
    with one.held("one", Demand(cores=2, memory_bytes=GIBIBYTE)), other.held("other", Demand(cores=2)):
        assert "of memory of which" in refusal(other, Demand(memory_bytes=1)).what


def test_launches_of_one_job_are_not_counted(launches: Launches) -> None:
    """The attempt before may be about to end."""
    with launches.held("attempt 1", Demand(cores=4), uid="u-1"):
        refusal(launches, Demand(cores=4))
        with launches.held("attempt 2", Demand(cores=4), uid="u-1"):
            assert launches.others(["u-1"]) == []


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(1, 30),
)
def test_concurrent_launches_fit_or_there_is_only_one(
    demands: list[tuple[int, int]], cores: int, memory_bytes: int
) -> None:
    """A launch is refused only if it does not fit."""
    capacity = Demand(cores=cores, memory_bytes=memory_bytes)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        launches = Launches(Path(folder), Machine(cores=cores, memory_bytes=memory_bytes), CPUS)
        held: list[Demand] = []
        for wanted_cores, wanted_bytes in demands:
            demand, total = Demand(cores=wanted_cores, memory_bytes=wanted_bytes), Demand()
            for other in [*held, demand]:
                total = total.plus(other)
            try:
                stack.enter_context(launches.held("one", demand))
            except InUseError:
                assert held
                assert not total.fits(capacity)
            else:
                assert not held or total.cores <= cores
                held.append(demand)
        assert len(launches.holdings()) == len(held)


# Devices


def test_launches_get_separate_devices(on_devices: Launches) -> None:
    with (
        on_devices.held("one", Demand(cuda_devices=1)) as one,
        on_devices.held("two", Demand(cuda_devices=2)) as two,
    ):
        assert (one, two) == (("0",), ("1", "2"))
        mistake = refusal(on_devices, Demand(cuda_devices=1))
        assert "1 CUDA device of which 0 of 3 are free" in mistake.what
        assert f"process {os.getpid()} (one) holds 1 CUDA device" in mistake.what
        with on_devices.held("on processors", Demand(cores=2)):
            pass
    with on_devices.held("three", Demand(cuda_devices=1)) as three:
        assert three == ("0",)


def test_devices_chosen_by_the_caller_are_held_if_they_are_free(on_devices: Launches) -> None:
    with on_devices.held("a service's", Demand(cuda_devices=1), devices=("1",)) as given:
        assert given == ("1",)
        assert on_devices.devices_of(on_devices.holdings()) == ("1",)
        assert "(a service's)" in refusal(on_devices, Demand(cuda_devices=1), devices=("1",)).what
        with on_devices.held("next", Demand(cuda_devices=2)) as free:
            assert free == ("0", "2")


def test_a_device_under_another_name_is_the_same(tmp_path: Path) -> None:
    uuids = {"GPU-a": "0", "GPU-b": "1"}
    by_uuid = Machine(cores=4, memory_bytes=GIBIBYTE, devices=("GPU-a", "GPU-b"))
    by_number = Machine(cores=4, memory_bytes=GIBIBYTE, devices=("0", "1"))
    one, other = (
        Launches(tmp_path, machine, CPUS, lambda devices: tuple(uuids.get(name, name) for name in devices))
        for machine in (by_uuid, by_number)
    )
    with one.held("one", Demand(cuda_devices=1)) as first, other.held("other", Demand(cuda_devices=1)) as second:
        assert (first, second) == (("GPU-a",), ("1",))


def test_devices_that_no_driver_lists_have_one_launch(launches: Launches) -> None:
    with launches.held("one", Demand(cores=1, cuda_devices=1)) as devices:
        assert devices == (), "all that the process may use"
        assert "(one)" in refusal(launches, Demand(cores=1, cuda_devices=1)).what
        with launches.held("on processors", Demand(cores=1)):
            pass


# Processes


def test_resources_of_a_killed_process_are_free(launches: Launches, tmp_path: Path) -> None:
    folder = tmp_path / "launches"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert f"process {process.pid} (run directory /elsewhere)" in refusal(launches, Demand(cores=2)).what
        process.kill()
    assert len(list(folder.glob("*.json"))) == 1
    with launches.held("one", Demand(cores=2)):
        assert [holding.pid for holding in launches.holdings()] == [os.getpid()]
        assert len(list(folder.glob("*.json"))) == 1


def test_of_simultaneous_launches_only_those_that_fit_start(launches: Launches) -> None:
    outcomes: list[bool] = []
    all_tried, begin = threading.Barrier(8), threading.Barrier(8)

    def launch() -> None:
        begin.wait()
        try:
            with launches.held("one", Demand(cores=1)):
                all_tried.wait()
                outcomes.append(True)
        except InUseError:
            all_tried.wait()
            outcomes.append(False)

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 4 + [True] * 4


def test_a_launch_that_cannot_be_read_is_named(launches: Launches, tmp_path: Path) -> None:
    with launches.held("one", Demand(cores=1)):
        (path,) = (tmp_path / "launches").glob("*.json")
        path.write_text('{"pid": 1, "unheardOf": 2}')
        (holding,) = launches.holdings()
        assert str(path) in holding.what


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"cannot be written(.|\n)*XDG_STATE_HOME"),
        Launches(tmp_path / "file" / "launches", MACHINE, CPUS).held("one", Demand(cores=1)),
    ):
        pass


def test_holdings_are_read_back() -> None:
    holding = Holding(
        pid=1, what="a run", cores=2, cuda_devices=1, memory_bytes=3, cpus=(0, 1), devices=("0",), uid="u"
    )
    assert Holding.from_manifest(holding.to_manifest()) == holding
