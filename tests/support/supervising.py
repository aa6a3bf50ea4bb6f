"""A supervisor on simulated time, whose workers follow scripts; the test is the service beyond the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from penstock.agent.mailbox import FolderMailbox
from penstock.agent.supervisor import Supervisor
from penstock.core.host.stopping import StopRequests
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.plan import Plan
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, Binding, SupervisorRequest
from penstock.planner.worker.process import Planner
from tests.support.fake_workers import FakeWorkers, Script
from tests.support.sample_run import sample_plan
from tests.support.supervised import FakeDecider, sample_job

SILENT = Script(until=6, end=None)


class Bench:
    """A supervisor on simulated time; at every pause the service reads the report and then does ``meanwhile``."""

    def __init__(
        self,
        root: Path,
        workers: FakeWorkers | None = None,
        *,
        decider: FakeDecider | None = None,
        deadline_at: float | None = None,
        planner: Planner | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.run = RunDir(root)
        self.run.create()
        self.job = sample_job()
        self.folder = AttemptFolder(root, 3)
        self.folder.path.mkdir(parents=True)
        self.deadline_at, self.planner, self.plan = deadline_at, planner, plan or sample_plan()
        self.workers, self.decider = workers or FakeWorkers(), decider or FakeDecider()
        self.requests = StopRequests()
        self.now = 1000.0
        self.pauses = 0
        self.seen: list[AttemptReport] = []
        self.meanwhile: Callable[[AttemptReport], None] = self.serve

    def supervise(self) -> AttemptReport:
        supervisor = Supervisor(
            self.job,
            self.run,
            self.folder.attempt,
            FolderMailbox(self.folder),
            workers=self.workers,
            decider=self.decider,
            requests=self.requests,
            deadline_at=self.deadline_at,
            planner=self.planner,
            clock=lambda: self.now,
            seconds=lambda: self.now,
            pause=self.pause,
        )
        try:
            return supervisor.run()
        finally:
            assert not self.workers.alive

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        assert self.pauses < 1000, "the attempt does not end"
        self.now += seconds
        report = self.report
        if report not in self.seen[-1:]:
            self.seen.append(report)
        self.meanwhile(report)

    @property
    def report(self) -> AttemptReport:
        return AttemptReport.from_manifest(json.loads(self.folder.report.read_text()))

    @property
    def states(self) -> list[tuple[AttemptState, Step]]:
        """What the service saw, each once."""
        return list(dict.fromkeys((report.state, report.profile) for report in self.seen))

    def request(self, request: SupervisorRequest) -> None:
        self.folder.request(request).touch()

    def bind(self, digest: str | None = None) -> None:
        write_json(self.run.plan, self.plan.to_manifest())
        write_json(self.folder.binding, Binding(plan_digest=digest or self.plan.digest).to_manifest())

    def serve(self, report: AttemptReport) -> None:
        """What a service does that wants the job done."""
        if report.state is AttemptState.READY and report.profile is Step.MISSING:
            self.request(SupervisorRequest.MEASURE)
        if report.state is AttemptState.READY and report.profile is Step.DONE:
            self.bind()


def silently_profiling() -> FakeWorkers:
    """Workers whose measurement does not end by itself."""
    workers = FakeWorkers()
    workers.profile = lambda job, run, attempt: workers._add(  # type: ignore[method-assign]
        Script(end=None), lambda: False, lambda _: None
    )
    return workers
