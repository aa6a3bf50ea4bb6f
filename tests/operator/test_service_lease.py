"""Whether the service is there, by the operator's own clock."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.kube.resources import LEASES
from penstock.kube.transport import KubeError
from penstock.operator.service_lease import LAPSE_SECONDS, ServiceLease
from tests.support.fake_kube import FakeKube


class Hands:
    """A cluster, a service that renews its Lease by a clock of its own, and an operator that looks."""

    def __init__(self) -> None:
        self.kube, self.now = FakeKube(), 1000.0
        self.lease = ServiceLease(self.kube, "own", lambda: self.now)

    def renew(self, spec: dict[str, Any]) -> None:
        self.kube.add(LEASES, {"metadata": {"name": "penstock-service", "namespace": "own"}, "spec": spec})

    def later(self, seconds: float) -> bool:
        self.now += seconds
        return self.lease.is_held()


@pytest.fixture
def hands() -> Hands:
    return Hands()


def test_it_was_never_there(hands: Hands) -> None:
    assert not hands.lease.is_held()


@pytest.mark.parametrize("at", ["1999-01-01T00:00:00.000000Z", "2099-01-01T00:00:00.000000Z"])
def test_its_clock_may_be_off(hands: Hands, at: str) -> None:
    hands.renew({"renewTime": at})
    assert hands.lease.is_held()
    assert hands.later(LAPSE_SECONDS - 1)
    assert not hands.later(2)
    hands.renew({"renewTime": at.replace("00:00:00", "00:00:10")})
    assert hands.lease.is_held()


@pytest.mark.parametrize("spec", [{}, {"renewTime": None}])
def test_a_lease_that_was_given_back(hands: Hands, spec: dict[str, Any]) -> None:
    hands.renew({"renewTime": "2026-01-01T00:00:00Z"})
    assert hands.lease.is_held()
    hands.renew(spec)
    assert not hands.lease.is_held()


def test_a_lease_that_was_removed(hands: Hands) -> None:
    hands.renew({"renewTime": "2026-01-01T00:00:00Z"})
    assert hands.lease.is_held()
    hands.kube.objects.clear()
    assert not hands.lease.is_held()


def test_a_cluster_that_does_not_answer_says_nothing_new(hands: Hands) -> None:
    hands.renew({"renewTime": "2026-01-01T00:00:00Z"})
    assert hands.lease.is_held()
    hands.kube.failure = KubeError(503, "Unavailable", "")
    assert hands.later(LAPSE_SECONDS / 2)
    assert not hands.later(LAPSE_SECONDS)
