"""What a service does again and again beside answering, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.api import retention
from penstock.api.service import Service

LOOK_SECONDS = 0.5
FORGET_SECONDS = 3600.0


@contextmanager
def looking(name: str, turn: Callable[[], None], close: Callable[[], None] = lambda: None) -> Iterator[None]:
    """``turn`` is called again and again, in a thread of its own, for as long as the block lasts; then ``close``."""
    with _repeating(name, LOOK_SECONDS, lambda ending: turn(), close):
        yield


@contextmanager
def forgetting(service: Service) -> Iterator[None]:
    """Now and then what is older than its limit is dropped, for as long as the block lasts."""
    with _repeating("retention", FORGET_SECONDS, lambda ending: retention.forget_old(service, ending.is_set)):
        yield


@contextmanager
def _repeating(
    name: str, seconds: float, do: Callable[[threading.Event], object], close: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Does it again and again, ``seconds`` in between, in a thread; it is told by an event that the block ends."""
    ending = threading.Event()

    def work() -> None:
        while not ending.wait(seconds):
            do(ending)
        close()

    thread = threading.Thread(target=work, name=f"penstock-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(timeout=30)
