"""A cluster of few places and many jobs: controllers, a scheduler that places pods one by one, and ranks that train.

Jobs are looked at when there is news of them or when they asked for it, as the operator's queue does, and never
otherwise: an operator that forgets to wake a job leaves it waiting.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from penstock.core.instants import format_instant
from penstock.core.lifecycle import AttemptState, Phase
from penstock.kube.names import ATTEMPT_LABEL, REPORTER_CONTAINER, TRAINER_CONTAINER, UID_LABEL
from penstock.kube.resources import BATCH_JOBS, JOBSETS, PODS
from tests.support.fake_planner import FakePlanner
from tests.support.one_job import example, word
from tests.support.operating import Operating, measured
from tests.support.sample_run import sample_profile

STEP_SECONDS = 1.0


class Cluster:
    """``num_places`` nodes, each of which holds one pod; jobs train for ``train_seconds``. Order is by ``seed``.

    Places that are ``taken`` are held by pods that are not penstock's. Pods of a job in ``unfit`` fit on no node, and
    are told so in these words.
    """

    def __init__(self, num_places: int, *, seed: int = 0, train_seconds: float = 30.0) -> None:
        self.operating = Operating(FakePlanner())
        self.kube = self.operating.kube
        self.kube.clock = self.operating.clock
        self.nodes = [f"node-{number}" for number in range(num_places)]
        for node in self.nodes:
            self.kube.add_node(node)
        self.taken: set[str] = set()
        self.unfit: dict[str, str] = {}
        self._random, self._train_seconds = random.Random(seed), train_seconds
        self._due: dict[str, float] = {}
        self._running_since: dict[str, float] = {}

    def submit(self, name: str, ranks: int, **changes: Any) -> str:
        """A job comes; its uid."""
        manifest = example(resources={"ranks": ranks, **changes.pop("resources", {})}, **changes)
        return self.kube.submit({**manifest, "metadata": {"name": name}})

    def restart(self) -> None:
        """The operator ends, and another looks at every job once."""
        self.operating.restart()
        self._due = dict.fromkeys(self._due, self.operating.now)
        self._operate()
        self._due |= {job.uid: self.operating.now for job in self.operating.cache.jobs()}

    def phases(self) -> Mapping[str, Phase]:
        """By name."""
        return {job.name: job.status.phase for job in self.operating.cache.jobs()}

    def run(self, seconds: float) -> float:
        """Until all jobs have ended, but no longer; how long that took."""
        began = self.operating.now
        while self.operating.now < began + seconds:
            self.step(began + seconds)
            phases = self.phases()
            if phases and all(phase.terminal for phase in phases.values()):
                break
        return self.operating.now - began

    def step(self, until: float = 0.0) -> None:
        """All do what they have to do, and time passes: a second, or where nothing happened until something is due, at
        the latest ``until`` then.
        """
        self._control()
        self._schedule()
        self._train()
        happened = self._operate()
        now = self.operating.now
        due = [*self._due.values(), *(since + self._train_seconds for since in self._running_since.values())]
        later = now if happened else min([until, *(at for at in due if at > now)])
        self.operating.now = max(now + STEP_SECONDS, later)

    def placed(self) -> Mapping[str, str]:
        """The pod of each place that is held."""
        live = [pod for pod in self.kube.all(PODS) if pod["status"]["phase"] in ("Pending", "Running")]
        return {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in live if pod["spec"].get("nodeName")}

    def _control(self) -> None:
        for jobset in self.kube.all(JOBSETS):
            known = len(self.kube.all(BATCH_JOBS))
            job = self.kube.start_job(jobset)
            if len(self.kube.all(BATCH_JOBS)) > known:
                for index in range(job["spec"]["parallelism"]):
                    self.kube.make_pod(job, index)

    def _schedule(self) -> None:
        waiting = [pod for pod in self.kube.all(PODS) if not pod["spec"].get("nodeName")]
        self._random.shuffle(waiting)
        free = [node for node in self.nodes if node not in self.taken and node not in self.placed()]
        for pod in waiting:
            unfit = next((said for job, said in self.unfit.items() if pod["metadata"]["name"].startswith(job)), "")
            if free and not unfit:
                self._place(pod, free.pop())
            elif "conditions" not in pod["status"]:
                said = unfit or f"0/{len(self.nodes)} nodes are available: {len(self.nodes)} Insufficient cpu."
                pod["status"]["conditions"] = [self._scheduled("False", reason="Unschedulable", message=said)]
                self.kube.touch(pod)

    def _place(self, pod: dict[str, Any], node: str) -> None:
        pod["spec"]["nodeName"] = node
        state = {"name": TRAINER_CONTAINER, "imageID": "image@1", "state": {"running": {}}}
        pod["status"] = {
            "phase": "Running",
            "podIP": f"10.0.0.{self.nodes.index(node) + 1}",
            "conditions": [self._scheduled("True")],
            "containerStatuses": [state],
            "initContainerStatuses": [{**state, "name": REPORTER_CONTAINER}],
        }
        self.kube.touch(pod)

    def _scheduled(self, status: str, **why: str) -> dict[str, Any]:
        since = format_instant(self.operating.now)
        return {"type": "PodScheduled", "status": status, "lastTransitionTime": since, **why}

    def _train(self) -> None:
        for job in self.operating.cache.jobs():
            status = job.status
            reported = status.progress.attempt if status.progress is not None else 0
            if status.phase is Phase.PROFILING and reported < status.attempt:
                name = f"{job.name}-profile-a{status.attempt}"
                measured(self.kube, job.uid, sample_profile(), status.attempt, name)
            if status.phase is Phase.RUNNING:
                since = self._running_since.setdefault(f"{job.uid}/{status.attempt}", self.operating.now)
                if self.operating.now >= since + self._train_seconds:
                    self._end(job.uid, status.attempt)

    def _end(self, uid: str, attempt: int) -> None:
        labels = {UID_LABEL: uid, ATTEMPT_LABEL: str(attempt)}
        for index, pod in enumerate(self.kube.all(PODS)):
            if pod["metadata"]["labels"].items() >= labels.items() and pod["status"]["phase"] == "Running":
                self.kube.end_pod(index, code=0, word=word(AttemptState.SUCCEEDED), at=self.operating.now)

    def _operate(self) -> bool:
        """Whether there was anything to look at."""
        operating, happened = self.operating, False
        for _ in range(20):
            operating.look()
            due = {uid for uid, at in self._due.items() if at <= operating.now}
            uids = sorted(due | set(operating.news))
            operating.news.clear()
            if not uids:
                break
            happened = True
            self._random.shuffle(uids)
            for uid in uids:
                wait = operating.reconciler.reconcile(uid)
                self._due.pop(uid, None)
                if wait is not None:
                    self._due[uid] = operating.now + wait
        return happened
