"""Message of the webhook, and its signature; headers as in standardwebhooks.com."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from penstock.api.store.jobs import StoredJob
from penstock.core.errors import UserError

FEWEST_SECRET_BYTES = 16


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
