"""A service whose executor runs jobs with fake supervisors, turn by turn, and can be killed between any two."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.api.executor.executor import Executor, Reports
from penstock.api.executor.supervisors import Supervisors
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.api.store.jobs import StoredJob
from penstock.core.capacity import Machine
from penstock.core.host.launches import Launches
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.run.attempt_folder import AttemptFolder
from tests.support.fake_planner import FakePlanner
from tests.support.fake_supervisors import FakeSupervisors
from tests.support.service import Clock, job_manifest

WHOLE_LIFE = [Phase.QUEUED, Phase.PROFILING, Phase.PLANNING, Phase.BINDING, Phase.RUNNING, Phase.SUCCEEDED]
MACHINE = Machine(cores=2, memory_bytes=2**40)
MOST_TURNS = 60


@dataclass
class World:
    """A service, its executor, and what the executor is told to work with."""

    service: Service
    clock: Clock
    supervisors: FakeSupervisors = field(default_factory=FakeSupervisors)
    planner: FakePlanner = field(default_factory=FakePlanner)
    submitted: int = 0
    name: str = "here"
    machine: Machine = MACHINE
    may_launch: bool = True
    launches: Launches | None = None
    boottime: Clock | None = None
    executor: Executor = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, service: Service | None = None, supervisors: Supervisors | None = None) -> None:
        """The service is killed and started again: its memory and the plans in progress are lost."""
        self.planner = FakePlanner(answer=self.planner.answer)
        reports = Reports(address_file=Path("address"), token_file=Path("token"))
        self.executor = Executor(
            service or self.service,
            supervisors or self.supervisors,
            self.planner,
            machine=self.machine,
            name=self.name,
            reports=reports,
            may_launch=lambda: self.may_launch,
            launches=self.launches,
            boottime=self.boottime or self.clock,
        )

    def submit(
        self, name: str = "tiny", *, source: str = "python-stdlib", ranks: int = 2, device: str = "cpu", **policy: Any
    ) -> str:
        """A new job's uid."""
        self.submitted += 1
        uid = f"10000000-0000-0000-0000-{self.submitted:012d}"
        manifest = job_manifest(name)
        manifest["spec"]["resources"] = {"device": device, "ranks": ranks}
        manifest["spec"]["data"]["source"] = source
        manifest["spec"]["runPolicy"] = policy
        job = PipelineJob.from_manifest(manifest)
        self.service.write(uid, lambda connection: jobs.create(connection, job, uid, "me", self.clock()))
        return uid

    def turn(self) -> None:
        """The executor looks once, then every attempt goes on."""
        self.executor.run_once()
        self.supervisors.step()

    def pass_time(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self.clock.now += seconds
        if self.boottime is not None:
            self.boottime.now += seconds

    def until(self, uid: str, phase: Phase, seconds: float = 0.0) -> StoredJob:
        """Turn until the job has just entered the phase; ``seconds`` pass between turns."""
        for _ in range(MOST_TURNS):
            self.executor.run_once()
            if self.job(uid).phase is phase:
                return self.job(uid)
            self.supervisors.step()
            self.clock.now += seconds
        raise AssertionError(f"{self.job(uid).phase} is not {phase}")

    def job(self, uid: str) -> StoredJob:
        return self.service.read(lambda connection: jobs.get(connection, uid))

    def phases(self, uid: str) -> list[Phase]:
        """All that the job entered, in order."""
        rows = self.service.read(lambda connection: jobs.history(connection, uid))
        return [Phase(row.body["phase"]) for row in rows if row.kind == "phase"]

    def suspend(self, uid: str, suspend: bool = True) -> None:
        self.service.write(uid, lambda connection: jobs.set_suspend(connection, uid, suspend, "me", self.clock()))

    def delete(self, uid: str) -> None:
        self.service.write(uid, lambda connection: jobs.request_delete(connection, uid, "me", self.clock()))

    def report_step(self, uid: str, attempt: int = 1) -> None:
        told = jobs.Reported(attempt=attempt, step=3, reported_at=self.clock())
        self.service.write(uid, lambda connection: jobs.report(connection, [(uid, told)]))

    def see_step(self, uid: str, attempt: int = 1) -> None:
        """The supervisor sees one, of which no record has come yet."""
        found = self.supervisors.attempts[self.folder(uid, attempt)]
        assert found.report is not None
        found.report = replace(found.report, last_step_at=self.clock())

    def folder(self, uid: str, attempt: int = 1) -> AttemptFolder:
        return AttemptFolder(self.service.settings.runs / uid, attempt)
