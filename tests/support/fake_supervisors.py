"""Supervisors without processes: attempts follow scripts, a state per step; and those of a service that is killed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import Connection

from penstock.api.executor.supervisors import Supervisors
from penstock.api.service import Service
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.processes import ProcessState
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.supervision import AttemptReport, Binding, Order, SupervisorRequest
from tests.support.crashing import Crash
from tests.support.sample_run import sample_profile

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Script:
    """What an attempt does: it runs for ``runs`` steps, then comes to ``end``; none runs on until it is asked to stop.

    One that ``vanishes`` ends without a word instead. One that does not come up is never seen.
    """

    profiled: bool = False
    leaves_profile: bool = True
    runs: int = 1
    end: AttemptState | None = AttemptState.SUCCEEDED
    message: str = ""
    last_words: tuple[str, ...] = ()
    refused: bool = False
    vanishes: bool = False
    comes_up: bool = True


FAILS = Script(end=AttemptState.FAILED, message="rank 1 was killed in step 5")
RUNS_ON = Script(end=None)
VANISHES = Script(vanishes=True)


@dataclass
class FakeAttempt:
    """One supervisor and its attempt."""

    folder: AttemptFolder
    order: Order
    script: Script
    alive: bool = True
    claimed: bool = False
    ran: int = 0
    binding: Binding | None = None
    requests: set[SupervisorRequest] = field(default_factory=set)
    report: AttemptReport | None = None

    def step(self) -> None:
        """Do the next thing."""
        if not self.claimed:
            self.claimed = True
            self.report = AttemptReport(state=AttemptState.STARTING)
        elif self.report is not None:
            self._go_on(self.report)

    def _go_on(self, report: AttemptReport) -> None:
        if report.state is AttemptState.STARTING:
            self._tell(AttemptState.READY, profile=Step.DONE if self.script.profiled else Step.MISSING)
        elif SupervisorRequest.STOP in self.requests:
            self._finish(AttemptState.STOPPED)
        elif report.state is AttemptState.RUNNING:
            self._run()
        elif self.binding is not None:
            self._tell(AttemptState.RUNNING, num_ranks=2)
        elif report.profile is Step.WORKING:
            self._measured()
        elif SupervisorRequest.MEASURE in self.requests and report.profile is Step.MISSING:
            self._tell(AttemptState.READY, profile=Step.WORKING)

    def _measured(self) -> None:
        if self.script.leaves_profile:
            (self.folder.root / "profile.json").write_text(json.dumps(sample_profile().to_manifest()))
        self._tell(AttemptState.READY, profile=Step.DONE)

    def _run(self) -> None:
        self.ran += 1
        if self.ran <= self.script.runs:
            return
        if self.script.vanishes:
            self.alive = False
        elif self.script.end is not None:
            self._finish(self.script.end)

    def _tell(self, state: AttemptState, **changes: object) -> None:
        assert self.report is not None
        self.report = dataclasses.replace(self.report, state=state, **changes)  # type: ignore[arg-type]

    def _finish(self, state: AttemptState) -> None:
        script = self.script
        self._tell(state, message=script.message, last_words=script.last_words, refused=script.refused)
        self.alive = False

    def end(self) -> None:
        """What SIGTERM does: it says that it was ended, unless it had said how it ended."""
        if self.alive and self.report is not None and not self.report.ended:
            self._tell(AttemptState.FAILED, message="the supervisor received a signal and ended the attempt")
        self.alive = False


@dataclass
class FakeSupervisors:
    """The seam's other side. Attempts follow ``scripts`` in turn, the last one again and again.

    ``asked`` holds everything that was asked for; ``started`` only what a supervisor came of.
    """

    scripts: list[Script] = field(default_factory=lambda: [Script()])
    asked: list[tuple[str, int]] = field(default_factory=list)
    started: list[tuple[str, int]] = field(default_factory=list)
    attempts: dict[AttemptFolder, FakeAttempt] = field(default_factory=dict)
    closed: set[AttemptFolder] = field(default_factory=set)

    def step(self) -> None:
        """Every attempt goes on by one state."""
        for attempt in self.attempts.values():
            if attempt.alive:
                attempt.step()

    @property
    def living(self) -> list[FakeAttempt]:
        """Attempts of which something is left."""
        return [attempt for attempt in self.attempts.values() if attempt.alive]

    def start(self, folder: AttemptFolder, order: Order) -> None:
        self.asked.append(("start", folder.attempt))
        if folder in self.attempts or folder in self.closed:
            return
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if script.comes_up:
            self.started.append((order.uid, order.attempt))
            self.attempts[folder] = FakeAttempt(folder, order, script)

    def observe(self, folder: AttemptFolder) -> ProcessState:
        attempt = self.attempts.get(folder)
        return ProcessState(
            claimed=folder in self.closed or (attempt is not None and attempt.claimed),
            alive=self.alive(folder),
            stop_requested=attempt is not None and SupervisorRequest.STOP in attempt.requests,
            report=self.report(folder),
        )

    def alive(self, folder: AttemptFolder) -> bool:
        return folder in self.attempts and self.attempts[folder].alive

    def report(self, folder: AttemptFolder) -> AttemptReport | None:
        return self.attempts[folder].report if folder in self.attempts else None

    def request(self, folder: AttemptFolder, request: SupervisorRequest) -> None:
        self.asked.append((request.value, folder.attempt))
        self.attempts[folder].requests.add(request)

    def bind(self, folder: AttemptFolder, binding: Binding) -> None:
        self.asked.append(("bind", folder.attempt))
        attempt = self.attempts[folder]
        attempt.binding = attempt.binding or binding

    def end(self, folder: AttemptFolder) -> None:
        self.asked.append(("end", folder.attempt))
        self.closed.add(folder)
        if folder in self.attempts:
            self.attempts[folder].end()


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashingService(Service):
    """A service that may be killed around each change of its store."""

    crash: Crash

    def write(self, key: str, change: Callable[[Connection], T]) -> T:
        return self.crash.around(lambda: self.writer.write(key, change))


@dataclass
class CrashingSupervisors:
    """Supervisors of a service that may be killed around whatever it asks of them."""

    real: Supervisors
    crash: Crash

    def start(self, folder: AttemptFolder, order: Order) -> None:
        self.crash.around(lambda: self.real.start(folder, order))

    def observe(self, folder: AttemptFolder) -> ProcessState:
        return self.real.observe(folder)

    def request(self, folder: AttemptFolder, request: SupervisorRequest) -> None:
        self.crash.around(lambda: self.real.request(folder, request))

    def bind(self, folder: AttemptFolder, binding: Binding) -> None:
        self.crash.around(lambda: self.real.bind(folder, binding))

    def end(self, folder: AttemptFolder) -> None:
        self.crash.around(lambda: self.real.end(folder))
