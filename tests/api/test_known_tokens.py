"""Tokens that are remembered for some seconds: what that saves, and what it must not let through."""

from __future__ import annotations

from functools import partial

from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.api.auth.known_tokens import KNOWN_SECONDS
from penstock.api.service import Service
from penstock.api.store import tokens
from tests.support.service import Clock, client_of


def status(client: TestClient) -> int:
    return client.get("/v1/jobs").status_code


def revoked_elsewhere(service: Service) -> None:
    """As another service does it, or `penstock token revoke`."""
    for token in service.read(tokens.every):
        service.write("tokens", partial(tokens.revoke, token=token.id, now=service.clock()))


def test_a_token_that_was_revoked_elsewhere_passes_some_seconds_at_most(service: Service, clock: Clock) -> None:
    client = client_of(service, Role.VIEWER)
    assert status(client) == 200
    revoked_elsewhere(service)
    clock.now += KNOWN_SECONDS - 0.1
    assert status(client) == 200
    clock.now += 0.1
    assert status(client) == 401


def test_a_token_that_is_revoked_here_passes_no_more(service: Service) -> None:
    client, admin = client_of(service, Role.VIEWER), client_of(service, Role.ADMIN)
    assert status(client) == 200
    (viewer,) = [token.id for token in service.read(tokens.every) if token.role is Role.VIEWER]
    assert admin.delete(f"/v1/tokens/{viewer}").status_code == 200
    assert status(client) == 401


def test_a_token_that_expires_is_not_waited_for(service: Service, clock: Clock) -> None:
    client = client_of(service, Role.VIEWER)
    lifetime = KNOWN_SECONDS / 2
    _, secret = service.write(
        "tokens", lambda c: tokens.add(c, service.read(tokens.every)[0].identity, clock.now, lifetime)
    )
    client.headers["Authorization"] = f"Bearer {secret}"
    assert status(client) == 200
    clock.now += lifetime
    assert status(client) == 401


def test_unknown_tokens_are_looked_up_each_time(service: Service) -> None:
    client = client_of(service, Role.VIEWER)
    known = client.headers["Authorization"]
    client.headers["Authorization"] = f"{known}x"
    assert status(client) == 401
    client.headers["Authorization"] = known
    assert status(client) == 200
