"""A job of a service as it is watched: phases as lines, and how far it is while they last."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from penstock.api.client import Client, Job, Place, Progress, Status
from penstock.cli import remote
from penstock.cli.remote import watch_job
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from tests.support.service import job_manifest
from tests.support.shown_line import Remembering

TINY = Place(name="tiny")


class Followed:
    """A client that tells a life."""

    def __init__(self, *life: Status) -> None:
        self._life = life

    def follow(self, place: Place) -> Iterator[Job]:
        job = PipelineJob.from_manifest(job_manifest(place.name))
        return (Job(job=job, status=status, etag="1", created_at="") for status in self._life)


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
