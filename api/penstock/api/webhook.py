"""Webhook: a call to a URL of the administrator's choice when a job has ended, repeated for a day until it is accepted.

Headers and signature are those of standardwebhooks.com. A delivery may be repeated: a call is made again if the service
was killed before it stored the answer. Deliveries are in the store, so a restarted service continues. At most one call
is in progress; jobs do not wait for it.

Pauses are by this process's monotonic clock. A service waits from when it first reads a try of another one, at least
`CLAIM_SECONDS` and at most the whole pause. So clocks that differ or jump cause neither a call at the same time nor a
longer pause.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from sqlalchemy import Connection

from penstock.api.service import Service
from penstock.api.store import deliveries
from penstock.api.store.deliveries import Pending
from penstock.api.store.jobs import StoredJob, get
from penstock.core.errors import UserError

log = logging.getLogger(__name__)

FEWEST_SECRET_BYTES = 16
CALL_SECONDS = 5.0
CLAIM_SECONDS = 15.0
"""Seconds for which no other service tries: longer than a call takes."""
BACKOFF_SECONDS = 5.0
MOST_BACKOFF_SECONDS = 3600.0
GIVE_UP_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Webhook:
    """URL of the receiver, and the shared secret."""

    url: str
    secret: bytes

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.fragment:
            raise UserError(
                what="is not a URL for POST requests",
                where="--webhook",
                remedy="write https://HOST/PATH, without credentials",
            )
        if len(self.secret) < FEWEST_SECRET_BYTES:
            raise UserError(
                what=f"is shorter than {FEWEST_SECRET_BYTES} bytes",
                where="--webhook-secret",
                remedy="create the file with: openssl rand -hex 32 > FILE",
            )

    def __repr__(self) -> str:
        """Scheme and host only: the path and query may contain a secret."""
        return f"Webhook({urlsplit(self.url).hostname})"


def body(job: StoredJob, service_url: str) -> bytes:
    """Return the end of ``job`` as JSON, the same for every try."""
    document = {
        "type": f"job.{job.phase.value.lower()}",
        "uid": job.uid,
        "namespace": job.namespace,
        "name": job.name,
        "phase": job.phase.value,
        "reason": job.phase_reason,
        "message": job.phase_message,
        "attempt": job.attempt,
        "createdAt": job.created_at,
        "startedAt": job.started_at,
        "finishedAt": job.finished_at,
        "url": f"{service_url}/jobs/{quote(job.namespace)}/{quote(job.name)}",
    }
    return json.dumps(document).encode()


def headers(uid: str, sent: bytes, secret: bytes, now: float) -> Mapping[str, str]:
    """Return the id (against duplicates), the time (against replays), and the signature over both and the body."""
    timestamp = str(int(now))
    signed = b".".join((uid.encode(), timestamp.encode(), sent))
    signature = base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
    return {
        "Content-Type": "application/json",
        "User-Agent": "penstock",
        "webhook-id": uid,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{signature}",
    }


class Deliverer:
    """Calls ``webhook`` for the jobs of ``service``, which users reach at ``service_url``. ``seconds`` is monotonic."""

    def __init__(
        self, service: Service, webhook: Webhook, service_url: str, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._service, self._webhook, self._service_url, self._seconds = service, webhook, service_url, seconds
        self._due_at: dict[Pending, float] = {}

    def run_once(self) -> None:
        """Deliver one end of a job, if one is due."""
        delivery = self._claimed()
        if delivery is not None:
            self._deliver(*delivery)

    def _claimed(self) -> tuple[StoredJob, int] | None:
        """Return the job of a due delivery that no other service has claimed, and the number of its tries."""
        now = self._service.clock()
        since = now - GIVE_UP_SECONDS
        delivery = self._due(self._service.read(lambda connection: deliveries.pending(connection, since)), now)
        if delivery is None:
            return None
        uid, tries, until = delivery.uid, delivery.tries, now + CLAIM_SECONDS

        def claim(connection: Connection) -> StoredJob | None:
            return get(connection, uid) if deliveries.claim(connection, uid, tries, until) else None

        job = self._service.write(uid, claim)
        return None if job is None else (job, tries + 1)

    def _due(self, pending: Iterable[Pending], now: float) -> Pending | None:
        """Return the first delivery whose pause has passed since this service first read its last try."""
        seconds, known = self._seconds(), self._due_at
        self._due_at = {
            delivery: known[delivery] if delivery in known else seconds + _pause_seconds(delivery, now)
            for delivery in pending
        }
        return next((delivery for delivery, due_at in self._due_at.items() if due_at <= seconds), None)

    def _deliver(self, job: StoredJob, tries: int) -> None:
        sent = body(job, self._service_url)
        problem = post(self._webhook.url, sent, headers(job.uid, sent, self._webhook.secret, self._service.clock()))
        now = self._service.clock()
        if not problem:
            self._service.write(job.uid, lambda connection: deliveries.mark_delivered(connection, job.uid, now))
            return
        wait = backoff_seconds(tries)
        ends = now + wait > (job.finished_at or now) + GIVE_UP_SECONDS
        after = "giving up" if ends else f"retrying in {wait:.0f} s"
        log.warning("webhook for %s/%s (%s): %s; %s", job.namespace, job.name, job.uid, problem, after)
        self._service.write(job.uid, lambda connection: deliveries.postpone(connection, job.uid, now + wait))
        self._due_at[Pending(uid=job.uid, tries=tries, next_try_at=now + wait)] = self._seconds() + wait


def _pause_seconds(delivery: Pending, now: float) -> float:
    """Seconds until a delivery is due that this service has not read before."""
    if delivery.tries == 0:
        return 0.0
    whole = max(CLAIM_SECONDS, backoff_seconds(delivery.tries))
    return min(max(delivery.next_try_at - now, CLAIM_SECONDS), whole)


def backoff_seconds(tries: int) -> float:
    """Backoff after that many tries, in seconds."""
    return float(min(BACKOFF_SECONDS * 2 ** min(tries - 1, 20), MOST_BACKOFF_SECONDS))


def post(url: str, sent: bytes, headers: Mapping[str, str]) -> str:
    """Send the message; return the error, empty if the answer is 2xx.

    A redirect is an answer like any other and is not followed: it could lead anywhere.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=CALL_SECONDS)
    try:
        target = parts._replace(scheme="", netloc="", path=parts.path or "/").geturl()
        connection.request("POST", target, body=sent, headers=dict(headers))
        status = connection.getresponse().status
        return "" if 200 <= status < 300 else f"answered {status}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"not reached: {str(error) or type(error).__name__}"
    finally:
        connection.close()
