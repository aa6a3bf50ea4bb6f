"""Ranks of one pod, which start together with those of the attempt's other pods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from penstock.agent.launch import Nodes, Ranks, launch
from penstock.agent.workers import launch_spec
from penstock.core.device_mapping import ranks_of_devices, require_shards_in_pods
from penstock.core.errors import RunError
from penstock.core.job import PipelineJob
from penstock.core.pod import MEASURES_LABEL, PodBinding
from penstock.core.preparing import Reporter
from penstock.core.run.folder import RunDir


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
        spec = launch_spec(job, run, f"a{attempt}-profile", place.ranks_per_pod, "profile")
        return launch(dataclasses.replace(spec, nodes=_nodes(place), names=tuple(place.devices)))

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
        spec = launch_spec(job, run, f"a{attempt}", place.ranks_per_pod, "train", *arguments)
        return launch(dataclasses.replace(spec, nodes=_nodes(place), names=names, result=run.result))

    def rehearse(self, job: PipelineJob, run: RunDir, num_ranks: int) -> Ranks:
        raise NotImplementedError("a rehearsal runs on one machine, not in pods")

    def _bound(self) -> PodBinding:
        place = self._place()
        if place is None:
            raise RunError(
                "the pod lost its binding: another writer removed the annotation; the next attempt gets a new one"
            )
        return place


def _nodes(place: PodBinding) -> Nodes:
    return Nodes(node_rank=place.node_rank, num_nodes=place.num_nodes, master=place.master, port=place.meeting_port)
