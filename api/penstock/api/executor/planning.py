"""Planning in a process of its own: it can be limited, and ended, and a mistake in it takes nothing else along.

python -m penstock.api.executor.planning < question.json > answer.json
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, Any, Protocol

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import PenstockError, UserError
from penstock.core.job import JobSpec
from penstock.core.manifest import Manifest
from penstock.core.plan import Plan
from penstock.core.profile import Profile

MOST_BYTES = 4 * 2**30
COMMAND = (sys.executable, "-m", "penstock.api.executor.planning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(Manifest):
    """What to plan, for hardware that was measured or described."""

    spec: JobSpec
    profile: Profile | None = None
    cluster: ClusterSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Manifest):
    """The plan, or why there is none."""

    plan: Plan | None = None
    what: str = ""
    where: str = ""
    remedy: str = ""

    @property
    def error(self) -> str:
        """Why there is none, as one text."""
        return str(UserError(what=self.what, where=self.where, remedy=self.remedy)) if self.what else ""


class Planner(Protocol):
    """Plans one thing at a time per key."""

    def start(self, key: str, question: Question) -> None:
        """Begin, unless it was begun."""
        ...

    def poll(self, key: str) -> Answer | None:
        """The answer, told once; none while it is worked on."""
        ...

    def busy(self, key: str) -> bool:
        """Whether it was begun and its answer not told."""
        ...

    def cancel(self, key: str) -> None:
        """Forget it."""
        ...


class ProcessPlanner:
    """A process per question."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._running: dict[str, tuple[subprocess.Popen[str], IO[str]]] = {}

    def start(self, key: str, question: Question) -> None:
        """See `Planner`."""
        if key in self._running:
            return
        answered = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed when the answer is told
        with tempfile.TemporaryFile("w+") as asked:
            json.dump(question.to_manifest(), asked)
            asked.seek(0)
            process = subprocess.Popen(
                self._command,
                stdin=asked,
                stdout=answered,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        self._running[key] = (process, answered)

    def poll(self, key: str) -> Answer | None:
        """See `Planner`."""
        process, answered = self._running[key]
        code = process.poll()
        if code is None:
            return None
        del self._running[key]
        with answered:
            answered.seek(0)
            text = answered.read()
        with contextlib.suppress(ValueError, UserError):
            found = Answer.from_manifest(json.loads(text))
            if found.plan is not None or found.what:
                return found
        return Answer(what=f"planning ended with code {code}", remedy="plan a smaller search: pin dp, pp or slices")

    def busy(self, key: str) -> bool:
        """See `Planner`."""
        return key in self._running

    def cancel(self, key: str) -> None:
        """See `Planner`."""
        if key in self._running:
            process, answered = self._running.pop(key)
            process.kill()
            process.wait()
            answered.close()


def answer(question: Question) -> Answer:
    """Plan now, here."""
    from penstock.planner.decide import decide

    try:
        return Answer(plan=decide(_problem(question)).plan)
    except UserError as mistake:
        return Answer(what=mistake.what, where=mistake.where, remedy=mistake.remedy)
    except (MemoryError, PenstockError) as error:
        return Answer(what=str(error) or "planning needs more memory than it may have", remedy="pin dp, pp or slices")


def _problem(question: Question) -> Any:
    if question.cluster is not None:
        from penstock.planner.problem import problem_from_cluster

        return problem_from_cluster(question.spec, question.cluster)
    from penstock.planner.measured import problem_from_profile

    if question.profile is None:
        raise UserError(what="neither a profile nor a cluster is given", remedy="give one of them")
    return problem_from_profile(question.spec, question.profile)


def main() -> None:
    """Answer the question on stdin."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    question = Question.from_manifest(json.load(sys.stdin))
    json.dump(answer(question).to_manifest(), sys.stdout)


if __name__ == "__main__":
    main()
