"""What supervisors are tested with: a job, and a decider that finds a profile or not."""

from __future__ import annotations

from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.planner.worker.searching import Report
from tests.support.manifests import example

STEPS = 20
EVERY = 5


class FakeDecider:
    """A profile is found or not, or asking for one goes wrong."""

    def __init__(self, *, has_profile: bool = False, error: Exception | None = None) -> None:
        self.has_profile, self.error = has_profile, error
        self.kept = 0

    def find_profile(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.has_profile

    def keep_profile(self) -> None:
        self.kept += 1

    def find_plan(self) -> Plan | None:
        raise AssertionError("the service plans")

    def plan(self, report: Report) -> Plan:
        raise AssertionError("the service plans")


def sample_job() -> PipelineJob:
    return PipelineJob.from_manifest(example(training__steps=STEPS, checkpoint={"everySteps": EVERY}))
