"""Delivers the end of every job to the webhook, with retries for a day until the receiver answers with 2xx.

A delivery may be repeated: a call is made again if the service was killed before it stored the answer.

Deliveries are in the store, so a restarted service continues. At most one call is in progress; jobs do not wait for it.
"""

from __future__ import annotations

import http.client
import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError

from penstock.api.service import Service
from penstock.api.store import deliveries
from penstock.api.store.deliveries import Due
from penstock.api.webhook.message import Webhook, body, headers

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
CLAIM_SECONDS = 15.0
"""Seconds for which no other service tries: longer than a call takes."""
BACKOFF_SECONDS = 5.0
MOST_BACKOFF_SECONDS = 3600.0
GIVE_UP_SECONDS = 86_400.0


class Deliverer:
    """Calls ``webhook`` for the jobs of ``service``, which users reach at ``service_url``."""

    def __init__(self, service: Service, webhook: Webhook, service_url: str) -> None:
        self._service, self._webhook, self._service_url = service, webhook, service_url

    def run_once(self) -> None:
        """Deliver one end of a job, if one is due."""
        try:
            delivery = self._claimed()
            if delivery is not None:
                self._deliver(delivery)
        except SQLAlchemyError:
            log.exception(
                "deliveries to the webhook could not be read from or written to the store; retrying at the next poll"
            )

    def _claimed(self) -> Due | None:
        now = self._service.clock()
        delivery = self._service.read(lambda connection: deliveries.due(connection, now, now - GIVE_UP_SECONDS))
        if delivery is None:
            return None
        uid, tries = delivery.job.uid, delivery.tries
        until = now + CLAIM_SECONDS
        mine = self._service.write(uid, lambda connection: deliveries.claim(connection, uid, tries, until))
        return delivery if mine else None

    def _deliver(self, delivery: Due) -> None:
        job, clock = delivery.job, self._service.clock
        sent = body(job, self._service_url)
        problem = post(self._webhook.url, sent, headers(job.uid, sent, self._webhook.secret, clock()))
        now = clock()
        if not problem:
            self._service.write(job.uid, lambda connection: deliveries.mark_delivered(connection, job.uid, now))
            return
        wait = backoff_seconds(delivery.tries + 1)
        ends = now + wait > (job.finished_at or now) + GIVE_UP_SECONDS
        after = "giving up" if ends else f"retrying in {wait:.0f} s"
        log.warning("webhook for %s/%s (%s): %s; %s", job.namespace, job.name, job.uid, problem, after)
        self._service.write(job.uid, lambda connection: deliveries.postpone(connection, job.uid, now + wait))


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
