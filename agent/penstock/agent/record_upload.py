"""Upload of batches of records by HTTP, to the current address of a service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.supervision import Address

if TYPE_CHECKING:
    import httpx

TIMEOUT_SECONDS = 10.0
_HEADERS = {"Content-Type": "application/json", "Content-Encoding": "gzip"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The service's answer: an HTTP status (0 if it could not be reached), and the sequence that it acknowledged."""

    status: int
    sequence: int = -1
    detail: str = ""


Post = Callable[[bytes], Reply]
"""Sends one compressed batch, and returns the service's answer."""


class HttpPost:
    """The `Post` to the service whose `Address` is in a file.

    Address and token are read for each batch, because a restarted service may have another port, certificate or token.
    After an error the connection is closed, so that the certificate is reloaded too.
    """

    def __init__(self, address_file: Path, token_file: Path) -> None:
        import httpx

        self._failures = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, UserError)
        self._address_file, self._token_file = address_file, token_file
        self._address: Address | None = None
        self._client: httpx.Client | None = None

    def __call__(self, body: bytes) -> Reply:
        try:
            bearer = {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}
            answer = self._connected().post("/v1/ingest", content=body, headers={**_HEADERS, **bearer})
        except self._failures as error:
            self.close()
            return Reply(status=0, detail=str(error))
        return _read(answer)

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
        self._client = None

    def _connected(self) -> httpx.Client:
        """Return the client for the service's current address, or for its last one if the file is gone."""
        try:
            address = Address.from_manifest(jsontext.load(self._address_file.read_text()))
        except FileNotFoundError:
            if self._address is None:
                raise
            address = self._address
        if self._client is None or address != self._address:
            self.close()
            self._address, self._client = address, _client(address)
        return self._client


def _client(address: Address) -> httpx.Client:
    import httpx

    from penstock.client.config import trusted

    verify = trusted(Path(address.ca_file) if address.ca_file else None)
    timeout = httpx.Timeout(TIMEOUT_SECONDS)
    return httpx.Client(base_url=address.server, timeout=timeout, trust_env=False, verify=verify)


def _read(answer: httpx.Response) -> Reply:
    """Parse the answer. One of another server, such as a proxy, counts as no answer, regardless of its status."""
    if answer.status_code != 200:
        return Reply(status=answer.status_code, detail=answer.text[:500])
    try:
        return Reply(status=200, sequence=int(answer.json()["sequence"]))
    except (ValueError, KeyError, TypeError):
        return Reply(status=0, detail=f"another server answered, such as a proxy: {answer.text[:500]}")
