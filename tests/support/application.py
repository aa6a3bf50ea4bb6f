"""The application as a client's transport, without a network."""

from __future__ import annotations

import httpx

from penstock.api.auth.identity import Identity, Role
from penstock.api.service import Service
from penstock.api.store import tokens
from penstock.client import Target
from tests.support.service import HOST, NOW, client_of


def here(service: Service) -> Target:
    """The service, and an administrator's token for it."""
    admin = Identity(name="me", role=Role.ADMIN)
    _, secret = service.write("tokens", lambda c: tokens.add(c, admin, NOW))
    return Target(server=HOST, token=secret)


class Application(httpx.BaseTransport):
    """Hands requests to the application, as the test client does."""

    def __init__(self, service: Service) -> None:
        self._client = client_of(service, None)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        headers = dict(request.headers)
        answer = self._client.request(request.method, str(request.url), content=request.read(), headers=headers)
        return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)
