"""Which waiting jobs start: nothing beyond the machine, nothing past its turn, and always something that can."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.executor.admission import Waiting, admitted, assigned
from penstock.core.capacity import Demand, Machine, demand_of, lacking
from penstock.core.job import PipelineJob
from tests.support.service import job_manifest

CAPACITIES = st.builds(Demand, cores=st.integers(0, 8), cuda_devices=st.integers(0, 4), memory_bytes=st.integers(0, 16))
DEMANDS = st.builds(Demand, cores=st.integers(0, 10), cuda_devices=st.integers(0, 5), memory_bytes=st.integers(0, 20))
QUEUES = st.lists(st.tuples(st.integers(-2, 2), DEMANDS), max_size=8).map(
    lambda jobs: [
        Waiting(uid=str(number), number=number, priority=priority, demand=demand)
        for number, (priority, demand) in enumerate(jobs)
    ]
)
RUNNING = st.lists(DEMANDS, max_size=3)
DEVICES = st.lists(st.sampled_from("0123456789"), unique=True)


def total(demands: list[Demand]) -> Demand:
    found = Demand()
    for demand in demands:
        found = found.plus(demand)
    return found


def before(one: Waiting, other: Waiting) -> bool:
    """Whether it is one's turn before the other's."""
    return (one.priority, -one.number) > (other.priority, -other.number)


@given(QUEUES, RUNNING, CAPACITIES)
def test_what_is_admitted_fits_beside_what_runs(
    waiting: list[Waiting], running: list[Demand], capacity: Demand
) -> None:
    found = admitted(waiting, running, capacity)
    chosen = [job.demand for job in waiting if job.uid in found]
    assert not chosen or total([*running, *chosen]).fits(capacity)


@given(QUEUES, RUNNING, CAPACITIES)
def test_no_job_passes_one_that_waits_before_it_and_could_ever_start(
    waiting: list[Waiting], running: list[Demand], capacity: Demand
) -> None:
    found = admitted(waiting, running, capacity)
    held_up = [job for job in waiting if job.uid not in found and job.demand.fits(capacity)]
    assert not [(one, job) for job in waiting if job.uid in found for one in held_up if before(one, job)]


@given(QUEUES, RUNNING, CAPACITIES)
def test_the_first_that_is_held_up_has_no_room(waiting: list[Waiting], running: list[Demand], capacity: Demand) -> None:
    """Nobody waits for nothing."""
    found = admitted(waiting, running, capacity)
    held_up = [job for job in waiting if job.uid not in found and job.demand.fits(capacity)]
    if held_up:
        first = max(held_up, key=lambda job: (job.priority, -job.number))
        chosen = [job.demand for job in waiting if job.uid in found]
        assert not total([*running, *chosen, first.demand]).fits(capacity)


@given(QUEUES, RUNNING, CAPACITIES, DEMANDS, st.integers(-3, 3))
def test_a_job_larger_than_the_machine_neither_starts_nor_holds_up_others(
    waiting: list[Waiting], running: list[Demand], capacity: Demand, more: Demand, priority: int
) -> None:
    larger = Waiting(
        uid="larger", number=-1, priority=priority, demand=capacity.plus(more).plus(Demand(memory_bytes=1))
    )
    assert admitted([*waiting, larger], running, capacity) == admitted(waiting, running, capacity)


@given(QUEUES, CAPACITIES)
def test_an_empty_machine_starts_something_that_fits(waiting: list[Waiting], capacity: Demand) -> None:
    assert bool(admitted(waiting, [], capacity)) == any(job.demand.fits(capacity) for job in waiting)


@given(QUEUES, RUNNING, CAPACITIES, st.randoms())
def test_the_order_of_the_list_does_not_matter(
    waiting: list[Waiting], running: list[Demand], capacity: Demand, chance: Any
) -> None:
    shuffled = [*waiting]
    chance.shuffle(shuffled)
    assert admitted(shuffled, running, capacity) == admitted(waiting, running, capacity)


# Which devices


@given(QUEUES, DEVICES, DEVICES)
def test_no_device_is_given_twice_or_while_it_is_held(
    starting: list[Waiting], held: list[str], devices: list[str]
) -> None:
    given = [name for names in assigned(starting, held, devices).values() for name in names]
    assert len(given) == len({*given})
    assert {*given} <= {*devices} - {*held}


@given(QUEUES, DEVICES)
def test_a_job_gets_as_many_devices_as_it_needs_or_does_not_start(starting: list[Waiting], devices: list[str]) -> None:
    found = assigned(starting, [], devices)
    assert all(len(found[job.uid]) == job.demand.cuda_devices for job in starting if job.uid in found)


@given(QUEUES, st.lists(st.integers(1, 2), max_size=3), DEVICES)
def test_whoever_is_admitted_gets_devices(waiting: list[Waiting], running: list[int], devices: list[str]) -> None:
    """Next to jobs that hold as many as they were counted with."""
    machine = Machine(cores=100, memory_bytes=1000, devices=tuple(devices))
    demands = [Demand(cuda_devices=count) for count in running]
    found = admitted(waiting, demands, machine.capacity)
    starting = [job for job in waiting if job.uid in found]
    assert {*assigned(starting, devices[: sum(running)], devices)} == found


def test_two_jobs_of_one_device_have_one_each() -> None:
    jobs = [Waiting(uid=uid, number=0, priority=0, demand=Demand(cores=1, cuda_devices=1)) for uid in ("a", "b")]
    assert assigned(jobs, [], ["0", "1"]) == {"a": ("0",), "b": ("1",)}
    assert assigned(jobs[1:], ["0"], ["0", "1"]) == {"b": ("1",)}


def test_a_job_without_devices_starts_though_all_are_held() -> None:
    job = Waiting(uid="a", number=0, priority=0, demand=Demand(cores=1))
    assert assigned([job], ["0"], ["0"]) == {"a": ()}


# What a job needs


def demand(**resources: Any) -> Demand:
    manifest = job_manifest()
    manifest["spec"]["resources"] = resources
    return demand_of(PipelineJob.from_manifest(manifest).spec)


def test_a_job_on_cpus_holds_its_threads_and_memory() -> None:
    held = demand(ranks=3, threadsPerRank=2, memoryPerRank="1Gi")
    assert held == Demand(cores=6, memory_bytes=3 * 2**30)


def test_a_job_on_cuda_holds_devices_and_a_core_for_each() -> None:
    """Memory per rank is the device's, of which nobody else has any."""
    held = demand(device="cuda", ranks=3, threadsPerRank=2, memoryPerRank="1Gi")
    assert held == Demand(cores=3, cuda_devices=3)


@given(DEMANDS, CAPACITIES)
def test_what_is_lacking_is_said_exactly_where_a_job_does_not_fit(demand: Demand, capacity: Demand) -> None:
    assert (lacking(demand, capacity) == "") == demand.fits(capacity)


def test_what_is_lacking_is_said_with_its_amounts() -> None:
    wanted = Demand(cores=4, cuda_devices=1, memory_bytes=2 * 2**30)
    there = Demand(cores=2, memory_bytes=2**30)
    assert lacking(wanted, there) == "4 cores of 2 and 1 CUDA devices of 0 and 2 GiB of memory of 1 GiB"
