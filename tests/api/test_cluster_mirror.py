"""Jobs of a cluster in the store: whatever was missed, the rows are as the cluster is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.cluster.job_snapshot import job_snapshot
from penstock.api.cluster.mirror import MirrorError
from penstock.api.store import changes, jobs, snapshots
from penstock.core.lifecycle import Phase
from penstock.core.pod import CONFIDENCE_FILE, PLAN_FILE
from penstock.kube.packing import packed
from penstock.kube.resources import JOBS
from penstock.kube.transport import Listing
from tests.support.fake_apiserver import CLUSTER, FakeApiserver, Found
from tests.support.on_cluster import OnCluster, instant, on_cluster
from tests.support.poison import poison
from tests.support.sample_run import confident_plan
from tests.support.service import NOW, Clock, add_job, job_manifest
from tests.support.small_plans import small_plan

POISON = {**poison(small_plan().to_manifest()), "nothing": packed({}), "another": packed(small_plan().to_manifest())}


@pytest.fixture
def fake() -> FakeApiserver:
    return FakeApiserver()


@pytest.fixture
def here(tmp_path: Path, database: str, fake: FakeApiserver, clock: Clock) -> Iterator[OnCluster]:
    with on_cluster(tmp_path, database, fake, clock) as made:
        yield made


def phase(name: str, reason: str = "Because", at: float = NOW, **status: Any) -> dict[str, Any]:
    """What the operator writes when a job comes into a phase."""
    return {"phase": name, "reason": reason, "message": "", "phaseEnteredAt": instant(at), **status}


def condition(kind: str, status: str, reason: str = "Because", message: str = "") -> dict[str, Any]:
    found = {"type": kind, "status": status, "reason": reason, "message": message}
    return {**found, "lastTransitionTime": instant(NOW)}


def uid_of(job: Found) -> str:
    return str(job["metadata"]["uid"])


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"a": found}
    return found


class TestJobs:
    def test_one_that_kubectl_made_is_there(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest(labels={"team": "a"}, annotations={"note": "b"}))
        here.mirror()
        found = here.person("eve", ("get", "default"), ("list", "default")).get("/v1/jobs?label=team=a").json()["items"]
        assert [each["metadata"]["uid"] for each in found] == [uid_of(job)]
        assert found[0]["spec"]["training"]["steps"] == 10
        assert found[0]["status"]["phase"] == "Pending"
        assert found[0]["metadata"]["annotations"] == {"note": "b"}
        assert (here.stored().cluster, here.stored().created_at) == (CLUSTER, NOW)

    def test_kubectl_s_own_notes_are_left_out(self, here: OnCluster) -> None:
        here.fake.add_job(job_manifest(annotations={"kubectl.kubernetes.io/last-applied-configuration": "{}"}))
        here.mirror()
        assert "annotations" not in here.stored().manifest["metadata"]

    def test_the_spec_follows(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest(labels={"team": "a"}))
        here.mirror()
        job["spec"]["runPolicy"] = {"priority": 7, "suspend": True}
        job["metadata"] |= {"generation": 2, "labels": {"team": "b"}}
        here.fake.touch(job)
        here.mirror()
        stored = here.stored()
        assert (stored.priority, stored.generation, stored.labels) == (7, 2, {"team": "b"})
        assert here.events(stored.uid)[-1] == ("suspend-requested", {"by": "cluster", "generation": 2})
        client = here.person("eve", ("get", ""), ("list", ""))
        assert client.get("/v1/jobs?label=team=b").json()["items"]
        assert not client.get("/v1/jobs?label=team=a").json()["items"]

    def test_one_that_core_refuses_is_shown_all_the_same(self, here: OnCluster) -> None:
        """The CRD lets some pass that only the operator refuses."""
        manifest = job_manifest()
        manifest["spec"]["model"]["heads"] = 3
        manifest["spec"]["resources"] = {"memoryPerRank": "nonsense"}
        here.fake.add_job(manifest, **phase("Failed", "UserError", message="heads"))
        here.mirror()
        client = here.person("eve", *((verb, "") for verb in ("get", "list")))
        assert client.get("/v1/jobs").json()["items"][0]["status"]["reason"] == "UserError"
        assert client.get("/metrics").status_code == 200
        page = client.get("/", headers={"Accept": "text/html"})
        assert (page.status_code, "tiny" in page.text) == (200, True)
        page = client.get("/jobs/default/tiny", headers={"Accept": "text/html"})
        assert (page.status_code, "heads" in page.text) == (200, True)

    def test_a_status_that_nobody_understands_takes_no_other_along(self, here: OnCluster) -> None:
        here.fake.add_job(job_manifest("odd"), phase="Dancing")
        here.fake.add_job(job_manifest())
        here.mirror()
        assert here.stored().phase is Phase.PENDING


class TestPhases:
    @pytest.mark.parametrize(
        "part",
        [
            {"training": {"globalBatch": 2}},
            {"training": [1, 2]},
            {"training": {"steps": "many"}},
            {"runPolicy": "never"},
            {"runPolicy": {"priority": "high", "suspend": {"a": 1}}},
            {"runPolicy": {"priority": 10**30}},
            {"data": {"source": "a\x00b"}},
            {"model": nested(300)},
        ],
        ids=lambda part: str(part)[:40],
    )
    def test_a_spec_that_core_refuses_breaks_no_list_and_no_page(self, here: OnCluster, part: dict[str, Any]) -> None:
        """An older definition lets pass what this one refuses."""
        bad, good = job_manifest("bad"), job_manifest("good")
        bad["spec"] |= part
        for manifest in (bad, good):
            job = here.fake.add_job(manifest, **phase("Running", attempt=1))
            here.member.mirror.put(job)
        client = here.person("eve", *((verb, "") for verb in ("get", "list")))
        for path in ("/v1/jobs", "/v1/jobs/default/bad", "/v1/jobs/default/good", "/metrics"):
            assert client.get(path).status_code in (200, 404), path
        for path in ("/", "/jobs/default/bad", "/compare?job=default/bad&job=default/good"):
            assert client.get(path, headers={"Accept": "text/html"}).status_code in (200, 404, 422), path
        assert "good" in {each["metadata"]["name"] for each in client.get("/v1/jobs").json()["items"]}

    @pytest.mark.parametrize(
        "status",
        [
            {"progress": {"attempt": 1, "loss": "nothing"}},
            {"failures": 2**40},
            {"attempt": 2**40},
            {"message": "a\x00b"},
            {"reason": "\x00"},
            {"startedAt": "0001-01-01T00:00:00+14:00"},
        ],
        ids=str,
    )
    def test_a_status_that_cannot_be_kept_holds_up_no_other_job(self, here: OnCluster, status: dict[str, Any]) -> None:
        bad = here.fake.add_job(job_manifest("bad"), **{**phase("Running", attempt=1), **status})
        here.member.mirror.put(bad)
        here.member.mirror.put(here.fake.add_job(job_manifest("good"), **phase("Running", attempt=1)))
        assert here.stored("good").phase is Phase.RUNNING

    @pytest.mark.parametrize("place", ["labels", "annotations"])
    def test_a_note_that_no_database_keeps_holds_up_no_other_job(self, here: OnCluster, place: str) -> None:
        manifest = job_manifest("bad", **{place: {"a": "b\x00c"}})
        here.member.mirror.put(here.fake.add_job(manifest, **phase("Running")))
        here.member.mirror.put(here.fake.add_job(job_manifest("good"), **phase("Running")))
        assert {here.stored(name).phase for name in ("bad", "good")} == {Phase.RUNNING}

    def test_they_are_events_with_the_cluster_s_times(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest())
        here.mirror()
        for number, name in enumerate(("Queued", "Profiling", "Planning", "Binding", "Running")):
            here.fake.touch(job, **phase(name, at=NOW + number, attempt=1, ranks=2))
            here.mirror()
        rows = here.service.read(lambda connection: jobs.history(connection, uid_of(job)))
        assert [(row.body["phase"], row.at) for row in rows if row.kind == "phase"] == [
            ("Queued", NOW),
            ("Profiling", NOW + 1),
            ("Planning", NOW + 2),
            ("Binding", NOW + 3),
            ("Running", NOW + 4),
        ]
        assert [row.body for row in rows if row.kind == "launched"] == [{"attempt": 1, "ranks": 2}]

    def test_those_that_were_missed_are_jumped_over(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest())
        here.mirror()
        here.fake.touch(job, **phase("Succeeded", attempt=4, failures=3, finishedAt=instant(NOW + 9)))
        here.mirror()
        stored = here.stored()
        assert (stored.phase, stored.attempt, stored.failures) == (Phase.SUCCEEDED, 4, 3)
        assert (stored.phase_entered_at, stored.finished_at) == (NOW, NOW + 9)

    def test_the_same_phase_again_is_one_event(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest(), **phase("Queued"))
        here.mirror()
        here.fake.touch(job, message="waits for 2 nodes")
        here.mirror()
        assert here.stored().phase_message == "waits for 2 nodes"
        assert [kind for kind, _ in here.events(uid_of(job))] == ["created", "phase"]

    def test_conditions_are_events_when_they_change(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest(), conditions=[condition("Admitted", "False", "Waiting")])
        here.mirror()
        here.fake.touch(job, conditions=[condition("Admitted", "False", "Waiting", "still")])
        here.mirror()
        here.fake.touch(job, conditions=[condition("Admitted", "True"), condition("Stalled", "False")])
        here.mirror()
        told = [(body["type"], body["status"]) for kind, body in here.events(uid_of(job)) if kind == "condition"]
        assert told == [("Admitted", "False"), ("Admitted", "True"), ("Stalled", "False")]

    def test_progress_alone_is_no_change(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest(), **phase("Running", attempt=1))
        here.mirror()
        before = here.stored()
        for step in range(5):
            here.fake.touch(job, progress={"attempt": 1, "step": step})
            here.mirror()
        assert here.stored() == before

    def test_a_stream_tells_it(self, here: OnCluster) -> None:
        """What reads changes for live streams finds those of the mirror by the service's clock, not the cluster's."""
        here.clock.now += 500.0
        job = here.fake.add_job(job_manifest(), **phase("Queued", at=NOW))
        here.mirror()
        found = here.service.read(lambda connection: changes.changed_since(connection, here.clock.now - 1.0))
        assert list(found) == [uid_of(job)]


class TestDeletions:
    def test_one_that_is_gone_is_marked(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest())
        here.mirror()
        here.fake.remove(job)
        here.mirror()
        assert here.stored().deleted_at == NOW
        eve = here.person("eve", ("get", ""), ("list", ""))
        assert eve.get("/v1/jobs").json()["items"] == []
        assert eve.get("/v1/jobs/default/tiny").json()["metadata"]["deletionTimestamp"]

    def test_one_that_is_being_deleted_says_so(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest())
        job["metadata"]["deletionTimestamp"] = instant(NOW + 1)
        here.fake.touch(job)
        here.mirror()
        assert (here.stored().delete_requested_at, here.stored().deleted_at) == (NOW + 1, None)

    def test_one_that_was_made_after_the_list_is_not_missing_from_it(self, here: OnCluster) -> None:
        before = here.member.kube.list(JOBS)
        here.member.mirror.put(here.fake.add_job(job_manifest()))
        here.member.mirror.replace(before)
        assert here.stored().deleted_at is None

    def test_a_namesake_takes_the_name(self, here: OnCluster) -> None:
        first = here.fake.add_job(job_manifest())
        here.mirror()
        here.fake.remove(first)
        second = here.fake.add_job(job_manifest())
        here.member.mirror.put(second)
        assert here.stored().uid == uid_of(second)
        old = here.service.read(lambda connection: jobs.get(connection, uid_of(first)))
        assert old.deleted_at is not None

    def test_what_is_said_late_of_one_that_is_gone_changes_nothing(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest())
        late = copy.deepcopy(here.fake.touch(job, **phase("Running", attempt=1)))
        here.mirror()
        here.fake.remove(job)
        here.mirror()
        here.member.mirror.store(late)
        assert here.service.read(lambda connection: jobs.get(connection, uid_of(job))).deleted_at is not None

    def test_other_clusters_and_machines_are_left_alone(self, here: OnCluster) -> None:
        local = add_job(here.service, "local")
        elsewhere = job_snapshot(here.fake.add_job(job_manifest("elsewhere")), "another-cluster")
        here.service.write("elsewhere", lambda connection: snapshots.put(connection, elsewhere, NOW))
        here.fake.remove(here.fake.job("elsewhere"))
        here.mirror()
        kept = here.service.read(lambda connection: [jobs.get(connection, each.uid) for each in (local, elsewhere)])
        assert [each.deleted_at for each in kept] == [None, None]

    def test_jobs_of_a_cluster_are_nobody_s_to_run(self, here: OnCluster) -> None:
        here.fake.add_job(job_manifest())
        here.mirror()
        assert here.service.read(lambda connection: jobs.unfinished(connection, "me")) == []


class TestPlans:
    def plan_of(self, here: OnCluster, plan: Any, attempt: int = 1) -> Found:
        name = f"tiny-a{attempt}"
        found = {"metadata": {"name": name, "namespace": "default"}, "binaryData": {"plan.json.gz": packed(plan)}}
        return here.fake.add("configmaps", found)

    def planned(self, digest: str, attempt: int = 1) -> dict[str, Any]:
        return {**phase("Running", attempt=attempt), "plan": {"digest": digest, "summary": "pp 2"}}

    def plans(self, here: OnCluster) -> list[dict[str, Any]]:
        client = here.person("eve", ("get", ""), ("list", ""))
        found: list[dict[str, Any]] = client.get("/v1/jobs/default/tiny/plans").json()["items"]
        return found

    def test_the_plan_is_read_from_the_attempt_s_config_map(self, here: OnCluster) -> None:
        plan = small_plan()
        self.plan_of(here, plan.to_manifest())
        here.fake.add_job(job_manifest(), **self.planned(plan.digest))
        here.mirror()
        (found,) = self.plans(here)
        assert (found["digest"], found["attempt"], found["plan"]) == (plan.digest, 1, plan.to_manifest())
        assert here.stored().plan_digest == plan.digest
        page = here.person("eve").get("/jobs/default/tiny", headers={"Accept": "text/html"})
        assert page.status_code == 200

    def test_what_ranks_are_not_given_is_read_too(self, here: OnCluster) -> None:
        plan = confident_plan()
        files = {PLAN_FILE: packed(plan.for_ranks.to_manifest()), CONFIDENCE_FILE: packed(plan.confidence)}
        metadata = {"name": "tiny-a1", "namespace": "default"}
        here.fake.add("configmaps", {"metadata": metadata, "binaryData": files})
        here.fake.add_job(job_manifest(), **self.planned(plan.digest))
        here.mirror()
        (found,) = self.plans(here)
        assert (found["digest"], found["plan"]) == (plan.digest, plan.to_manifest())

    def test_it_is_read_once(self, here: OnCluster) -> None:
        plan = small_plan()
        self.plan_of(here, plan.to_manifest())
        job = here.fake.add_job(job_manifest(), **self.planned(plan.digest))
        for attempt in (1, 2):
            here.fake.touch(job, **self.planned(plan.digest, attempt))
            here.mirror()
        assert [each["attempt"] for each in self.plans(here)] == [1, 2]
        assert here.fake.words("GET").count("GET configmaps default tiny-a1") == 1

    @pytest.mark.parametrize("made", [False, True])
    def test_one_that_is_not_there_yet_is_read_later(
        self, here: OnCluster, made: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The ConfigMap is there from the attempt's beginning on, and nothing is wrong with it."""
        plan = small_plan()
        if made:
            here.fake.add("configmaps", {"metadata": {"name": "tiny-a1", "namespace": "default"}, "binaryData": {}})
        here.fake.add_job(job_manifest(), **self.planned(plan.digest))
        here.mirror()
        assert self.plans(here) == []
        assert not caplog.records
        self.plan_of(here, plan.to_manifest())
        here.mirror()
        assert [each["digest"] for each in self.plans(here)] == [plan.digest]

    def test_a_poisoned_config_map_holds_up_no_other_job(self, here: OnCluster) -> None:
        plan = small_plan()
        bad = [f"bad-{number}" for number in range(len(POISON))]
        for name, content in zip(bad, POISON.values(), strict=True):
            metadata = {"name": f"{name}-a1", "namespace": "default"}
            here.fake.add("configmaps", {"metadata": metadata, "binaryData": {"plan.json.gz": content}})
            here.fake.add_job(job_manifest(name), **self.planned("0" * 64))
        self.plan_of(here, plan.to_manifest())
        here.fake.add_job(job_manifest(), **self.planned(plan.digest))
        here.mirror()
        assert [each["digest"] for each in self.plans(here)] == [plan.digest]
        assert {here.stored(name).phase for name in bad} == {Phase.RUNNING}
        assert {here.stored(name).plan_digest for name in bad} == {None}


def test_a_store_that_is_away_is_told(here: OnCluster) -> None:
    """So that anyone who watches begins again, with a list."""
    here.service.writer.close()
    with pytest.raises(MirrorError, match="the store refuses an observed job"):
        here.member.mirror.put(here.fake.add_job(job_manifest()))


STATES = st.lists(
    st.tuples(st.sampled_from([each.value for each in Phase]), st.integers(0, 3), st.sampled_from(["a", "b"])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states=STATES, data=st.data())
def test_in_whatever_order_and_with_whatever_loss_the_newest_holds(
    tmp_path_factory: pytest.TempPathFactory, states: list[tuple[str, int, str]], data: st.DataObject
) -> None:
    fake = FakeApiserver()
    job = fake.add_job(job_manifest())
    versions = []
    for number, (name, attempt, reason) in enumerate(states):
        fake.touch(job, **phase(name, reason, NOW + number, attempt=attempt))
        versions.append(copy.deepcopy(job))
    told = data.draw(st.lists(st.sampled_from(versions), max_size=8))
    with on_cluster(tmp_path_factory.mktemp("store"), "", fake, Clock()) as here:
        for found in told:
            here.member.mirror.store(found)
        newest = versions[-1]
        here.member.mirror.replace(Listing(objects=(newest,), version=newest["metadata"]["resourceVersion"]))
        stored = here.stored()
        numbers = [row.number for row in here.service.read(lambda c: jobs.history(c, stored.uid))]
    name, attempt, reason = states[-1]
    assert (stored.phase.value, stored.phase_reason) == (name, reason)
    assert stored.attempt >= attempt
    assert numbers == list(range(1, len(numbers) + 1))
