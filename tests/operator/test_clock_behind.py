"""A restarted operator whose clock is behind its predecessor's: nothing takes longer than its full duration."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.lifecycle import BACKOFF_BASE_SECONDS, PREPARING_SECONDS, AttemptState, Phase
from penstock.core.status import JobStatus
from penstock.core.supervision import AttemptReport
from penstock.kube.resources import JOBS, PODS
from penstock.operator.grace import LEAST_SECONDS
from penstock.operator.statuses import ROUNDING_SECONDS
from tests.support import manifests
from tests.support.fake_planner import FakePlanner
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile

NODES = ("east", "west")
TTL_SECONDS, DEADLINE_SECONDS = 300, 500


def running(operating: Operating, **changes: Any) -> str:
    return operating.running(example(**changes), sample_profile(), *NODES)


def example(**changes: Any) -> dict[str, Any]:
    return manifests.example(kubernetes={"volumes": {"out": {"claim": "shared"}}}, **changes)


def end_all(operating: Operating, state: AttemptState, code: int) -> None:
    word = json.dumps(AttemptReport(state=state).to_manifest())
    for index in range(len(operating.kube.all(PODS))):
        operating.kube.end_pod(index, code=code, word=word, at=operating.now)
    operating.turn()


def retrying(operating: Operating) -> str:
    uid = running(operating)
    end_all(operating, AttemptState.FAILED, 1)
    assert operating.phase(uid) is Phase.RECOVERING
    return uid


def measuring(operating: Operating) -> str:
    for node in NODES:
        operating.kube.add_node(node)
    uid = operating.kube.submit(example())
    operating.turn()
    operating.kube.start_pods(*NODES)
    operating.turn()
    assert operating.phase(uid) is Phase.PROFILING
    return uid


def stopping(operating: Operating) -> str:
    uid = running(operating)
    operating.kube.change_spec(uid, runPolicy={"suspend": True})
    operating.turn()
    assert operating.phase(uid) is Phase.RUNNING
    return uid


def finished(operating: Operating) -> str:
    uid = running(operating, runPolicy={"ttlSecondsAfterFinished": TTL_SECONDS})
    end_all(operating, AttemptState.SUCCEEDED, 0)
    assert operating.phase(uid) is Phase.SUCCEEDED
    return uid


def limited(operating: Operating) -> str:
    for node in NODES:
        operating.kube.add_node(node)
    uid = operating.kube.submit(example(runPolicy={"activeDeadlineSeconds": DEADLINE_SECONDS}))
    operating.turn()
    return uid


@dataclass(frozen=True)
class Case:
    """A job that is brought to a wait, its full duration, and what follows it."""

    begin: Callable[[Operating], str]
    seconds: float
    is_over: Callable[[JobStatus | None], bool]


CASES = {
    "retry": Case(retrying, BACKOFF_BASE_SECONDS, lambda status: status is not None and status.attempt == 2),
    "measurement": Case(measuring, PREPARING_SECONDS, lambda status: status is not None and status.failures == 1),
    "stop": Case(stopping, LEAST_SECONDS, lambda status: status is not None and status.phase is Phase.SUSPENDED),
    "time to live": Case(finished, TTL_SECONDS, lambda status: status is None),
    "deadline": Case(limited, DEADLINE_SECONDS, lambda status: status is not None and status.phase is Phase.FAILED),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4, deadline=None, phases=[Stage.generate])
@given(back=st.floats(0.0, 7200.0), passed=st.floats(0.0, 0.95))
def test_a_restart_with_a_clock_behind_prolongs_no_wait(name: str, back: float, passed: float) -> None:
    case, operating = CASES[name], Operating(FakePlanner())
    operating.now = 1_700_000_000.0
    uid = case.begin(operating)
    operating.now += passed * case.seconds
    operating.turn()
    assert not case.is_over(status_of(operating, uid))
    operating.now -= back
    operating.restart()
    wait = operating.turn()
    assert wait is None or wait <= case.seconds + 2 * ROUNDING_SECONDS
    operating.now += case.seconds + 2 * ROUNDING_SECONDS
    operating.turn()
    assert case.is_over(status_of(operating, uid))


def status_of(operating: Operating, uid: str) -> JobStatus | None:
    """The job's status; none if it was deleted."""
    there = any(job["metadata"]["uid"] == uid for job in operating.kube.all(JOBS))
    return operating.status(uid) if there else None
