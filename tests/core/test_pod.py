"""Input of a pod, and its termination message within the bytes that Kubernetes keeps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.lifecycle import AttemptState
from penstock.core.pod import MOST_REPORT_BYTES, TRAIN_EPOCH, PodBinding, termination_message
from penstock.core.supervision import AttemptReport

BINDING = PodBinding(
    pod_uid="p", attempt=2, epoch=TRAIN_EPOCH, node_rank=1, num_nodes=3, ranks_per_pod=4, master="10.0.0.1", port=29400
)


def read(text: str) -> AttemptReport:
    return AttemptReport.from_manifest(json.loads(text))


def failed(message: str = "", *last_words: str) -> AttemptReport:
    return AttemptReport(state=AttemptState.FAILED, message=message, last_words=last_words)


def test_a_binding_round_trips() -> None:
    assert PodBinding.from_manifest(json.loads(json.dumps(BINDING.to_manifest()))) == BINDING


def test_devices_are_numbered_pod_by_pod() -> None:
    pods = [replace(BINDING, node_rank=rank) for rank in range(3)]
    assert [device for pod in pods for device in pod.devices] == list(range(12))


def test_no_epoch_meets_where_the_one_before_did() -> None:
    assert replace(BINDING, epoch=0).meeting_port != replace(BINDING, epoch=1).meeting_port


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"node_rank": 3}, "nodeRank"),
        ({"node_rank": -1}, "nodeRank"),
        ({"num_nodes": 0}, "numNodes"),
        ({"ranks_per_pod": 0}, "ranksPerPod"),
        ({"epoch": -1}, "epoch"),
    ],
)
def test_an_invalid_place_is_refused(change: dict[str, int], where: str) -> None:
    with pytest.raises(UserError) as caught:
        replace(BINDING, **change)  # type: ignore[arg-type]
    assert caught.value.where == where


@given(st.text(max_size=6000), st.lists(st.text(max_size=800), max_size=14))
def test_a_report_always_fits_and_keeps_its_numbers(message: str, last_words: list[str]) -> None:
    report = replace(failed(message, *last_words), refused=True, last_checkpoint=40, done=3, total=9)
    text = termination_message(report)
    assert len(text.encode()) <= MOST_REPORT_BYTES
    assert replace(read(text), message="", last_words=()) == replace(report, message="", last_words=())


def test_a_short_report_is_whole() -> None:
    report = failed("rank 1 was killed\n  remedy: none", "a", "b")
    assert read(termination_message(report)) == report


def test_the_newest_log_lines_and_the_whole_message_are_kept() -> None:
    words = tuple(f"{number} " + "x" * 290 for number in range(20))
    found = read(termination_message(failed("no", *words)))
    assert found.message == "no"
    assert 5 < len(found.last_words) < 20
    assert found.last_words == words[-len(found.last_words) :]


def test_a_long_message_keeps_its_beginning_and_its_remedy() -> None:
    found = read(termination_message(failed("what happened: " + "é" * 5000 + "\n  remedy: fix it", "a word")))
    assert found.message.startswith("what happened: é")
    assert found.message.endswith("é\n  remedy: fix it")
    assert found.last_words == ()
