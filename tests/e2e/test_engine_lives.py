"""The engine's table of lives on a real cluster: operator, apiserver, JobSet controller and kubelets are the real ones.

Pods are real, train nothing and end as the case says (`tests.support.stub_pod`). The test is the user, and the service,
to which such pods report nothing. All cases of the table run, with three differences from the backends in memory:

- A silent attempt is silent for a real minute.
- Clocks are set for the operator only, which decides by them (`tests.support.timed_operator`): other processes share
  those of the machine.
- The operator's clock only approaches a wall clock that was set, so the deadline's time passes on both of its clocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.core.lifecycle import Phase
from penstock.core.pod import TRAIN_EPOCH
from penstock.core.status import JobStatus
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import ClusterJob, small_training, submitted
from tests.support.engine_cases import CASES, Case, End, Outcome, expected
from tests.support.installed import OUT, Installed, operated_by
from tests.support.story import Story
from tests.support.stub_jobs import PATH, jobset_uids, measurement, report_progress, watched_jobsets
from tests.support.stub_pod import FOLDER_VARIABLE, LAST_REPORTS, VANISHES
from tests.support.timed_operator import FILE_VARIABLE, RESYNC_SECONDS, set_clocks

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

LIFE_SECONDS = 240.0
POLL_SECONDS = 0.2
NUM_STEPS = 3
MEMORY_MIB = 832


@dataclass
class Lives:
    """Where the cases live, one after the other, under one operator that reads its clocks from ``clocks``."""

    on: Installed
    folder: Path
    passed_seconds: float = 0.0
    ahead_seconds: float = 0.0

    @property
    def clocks(self) -> Path:
        """The file with the operator's clocks."""
        return self.folder / "clocks"

    def set_clocks(self) -> None:
        """Let the operator have these clocks."""
        set_clocks(self.clocks, self.passed_seconds, self.ahead_seconds)

    def outcome(self, case: Case) -> Outcome:
        """Submit the case's job, live its life, and remove what is left of it."""
        number = CASES.index(case)
        name = f"life-{number}"
        ends = self.on.out / name
        ends.mkdir()
        with watched_jobsets(self.on, self.folder / f"{name}.jobsets") as watched:
            job = submitted(
                self.on,
                name,
                resources={"ranks": 2, "memoryPerRank": f"{MEMORY_MIB + number}Mi"},  # no case has another's profile
                training=small_training(2),
                runPolicy=dict(case.policy),
                kubernetes={"env": [PATH, {"name": FOLDER_VARIABLE, "value": f"/penstock/{OUT}/{name}"}]},
            )
            try:
                status = self._live(case, job, ends)
                job.wait(lambda: life_of(job)[-1:] == ((status.phase, status.reason),), "an event is missing")
                return Outcome(life=life_of(job), started=started(watched, job), failures=status.failures)
            finally:
                self.on.kubectl("delete", "pj", name)
                self.on.wait_for_room([name])

    def _live(self, case: Case, job: ClusterJob, ends: Path) -> JobStatus:
        """Do what others do while the job lives; the status once it is over."""
        end, trains = time.monotonic() + LIFE_SECONDS, 0
        while not is_over(case, status := job.status()):
            assert time.monotonic() < end, f"the job is still {status}"
            if status.phase is Phase.PROFILING:
                report_progress(job, status.attempt)
            if status.phase is Phase.RUNNING and status.attempt > trains:
                trains = status.attempt
                report_progress(job, trains, epoch=TRAIN_EPOCH, step=NUM_STEPS)
                if trains == 1:
                    self._meanwhile(case, job)
                (ends / str(trains)).write_text(case.ends[trains - 1])
            time.sleep(POLL_SECONDS)
        return status

    def _meanwhile(self, case: Case, job: ClusterJob) -> None:
        """What happens while the job first runs, but for the seconds that pass: a silent attempt lasts that long."""
        self.passed_seconds += case.policy.get("activeDeadlineSeconds", 0.0)
        self.ahead_seconds += case.jump_seconds
        self.set_clocks()
        if case.jump_seconds:
            time.sleep(2 * RESYNC_SECONDS)  # the operator decides by the new clock before the attempt ends
        if case.suspends:
            job.suspend(True)


def is_over(case: Case, status: JobStatus) -> bool:
    """Whether the case's life has ended."""
    return status.phase.terminal or (case.suspends and status.phase is Phase.SUSPENDED)


def life_of(job: ClusterJob) -> tuple[tuple[Phase, str], ...]:
    """The phases with their reasons, by the events that the operator wrote."""
    return tuple((Phase(message.partition(":")[0]), reason) for reason, message in job.events())


def started(watched: Path, job: ClusterJob) -> tuple[int, ...]:
    """The attempts of which a JobSet was made, in order; fails if one was made twice."""
    uids = jobset_uids(watched, job)
    assert all(len(of_name) == 1 for of_name in uids.values()), uids
    return tuple(int(name.rpartition("-a")[2]) for name in uids)


@pytest.fixture(scope="module")
def lives(penstock_there: Installed, first: Story, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """One operator for all cases, and a profile that their jobs can have measured."""
    there = Lives(penstock_there, tmp_path_factory.mktemp("lives"))
    there.set_clocks()
    environment = {FILE_VARIABLE: str(there.clocks)}
    with (
        measurement(penstock_there, first.job),
        operated_by(penstock_there, "tests.support.timed_operator", **environment),
    ):
        yield there


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_life_of_a_job_on_a_cluster(case: Case, lives: Lives) -> None:
    assert lives.outcome(case) == expected(case)


def test_a_pod_can_end_in_every_way_of_the_table() -> None:
    assert set(End) - {End.RUNS_ON, End.FALLS_SILENT} <= {*LAST_REPORTS, VANISHES}
