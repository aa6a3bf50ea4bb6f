"""Services killed at random moments while a load reports to them, and started again at once."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.support.load import Kept, Load, Target, bodies, kept
from tests.support.load_sending import Sending, send
from tests.support.load_service import LoneService

CONNECTING_SECONDS = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Survived:
    """What was sent, how often a service was killed meanwhile, and what the database has of it."""

    sending: Sending
    num_kills: int
    kept: Kept


def kill_under(load: Load, target: Target, services: Sequence[LoneService], num_kills: int, seed: int) -> Survived:
    """Put the services under the load, and kill one of them so many times while it lasts."""
    moments = random.Random(seed)
    written = list(bodies(load))
    start = time.monotonic() + CONNECTING_SECONDS
    ports = [service.port for service in services]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        sending = pool.submit(send, load, ports, target.ingest, written, start)
        time.sleep(max(start - time.monotonic(), 0))
        for number in range(num_kills):
            due = start + load.seconds * (number + moments.random()) / num_kills
            time.sleep(max(due - time.monotonic(), 0))
            if sending.done():
                break
            service = services[number % len(services)]
            service.end(signal.SIGKILL)
            service.start()
        else:
            number = num_kills
        sent = sending.result()
    return Survived(sending=sent, num_kills=number, kept=kept(load, target))
