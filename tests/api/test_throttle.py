"""Token buckets against their definition, and who is counted as whom."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock.api.app import create_app
from penstock.api.auth.identity import Role, new_token
from penstock.api.auth.throttle import Bucket, Rate, Throttle, site, take
from penstock.api.http.credentials import COOKIE
from penstock.api.service import Service
from penstock.api.settings import Limits
from penstock.api.store import sessions
from tests.support.service import HOST, Clock, client_of, new_service, session_of

RATES = st.builds(Rate, per_second=st.sampled_from([0.25, 0.5, 1.0, 4.0, 64.0]), burst=st.integers(1, 6))
GAPS = st.lists(st.integers(0, 64).map(lambda sixteenths: sixteenths / 16), max_size=60)
"""Binary fractions, so that what is compared is exact."""


def allowed(rate: Rate, times: list[float]) -> list[bool]:
    """By definition: from any passed request on, no more pass than ``burst`` and what the rate gives since."""
    passed: list[Fraction] = []
    found = []
    for now in map(Fraction, times):
        windows = [(passed[i], len(passed) - i + 1) for i in range(len(passed))]
        within = all(count <= rate.burst + Fraction(rate.per_second) * (now - start) for start, count in windows)
        found.append(within)
        if within:
            passed.append(now)
    return found


@given(RATES, GAPS)
def test_a_bucket_lets_through_what_its_definition_does(rate: Rate, gaps: list[float]) -> None:
    bucket: Bucket | None = None
    now, times, passed = 0.0, [], []
    for gap in gaps:
        now += gap
        times.append(now)
        bucket, seconds = take(bucket, rate, now)
        passed.append(seconds == 0)
    assert passed == allowed(rate, times)


@given(RATES, GAPS)
def test_waiting_as_long_as_is_said_helps_and_less_does_not(rate: Rate, gaps: list[float]) -> None:
    bucket: Bucket | None = None
    now = 0.0
    for gap in gaps:
        now += gap
        bucket, seconds = take(bucket, rate, now)
        if seconds:
            assert take(bucket, rate, now + seconds)[1] == 0
            assert take(bucket, rate, now + seconds - 1 / 16)[1] > 0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    rate = Rate(per_second=1.0, burst=1)
    bucket, _ = take(None, rate, 100.0)
    assert take(bucket, rate, 0.0)[1] == 1.0


def test_no_more_are_remembered_than_allowed() -> None:
    throttle = Throttle(3, lambda: 0.0)
    rate = Rate(per_second=1.0, burst=1)
    for key in "abcdefg":
        assert throttle.take(key, rate) == 0
    assert len(throttle) == 3
    assert throttle.take("g", rate) > 0
    assert throttle.take("a", rate) == 0


def test_one_that_keeps_asking_is_not_forgotten() -> None:
    throttle = Throttle(2, lambda: 0.0)
    rate = Rate(per_second=1.0, burst=1)
    throttle.take("busy", rate)
    for key in "abcdefg":
        throttle.take(key, rate)
        assert throttle.take("busy", rate) > 0


@pytest.mark.parametrize(
    ("address", "whose"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_a_network_is_one(address: str, whose: str) -> None:
    assert site(address) == whose


class TestRequests:
    """What a service does about too many of them."""

    SLOW = Limits(requests=Rate(per_second=0.5, burst=3), ingest_requests=Rate(per_second=1.0, burst=9))

    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[Service]:
        made = new_service(tmp_path, limits=self.SLOW)
        yield made
        made.close()

    @pytest.fixture
    def seconds(self) -> Clock:
        return Clock(0.0)

    @pytest.fixture
    def plain(self, service: Service, seconds: Clock) -> TestClient:
        """Of nobody, on a service whose seconds are counted by hand."""
        return TestClient(create_app(service, seconds), base_url=HOST)

    def test_too_many_are_told_when_to_come_again(self, plain: TestClient, service: Service, seconds: Clock) -> None:
        bearer = dict(client_of(service, Role.VIEWER).headers)
        assert [plain.get("/v1/me", headers=bearer).status_code for _ in range(4)] == [200, 200, 200, 429]
        answer = plain.get("/v1/me", headers=bearer)
        assert answer.headers["retry-after"] == "2"
        assert answer.json()["type"].endswith("/too-many-requests")
        assert "0.5 requests a second" in answer.json()["detail"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        seconds.now += 2
        assert [plain.get("/v1/me", headers=bearer).status_code for _ in range(2)] == [200, 429]

    def test_a_session_counts_for_its_token(self, plain: TestClient, service: Service) -> None:
        session, secret = session_of(service)
        cookie = {"Cookie": f"{COOKIE}={secret}"}
        assert [plain.get("/v1/me", headers=cookie).status_code for _ in range(4)] == [200, 200, 200, 429]
        link = new_token(sessions.LINK_PREFIX)
        service.write("sessions", lambda c: sessions.add_link(c, session.token, link, service.clock()))
        _, another = service.write("sessions", lambda c: sessions.begin(c, link, "", service.clock()))
        assert plain.get("/v1/me", headers={"Cookie": f"{COOKIE}={another}"}).status_code == 429

    def test_each_token_has_its_own(self, plain: TestClient, service: Service) -> None:
        for _ in range(2):
            bearer = dict(client_of(service, Role.VIEWER).headers)
            assert [plain.get("/v1/me", headers=bearer).status_code for _ in range(4)] == [200, 200, 200, 429]

    @pytest.mark.parametrize("path", ["/healthz", "/v1/jobs", "/nowhere", "/login", "/static/login.js"])
    def test_who_shows_nothing_counts_by_address(self, plain: TestClient, path: str) -> None:
        statuses = [plain.get(path).status_code for _ in range(4)]
        assert statuses[:3] == [statuses[0]] * 3 != [429] * 3
        assert statuses[3] == 429

    def test_guesses_shut_out_nobody_else_at_the_address(self, plain: TestClient, service: Service) -> None:
        """On one machine everybody has the same address."""
        guesses = [plain.get("/v1/jobs", headers={"Authorization": f"Bearer pst_{i}"}) for i in range(9)]
        assert [answer.status_code for answer in guesses] == [401] * 3 + [429] * 6
        bearer = dict(client_of(service, Role.VIEWER).headers)
        assert plain.get("/v1/jobs", headers=bearer).status_code == 200

    def test_reports_of_ranks_have_a_rate_of_their_own(self, plain: TestClient, service: Service) -> None:
        bearer = dict(client_of(service, Role.INGEST).headers)
        statuses = [plain.post("/v1/ingest", json={}, headers=bearer).status_code for _ in range(10)]
        assert statuses == [422] * 9 + [429]
