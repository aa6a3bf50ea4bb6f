"""An operator whose writes go wrong: a process runs this module instead of `penstock.operator`.

It stands where Kubernetes is called, and nowhere else. The folder that PENSTOCK_TEST_TROUBLE names holds
`trouble.json`, which says what happens (see `Trouble`), and `writes.log`, the writes so far, each once, whatever became
of it. Each write meets its trouble once, however often the operator is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.kube.resources import Resource
from penstock.kube.transport import Change, KubeError, Object
from penstock.operator import __main__ as program
from penstock.operator import controller
from penstock.operator.job_feed import JobFeed
from penstock.operator.kube import HttpKube

FOLDER_VARIABLE = "PENSTOCK_TEST_TROUBLE"
KILL, CONFLICT, FAILURE = "kill", "conflict", "failure"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What happens to write number ``only``, or to every one.

    After a `KILL` the write was made and the operator is dead; a `CONFLICT` was not made; of a `FAILURE` the operator
    hears that it failed, and it was made. Of ``kinds`` each write meets the next one. Watches tell everything
    ``late_seconds`` late, and expire after so many changes.
    """

    kinds: tuple[str, ...] = (KILL,)
    only: int | None = None
    late_seconds: float = 0.0
    expire_after: int = 0


def write_trouble(folder: Path, trouble: Trouble) -> None:
    """Let this happen from now on, with a new count of writes."""
    (folder / "writes.log").write_text("")
    (folder / "trouble.json").write_text(json.dumps(asdict(trouble)))


def read_writes(folder: Path) -> list[str]:
    """A word for each write so far."""
    return (folder / "writes.log").read_text().splitlines()


def read_trouble(folder: Path) -> Trouble:
    """What `write_trouble` wrote last."""
    return Trouble(**json.loads((folder / "trouble.json").read_text()))


class LateFeed(JobFeed):
    """What kopf's watch reports of PipelineJobs arrives ``late_seconds`` late."""

    def observe(self, kind: str | None, item: Object) -> None:
        late = read_trouble(Path(os.environ[FOLDER_VARIABLE])).late_seconds
        asyncio.get_running_loop().call_later(late, super().observe, kind, item)


class TroubledKube(HttpKube):
    """See the module."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._folder, self._lock = Path(os.environ[FOLDER_VARIABLE]), threading.Lock()

    def create(self, manifest: Mapping[str, Any]) -> Object:
        """See `penstock.operator.kube.Kube`, as for all that follow."""
        metadata = manifest["metadata"]
        name = metadata.get("name") or f"{manifest.get('reason')}: {manifest.get('message')}"
        return self._troubled(f"create {manifest['kind']} {name}", lambda: super(TroubledKube, self).create(manifest))

    def apply(self, manifest: Mapping[str, Any], subresource: str = "") -> Object:
        said = status_word(manifest["status"]) if subresource else ""
        word = f"apply {manifest['kind']} {manifest['metadata']['name']} {said}".rstrip()
        return self._troubled(word, lambda: super(TroubledKube, self).apply(manifest, subresource))

    def annotate(self, pod: tuple[str, str, str], annotations: Mapping[str, str]) -> Object:
        epochs = [str(json.loads(text)["epoch"]) if text.startswith("{") else "" for text in annotations.values()]
        word = f"annotate {pod[2]} {' '.join(annotations)} {' '.join(epochs)}".rstrip()
        return self._troubled(word, lambda: super(TroubledKube, self).annotate(pod, annotations))

    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        word = f"delete {resource.plural} {name}"
        self._troubled(word, lambda: super(TroubledKube, self).delete(resource, namespace, name, uid))

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        trouble = read_trouble(self._folder)
        for number, change in enumerate(super().watch(resource, version, namespace, selector), 1):
            time.sleep(trouble.late_seconds)
            if number == trouble.expire_after:
                raise KubeError(410, "Expired", "too old resource version")
            yield change

    def _troubled(self, word: str, write: Callable[[], T]) -> T:
        """One write after the other, so that each is the last of an operator that is killed after it."""
        with self._lock:
            kind = self._next(word)
            if kind == CONFLICT:
                raise KubeError(409, "Conflict", "as if somebody else had written")
            done = write()
            if kind == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == FAILURE:
                raise KubeError(500, "InternalError", "as if the answer were lost")
            return done

    def _next(self, word: str) -> str:
        """What happens to this write; empty if nothing does."""
        written, trouble = read_writes(self._folder), read_trouble(self._folder)
        if word in written:
            return ""
        with (self._folder / "writes.log").open("a") as log:
            log.write(f"{word}\n")
        number = len(written)
        return trouble.kinds[number % len(trouble.kinds)] if trouble.only in (None, number) else ""


def status_word(status: Mapping[str, Any]) -> str:
    """A status without its times and messages."""
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    told = [name for name, value in conditions.items() if value == "True"]
    numbers = f"attempt {status.get('attempt', 0)}, launched {status.get('launched', 0)}"
    return f"{status['phase']} ({status.get('reason', '')}), {numbers}: {' '.join(told)}"


controller.HttpKube = TroubledKube  # type: ignore[attr-defined, assignment]
controller.JobFeed = LateFeed  # type: ignore[attr-defined]

if __name__ == "__main__":
    program.main()
