"""A job's whole story as kubectl shows it to somebody who watches."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cluster_jobs import ClusterJob
from tests.support.installed import Installed
from tools.lab.console import plain_environ

WATCH_SECONDS = 60.0
QUIET_SECONDS = 2.0
AGE = re.compile(r"\d+[smhd](\d+[smhd])?")


@dataclass
class Story:
    """What was seen: ``objects`` one after the other, and the ``rows`` that were printed for them, in words.

    ``events`` are reasons and messages, and ``pods`` those that were there at its end; the cluster itself forgets
    events after an hour, and pods when their node is lost.
    """

    job: ClusterJob = field(init=False)
    objects: list[dict[str, Any]] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    pods: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def story_of(on: Installed, name: str) -> Iterator[Story]:
    """The story of the job of that name, if it is made and ended in the block; complete after it."""
    story = Story()
    wide = _Watch(on, name, "wide")
    objects = _Watch(on, name, "json")
    try:
        yield story
        _until_quiet(wide, objects)
    finally:
        wide.end()
        objects.end()
    story.events, story.pods = story.job.events(), story.job.pods()
    lines = wide.text().splitlines()
    story.header, story.rows = lines[0].split(), [line.split() for line in lines[1:]]
    story.objects = _documents(objects.text())


class _Watch:
    """`kubectl get --watch`, which sees all from its start on."""

    def __init__(self, on: Installed, name: str, form: str) -> None:
        self._out, self._err = on.folder / f"{name}-{form}.out", on.folder / f"{name}-{form}.err"
        words = ["--namespace", on.namespace, "get", "pj", "--field-selector", f"metadata.name={name}"]
        command = [on.cluster.program, "--kubeconfig", str(on.cluster.kubeconfig), "-v=6", *words]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [*command, "--watch", "--output", form], env=plain_environ(), stdout=out, stderr=err
            )
        on.cluster.wait(lambda: "watch=true" in _read(self._err), f"kubectl does not watch: {_read(self._err)}")

    def end(self) -> None:
        """It would run forever."""
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        """All that it printed."""
        return _read(self._out)


def _until_quiet(*watches: _Watch) -> None:
    end = time.monotonic() + WATCH_SECONDS
    before: list[str] = []
    while before != (before := [watch.text() for watch in watches]):
        assert time.monotonic() < end, "the job goes on changing"
        time.sleep(QUIET_SECONDS)


def _read(path: Path) -> str:
    return path.read_text()


def _documents(text: str) -> list[dict[str, Any]]:
    """Objects that are written one behind the other."""
    found, decoder, place = [], json.JSONDecoder(), 0
    while place < len(text):
        document, place = decoder.raw_decode(text, place)
        found.append(document)
        place = len(text) - len(text[place:].lstrip())
    return found
