"""The Lease: one of several services mirrors, and another goes on when it is gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.lease import LEASE_SECONDS, Lease, micro_time
from penstock.api.cluster.membership import Following
from penstock.core.instants import parse_instant
from tests.support.fake_apiserver import Call, FakeApiserver, RefusedError, served
from tests.support.on_cluster import OWN_NAMESPACE, OnCluster, instant, on_cluster
from tests.support.service import NOW, Clock, job_manifest, step_records
from tests.support.serving import wait_until


@pytest.fixture
def fake() -> FakeApiserver:
    return FakeApiserver()


@dataclass
class Leases:
    """Services that want the same Lease; seconds pass for all of them alike."""

    fake: FakeApiserver
    kube: Cluster
    seconds: Clock = dataclasses.field(default_factory=lambda: Clock(0.0))
    clock: Clock = dataclasses.field(default_factory=Clock)

    def new(self, name: str) -> Lease:
        return Lease(self.kube, OWN_NAMESPACE, name, self.clock, self.seconds)

    def spec(self) -> dict[str, Any]:
        """As the cluster has it."""
        found: dict[str, Any] = self.fake.objects[("leases", OWN_NAMESPACE, "penstock-service")]["spec"]
        return found

    def wait(self, seconds: float, *leases: Lease) -> None:
        """Time passes, and each service has its turns, half a second apart."""
        for _ in range(round(2 * seconds)):
            self.seconds.now += 0.5
            self.clock.now += 0.5
            for each in leases:
                each.run_once()


@pytest.fixture
def leases(fake: FakeApiserver) -> Iterator[Leases]:
    with served(fake) as client:
        yield Leases(fake, Cluster(client))


class TestLease:
    def test_it_is_renewed_every_ten_seconds(self, leases: Leases) -> None:
        one = leases.new("one")
        ages = []
        for _ in range(120):
            leases.wait(0.5, one)
            renewed_at = parse_instant(leases.spec()["renewTime"], "renewTime")
            assert renewed_at is not None
            ages.append(leases.clock() - renewed_at)
        assert max(ages) < 10.5
        assert one.held
        writes = [call for call in leases.fake.calls if call.method in ("POST", "PUT")]
        assert len(writes) == 6

    def test_it_is_written_as_leases_are(self, leases: Leases) -> None:
        leases.wait(0.5, leases.new("one"))
        found = leases.spec()
        assert (found["holderIdentity"], found["leaseDurationSeconds"]) == ("one", LEASE_SECONDS)
        assert found["renewTime"] == "2023-11-14T22:13:20.500000Z"
        assert micro_time(NOW) == "2023-11-14T22:13:20.000000Z"

    def test_one_holds_it(self, leases: Leases) -> None:
        one, two = leases.new("one"), leases.new("two")
        leases.wait(120, one, two)
        assert (one.held, two.held) == (True, False)
        assert leases.spec()["leaseTransitions"] == 1

    def test_an_epoch_begins_with_each_time_that_it_is_taken(self, leases: Leases) -> None:
        """And once a write has shown that another began one since."""
        done: list[str] = []
        valid = True
        one = Lease(
            leases.kube,
            OWN_NAMESPACE,
            "one",
            leases.clock,
            leases.seconds,
            begin=lambda: done.append("begin"),
            valid=lambda: valid,
        )
        leases.wait(60, one)
        assert done == ["begin"]
        valid = False
        assert not one.held
        one.run_once()
        valid = True
        leases.wait(10, one)
        assert one.held
        assert len(done) >= 2

    def test_another_takes_it_when_it_is_not_renewed(self, leases: Leases) -> None:
        one, two = leases.new("one"), leases.new("two")
        leases.wait(30, one, two)
        leases.wait(LEASE_SECONDS - 10, two)
        assert not two.held
        leases.wait(15, two)
        assert two.held
        assert leases.spec()["holderIdentity"] == "two"

    def test_never_do_two_hold_it(self, leases: Leases) -> None:
        """Also if the first still runs, and only cannot reach the cluster."""
        one, two = leases.new("one"), leases.new("two")
        leases.wait(30, one, two)
        cut = {"one": True}

        def hook(call: Call) -> None:
            if cut["one"]:
                raise RefusedError(500, "InternalError", "cut off")

        for _ in range(200):
            leases.fake.hook = hook
            leases.wait(0.5, one)
            leases.fake.hook = lambda call: None
            leases.wait(0.0, two)
            two.run_once()
            assert not (one.held and two.held)
        assert two.held

    def test_one_that_ends_hands_it_over_at_once(self, leases: Leases) -> None:
        one, two = leases.new("one"), leases.new("two")
        leases.wait(30, one, two)
        one.release()
        leases.wait(6, two)
        assert (one.held, two.held) == (False, True)

    def test_one_that_was_killed_takes_it_again_at_once(self, leases: Leases) -> None:
        leases.wait(30, leases.new("one"))
        again = leases.new("one")
        leases.wait(0.5, again)
        assert again.held

    def test_clocks_that_are_wrong_change_nothing(self, leases: Leases) -> None:
        one = leases.new("one")
        wrong = Lease(leases.kube, OWN_NAMESPACE, "two", Clock(NOW + 86_400), leases.seconds)
        leases.wait(120, one, wrong)
        assert (one.held, wrong.held) == (True, False)

    def test_who_lost_a_race_holds_nothing(self, leases: Leases) -> None:
        one = leases.new("one")

        def hook(call: Call) -> None:
            if call.method == "POST":
                metadata = {"name": "penstock-service", "namespace": OWN_NAMESPACE}
                leases.fake.add("leases", {"metadata": metadata, "spec": {"holderIdentity": "two"}})

        leases.fake.hook = hook
        leases.wait(0.5, one)
        assert not one.held
        assert leases.spec()["holderIdentity"] == "two"


class TestFollowing:
    """By a real watch, with threads of its own."""

    @pytest.fixture
    def here(self, tmp_path: Path, fake: FakeApiserver, clock: Clock) -> Iterator[OnCluster]:
        with on_cluster(tmp_path, "", fake, clock) as made:
            yield made

    @pytest.fixture
    def part(self, here: OnCluster) -> Iterator[Callable[[str], Following]]:
        made = []

        def new(name: str) -> Following:
            kube, mirror, clock = here.member.kube, here.member.mirror, here.clock
            lease = Lease(kube, OWN_NAMESPACE, name, clock, clock)
            made.append(Following(kube, mirror, here.reporter, lease, "", clock))
            return made[-1]

        yield new
        for each in made:
            each.close()

    def is_there(self, here: OnCluster, name: str) -> Callable[[], bool]:
        def is_stored() -> bool:
            client = here.person("eve", ("get", ""), ("list", ""))
            return client.get(f"/v1/jobs/default/{name}").status_code == 200

        return is_stored

    def test_jobs_come_and_go_by_themselves(self, here: OnCluster, part: Callable[[str], Following]) -> None:
        here.fake.add_job(job_manifest("before"))
        part("one").run_once()
        wait_until(self.is_there(here, "before"), 10)
        job = here.fake.add_job(job_manifest("after"))
        wait_until(self.is_there(here, "after"), 10)
        here.fake.touch(job, phase="Running", reason="Bound", phaseEnteredAt=instant(NOW), attempt=1)
        wait_until(lambda: here.stored("after").attempt == 1, 10)
        here.fake.remove(job)
        wait_until(lambda: here.stored("after").deleted_at is not None, 10)

    def test_a_watch_that_expired_begins_anew(self, here: OnCluster, part: Callable[[str], Following]) -> None:
        job = here.fake.add_job(job_manifest())
        part("one").run_once()
        wait_until(self.is_there(here, "tiny"), 10)
        here.fake.forget_history()
        here.fake.remove(job)
        here.fake.forget_history()
        here.fake.add_job(job_manifest("later"))
        wait_until(self.is_there(here, "later"), 20)
        assert here.stored().deleted_at is not None

    def test_a_definition_that_is_gone_deletes_no_job(self, here: OnCluster, part: Callable[[str], Following]) -> None:
        """It is, for a service that begins while definitions are made again."""
        here.fake.add_job(job_manifest())
        here.mirror()
        lists = []

        def hook(call: Call) -> None:
            if call.place[0] == "pipelinejobs" and not call.place[2]:
                lists.append(call)
                raise RefusedError(404, "NotFound", "404 page not found")

        here.fake.hook = hook
        part("one").run_once()
        wait_until(lambda: len(lists) >= 2, 10)
        assert here.stored().deleted_at is None
        here.fake.hook = lambda call: None
        here.fake.add_job(job_manifest("later"))
        wait_until(self.is_there(here, "later"), 20)
        assert here.stored().deleted_at is None

    def test_what_nobody_expects_ends_no_thread(
        self, here: OnCluster, part: Callable[[str], Following], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A Lease, a watch and a report that cannot be read; then they can."""
        lease = {"metadata": {"name": "penstock-service", "namespace": OWN_NAMESPACE}, "spec": "nonsense"}
        here.fake.add("leases", lease)
        following = part("one")
        following.run_once()
        assert "the Lease" in caplog.text
        lease["spec"] = {}
        here.clock.now += 10.0
        odd = here.fake.add_job(job_manifest("odd"))
        odd["metadata"]["creationTimestamp"] = 17
        following.run_once()
        here.fake.add_job(job_manifest())
        wait_until(self.is_there(here, "tiny"), 10)
        following.report()

    def test_who_does_not_hold_the_lease_follows_nothing(
        self, here: OnCluster, part: Callable[[str], Following]
    ) -> None:
        part("one").run_once()
        other = part("two")
        other.run_once()
        other.report()
        assert len([word for word in here.fake.words("GET") if word == "GET pipelinejobs"]) <= 1

    def test_reports_wait_until_everything_was_seen(self, here: OnCluster, part: Callable[[str], Following]) -> None:
        """Or a service that starts would tell again all that the cluster was told."""
        job = here.fake.add_job(job_manifest(), phase="Running", attempt=1)
        here.fake.add_rank(job, 1, "a.pod.token")
        assert here.send("a.pod.token", step_records(job["metadata"]["uid"], range(2))).status_code == 200
        following = part("one")
        following.report()
        assert here.progress() == {}
        following.run_once()

        def is_reported() -> bool:
            following.report()
            return here.progress() != {}

        wait_until(is_reported, 10)
        assert here.progress()["step"] == 2
