"""Requests for plans and profiles in the store, on both databases."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.api.service import Service
from penstock.api.store import plan_requests, profiles
from penstock.api.store.plan_requests import NoSuchRequestError, PlanInput, State
from penstock.api.store.profiles import NoSuchProfileError
from penstock.core.job import PipelineJob
from penstock.core.profile import Profile
from tests.support.planning import cluster, profile_for
from tests.support.sample_run import sample_plan
from tests.support.service import NOW, job_manifest
from tests.support.whatif import add_request, keep_profile, request_of, tiny_job

PLAN_INPUT = PlanInput(job=tiny_job(), cluster=cluster())
SPEC = tiny_job().spec


def claimed(service: Service, request: str, worker: str = "me", now: float = NOW) -> bool:
    found = request_of(service, request)
    return service.write(request, lambda c: plan_requests.claim(c, found, worker, now))


def test_what_was_wanted_comes_back(service: Service) -> None:
    made = add_request(service, "r", PLAN_INPUT)
    assert (made.state, made.begun, made.namespace, made.name) == (State.QUEUED, 0, "default", "tiny")
    assert service.read(lambda c: plan_requests.plan_input(c, "r")) == PLAN_INPUT
    assert service.read(lambda c: plan_requests.plan(c, "r")) is None


@pytest.mark.parametrize("question", [plan_requests.get, plan_requests.plan_input])
def test_one_that_is_not_there_is_missed(service: Service, question: object) -> None:
    with pytest.raises(NoSuchRequestError):
        service.read(lambda c: question(c, "none"))  # type: ignore[operator]


def test_a_request_is_claimed_once(service: Service) -> None:
    found = add_request(service, "r")
    won = [service.write("r", lambda c: plan_requests.claim(c, found, "me", NOW)) for _ in range(2)]
    assert won == [True, False]
    assert request_of(service, "r").worker == "me"


def test_only_who_works_on_it_answers(service: Service) -> None:
    add_request(service, "r")
    claimed(service, "r", "first")
    claimed(service, "r", "second")
    told = {"candidates": 7}
    service.write("r", lambda c: plan_requests.renew(c, "r", "first", told, NOW + 9))
    service.write("r", lambda c: plan_requests.succeed(c, "r", "first", sample_plan(), NOW))
    service.write("r", lambda c: plan_requests.fail(c, "r", "first", {"what": "x"}, NOW))
    found = request_of(service, "r")
    assert (found.state, found.begun, found.progress, found.renewed_at) == (State.WORKING, 2, {}, NOW)
    service.write("r", lambda c: plan_requests.renew(c, "r", "second", told, NOW + 9))
    found = request_of(service, "r")
    assert (found.progress, found.renewed_at) == (told, NOW + 9)


def test_an_answer_is_kept_and_final(service: Service) -> None:
    add_request(service, "r")
    claimed(service, "r")
    service.write("r", lambda c: plan_requests.succeed(c, "r", "me", sample_plan(), NOW + 5))
    service.write("r", lambda c: plan_requests.fail(c, "r", "me", {"what": "x"}, NOW + 6))
    found = request_of(service, "r")
    assert (found.state, found.plan_digest, found.finished_at) == (State.SUCCEEDED, sample_plan().digest, NOW + 5)
    assert found.error == {}
    assert service.read(lambda c: plan_requests.plan(c, "r")) == sample_plan()
    assert not claimed(service, "r")


def test_a_canceled_one_takes_no_answer(service: Service) -> None:
    add_request(service, "r")
    claimed(service, "r")
    service.write("r", lambda c: plan_requests.cancel(c, "r", NOW + 1))
    service.write("r", lambda c: plan_requests.succeed(c, "r", "me", sample_plan(), NOW + 2))
    found = request_of(service, "r")
    assert (found.state, found.finished_at, found.plan_digest) == (State.CANCELED, NOW + 1, None)
    assert service.write("r", lambda c: plan_requests.cancel(c, "r", NOW + 3)) == found
    with pytest.raises(NoSuchRequestError):
        service.write("r", lambda c: plan_requests.cancel(c, "r", NOW + 4))


def test_lists_are_of_namespaces_and_bounded(service: Service) -> None:
    for i, namespace in enumerate(("one", "two", "one")):
        job = PipelineJob.from_manifest(job_manifest(namespace=namespace))
        add_request(service, f"r{i}", PlanInput(job=job, cluster=cluster()))

    def ids(namespaces: tuple[str, ...] | None, limit: int = 50) -> list[str]:
        return [each.id for each in service.read(lambda c: plan_requests.newest(c, namespaces, limit))]

    assert ids(None) == ["r2", "r1", "r0"]
    assert ids(("one",)) == ["r2", "r0"]
    assert ids(None, 1) == ["r2"]
    assert ids(()) == []


def test_what_is_open_comes_oldest_first(service: Service) -> None:
    for each in "abc":
        add_request(service, each)
    claimed(service, "b")
    service.write("a", lambda c: plan_requests.cancel(c, "a", NOW))
    assert [each.id for each in service.read(plan_requests.unfinished)] == ["b", "c"]
    assert service.read(plan_requests.num_waiting) == 1


class TestProfiles:
    """Measurements."""

    def test_a_profile_is_kept_once(self, service: Service) -> None:
        measured = profile_for(SPEC, method="by hand")
        assert keep_profile(service, measured) == keep_profile(service, measured)
        (listed,) = service.read(profiles.every)
        stored, whole = service.read(lambda c: profiles.get(c, measured.digest))
        assert stored == listed
        assert (whole, stored.digest, stored.host, stored.method) == (measured, measured.digest, "desk", "by hand")

    def test_the_newest_of_a_key_is_known(self, service: Service) -> None:
        old, new = profile_for(SPEC, measured_at=NOW - 9), profile_for(SPEC, measured_at=NOW)
        other = of_host(profile_for(SPEC, measured_at=NOW - 99), "other")
        for each in (new, old, other):
            keep_profile(service, each)
        listed = service.read(profiles.every)
        assert [each.digest for each in listed] == [new.digest, old.digest, other.digest]
        assert [each.newest for each in listed] == [True, False, True]
        assert listed[0].key == listed[1].key != listed[2].key
        assert not service.read(lambda c: profiles.get(c, old.digest))[0].newest

    def test_what_serves_a_job_is_found(self, service: Service) -> None:
        here, there = profile_for(SPEC), of_host(profile_for(SPEC, measured_at=NOW + 1), "there")
        for each in (here, there, profile_for(SPEC, num_ranks=8), profile_for(SPEC, model_digest="2" * 64)):
            keep_profile(service, each)

        def profiles_of(host: str, since: float = 0.0) -> list[Profile]:
            model = here.model_digest
            return service.read(lambda c: profiles.measured_since(c, SPEC, model, host, since))

        assert profiles_of("") == [there, here]
        assert profiles_of("desk") == [here]
        assert profiles_of("", NOW + 0.5) == [there]
        assert profiles_of("nowhere") == []

    def test_one_that_is_not_there_is_missed(self, service: Service) -> None:
        with pytest.raises(NoSuchProfileError):
            service.read(lambda c: profiles.get(c, "0" * 64))


def of_host(measured: Profile, host: str) -> Profile:
    return dataclasses.replace(measured, key=dataclasses.replace(measured.key, host=host))
