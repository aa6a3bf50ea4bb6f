"""An operator's reconciles on a cluster in memory, with time and other people's deeds in the test's hands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.core.job_policy import JobPolicy
from penstock.core.lifecycle import Phase, Step
from penstock.core.packing import pack
from penstock.core.pod import AGENT_MEASUREMENT, AGENT_REPORT, AgentReport
from penstock.core.profile import Profile
from penstock.core.status import JobStatus
from penstock.kube.names import PROFILE_FILE
from penstock.kube.packing import packed
from penstock.kube.resources import BATCH_JOBS, CONFIG_MAPS, EVENTS, JOBS, JOBSETS, NODES, PODS
from penstock.kube.transport import Listing
from penstock.operator.actions import Actions
from penstock.operator.agents import Agents
from penstock.operator.cache import Cache
from penstock.operator.cluster_profiles import ClusterProfiles
from penstock.operator.events import EventRecorder
from penstock.operator.fetching import AgentError
from penstock.operator.planning import Planning
from penstock.operator.reconcile import Reconciler
from penstock.operator.settings import Settings
from penstock.operator.snapshots import (
    JobSetSnapshot,
    PodSnapshot,
    RanksJobSnapshot,
    jobset_snapshot,
    node_snapshot,
    pod_snapshot,
    ranks_job_snapshot,
)
from penstock.planner.worker.process import Planner
from tests.support.fake_kube import FakeKube

SETTINGS = Settings(image="penstock/trainer:1", service="https://service:8470")


def run_inline(act: Callable[[], None]) -> None:
    """Runs the call at once."""
    act()


class Answers:
    """What agents serve, by address and name, and which were asked; nobody answers at any other address."""

    def __init__(self) -> None:
        self.served: dict[tuple[str, str], bytes] = {}
        self.asked: list[tuple[str, str]] = []

    def fetch(self, address: str, name: str) -> bytes:
        """As `penstock.operator.fetching.fetch`."""
        self.asked.append((address, name))
        if (address, name) not in self.served:
            raise AgentError("cannot be reached: Connection refused")
        return self.served[address, name]

    def serve(self, address: str, report: AgentReport, profile: Profile | None = None) -> None:
        """The agent at that address says so, and what was measured."""
        if profile is not None:
            self.serve_measurement(address, report, pack(profile.to_manifest()))
        else:
            self.served[address, AGENT_REPORT] = pack(report.to_manifest())

    def serve_measurement(self, address: str, report: AgentReport, content: bytes) -> None:
        """The agent at that address has measured, and serves this."""
        self.served[address, AGENT_MEASUREMENT] = content
        self.serve(address, replace(report, profile=Step.DONE, measurement=hashlib.sha256(content).hexdigest()))


class Operating:
    """One operator after the other, on one cluster; ``restart`` forgets all that was not written down."""

    def __init__(self, planner: Planner, policy: JobPolicy | None = None) -> None:
        self.kube, self.now, self._planner = FakeKube(), 1000.0, planner
        self._settings = replace(SETTINGS, policy=policy or SETTINGS.policy)
        self.service_is_there = True
        self.answers = Answers()
        self.restart()

    def restart(self) -> None:
        """The operator ends, and another begins."""
        self.news: list[str] = []
        self.cache = Cache(self.clock, self.news.append)
        self.planning = Planning(self._planner)
        announcer = EventRecorder(self.kube, self.clock, run_inline)
        self.actions = Actions(self.kube, self.cache, self._settings, self.clock)
        self.profiles = ClusterProfiles(self.kube, self.cache, self.actions, "default", self.clock)
        self.agents = Agents(self.answers.fetch, self.clock, run_inline, self.news.append)
        self.reconciler = Reconciler(self.cache, self.actions, self.planning, self.agents, self.clock, announcer.phase)

    def forbid(self) -> None:
        """Another operator begins, whose policy is the one of `SETTINGS`."""
        self._settings = SETTINGS
        self.restart()

    def clock(self) -> float:
        """The time."""
        return self.now

    def look(self) -> None:
        """Watches tell all there is."""
        kube, cache = self.kube, self.cache
        jobs, pods = kube.list(JOBS), kube.list(PODS)
        jobsets = kube.list(JOBSETS) if JOBSETS.plural not in kube.refusals else Listing(objects=(), version="0")
        cache.replace_jobs(jobs.objects, int(jobs.version))
        cache.replace_children(JobSetSnapshot, map(jobset_snapshot, jobsets.objects), int(jobsets.version))
        ranks_jobs = kube.list(BATCH_JOBS)
        cache.replace_children(RanksJobSnapshot, map(ranks_job_snapshot, ranks_jobs.objects), int(ranks_jobs.version))
        cache.replace_children(PodSnapshot, map(pod_snapshot, pods.objects), int(pods.version))
        cache.replace_nodes(map(node_snapshot, kube.list(NODES).objects))
        cache.set_service(self.service_is_there, self.now)

    def turn(self, times: int = 4) -> float | None:
        """Watches tell, and every job is looked at, until nothing more happens; when to look again."""
        wait: float | None = None
        for _ in range(times):
            self.profiles.reconcile_all()
            self.look()
            for job in self.cache.jobs():
                wait = self.reconciler.reconcile(job.uid)
        return wait

    def status(self, uid: str) -> JobStatus:
        """What the cluster says of a job."""
        job = next(each for each in self.kube.all(JOBS) if each["metadata"]["uid"] == uid)
        return JobStatus.from_manifest(job.get("status") or {})

    def phase(self, uid: str) -> Phase:
        """Where the cluster says that a job is."""
        return self.status(uid).phase

    def measured(self, uid: str, profile: Profile, attempt: int = 1) -> None:
        """The service lays out what a job's ranks measured."""
        measured(self.kube, uid, profile, attempt)

    def running(self, manifest: Mapping[str, Any], profile: Profile, *nodes: str) -> str:
        """A job that has come to Running on these nodes; its uid."""
        for node in nodes:
            self.kube.add_node(node)
        uid = self.kube.submit(manifest)
        self.turn()
        self.kube.start_pods(*nodes)
        self.turn()
        self.measured(uid, profile)
        self.turn(12)
        assert self.phase(uid) is Phase.RUNNING, self.status(uid)
        return uid

    def names(self) -> list[str]:
        """The JobSets there are."""
        return [each["metadata"]["name"] for each in self.kube.all(JOBSETS)]

    def events(self) -> list[tuple[str, str]]:
        """What people were told, in order: reason and message."""
        found = sorted(self.kube.all(EVENTS), key=lambda each: int(each["metadata"]["resourceVersion"]))
        return [(each["reason"], each["message"]) for each in found]


def measured(kube: FakeKube, uid: str, profile: Profile, attempt: int = 1, name: str = "measured") -> None:
    """The service lays out what a job's ranks measured."""
    found = {"metadata": {"name": name, "namespace": "default"}}
    kube.add(CONFIG_MAPS, {**found, "binaryData": {PROFILE_FILE: packed(profile.to_manifest())}})
    kube.report(uid, attempt=attempt, profileRef=name)
