"""kopf's settings for an operator that only watches: it retries forever, and it writes nothing to any object."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import kopf

from penstock.kube.transport import WATCH_SECONDS

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 15.0
REQUEST_SECONDS = 20.0
IDLE_SECONDS = 30.0
"""kopf ends the worker of an object that had no event for this time. Running jobs have events more often."""


class Backoffs:
    """Seconds before every retry of a call: 1, 2, 4, 8, 15, 15, ... kopf iterates over it once for each call."""

    def __iter__(self) -> Iterator[float]:
        seconds = FIRST_BACKOFF_SECONDS
        while seconds < LONGEST_BACKOFF_SECONDS:
            yield seconds
            seconds *= 2
        yield from itertools.repeat(LONGEST_BACKOFF_SECONDS)


class NoDiffBase(kopf.DiffBaseStorage):
    """Compares only ``metadata.generation``, and stores nothing.

    kopf's own storage would copy and compare the whole object.
    """

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> Any:
        return {"metadata": {"generation": body["metadata"].get("generation")}}

    def fetch(self, *, body: kopf.Body) -> None:
        """Return nothing: no state was stored."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: Any) -> None:
        """Store nothing."""


class NoProgress(kopf.ProgressStorage):
    """Stores no progress of handlers: a handler that only enqueues a key has none."""

    def fetch(self, *, key: Any, body: kopf.Body) -> None:
        """Return nothing: no progress was stored."""

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Store nothing."""

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Remove nothing: nothing was stored."""

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        """Leave the object as it is."""

    def clear(self, *, essence: Any) -> Any:
        return essence


def configure(settings: kopf.OperatorSettings) -> None:
    """Set the values that differ from kopf's defaults."""
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.error_backoffs = Backoffs()
    settings.watching.server_timeout = WATCH_SECONDS
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
