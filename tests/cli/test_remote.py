"""A job of a service as it is watched: phases as lines, and how far it is while they last."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from penstock.cli import remote
from penstock.cli.remote import failure_lines, job_table, last_words_of, watch_job
from penstock.client import Client, Job, Place, Progress, Status
from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.speed import Speed
from tests.support.application import Application, here
from tests.support.executing import World
from tests.support.fake_supervisors import Script
from tests.support.service import Clock, job_manifest, new_service
from tests.support.shown_line import Remembering

TINY = Place(name="tiny")


class Followed:
    """A client that tells a life."""

    def __init__(self, *life: Status) -> None:
        self._life = life

    def follow(self, place: Place) -> Iterator[Job]:
        return (Job(manifest=job_manifest(place.name), status=status, etag="1", created_at="") for status in self._life)


def running(step: int, **told: Any) -> Status:
    return Status(phase=Phase.RUNNING, reason="Started", progress=Progress(step=step, num_steps=4, **told))


def watch(*life: Status) -> int:
    return watch_job(cast(Client, Followed(*life)), TINY)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Remembering:
    made = Remembering()
    monkeypatch.setattr(remote, "line", lambda: made)
    return made


def test_a_life_is_told(screen: io.StringIO, shown: Remembering) -> None:
    steps = [running(0), running(1, loss=3.0, step_seconds=2.0), running(4, loss=2.5, step_seconds=2.0)]
    code = watch(Status(phase=Phase.PROFILING, reason="Admitted"), *steps, Status(phase=Phase.SUCCEEDED))
    assert code == 0
    assert screen.getvalue().split("\n") == [
        "tiny  Profiling  Admitted",
        "tiny  Running  Started",
        "  step 4/4  loss 2.500  2 s per step",
        "tiny  Succeeded",
        "",
    ]
    assert list(zip(shown.texts, shown.shares, strict=True)) == [
        ("Profiling ...", None),
        ("Running ...", None),
        ("step 1/4  loss 3.000  2 s per step  6 s left", 0.25),
        ("step 4/4  loss 2.500  2 s per step", 1.0),
    ]


SPEED = Speed(tokens_per_second_per_device=4096.0, model_flops_utilization=0.542)
ON_CPU = replace(SPEED, model_flops_utilization=None)


def test_steps_are_told_with_their_speed(screen: io.StringIO, shown: Remembering) -> None:
    watch(running(0), running(1, step_seconds=2.0, speed=SPEED), running(4, step_seconds=2.0, speed=ON_CPU))
    assert shown.texts[-2:] == [
        "step 1/4  2 s per step  4,096 tokens/s per device, MFU 54.2 %  6 s left",
        "step 4/4  2 s per step  4,096 tokens/s per device",
    ]


WIDTH = 80
"""Of a terminal as it opens."""


def listed(*statuses: Status, namespace: str = "default") -> list[list[str]]:
    """What `penstock status` and `penstock top` print of jobs that stand so, in columns; a header has two lines."""
    made: dict[str, Any] = {
        "manifest": job_manifest("tiny", namespace=namespace),
        "etag": "1",
        "created_at": "2026-03-01T12:00:00Z",
    }
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(job_table([Job(status=status, **made) for status in statuses]))
    assert isinstance(console.file, io.StringIO)
    return [re.split(r"  +", line.strip()) for line in console.file.getvalue().splitlines()]


def test_the_list_shows_speeds_next_to_step_times() -> None:
    above, header, fast, slow, waiting = listed(
        running(1, step_seconds=2.0, speed=SPEED),
        running(1, step_seconds=2.0, speed=ON_CPU),
        Status(phase=Phase.PENDING, reason="Submitted"),
    )
    assert above == ["per", "tokens/s"]
    assert header == ["name", "phase", "step", "loss", "step", "per device", "MFU", "attempt", "age"]
    assert fast[:7] == ["tiny", "Running", "1/4", "–", "2 s", "4,096", "54.2 %"]
    assert slow[4:7] == ["2 s", "4,096", "–"]
    assert waiting[4:7] == ["–", "–", "–"]


def test_the_list_has_no_column_for_what_is_known_of_no_job() -> None:
    _, header, _ = listed(running(1, step_seconds=2.0, speed=ON_CPU))
    assert header[4:7] == ["step", "per device", "attempt"]
    above, header, _ = listed(running(0))
    assert above == ["per"]
    assert header[4:6] == ["step", "attempt"]


def test_the_list_names_namespaces_other_than_the_default() -> None:
    _, header, job = listed(running(0), namespace="team")
    assert header[:2] == ["namespace", "name"]
    assert job[:2] == ["team", "tiny"]


def test_a_job_that_fails_fails_the_command(screen: io.StringIO, shown: Remembering) -> None:
    failed = replace(running(1), phase=Phase.FAILED, message="rank 1 was killed")
    assert watch(running(1), failed) == 1
    assert "rank 1 was killed" in screen.getvalue()


def test_what_breaks_off_leaves_the_terminal_as_it_was(shown: Remembering, screen: io.StringIO) -> None:
    def broken(place: Place) -> Iterator[Job]:
        yield from Followed(running(0), running(1)).follow(place)
        raise KeyboardInterrupt

    client = Followed()
    client.follow = broken  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        watch_job(cast(Client, client), TINY)
    assert shown.num_closed == 2, "once for the phase, once at the end"


def failed(message: str, reason: str = "BackoffLimitExceeded", phase: Phase = Phase.FAILED, **metadata: Any) -> Job:
    status = Status(phase=phase, reason=reason, message=message)
    return Job(manifest=job_manifest("tiny", **metadata), status=status, etag="1", created_at="")


def test_a_lost_rank_is_told_with_evidence_and_a_remedy() -> None:
    said = ["step 4", "MemoryError: \x1b[31mno room", "RuntimeError: later"]
    assert failure_lines(failed("rank 1 was killed"), said) == [
        "rank 1 was killed",
        "  MemoryError: \ufffd[31mno room",
        "  remedy: read penstock logs tiny --rank 1; penstock retry tiny continues from the last checkpoint",
    ]
    again = failed("the attempt ended", "AttemptFailed", Phase.RECOVERING, namespace="team")
    assert failure_lines(again, ()) == [
        "the attempt ended",
        "  remedy: read penstock logs tiny --namespace team; the job continues from the last checkpoint",
    ]


def test_a_remedy_that_came_along_is_the_only_one() -> None:
    found = failure_lines(failed("rank 0: no room\n  of 4 GiB\n  remedy: pin fewer layers"), ["MemoryError"])
    assert found == ["rank 0: no room", "  MemoryError", "  of 4 GiB", "  remedy: pin fewer layers"]


def test_the_last_words_are_asked_of_a_service(tmp_path: Path) -> None:
    """Of the newest phase, however much happened before."""
    clock = Clock()
    service = new_service(tmp_path, clock=clock)
    world = World(service, clock)
    world.supervisors.scripts = [Script(end=AttemptState.FAILED, message="gone", last_words=("MemoryError",)), Script()]
    uid = world.submit()
    with Client(here(service), transport=Application(service)) as client:
        world.until(uid, Phase.RECOVERING)
        assert last_words_of(client, client.get(TINY)) == ("MemoryError",)
        world.until(uid, Phase.SUCCEEDED, seconds=1)
        assert last_words_of(client, client.get(TINY)) == ()
    service.close()
