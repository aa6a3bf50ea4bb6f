"""Sessions, login links and the audit log in the store, on both databases."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.api.auth.identity import Identity, Role
from penstock.api.service import Service
from penstock.api.store import audit, sessions, tokens
from penstock.api.store.audit import Entry
from penstock.api.store.sessions import LINK_SECONDS, SESSION_SECONDS, NoSuchLinkError, NoSuchSessionError
from tests.support.service import NOW, Clock, new_service, session_of

BEARER = Identity(name="me", role=Role.EDITOR, namespace="team")


def new_token(service: Service, lifetime_seconds: float | None = None) -> str:
    made, _ = service.write("tokens", lambda c: tokens.add(c, BEARER, NOW, lifetime_seconds))
    return made.id


def new_link(service: Service, token: str, secret: str = "psl_link") -> str:
    service.write("sessions", lambda c: sessions.add_link(c, token, secret, service.clock()))
    return secret


def begin(service: Service, link: str) -> tuple[sessions.StoredSession, str]:
    return service.write("sessions", lambda c: sessions.begin(c, link, "127.0.0.1", service.clock()))


class TestLinks:
    def test_a_link_begins_one_session(self, service: Service) -> None:
        token = new_token(service)
        link = new_link(service, token)
        session, secret = begin(service, link)
        assert (session.token, session.caller.identity, session.expires_at) == (token, BEARER, NOW + SESSION_SECONDS)
        assert service.read(lambda c: sessions.by_secret(c, secret)) == session
        with pytest.raises(NoSuchLinkError):
            begin(service, link)

    def test_a_link_lives_a_minute(self, service: Service, clock: Clock) -> None:
        token = new_token(service)
        new_link(service, token, "early")
        new_link(service, token, "late")
        clock.now += LINK_SECONDS - 0.1
        begin(service, "early")
        clock.now += 0.1
        with pytest.raises(NoSuchLinkError):
            begin(service, "late")

    def test_an_old_link_goes_when_a_new_one_comes(self, service: Service, clock: Clock) -> None:
        token = new_token(service)
        new_link(service, token)
        clock.now += LINK_SECONDS
        new_link(service, token)  # under the same digest: it could not, were the old row there
        begin(service, "psl_link")

    def test_a_session_ends_with_its_token(self, service: Service, clock: Clock) -> None:
        token = new_token(service, lifetime_seconds=90)
        session, secret = begin(service, new_link(service, token))
        assert session.expires_at == NOW + 90
        assert session.valid(NOW + 89.9)
        assert not session.valid(NOW + 90)
        service.write("tokens", lambda c: tokens.revoke(c, token, NOW))
        found = service.read(lambda c: sessions.by_secret(c, secret))
        assert found is not None
        assert not found.valid(NOW)

    def test_a_link_of_a_revoked_or_expired_token_begins_nothing(self, service: Service, clock: Clock) -> None:
        token = new_token(service)
        link = new_link(service, token)
        service.write("tokens", lambda c: tokens.revoke(c, token, NOW))
        with pytest.raises(NoSuchLinkError):
            begin(service, link)
        short = new_link(service, new_token(service, lifetime_seconds=10), "short")
        clock.now += 10
        with pytest.raises(NoSuchLinkError):
            begin(service, short)

    def test_of_many_at_once_one_begins(self, service: Service, database: str, tmp_path: Path, clock: Clock) -> None:
        """Also through two services on one database."""
        other = new_service(tmp_path, database, clock)
        link = new_link(service, new_token(service))
        start = threading.Barrier(8)

        def attempt(number: int) -> bool:
            start.wait()
            try:
                begin((service, other)[number % 2], link)
            except NoSuchLinkError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(attempt, range(8))) == 1
        other.close()


class TestSessions:
    def test_open_ones_are_listed(self, service: Service, clock: Clock) -> None:
        first, _ = session_of(service, lifetime_seconds=60)
        clock.now += 1
        second, _ = session_of(service)
        assert service.read(lambda c: sessions.open_sessions(c, clock.now)) == [second, first]
        assert service.read(lambda c: sessions.open_sessions(c, clock.now, first.token)) == [first]
        assert service.read(lambda c: sessions.open_sessions(c, clock.now + 60)) == [second]
        service.write("sessions", lambda c: sessions.end(c, second.id, clock.now))
        assert service.read(lambda c: sessions.open_sessions(c, clock.now)) == [first]

    def test_it_ends_once(self, service: Service) -> None:
        session, _ = session_of(service)
        assert service.write("sessions", lambda c: sessions.end(c, session.id, NOW + 1)).revoked_at == NOW + 1
        assert service.write("sessions", lambda c: sessions.end(c, session.id, NOW + 2)).ended_at == NOW + 1

    def test_another_token_s_is_not_found(self, service: Service) -> None:
        mine, _ = session_of(service)
        with pytest.raises(NoSuchSessionError):
            service.write("sessions", lambda c: sessions.end(c, mine.id, NOW, "another"))
        with pytest.raises(NoSuchSessionError):
            service.write("sessions", lambda c: sessions.end(c, "none", NOW))
        assert service.read(lambda c: sessions.open_sessions(c, NOW)) == [mine]


def an_entry(number: int, at: float = NOW) -> Entry:
    return Entry(
        at=at,
        identity="me",
        action="createJob",
        method="POST",
        path=f"/v1/jobs/team/{number}",
        namespace="team",
        status=201,
        address="::1",
    )


class TestAudit:
    def test_pages_are_newest_first_and_miss_none(self, service: Service) -> None:
        for number in range(7):
            service.write("audit", lambda c, number=number: audit.add(c, an_entry(number)))  # type: ignore[misc]
        seen: list[str] = []
        cursor: int | None = None
        while True:
            found, cursor = service.read(lambda c, before=cursor: audit.page(c, 3, before))  # type: ignore[misc]
            seen += [entry.path for entry in found]
            if cursor is None:
                break
        assert seen == [f"/v1/jobs/team/{number}" for number in range(6, -1, -1)]
