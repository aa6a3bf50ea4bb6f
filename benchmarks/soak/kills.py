"""Kills random processes of the service and its jobs, over whole jobs, and checks the database afterwards.

The service is `penstock serve` with its executor, ranks, supervisors and shippers on this machine. Every job gets two
to four kills at times that the seed determines: after a number of steps, or after a number of seconds since a launch,
so that starting and measuring are hit, too. A client polls meanwhile.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.core.lifecycle import Phase
from tests.support.killing import VICTIMS, Losses, counted, kill, losses, recorded, written
from tests.support.polling import Poller, milliseconds
from tests.support.serving import Served, wait_until

STEPS = 200
KILLS_OF_A_JOB = (2, 4)
LATEST_STEP, LATEST_SECONDS = 120, 4.0
JOB: dict[str, Any] = {
    "training": {"globalBatch": 2, "steps": STEPS, "optimizer": {"learningRate": 1e-2}},
    "checkpoint": {"everySteps": 50, "keep": 2},
    "runPolicy": {"backoffLimit": 2 * KILLS_OF_A_JOB[1]},
}
JOB_SECONDS = 600.0
RECORDED_SECONDS = 120.0
ENDED = frozenset({Phase.SUCCEEDED.value, Phase.FAILED.value})
TRACEBACK = "Traceback (most recent call last)"
LOGS, TORCH_AGENT_LOG = "logs", "torchrun.log"
PEER_LOST = re.compile("gloo.*(reset by peer|closed by peer|Broken pipe)|Connection (reset|closed)|Broken pipe")


def quiet(line: str) -> None:
    """Report nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One kill of a job: ``steps`` steps after the previous kill, or ``seconds`` after it if ``steps`` is not given."""

    victim: str
    steps: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class Survived:
    """Results of all jobs."""

    seed: int
    jobs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    steps: int = 0
    seconds: float = 0.0
    requests: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        """Number of kills over all kinds of victims."""
        return sum(self.kills.values())

    def to_json(self) -> dict[str, Any]:
        """Results as JSON."""
        return {
            "seed": self.seed,
            "kills": self.num_kills,
            "killsByVictim": dict(sorted(self.kills.items())),
            "jobs": self.jobs,
            "attempts": self.attempts,
            "stepsInDatabase": self.steps,
            "seconds": round(self.seconds, 1),
            "pollMilliseconds": milliseconds(self.requests),
            "violations": self.violations,
        }


def strikes(seed: int, number: int, first: int, most: int) -> list[Strike]:
    """The kills of job ``number``, at most ``most``. The first kills of a run, counted from ``first``, cycle through
    all victims, so that even a short run has each of them.
    """
    chance = random.Random(f"{seed} {number}")
    chosen = []
    for place in range(min(chance.randint(*KILLS_OF_A_JOB), most)):
        turn = first + place
        victim = VICTIMS[turn] if turn < len(VICTIMS) else chance.choice(VICTIMS)
        if chance.random() < 0.6:
            chosen.append(Strike(victim=victim, steps=chance.randint(5, LATEST_STEP // 2)))
        else:
            chosen.append(Strike(victim=victim, seconds=chance.uniform(0.0, LATEST_SECONDS)))
    return chosen


def survive(
    service: Served,
    undisturbed: dict[int, float],
    count: int,
    seed: int,
    report: Callable[[str], None] = quiet,
    seconds: float = math.inf,
) -> Survived:
    """Run jobs until ``count`` kills have struck or ``seconds`` have passed. Their losses have to be those of the
    ``undisturbed`` job. Violations are in the result's ``violations``.
    """
    survived, began, number = Survived(seed=seed), time.monotonic(), 0
    while survived.num_kills < count and time.monotonic() < began + seconds:
        name = f"struck-{number}"
        before = len(survived.violations)
        with _watched(service, name, survived) as poller:
            _live(
                service, name, strikes(seed, number, survived.num_kills, count - survived.num_kills), poller, survived
            )
        uid = service.uid(name)
        survived.violations += [
            f"job {name}: {mistake}" for mistake in _wrong(service, name, uid, undisturbed, survived)
        ]
        survived.jobs, survived.seconds = survived.jobs + 1, time.monotonic() - began
        number += 1
        report(_progress(survived, count, len(survived.violations) - before))
    survived.violations += [f"log {place}" for place in tracebacks(service)]
    return survived


def undisturbed_losses(service: Served) -> dict[int, float]:
    """Losses of a job without kills. It also measures the profile that all later jobs use."""
    uid = service.submit("undisturbed", **JOB)
    service.wait_for("undisturbed", Phase.SUCCEEDED.value)
    wait_until(lambda: len(losses(service, uid)) == STEPS, RECORDED_SECONDS)
    return losses(service, uid)


def _progress(survived: Survived, count: int, new: int) -> str:
    wrong = f", {new} NEW VIOLATIONS" if new else ""
    return f"{survived.num_kills} of {count} kills, {survived.jobs} jobs, {survived.seconds:.0f} s{wrong}"


@contextmanager
def _watched(service: Served, name: str, survived: Survived) -> Iterator[Poller]:
    """A client that polls pages and routes of the job. It starts before the job, so it gets 404 first."""
    job = f"/v1/jobs/default/{name}"
    paths = ("/healthz", "/readyz", "/v1/jobs", job, f"{job}/metrics", f"{job}/logs", f"{job}/events", f"{job}/plans")
    headers = {"Authorization": service.client.headers["Authorization"], "Accept": "application/json"}
    with Poller(f"http://127.0.0.1:{service.port}", headers, paths).polling() as poller:
        yield poller
    survived.violations += [f"job {name}: {violation}" for violation in poller.violations]
    survived.requests += poller.seconds


def _live(service: Served, name: str, planned: list[Strike], poller: Poller, survived: Survived) -> None:
    uid = service.submit(name, **JOB)
    for strike in planned:
        if not _reached(service, name, uid, strike) or not _struck(service, name, uid, strike.victim, poller):
            return  # the job has ended
        survived.kills[strike.victim] += 1


def _reached(service: Served, name: str, uid: str, strike: Strike) -> bool:
    """Wait until the time of the strike. Returns False if the job ends before."""
    if not strike.steps:
        time.sleep(strike.seconds)
        return not _has_ended(service, name)
    goal = service.steps_done(uid) + strike.steps
    wait_until(lambda: service.steps_done(uid) >= goal or _has_ended(service, name), JOB_SECONDS)
    return not _has_ended(service, name)


def _struck(service: Served, name: str, uid: str, victim: str, poller: Poller) -> bool:
    """Kill the victim as soon as it exists. Returns False if the job ends before."""
    if victim == "service":
        poller.away.set()
    try:
        end = time.monotonic() + JOB_SECONDS
        while not kill(service, uid, victim):
            if _has_ended(service, name) or time.monotonic() > end:
                return False
            time.sleep(0.02)
    finally:
        poller.away.clear()
    return True


def _has_ended(service: Served, name: str) -> bool:
    return service.status(name)["phase"] in ENDED


def _wrong(service: Served, name: str, uid: str, undisturbed: dict[int, float], survived: Survived) -> Iterator[str]:
    """Violations of a job after its kills, one sentence each."""
    try:
        wait_until(lambda: _has_ended(service, name), JOB_SECONDS)
    except AssertionError:
        yield f"it has not ended after {JOB_SECONDS:.0f} s: {service.status(name)}"
        return
    status = service.status(name)
    survived.attempts += status["attempt"]
    if status["phase"] != Phase.SUCCEEDED.value:
        yield f"it ended as {status['phase']}: {status['reason']}: {status['message']}"
    if status["attempt"] != 1 + status["failures"]:
        yield f"it took {status['attempt']} attempts for {status['failures']} failures"
    try:
        wait_until(lambda: not differences(recorded(service, uid), written(service, uid)), RECORDED_SECONDS)
    except AssertionError:
        yield from differences(recorded(service, uid), written(service, uid))
    kept = recorded(service, uid)
    survived.steps += len(kept)
    if counted(service, uid) != len(kept):
        yield f"the roll-ups took in {counted(service, uid)} points where there are {len(kept)}"
    if losses(service, uid) != undisturbed:
        yield "its losses are not those of the undisturbed job"


def differences(kept: Losses, left: Losses) -> list[str]:
    """Differences between the steps in the database, ``kept``, and those in ``metrics.jsonl``, one sentence each.

    A rank writes the record of a step before the line. If it is killed in between, only the database has the last step,
    which follows that of the attempt's last line.
    """
    extra: set[tuple[int, int]] = set()
    for attempt in {attempt for attempt, _ in kept.keys() - left.keys()}:
        alone = {step for number, step in kept.keys() - left.keys() if number == attempt}
        last = max((step for number, step in left if number == attempt), default=min(alone) - 1)
        if alone != {last + 1}:
            extra |= {(attempt, step) for step in alone}
    changed = {key for key in kept.keys() & left.keys() if kept[key] != left[key]}
    return [
        f"{len(keys)} steps {words}: attempt and step {sorted(keys)[:5]}"
        for words, keys in (
            ("are not in the database", left.keys() - kept.keys()),
            ("are in the database and not in metrics.jsonl", extra),
            ("have another loss in the database", changed),
        )
        if keys
    ]


def tracebacks(service: Served) -> Iterator[str]:
    """Logs in which the service, a supervisor, a shipper or a rank printed a traceback, with its last line.

    After a kill, a rank ends with the connection error of its peer, and torch's agent prints the ends of its ranks to
    ``torchrun.log``. These are expected and not violations.
    """
    logs = [service.log] if service.log else []
    for path in [*logs, *sorted((service.folder / "data" / "runs").rglob("*.log"))]:
        if path.name == TORCH_AGENT_LOG:
            continue
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if TRACEBACK in line:
                last = next((text for text in lines[number + 1 :] if text and not text.startswith(" ")), "")
                if not (LOGS in path.parts and PEER_LOST.search(last)):
                    yield f"{path.relative_to(service.folder)}:{number + 1} has a traceback: {last}"
