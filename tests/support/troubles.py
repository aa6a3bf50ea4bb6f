"""Short lives of jobs on a real cluster, under an operator whose writes go wrong. Their pods train nothing.

A life has three attempts: one that fails, one that is suspended, and one that succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.core.lifecycle import Phase
from penstock.core.status import JobStatus
from tests.support.cluster_jobs import ClusterJob, small_training, submitted
from tests.support.installed import Installed, Program, operated_by
from tests.support.stub_jobs import PATH, jobset_uids, measurement, report_progress, watched_jobsets
from tests.support.troubled_operator import FOLDER_VARIABLE, Trouble, read_writes, write_trouble

LIFE_SECONDS = 1200.0
LOOK_SECONDS = 0.2
RESOURCES = {"ranks": 2, "memoryPerRank": "896Mi"}
"""Unlike those of other jobs, so that what these measured does not count."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """How a job fared: its last ``status``, the ``writes`` of the operator, how often that was ``killed``.

    ``children`` are the uids that JobSets of each name had; ``left`` are the JobSets and ConfigMaps at the end.
    """

    status: JobStatus
    writes: list[str]
    killed: int
    children: dict[str, set[str]]
    left: tuple[list[str], list[str]]

    def verify(self, name: str) -> None:
        """It came to the one right end, and nothing was made twice."""
        status = self.status
        assert (status.phase, status.attempt, status.failures) == (Phase.SUCCEEDED, 3, 1), (status, self.writes)
        attempts = [f"{name}-a{number}" for number in (1, 2, 3)]
        assert self.left == ([attempts[-1]], [attempts[-1]]), self.writes
        assert sorted(self.children) == attempts, self.writes
        assert all(len(uids) == 1 for uids in self.children.values()), self.children


@dataclass
class Sieve:
    """Where such jobs live, one after the other. The test plays the service, which pods tell nothing."""

    on: Installed
    operator: Program
    folder: Path

    def live(self, name: str, trouble: Trouble) -> Life:
        """A whole life, with that trouble; what was left of the job is removed."""
        write_trouble(self.folder, trouble)
        with watched_jobsets(self.on, self.folder / f"{name}.jobsets") as seen:
            job = submitted(self.on, name, resources=RESOURCES, training=small_training(2), kubernetes={"env": [PATH]})
            try:
                killed = self._accompany(job)
                left = [each["metadata"]["name"] for each in job.jobsets()], job.config_maps()
                children = jobset_uids(seen, job)
                return Life(
                    status=job.status(),
                    writes=read_writes(self.folder),
                    killed=killed,
                    children=children,
                    left=left,
                )
            finally:
                self.on.kubectl("delete", "pj", name)
                self.on.wait_for_room([name])

    def _accompany(self, job: ClusterJob) -> int:
        """Do what others do while the job lives; how often the operator had to be started."""
        killed, end = 0, time.monotonic() + LIFE_SECONDS
        while not (status := job.status()).phase.terminal or not self._is_calm(job):
            assert time.monotonic() < end, (status, read_writes(self.folder))
            if not self._runs():
                self.operator.begin()
                killed += 1
            if status.phase is Phase.PROFILING:
                report_progress(job, status.attempt)
            if (status.phase, status.attempt) == (Phase.RUNNING, 2):
                job.suspend(True)
            if status.phase is Phase.SUSPENDED:
                job.suspend(False)
            time.sleep(LOOK_SECONDS)
        return killed

    def _is_calm(self, job: ClusterJob) -> bool:
        """Whether the operator still lives a moment after the last that it wrote."""
        written = read_writes(self.folder)
        time.sleep(1.0)
        return self._runs() and read_writes(self.folder) == written

    def _runs(self) -> bool:
        return self.operator.process is not None and self.operator.process.poll() is None


@contextmanager
def sieve(on: Installed, measured: ClusterJob, folder: Path) -> Iterator[Sieve]:
    """Such an operator sees to the jobs during the block; ``measured`` is a job with two ranks that has ended."""
    write_trouble(folder, Trouble(kinds=("",)))
    environment = {FOLDER_VARIABLE: str(folder)}
    with (
        measurement(on, measured),
        operated_by(on, "tests.support.troubled_operator", **environment) as operator,
    ):
        yield Sieve(on, operator, folder)
