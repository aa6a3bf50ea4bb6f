"""The engine's table of lives on the operator's backend, on a cluster in memory whose pods follow scripts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.core.host.clocks import SlewedClock
from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.pod import MEASURE_EPOCH, TRAIN_EPOCH, PodBinding
from penstock.kube.names import ATTEMPT_LABEL, BINDING_ANNOTATION, STOP_ANNOTATION
from penstock.kube.resources import JOBSETS, PODS
from tests.support.crashing import Crash, CrashError
from tests.support.engine_cases import CASES, Case, End, Outcome, expected
from tests.support.fake_planner import FakePlanner
from tests.support.memory_backend import on_every_crash
from tests.support.one_job import NODES, example, word
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile

MOST_TURNS = 400
NUM_STEPS = 3
LAST_WORDS = {
    End.SUCCEEDS: (0, word(AttemptState.SUCCEEDED)),
    End.FAILS: (1, word(AttemptState.FAILED, message="rank 1 was killed")),
    End.IS_REFUSED: (2, word(AttemptState.FAILED, message="data: empty", refused=True)),
    End.VANISHES: (137, ""),
}


class Life:
    """A case's job on a cluster: its user, the controllers and the pods of its attempts, and the clocks."""

    def __init__(self, case: Case, crash: Crash | None = None) -> None:
        self.case, self.crash = case, crash or Crash(at=-1)
        self.operating, self.kube = (operating := Operating(FakePlanner())), operating.kube
        self.boottime, self.ahead_seconds = 100.0, 900.0
        self._clock = SlewedClock(lambda: self.boottime + self.ahead_seconds, lambda: self.boottime)
        self.kube.hook = self.kube.after = self._written
        for node in NODES:
            self.kube.add_node(node)
        self.uid = self.kube.submit(example(runPolicy=dict(case.policy)))
        self.num_steps, self.is_pending = 0, True

    def _written(self, write: str) -> None:
        self.crash.moment()
        assert len(self.kube.all(JOBSETS)) < 2, "two attempts are there at once"

    def live(self) -> None:
        """Turn until the job is over."""
        for _ in range(MOST_TURNS):
            self._turn()
            if self._is_over:
                return
        raise AssertionError(f"the job is still {self.operating.status(self.uid)}")

    @property
    def _is_over(self) -> bool:
        status = self.operating.status(self.uid)
        return status.phase.terminal or (self.case.suspends and status.phase is Phase.SUSPENDED)

    def _turn(self) -> None:
        """A deadline passes within a few turns, since the operator's clock only approaches one that was set."""
        self.operating.now = self._clock()
        try:
            self.operating.turn(1)
        except CrashError:
            self.operating.restart()
        for jobset in self.kube.all(JOBSETS):
            self._go_on(int(jobset["metadata"]["labels"][ATTEMPT_LABEL]))
        self.boottime += self.case.policy.get("activeDeadlineSeconds", 6.0) / 12
        if self.is_pending and self.num_steps == NUM_STEPS:
            self.is_pending = False
            self.boottime += self.case.passes_seconds
            self.ahead_seconds += self.case.jump_seconds
            if self.case.suspends:
                self.kube.change_spec(self.uid, runPolicy={"suspend": True})

    def _go_on(self, attempt: int) -> None:
        """The pods of the attempt go on by one state."""
        pods = self.kube.all(PODS)
        if not pods:
            self.kube.start_pods(*NODES)
            self.num_steps = 0
        elif all(STOP_ANNOTATION in pod["metadata"].get("annotations", {}) for pod in pods):
            self._end(0, word(AttemptState.STOPPED))
        elif (epoch := min(map(_epoch, pods))) == MEASURE_EPOCH:
            self.operating.measured(self.uid, sample_profile(), attempt)
        elif epoch == TRAIN_EPOCH:
            self._train(attempt, self.case.ends[attempt - 1])

    def _train(self, attempt: int, end: End) -> None:
        if self.num_steps < NUM_STEPS or end is End.RUNS_ON:
            self.num_steps += 1
            self.kube.report(self.uid, attempt=attempt, epoch=TRAIN_EPOCH, step=self.num_steps)
        elif end in LAST_WORDS:
            self._end(*LAST_WORDS[end])

    def _end(self, code: int, last_word: str) -> None:
        for index in range(len(NODES)):
            self.kube.end_pod(index, code=code, word=last_word, at=self.operating.now)

    @property
    def started(self) -> tuple[int, ...]:
        """The attempts of which a JobSet was made, in order."""
        names = dict.fromkeys(write for write in self.kube.writes if write.startswith("create JobSet "))
        return tuple(int(name.rpartition("-a")[2]) for name in names)

    def outcome(self) -> Outcome:
        """What became of the job, by the events that the operator wrote."""
        events = self.operating.events()
        life = tuple((Phase(message.partition(":")[0]), reason) for reason, message in events)
        return Outcome(life=life, started=self.started, failures=self.operating.status(self.uid).failures)


def _epoch(pod: dict[str, Any]) -> int:
    """Epoch of the pod's binding, -1 before it is bound."""
    text = pod["metadata"].get("annotations", {}).get(BINDING_ANNOTATION)
    return -1 if text is None else PodBinding.from_manifest(json.loads(text)).epoch


def last_of(outcome: Outcome) -> Outcome:
    """The outcome without the phases before the last: an event is lost if the operator is killed before writing it."""
    return Outcome(life=outcome.life[-1:], started=outcome.started, failures=outcome.failures)


def crashing_outcome(case: Case, crash: Crash) -> Outcome:
    """What became of the job of an operator that is killed, by the job's status."""
    life = Life(case, crash)
    life.live()
    status = life.operating.status(life.uid)
    return Outcome(life=((status.phase, status.reason),), started=life.started, failures=status.failures)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_life_of_a_job_of_the_operator(case: Case) -> None:
    life = Life(case)
    life.live()
    assert life.outcome() == expected(case)


@pytest.mark.parametrize("case", [each for each in CASES if each.suspends], ids=lambda case: case.name)
def test_an_operator_killed_at_any_write_changes_nothing_of_it(case: Case) -> None:
    """A life with a retry is in `tests.operator.test_reconcile`."""
    outcomes = on_every_crash(lambda crash: crashing_outcome(case, crash))
    assert len(outcomes) > 20
    assert set(outcomes) == {last_of(expected(case))}
