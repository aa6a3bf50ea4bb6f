"""Training on the ranks of a pool, in which the plan changes after given steps."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from penstock.core.plan import Plan
from penstock.core.records import StepMetrics
from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import StatusFile, status_path
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Timeline
from penstock.planner.compile import program_of
from penstock.trainer import executor, loop
from penstock.trainer.arena import Arena
from penstock.trainer.metrics_writer import MetricsWriter, TrainingListener
from penstock.trainer.session import Session
from penstock.trainer.worker import Worker
from tests.support.worker_pool import CPU, PoolRank, WorkerPool


class _Changing(MetricsWriter):
    """Leaves the next plan in the run directory after the given steps; so it is taken after the step that follows."""

    changes: Mapping[int, Plan]

    def stepped(self, metrics: StepMetrics, timeline: Timeline | None) -> None:
        super().stepped(metrics, timeline)
        if metrics.step in self.changes:
            write_json(self._run.next_plan, self.changes[metrics.step].to_manifest())


@contextmanager
def _one_arena_at_a_time() -> Iterator[None]:
    """Fail where an arena is allocated while the rank still holds another one."""
    alive: weakref.WeakSet[Arena] = weakref.WeakSet()

    class Alone(Arena):
        def __init__(self, *arguments: Any) -> None:
            assert not alive, "the arena of the old plan was not freed"
            super().__init__(*arguments)
            alive.add(self)

    with mock.patch.object(executor, "Arena", Alone):
        yield


def train_with_changes(pool: WorkerPool, run: RunDir, changes: Mapping[int, Plan]) -> list[tuple[int, str]]:
    """Train to the end; of every rank the bytes of its last arena, and the digest of its last plan."""
    plan = run.read_plan()
    pool.connect(plan, program_of(plan))
    return pool.run(_train_rank, run, plan.num_ranks, changes, num_ranks=plan.num_ranks)


@_one_arena_at_a_time()
def _train_rank(me: PoolRank, run: RunDir, num_ranks: int, changes: Mapping[int, Plan]) -> tuple[int, str]:
    status = StatusFile(status_path(run.status, me.rank), os.getpid())
    worker = Worker(
        rank=me.rank, num_ranks=num_ranks, device=CPU, groups=me.groups, status=status, stop_requested=lambda: False
    )
    session = Session(run, worker)
    if me.rank:
        loop.train(session, 1, TrainingListener())
    else:
        with _Changing(run, session.job, session.plan, 1, None) as writer:
            writer.changes = changes
            loop.train(session, 1, writer)
    own = session.program.ranks[session.mesh.pipeline_rank(me.rank)]
    return own.arena_bytes, session.plan.digest
