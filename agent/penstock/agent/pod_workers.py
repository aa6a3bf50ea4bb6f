"""Ranks of one pod, which start together with those of the attempt's other pods."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from penstock.agent.launch import Nodes, Outcome, launch
from penstock.agent.workers import Ranks, launch_spec
from penstock.core.device_mapping import ranks_of_devices, require_shards_in_pods
from penstock.core.errors import RunError
from penstock.core.job import PipelineJob
from penstock.core.pod import MEASURES_LABEL, PodBinding
from penstock.core.preparing import Reporter
from penstock.core.run.folder import RunDir

RESULT_SECONDS = 45.0
"""Longest wait of a pod, after its own ranks have ended, for the first rank's result to appear on shared storage."""


class PodWorkers:
    """`penstock.agent.workers.Workers` in a pod.

    ``place`` returns the pod's binding, none if it has none; ``cache`` is the folder of prepared data.
    """

    def __init__(self, place: Callable[[], PodBinding | None], cache: Path) -> None:
        self._place, self._cache = place, cache

    def prepare(self, job: PipelineJob, run: RunDir, reporter: Reporter) -> None:
        """Prepare as in `Workers`, unless the job only measures. One pod prepares the data, and the others wait."""
        if MEASURES_LABEL in job.metadata.labels:
            return
        from penstock.trainer.prepare import prepare_data

        prepare_data(job, run, reporter, cache=self._cache)

    def profile(self, job: PipelineJob, run: RunDir, attempt: int) -> Ranks:
        place = self._bound()
        return self._launch(job, run, place, tuple(place.devices), f"a{attempt}-profile", "profile")

    def train(self, job: PipelineJob, run: RunDir, attempt: int, num_ranks: int, metrics_port: int | None) -> Ranks:
        """Train as in `Workers`. Each device that the plan does not use has an idle rank.

        Raises `UserError` if the shards of a pipeline rank are on several pods, but the plan has no placement.
        """
        place, plan = self._bound(), run.read_plan()
        if not plan.placement:
            require_shards_in_pods(plan.num_ranks, plan.tp, place.ranks_per_pod)
        ranks = ranks_of_devices(plan.devices, place.num_nodes * place.ranks_per_pod)
        names = tuple(ranks[device] for device in place.devices)
        arguments = ("--attempt", str(attempt), "--over-hosts")
        return AwaitingResult(self._launch(job, run, place, names, f"a{attempt}", "train", *arguments), run.result)

    def rehearse(self, job: PipelineJob, run: RunDir, num_ranks: int) -> Ranks:
        raise NotImplementedError("a rehearsal runs on one machine, not in pods")

    def _bound(self) -> PodBinding:
        place = self._place()
        if place is None:
            raise RunError(
                "the pod lost its binding: another writer removed the annotation; the next attempt gets a new one"
            )
        return place

    def _launch(
        self,
        job: PipelineJob,
        run: RunDir,
        place: PodBinding,
        names: tuple[int, ...],
        log: str,
        command: str,
        *arguments: str,
    ) -> Ranks:
        spec = launch_spec(job, run, log, place.ranks_per_pod, command, *arguments)
        nodes = Nodes(
            node_rank=place.node_rank, num_nodes=place.num_nodes, master=place.master, port=place.meeting_port
        )
        return launch(dataclasses.replace(spec, nodes=nodes, names=names))


class AwaitingResult:
    """Ranks whose `poll` counts them as running after success until the result file is visible, at most
    `RESULT_SECONDS`.
    """

    def __init__(self, ranks: Ranks, result: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks, self._result, self._clock = ranks, result, clock
        self._ended_at: float | None = None

    def poll(self) -> Outcome | None:
        outcome = self._ranks.poll()
        if outcome is None or outcome.failure is not None or self._result.exists():
            return outcome
        if self._ended_at is None:
            self._ended_at = self._clock()
        return outcome if self._clock() >= self._ended_at + RESULT_SECONDS else None

    def wait(self, timeout_seconds: float | None = None) -> Outcome | None:
        return self._ranks.wait(timeout_seconds)

    def stop(self) -> None:
        self._ranks.stop()

    def kill(self) -> None:
        self._ranks.kill()

    def all_started(self) -> bool:
        return self._ranks.all_started()

    def log_path(self, rank: int) -> Path | None:
        return self._ranks.log_path(rank)
