"""A client that asks a service again and again, and keeps what no client should ever be answered."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from tests.support.away import Shared

PAUSE_SECONDS = 0.05
TIMEOUT_SECONDS = 30.0


@dataclass
class Poller:
    """Asks for ``paths`` in turn. A service that is ``away``, because it was killed, need not answer."""

    base_url: str
    headers: dict[str, str]
    paths: Sequence[str]
    pause_seconds: float = PAUSE_SECONDS
    away: threading.Event = field(default_factory=threading.Event)
    violations: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def polling(self) -> Iterator[Poller]:
        """Ask during the block, in a thread."""
        thread = threading.Thread(target=self._ask, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join(TIMEOUT_SECONDS)

    def _ask(self) -> None:
        number = 0
        with httpx.Client(
            base_url=self.base_url, headers=self.headers, timeout=TIMEOUT_SECONDS, trust_env=False
        ) as client:
            while not self._ended.wait(self.pause_seconds):
                paths = list(self.paths)
                self._once(client, paths[number % len(paths)])
                number += 1

    def _once(self, client: httpx.Client, path: str) -> None:
        was_away, began = self.away.is_set(), time.monotonic()
        try:
            answer = client.get(path)
        except httpx.TransportError as error:
            if not (was_away or self.away.is_set()):
                self.violations.append(f"GET {path} got no answer while the service ran: {error!r}")
            return
        self.seconds.append(time.monotonic() - began)
        if answer.status_code >= 500:
            self.violations.append(f"GET {path} was answered {answer.status_code}: {answer.text[:200]}")


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Count, median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(1000 * each for each in seconds)
    if not ordered:
        return {"num": 0, "p50": float("nan"), "p99": float("nan"), "max": float("nan")}
    return {
        "num": len(ordered),
        "p50": statistics.median(ordered),
        "p99": ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)],
        "max": ordered[-1],
    }


def poll(shared: Shared, url: str, pause_seconds: float) -> tuple[list[float], list[str]]:
    """Ask for one URL until the moment ``end``: how long each answer took, and what was no good answer.

    For a process of its own.
    """
    took, errors = [], []
    with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        while not 0 < shared["end"] <= time.monotonic():
            began = time.monotonic()
            try:
                answer = client.get(url)
            except httpx.TransportError as error:
                errors.append(f"GET {url} got no answer: {error!r}")
            else:
                if answer.status_code != 200:
                    errors.append(f"GET {url} was answered {answer.status_code}: {answer.text[:200]}")
            took.append(time.monotonic() - began)
            time.sleep(pause_seconds)
    return took, errors
