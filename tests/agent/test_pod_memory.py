"""Processes that the kernel killed for memory are told of, with what to do, by either kind of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.agent.pod_memory import REMEDY, explained, num_killed
from penstock.core.lifecycle import AttemptState
from penstock.core.supervision import AttemptReport

V2, V1 = "memory.events", "memory/memory.oom_control"
EVENTS = "low 0\nhigh 0\nmax 41\noom 3\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
FAILED = AttemptReport(state=AttemptState.FAILED, message="rank 1 was killed")


def cgroups(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return root


@pytest.mark.parametrize(("name", "text"), [(V2, EVENTS), (V1, CONTROL)])
def test_a_failure_for_memory_says_so(tmp_path: Path, name: str, text: str) -> None:
    assert explained(FAILED, cgroups(tmp_path, name, text.format(0))) == FAILED
    told = explained(FAILED, cgroups(tmp_path, name, text.format(2)))
    assert told.message == f"rank 1 was killed; {REMEDY}"
    assert "resources.memoryPerRank" in REMEDY


@pytest.mark.parametrize("text", ["", "oom_kill", "oom_kill many", "oom 3", "oom_kill 1 2"])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    assert num_killed(tmp_path) == 0
    assert num_killed(cgroups(tmp_path, V2, text)) == 0


@pytest.mark.parametrize(
    "report",
    [
        AttemptReport(state=AttemptState.STOPPED),
        AttemptReport(state=AttemptState.SUCCEEDED),
        AttemptReport(state=AttemptState.FAILED, message="does not fit", refused=True),
    ],
)
def test_other_ends_are_told_as_they_are(tmp_path: Path, report: AttemptReport) -> None:
    assert explained(report, cgroups(tmp_path, V2, EVENTS.format(1))) == report
