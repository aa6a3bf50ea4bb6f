"""Periodic work of a service, each in its own thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from penstock.api.service import Service
from penstock.api.store import retention
from penstock.api.store.writer import WriterClosedError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
FIRST_FORGET_SECONDS, FORGET_SECONDS = 60.0, 3600.0


@contextmanager
def polling(
    name: str,
    run_once: Callable[[], None],
    close: Callable[[], None] = lambda: None,
    wake: threading.Event | None = None,
) -> Iterator[None]:
    """Call ``run_once`` periodically, in a separate thread for the duration of the block; then ``close``.

    The pause between two calls is `POLL_SECONDS`, or less if ``wake`` is set, but at least as long as the last call
    took: under many requests the thread is still idle half of the time.
    """
    with _repeating(name, POLL_SECONDS, POLL_SECONDS, lambda ending: run_once(), close, wake):
        yield


@contextmanager
def enforcing_retention(service: Service) -> Iterator[None]:
    """Periodically delete rows that are older than their limits, during the block.

    The first run is soon after the start, or a service that is often restarted would keep all rows.
    """

    def forget(ending: threading.Event) -> None:
        forget_old(service, ending.is_set)

    with _repeating("retention", FIRST_FORGET_SECONDS, FORGET_SECONDS, forget):
        yield


@contextmanager
def _repeating(
    name: str,
    first_seconds: float,
    seconds: float,
    do: Callable[[threading.Event], None],
    close: Callable[[], None] = lambda: None,
    wake: threading.Event | None = None,
) -> Iterator[None]:
    """Call ``do`` after ``first_seconds`` and then every ``seconds``, in a thread during the block.

    Errors, such as of a database that does not answer, are logged. The end of the block sets the event that ``do``
    gets.
    """
    ending = threading.Event()
    waking = wake or threading.Event()

    def work() -> None:
        pause = first_seconds
        while True:
            waking.wait(pause)
            waking.clear()  # before the check of ``ending``, which is set first
            if ending.is_set():
                break
            began = time.monotonic()
            try:
                do(ending)
            except SQLAlchemyError as error:
                reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
                log.warning("%s: the database does not answer: %s; retrying in %.1f s", name, reason, seconds)
            except Exception:  # of any kind: the thread would end unnoticed
                log.exception("%s: unexpected failure; retrying in %.1f s", name, seconds)
            took = time.monotonic() - began
            ending.wait(took)
            pause = max(seconds - took, 0.0)
        close()

    thread = threading.Thread(target=work, name=f"penstock-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        waking.set()
        thread.join(timeout=30)


def forget_old(service: Service, stopping: Callable[[], bool] = lambda: False) -> None:
    """Delete all rows that are older than their limit, unless ``stopping``.

    The search for old rows runs outside of the writer. An error leaves the rest to the next run.
    """
    now = service.clock()
    for limit in retention.LIMITS:
        try:
            _forget(service, limit, now - limit.seconds, stopping)
        except SQLAlchemyError as error:
            log.warning("old %s could not be deleted: %s; retrying at the next run of retention", limit.what, error)
        except WriterClosedError:
            return


def _forget(service: Service, limit: retention.Limit, before: float, stopping: Callable[[], bool]) -> None:
    last: Any = None
    while not stopping():
        old = service.read(lambda c, last=last: limit.find(c, before, last, limit.most))  # type: ignore[misc]
        if not old:
            return
        service.write("retention", lambda c, old=old: limit.drop(c, old))  # type: ignore[misc]
        last = old[-1]
