"""Services killed at random moments while a load reports to them, and started again at once."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tests.support.away import Shared, away
from tests.support.load import Kept, Load, Target, kept
from tests.support.load_sending import Sending, send

LATEST_SHARE = 0.9


class Killable(Protocol):
    """A service as a process."""

    port: int

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        ...

    def end(self, number: signal.Signals) -> object:
        """Send it a signal, and wait."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Survived:
    """What was sent, how often a service was killed meanwhile, and what the database has of it."""

    sending: Sending
    num_kills: int
    kept: Kept


def kill_under(load: Load, target: Target, services: Sequence[Killable], num_kills: int, seed: int) -> Survived:
    """Put the services under the load, and kill one of them so many times while it lasts.

    A moment is when so many reports were acknowledged, so that no machine is too slow to come to it.
    """
    random_ = random.Random(seed)
    total = load.num_jobs * load.num_reports
    moments = sorted(random_.randrange(1, int(LATEST_SHARE * total)) for _ in range(num_kills))
    killed = 0
    shared = Shared()
    with away(send, shared, load, [service.port for service in services], target.ingest) as sent:
        for moment in moments:
            if not shared.reached("acknowledged", moment, sent):
                break
            service = services[killed % len(services)]
            service.end(signal.SIGKILL)
            service.start()
            killed += 1
    return Survived(sending=sent.result(), num_kills=killed, kept=kept(load, target))
