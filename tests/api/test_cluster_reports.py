"""What pods report, and what the cluster is told of it: progress, measurements, each in its one place."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, update
from starlette.testclient import TestClient

from penstock.api.app import create_app
from penstock.api.settings import REVIEWS
from penstock.api.store import reports
from penstock.api.store.plans import keep_plan
from penstock.api.store.reports import AnyRow, reported_rows
from penstock.api.store.schema import measurements
from penstock.core.profile import Profile
from penstock.core.records import Record, RecordKind
from tests.support.fake_apiserver import Call, FakeApiserver, Found, RefusedError
from tests.support.on_cluster import OnCluster, instant, on_cluster
from tests.support.sample_run import explained_plan, sample_profile
from tests.support.service import HOST, NOW, Clock, job_manifest, step_records

POD = "a.pod.token"
PROFILE = sample_profile()
HOUR = 3600.0


@pytest.fixture
def fake() -> FakeApiserver:
    return FakeApiserver()


@pytest.fixture
def here(tmp_path: Path, database: str, fake: FakeApiserver, clock: Clock) -> Iterator[OnCluster]:
    with on_cluster(tmp_path, database, fake, clock) as made:
        yield made


def running(here: OnCluster, attempt: int = 1, token: str = POD) -> Found:
    """A job whose attempt runs, with a pod that bears the token."""
    fake = here.fake
    job = fake.add_job(job_manifest(), phase="Running", reason="Bound", attempt=attempt, phaseEnteredAt=instant(NOW))
    fake.add_rank(job, attempt, token)
    here.mirror()
    return job


def uid_of(job: Found) -> str:
    return str(job["metadata"]["uid"])


def measured(uid: str, attempt: int = 1, sequence: int = 0) -> Record:
    """What an attempt measured, as its pod reports it."""
    return Record(
        uid=uid,
        attempt=attempt,
        source="pod-0",
        sequence=sequence,
        recorded_at=NOW,
        kind=RecordKind.PROFILE,
        profile=PROFILE,
    )


class TestProgress:
    def test_the_first_step_is_told_at_once_and_whole(self, here: OnCluster) -> None:
        job = running(here)
        assert here.send(POD, step_records(uid_of(job), range(3))).status_code == 200
        here.turn(0.5)
        assert here.progress() == {
            "attempt": 1,
            "epoch": 1,
            "step": 3,
            "loss": "4.998",
            "stepSeconds": 0.5,
            "reportedAt": instant(NOW),
        }

    def test_a_step_has_its_speed_by_the_plan(self, here: OnCluster) -> None:
        job, plan = running(here), explained_plan()
        uid = uid_of(job)
        here.service.write(uid, lambda connection: keep_plan(connection, uid, 1, plan, NOW))
        assert here.send(POD, step_records(uid, range(3))).status_code == 200
        here.turn(0.5)
        speed = plan.speed(0.5)
        assert speed is not None
        told = here.progress()["speed"]
        assert told.keys() == {"tokensPerSecondPerDevice", "modelFlopsUtilization"}
        assert told["tokensPerSecondPerDevice"] == pytest.approx(speed.tokens_per_second_per_device)
        assert told["modelFlopsUtilization"] == pytest.approx(speed.model_flops_utilization)

    def test_one_long_step_is_not_the_length_of_a_step(self, here: OnCluster) -> None:
        """The operator compares it with the prediction, and may have the job measured again for it."""
        job = running(here)
        records = step_records(uid_of(job), range(5))
        newest = max(index for index, record in enumerate(records) if record.metrics is not None)
        late = replace(records[newest], metrics=replace(records[newest].metrics, step_seconds=9.0))  # type: ignore[type-var]
        records[newest] = late
        assert here.send(POD, records).status_code == 200
        here.turn(0.5)
        progress = here.progress()
        assert (progress["step"], progress["stepSeconds"]) == (5, 0.5)

    def test_then_at_most_once_in_five_seconds(self, here: OnCluster) -> None:
        job = running(here)
        told = []
        for step in range(40):
            here.send(POD, step_records(uid_of(job), range(step, step + 1), first=2 * step))
            here.turn(0.5)
            told.append(here.progress()["step"])
        writes = [call for call in here.fake.calls if call.place[3] == "status"]
        assert told[0] == 1
        assert len(writes) == 4  # of twenty seconds
        assert told[-1] == 31

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Suspended", "Recovering"])
    def test_an_attempt_s_last_steps_are_told_as_soon_as_it_has_ended(self, here: OnCluster, phase: str) -> None:
        """A job that has succeeded does not show the step of some seconds ago."""
        job = running(here)
        for step in range(3):
            here.send(POD, step_records(uid_of(job), range(step, step + 1), first=2 * step))
            here.turn(0.5)
        assert here.progress()["step"] == 1
        here.fake.touch(job, phase=phase)
        here.mirror()
        here.turn(0.5)
        assert here.progress()["step"] == 3

    def test_what_did_not_change_is_told_once(self, here: OnCluster) -> None:
        job = running(here)
        here.send(POD, step_records(uid_of(job), range(3)))
        for _ in range(5):
            here.turn(60.0)
        assert here.fake.words("PATCH") == ["PATCH pipelinejobs default tiny status"]

    def test_only_progress_is_written_and_under_the_service_s_name(self, here: OnCluster) -> None:
        job = running(here)
        here.send(POD, [*step_records(uid_of(job), range(1))])
        here.turn()
        (call,) = [call for call in here.fake.calls if call.method == "PATCH"]
        assert call.query == {"fieldManager": "penstock-service", "force": "true"}
        assert set(call.body["status"]) == {"progress"}
        meant = {"name": "tiny", "namespace": "default", "uid": uid_of(job)}
        assert call.body["metadata"] == {**meant, "resourceVersion": call.body["metadata"]["resourceVersion"]}
        assert here.fake.job("tiny")["status"]["phase"] == "Running"

    def test_a_namesake_is_not_struck(self, here: OnCluster) -> None:
        """The job was deleted and made again, and nobody has told the service yet."""
        job = running(here)
        here.send(POD, step_records(uid_of(job), range(3)))
        here.fake.remove(job)
        here.fake.add_job(job_manifest(), phase="Running", attempt=1)
        here.turn()
        assert here.progress() == {}

    def test_what_somebody_wrote_meanwhile_is_no_obstacle(self, here: OnCluster) -> None:
        job = running(here)
        here.send(POD, step_records(uid_of(job), range(3)))
        here.fake.touch(job, message="the operator was faster than its watch")
        here.turn()
        assert here.progress()["step"] == 3
        assert len(here.fake.words("PATCH")) == 2

    def test_a_new_attempt_begins_anew_and_at_once(self, here: OnCluster) -> None:
        job = running(here)
        here.send(POD, step_records(uid_of(job), range(5)))
        here.turn(0.5)
        here.fake.touch(job, attempt=2)
        here.fake.add_rank(job, 2, "the.second.token")
        here.mirror()
        here.send("the.second.token", step_records(uid_of(job), range(2, 3), attempt=2))
        here.turn(0.5)
        assert (here.progress()["attempt"], here.progress()["step"]) == (2, 3)

    def test_another_service_goes_on_and_tells_nothing_twice(
        self, here: OnCluster, tmp_path: Path, database: str, clock: Clock
    ) -> None:
        job = running(here)
        here.send(POD, step_records(uid_of(job), range(3)))
        here.turn()
        with on_cluster(tmp_path, database, here.fake, clock) as other:
            other.mirror()
            other.turn()
            assert len(here.fake.words("PATCH")) == 1
            other.send(POD, step_records(uid_of(job), range(3, 4), first=6))
            other.turn()
        assert here.progress()["step"] == 4

    def test_what_was_kept_before_a_kill_is_told_after_it(
        self, here: OnCluster, tmp_path: Path, database: str, clock: Clock
    ) -> None:
        """The first service took the report, and was gone before it told anybody."""
        job = running(here)
        here.send(POD, [measured(uid_of(job)), *step_records(uid_of(job), range(3))][:1])
        with on_cluster(tmp_path, database, here.fake, clock) as other:
            other.mirror()
            other.turn()
        assert here.progress()["profileRef"] == "tiny-profile-a1"

    def test_a_cluster_that_refuses_is_told_again(self, here: OnCluster) -> None:
        job = running(here)
        here.send(POD, step_records(uid_of(job), range(3)))
        here.fake.hook = refusing("PATCH")
        here.turn()
        assert here.progress() == {}
        here.fake.hook = lambda call: None
        here.turn(1.0)
        assert here.progress()["step"] == 3

    @pytest.mark.parametrize(("loss", "told"), [("1e999", "inf"), ("6.1815694272518", "6.18157")])
    def test_a_loss_fits_a_column_and_may_be_no_number(self, here: OnCluster, loss: str, told: str) -> None:
        job = running(here)
        metrics, _ = step_records(uid_of(job), range(1))
        text = json.dumps({"records": [metrics.to_manifest()]}).replace('"loss": 5.0', f'"loss": {loss}')
        assert here.client(POD).post("/v1/ingest", content=text).status_code == 200
        here.turn()
        assert here.progress()["loss"] == told


class TestClocks:
    """No report is lost because clocks differ or jump."""

    @pytest.mark.parametrize("seconds", [2.5, 7.5])
    @pytest.mark.parametrize("jump", [-HOUR, HOUR])
    def test_a_jump_of_an_hour_delays_nothing(self, here: OnCluster, jump: float, seconds: float) -> None:
        uid = uid_of(running(here))
        before = steps_on_cluster(here, here, uid, range(6), seconds)
        here.clock.ahead = jump
        after = steps_on_cluster(here, here, uid, range(6, 12), seconds)
        assert [*before, *after] == steps_in_time(12, seconds)

    @pytest.mark.parametrize("seconds", [2.5, 7.5])
    @pytest.mark.parametrize("ahead", [-60.0, 60.0])
    def test_reports_that_a_service_with_another_clock_receives(
        self, here: OnCluster, tmp_path: Path, database: str, ahead: float, seconds: float
    ) -> None:
        """One service receives the reports, the other one has the Lease."""
        uid = uid_of(running(here))
        with on_cluster(tmp_path, database, here.fake, Clock(here.clock.now, ahead)) as other:
            other.mirror()
            assert steps_on_cluster(here, other, uid, range(6), seconds) == steps_in_time(6, seconds)

    @pytest.mark.parametrize("ahead", [-60.0, 0.0, 60.0])
    def test_a_report_after_the_job_s_end(self, here: OnCluster, tmp_path: Path, database: str, ahead: float) -> None:
        """A pod whose job has failed may still report its last checkpoint, until the pod ends."""
        job = running(here)
        with on_cluster(tmp_path, database, here.fake, Clock(here.clock.now, ahead)) as other:
            other.mirror()
            steps_on_cluster(here, other, uid_of(job), range(3), 0.5)
            here.fake.touch(job, phase="Failed")
            for _ in range(50):
                turn(here, other)
            assert steps_on_cluster(here, other, uid_of(job), range(3, 4), 0.5) == [4]

    def test_a_measurement_that_a_service_with_another_clock_receives(
        self, here: OnCluster, tmp_path: Path, database: str
    ) -> None:
        job = running(here)
        here.turn(0.5)
        with on_cluster(tmp_path, database, here.fake, Clock(here.clock.now, -60.0)) as other:
            other.mirror()
            other.send(POD, [measured(uid_of(job))])
            here.turn(0.5)
        assert here.progress()["profileRef"] == "tiny-profile-a1"

    def test_finished_jobs_are_read_only_while_they_may_report(
        self, here: OnCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, num_read = running(here), []

        def counting(*arguments: Any) -> dict[str, AnyRow]:
            rows = reported_rows(*arguments)
            num_read.append(len(rows))
            return rows

        monkeypatch.setattr(reports, "reported_rows", counting)
        steps_on_cluster(here, here, uid_of(job), range(3), 0.5)
        here.fake.touch(job, phase="Succeeded")
        for _ in range(200):
            here.turn(0.5)
        assert num_read[:3] == [1] * 3
        assert num_read[-60:].count(1) == 3, "every ten seconds"
        assert num_read[-60:].count(0) == 57

    @pytest.mark.parametrize("seconds", [0.5, 10.0])
    def test_a_job_that_begins_and_ends_between_two_turns(self, here: OnCluster, seconds: float) -> None:
        """The job is short, the apiserver was slow, or another service had the Lease."""
        here.turn(0.5)
        job = running(here)
        here.send(POD, step_records(uid_of(job), range(3)))
        here.fake.touch(job, phase="Succeeded")
        here.mirror()
        for _ in range(int(10.0 / seconds)):
            here.turn(seconds)
        assert here.progress()["step"] == 3

    def test_a_first_report_after_the_job_s_end(self, here: OnCluster) -> None:
        job = running(here)
        here.turn(0.5)
        here.fake.touch(job, phase="Failed")
        here.mirror()
        here.turn(0.5)
        here.send(POD, step_records(uid_of(job), range(3)))
        for _ in range(20):
            here.turn(0.5)
        assert here.progress()["step"] == 3


def steps_on_cluster(here: OnCluster, receiver: OnCluster, uid: str, steps: range, seconds: float) -> list[int]:
    """The step on the cluster ``seconds`` after each of ``steps``, with two turns a second."""
    on_the_cluster = []
    for step in steps:
        receiver.send(POD, step_records(uid, range(step, step + 1), first=2 * step))
        for _ in range(int(seconds / 0.5)):
            turn(here, receiver)
        on_the_cluster.append(here.progress().get("step", 0))
    return on_the_cluster


def turn(here: OnCluster, receiver: OnCluster) -> None:
    """Half a second passes everywhere."""
    if receiver is not here:
        receiver.clock.now += 0.5
    here.turn(0.5)


def steps_in_time(num_steps: int, seconds: float) -> list[int]:
    """What `steps_on_cluster` finds if every step is reported, but no more often than every five seconds."""
    every = max(1, int(5.0 / seconds))
    return [1 + step - step % every for step in range(num_steps)]


class TestMeasurements:
    def test_one_lies_where_the_operator_reads_it(self, here: OnCluster) -> None:
        job = running(here)
        assert here.send(POD, [measured(uid_of(job))]).status_code == 200
        here.turn(0.5)
        found = here.fake.objects[("configmaps", "default", "tiny-profile-a1")]
        told = json.loads(gzip.decompress(base64.b64decode(found["binaryData"]["profile.json.gz"])))
        assert Profile.from_manifest(told) == PROFILE
        (owner,) = found["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("PipelineJob", uid_of(job))
        assert here.progress() | {"reportedAt": ""} == {
            "attempt": 1,
            "profileRef": "tiny-profile-a1",
            "reportedAt": "",
        }

    def test_progress_keeps_naming_it(self, here: OnCluster) -> None:
        job = running(here)
        here.send(POD, [measured(uid_of(job))])
        here.turn()
        here.send(POD, step_records(uid_of(job), range(1)))
        here.turn()
        assert (here.progress()["profileRef"], here.progress()["step"]) == ("tiny-profile-a1", 1)

    def test_it_is_kept_among_the_profiles(self, here: OnCluster) -> None:
        job = running(here)
        here.send(POD, [measured(uid_of(job))])
        here.fake.tokens["a.viewer.token"] = {"audiences": ["penstock"], "user": {"username": "eve"}}
        here.fake.rights |= {("eve", "get", ""), ("eve", "list", "")}
        answer = here.client("a.viewer.token").get(f"/v1/profiles/{PROFILE.digest}")
        assert answer.status_code == 200, answer.text

    def test_one_that_was_laid_before_a_kill_is_as_good(self, here: OnCluster) -> None:
        job = running(here)
        here.send(POD, [measured(uid_of(job))])
        here.fake.hook = refusing("PATCH")
        here.turn()
        with here.fake.news:
            assert ("configmaps", "default", "tiny-profile-a1") in here.fake.objects
        here.fake.hook = lambda call: None
        here.service.write("all", forget_refs)
        here.turn()
        assert here.progress()["profileRef"] == "tiny-profile-a1"

    def test_somebody_else_s_is_not_taken_for_it(self, here: OnCluster, caplog: pytest.LogCaptureFixture) -> None:
        job = running(here)
        here.fake.add("configmaps", {"metadata": {"name": "tiny-profile-a1", "namespace": "default"}})
        here.send(POD, [measured(uid_of(job))])
        here.turn()
        assert "profileRef" not in here.progress()
        assert "belongs to another owner" in caplog.text


class TestWhoMayReport:
    def test_a_pod_for_its_own_job(self, here: OnCluster) -> None:
        assert here.send(POD, step_records(uid_of(running(here)), range(1))).json() == {"sequence": 1}

    def test_and_for_no_other(self, here: OnCluster) -> None:
        running(here)
        other = here.fake.add_job(job_manifest("other"), phase="Running", attempt=1)
        here.mirror()
        answer = here.send(POD, step_records(uid_of(other), range(1)))
        assert (answer.status_code, answer.json()["where"]) == (403, "records")

    def test_an_attempt_that_was_followed_reports_what_it_has_left(self, here: OnCluster) -> None:
        """By its own pod while there is one, and by those of the attempts after it."""
        job = running(here)
        here.fake.touch(job, attempt=2)
        here.fake.add_rank(job, 2, "the.second.token")
        here.mirror()
        assert here.send(POD, step_records(uid_of(job), range(1))).status_code == 200
        assert here.send("the.second.token", step_records(uid_of(job), range(2))).json() == {"sequence": 3}

    def test_a_pod_cannot_report_for_an_attempt_to_come(self, here: OnCluster) -> None:
        job = running(here)
        assert here.send(POD, step_records(uid_of(job), range(1), attempt=2)).status_code == 403

    def test_a_job_that_the_mirror_has_not_seen_is_looked_at(self, here: OnCluster) -> None:
        job = here.fake.add_job(job_manifest(), phase="Running", attempt=1)
        here.fake.add_rank(job, 1, POD)
        assert here.send(POD, step_records(uid_of(job), range(1))).status_code == 200

    def test_an_attempt_that_the_mirror_has_not_seen_is_looked_at(self, here: OnCluster) -> None:
        job = running(here)
        here.fake.touch(job, attempt=2)
        here.fake.add_rank(job, 2, "the.second.token")
        assert here.send("the.second.token", step_records(uid_of(job), range(1), attempt=2)).status_code == 200

    @pytest.mark.parametrize(
        "path", ["/v1/jobs", "/v1/jobs/default/tiny", "/v1/profiles", "/v1/me", "/metrics", "/v1/events", "/"]
    )
    def test_it_may_read_nothing(self, here: OnCluster, path: str) -> None:
        running(here)
        assert here.client(POD).get(path).status_code == 403

    @pytest.mark.parametrize("path", ["/v1/jobs", "/v1/plans", "/v1/tokens", "/v1/login-links", "/v1/logout"])
    def test_it_may_make_nothing(self, here: OnCluster, path: str) -> None:
        running(here)
        assert here.client(POD).post(path, json=job_manifest("new")).status_code == 403

    @pytest.mark.parametrize(
        "change",
        [
            lambda fake, pod: fake.tokens[POD].update(audiences=["https://kubernetes.default.svc"]),
            lambda fake, pod: fake.tokens[POD]["user"].pop("extra"),
            lambda fake, pod: fake.tokens[POD]["user"]["extra"].update(
                {"authentication.kubernetes.io/pod-uid": ["another"]}
            ),
            lambda fake, pod: fake.tokens[POD]["user"].update(username="eve"),
            lambda fake, pod: pod["metadata"].pop("ownerReferences"),
            lambda fake, pod: pod["metadata"].pop("labels"),
            lambda fake, pod: pod["metadata"]["ownerReferences"][0].update(uid="another"),
            lambda fake, pod: pod["metadata"]["ownerReferences"][0].update(kind="ReplicaSet"),
            lambda fake, pod: pod["metadata"]["ownerReferences"][0].update(apiVersion="evil.dev/v1"),
            lambda fake, pod: fake.objects.pop(("jobsets", "default", "tiny-a1")),
            lambda fake, pod: fake.objects[("jobsets", "default", "tiny-a1")]["metadata"].update(uid="another"),
            lambda fake, pod: fake.tokens.pop(POD),
        ],
    )
    def test_whoever_is_no_rank_is_nobody(self, here: OnCluster, change: Any) -> None:
        job = here.fake.add_job(job_manifest(), phase="Running", attempt=1)
        pod = here.fake.add_rank(job, 1, POD)
        here.mirror()
        change(here.fake, pod)
        assert here.send(POD, step_records(uid_of(job), range(1))).status_code == 401

    def test_who_it_is_is_asked_once_a_minute(self, here: OnCluster) -> None:
        job = running(here)
        client = here.client(POD)
        for step in range(30):
            here.clock.now += 4.0
            records = step_records(uid_of(job), range(step, step + 1), first=2 * step)
            client.post("/v1/ingest", json={"records": [each.to_manifest() for each in records]})
        assert len(here.fake.words("POST")) == 2
        assert len([word for word in here.fake.words("GET") if word.startswith("GET pods")]) == 1

    def test_one_that_is_gone_reports_for_a_minute_at_most(self, here: OnCluster) -> None:
        job = running(here)
        assert here.send(POD, step_records(uid_of(job), range(1))).status_code == 200
        del here.fake.tokens[POD]
        here.clock.now += 61.0
        assert here.send(POD, step_records(uid_of(job), range(1, 2), first=2)).status_code == 401

    def test_a_cluster_that_does_not_answer_is_no_reason_to_stop_sending(self, here: OnCluster) -> None:
        job = running(here)
        here.fake.hook = refusing("POST")
        answer = here.send(POD, step_records(uid_of(job), range(1)))
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")

    def test_an_address_has_only_so_many_tokens_looked_up(self, here: OnCluster) -> None:
        """Or anyone who makes up tokens would keep the cluster busy."""
        app = create_app(here.service, seconds=lambda: 0.0)
        client = TestClient(app, base_url=HOST, raise_server_exceptions=False)
        statuses = [
            client.get("/v1/jobs", headers={"Authorization": f"Bearer a.{number}.b"}).status_code
            for number in range(REVIEWS.burst + 5)
        ]
        assert statuses == [401] * REVIEWS.burst + [429] * 5
        assert len(here.fake.words("POST")) == REVIEWS.burst

    def test_what_cannot_be_a_token_is_not_asked_about(self, here: OnCluster) -> None:
        for secret in ("pst_unknown", "nonsense", "a..b", "x." + 20_000 * "y" + ".z"):
            assert here.client(secret).get("/v1/jobs").status_code == 401
        assert here.fake.words("POST") == []


def refusing(method: str) -> Any:
    def hook(call: Call) -> None:
        if call.method == method and call.place[0] != "configmaps":
            raise RefusedError(500, "InternalError", "etcd is away")

    return hook


def forget_refs(connection: Connection) -> None:
    """The ConfigMap was made, and anyone who made it died before it was written down."""
    connection.execute(update(measurements).values(ref=""))
