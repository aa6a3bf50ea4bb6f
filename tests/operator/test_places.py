"""Jobs that want the same places and have no queue: all of them end, and none holds what another needs for long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from penstock.core.job import PipelineJob
from penstock.core.lifecycle import PLACED_IN_PART_SECONDS, Phase
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.resources import JOBSETS
from penstock.operator.places import Contender, PlacementState, Places, Pool, jitter, pool_of
from tests.support.one_job import condition, example
from tests.support.scheduling import Cluster

HOUR = 3600.0
CUDA = {"resources": {"device": "cuda"}}


def outcomes(cluster: Cluster) -> set[Phase]:
    return set(cluster.phases().values())


@pytest.mark.parametrize("seed", range(2))
def test_eight_jobs_that_need_all_three_places_end(seed: int) -> None:
    cluster = Cluster(3, seed=seed)
    for number in range(8):
        cluster.submit(f"d{number}", 3, runPolicy={"suspend": True})
    cluster.step()
    for job in cluster.operating.cache.jobs():
        cluster.kube.change_spec(job.uid, runPolicy={"suspend": False})
    took = cluster.run(HOUR)
    assert outcomes(cluster) == {Phase.SUCCEEDED}, cluster.phases()
    assert took < 20 * 60
    statuses = [job.status for job in cluster.operating.cache.jobs()]
    assert {status.failures for status in statuses} == {0}
    assert sum(status.attempt for status in statuses) <= 2 * len(statuses)


def test_where_places_abound_nobody_waits() -> None:
    cluster = Cluster(9)
    for number in range(3):
        cluster.submit(f"d{number}", 3)
    cluster.run(HOUR)
    assert [job.status.attempt for job in cluster.operating.cache.jobs()] == [1, 1, 1]


def test_what_is_held_in_part_goes_back_and_is_asked_for_again() -> None:
    """Others than penstock hold a place: nobody knows for how long, and perhaps they wait for the rest."""
    cluster = Cluster(2)
    cluster.taken = {"node-0"}
    uid = cluster.submit("wide", 2)
    for _ in range(3):
        cluster.step()
    assert condition(cluster.operating, uid, ConditionType.ADMITTED) == (ConditionStatus.FALSE, PlacementState.IN_PART)
    assert "1 of 2 ranks have a place" in cluster.operating.status(uid).message
    cluster.run(PLACED_IN_PART_SECONDS + 5.0)
    told = dict(cluster.operating.events())
    assert told["PlacedInPart"].startswith("Recovering: 1 of 2 ranks have a place after 120 s; pods that are not")
    cluster.run(HOUR)
    assert cluster.operating.status(uid).attempt < 20
    cluster.taken.clear()
    cluster.run(HOUR)
    assert (cluster.operating.phase(uid), cluster.operating.status(uid).failures) == (Phase.SUCCEEDED, 0)


def test_jobs_that_no_node_fits_wait_and_compete_with_nobody() -> None:
    """They gave way to each other every few seconds, and their messages no longer said what to do."""
    cluster = Cluster(3)
    said = {
        "no-claim": 'persistentvolumeclaim "nowhere" not found. not found',
        "no-node": "3 node(s) didn't match Pod's node affinity/selector. preemption: 0/3 nodes are available",
    }
    cluster.unfit = {name: f"0/3 nodes are available: {causes}" for name, causes in said.items()}
    for name in (*said, "trains"):
        cluster.submit(name, 2)
    cluster.run(HOUR)
    jobs = {job.name: job.status for job in cluster.operating.cache.jobs()}
    assert jobs["trains"].phase is Phase.SUCCEEDED
    for name, causes in said.items():
        assert (jobs[name].phase, jobs[name].attempt) == (Phase.QUEUED, 1)
        assert causes.partition(".")[0] in jobs[name].message


def test_the_reason_names_who_holds_the_places() -> None:
    cluster = Cluster(3, train_seconds=1000.0)
    cluster.submit("small", 1)
    for _ in range(8):
        cluster.step()
    cluster.submit("wide", 3)
    cluster.run(PLACED_IN_PART_SECONDS + 30.0)
    assert dict(cluster.operating.events())["PlacedInPart"].endswith(
        "2 of 3 ranks have a place after 120 s; held by job small"
    )


def test_one_that_lacks_all_places_and_holds_up_nobody_waits_calmly() -> None:
    cluster = Cluster(1)
    cluster.taken = {"node-0"}
    uid = cluster.submit("patient", 1)
    cluster.run(HOUR)
    assert (cluster.operating.phase(uid), cluster.operating.status(uid).attempt) == (Phase.QUEUED, 1)


def test_one_that_never_fits_keeps_nobody_from_its_places() -> None:
    cluster = Cluster(3)
    huge = cluster.submit("huge", 5, runPolicy={"priority": 9})
    for number in range(3):
        cluster.submit(f"d{number}", 3)
    cluster.run(HOUR)
    phases = cluster.phases()
    assert {phase for name, phase in phases.items() if name != "huge"} == {Phase.SUCCEEDED}
    assert cluster.operating.phase(huge) in (Phase.QUEUED, Phase.RECOVERING)


def test_many_that_never_fit_keep_nobody_from_their_places() -> None:
    """Each is tried now and then, so one of them always is: a later job must not queue behind all of them."""
    cluster = Cluster(2, seed=1)
    for number in range(5):
        cluster.submit(f"wide-{number}", 3)
    cluster.run(HOUR / 2)
    narrow = cluster.submit("narrow", 1)
    cluster.run(HOUR)
    assert cluster.operating.phase(narrow) is Phase.SUCCEEDED


@pytest.mark.parametrize("restarts", [False, True])
def test_important_jobs_that_never_fit_hold_up_no_lesser_one_indefinitely(restarts: bool) -> None:
    """They are tried one after the other, each ahead of all with less priority, and never end being tried."""
    cluster = Cluster(2, seed=1)
    for number in range(8):
        cluster.submit(f"wide-{number}", 3, runPolicy={"priority": 9})
    cluster.run(HOUR)
    lesser = [cluster.submit(f"narrow-{number}", 1) for number in range(3)]
    for _ in range(60):
        cluster.run(60.0)
        if restarts and cluster.operating.now % 600 < 60:
            cluster.restart()
    assert {cluster.operating.phase(uid) for uid in lesser} == {Phase.SUCCEEDED}


@pytest.mark.parametrize("ahead", [3, 8, 16])
def test_a_lesser_job_waits_for_one_attempt_of_each_job_ahead_and_one_more(ahead: int) -> None:
    cluster = Cluster(2, seed=1)
    for number in range(ahead):
        cluster.submit(f"wide-{number}", 3, runPolicy={"priority": 9})
    cluster.run(HOUR)
    lesser = cluster.submit("narrow", 1)
    cluster.run((ahead + 1) * PLACED_IN_PART_SECONDS)
    assert cluster.operating.phase(lesser) is Phase.SUCCEEDED


def test_what_others_hold_for_days_holds_up_no_lesser_job_that_fits() -> None:
    cluster = Cluster(3, seed=2)
    cluster.taken = {"node-0", "node-1"}
    important = [cluster.submit(f"wide-{number}", 2, runPolicy={"priority": 5}) for number in range(6)]
    cluster.run(HOUR)
    lesser = cluster.submit("narrow", 1)
    cluster.run(HOUR)
    assert cluster.operating.phase(lesser) is Phase.SUCCEEDED
    cluster.taken.clear()
    cluster.run(3 * HOUR)
    assert {cluster.operating.phase(uid) for uid in important} == {Phase.SUCCEEDED}


class Competition(RuleBasedStateMachine):
    """Jobs come, are suspended and resumed, others' pods come and go, the operator ends: in the end all have ended."""

    PLACES = 3

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(self.PLACES, seed=0, train_seconds=20.0)
        self.uids: list[str] = []

    @rule(
        ranks=st.integers(1, PLACES),
        least=st.none() | st.integers(1, PLACES),
        priority=st.integers(0, 1),
        many=st.integers(1, 3),
    )
    def submit(self, ranks: int, least: int | None, priority: int, many: int) -> None:
        resources = {} if least is None else {"minRanks": min(least, ranks)}
        for _ in range(many):
            name = f"job-{len(self.uids)}"
            policy = {"priority": priority}
            self.uids.append(self.cluster.submit(name, ranks, resources=resources, runPolicy=policy))

    @rule(number=st.integers(0, 9), wanted=st.booleans())
    def suspend(self, number: int, wanted: bool) -> None:
        if number < len(self.uids):
            self.cluster.kube.change_spec(self.uids[number], runPolicy={"suspend": wanted})

    @rule(seconds=st.sampled_from([2.0, 15.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.run(seconds)

    @rule(number=st.integers(0, PLACES - 1))
    def take_or_leave(self, number: int) -> None:
        node = f"node-{number}"
        if node not in self.cluster.placed():
            self.cluster.taken ^= {node}

    @rule()
    def restart(self) -> None:
        self.cluster.restart()

    def teardown(self) -> None:
        self.cluster.taken.clear()
        for uid in self.uids:
            self.cluster.kube.change_spec(uid, runPolicy={"suspend": False})
        self.cluster.run(6 * HOUR)
        assert outcomes(self.cluster) <= {Phase.SUCCEEDED}, self.cluster.phases()
        assert {job.status.failures for job in self.cluster.operating.cache.jobs()} <= {0}


TestCompetition = Competition.TestCase
TestCompetition.settings = settings(
    max_examples=4,
    stateful_step_count=6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Stage.explicit, Stage.reuse, Stage.generate),  # to shrink takes minutes
)


def job(**kubernetes: object) -> PipelineJob:
    resources = kubernetes.pop("resources", {})
    return PipelineJob.from_manifest(example(kubernetes=kubernetes, resources=resources))


@pytest.mark.parametrize(
    ("one", "other", "competes"),
    [
        ({}, {}, True),
        ({"nodeSelector": {"pool": "a"}}, {}, True),
        ({"nodeSelector": {"pool": "a"}}, {"nodeSelector": {"pool": "b"}}, False),
        ({"nodeSelector": {"pool": "a"}}, {"nodeSelector": {"zone": "b"}}, True),
        (CUDA, {}, False),
        (
            {"resources": {"device": "cuda"}},
            {"resources": {"device": "cuda"}, "acceleratorResource": "amd.com/gpu"},
            False,
        ),
    ],
)
def test_who_competes(one: Mapping[str, object], other: Mapping[str, object], competes: bool) -> None:
    first, second = pool_of(job(**one)), pool_of(job(**other))
    assert first.competes(second) == second.competes(first) == competes


def named(
    uid: str, state: PlacementState | None, since: float, pool: str = "cpu", namespace: str = "team"
) -> Contender:
    return Contender(uid=uid, namespace=namespace, name=uid, pool=Pool(pool), order=(0, since, uid), state=state)


class TestOrder:
    def test_those_behind_give_way(self) -> None:
        found = Places()
        first, second = named("a", PlacementState.IN_PART, 1.0), named("b", PlacementState.SHORT, 2.0)
        for each in (first, second, named("c", PlacementState.IN_PART, 0.0, pool="gpu")):
            found.put(each.uid, each)
        assert found.competition(first).gives_way_to == ""
        assert found.competition(second).gives_way_to == "job a"

    @pytest.mark.parametrize(
        ("state", "holds_in_line", "holds_a_new_one"),
        [
            (PlacementState.IN_PART, True, True),
            (PlacementState.SHORT, True, False),
            (PlacementState.PLACING, True, False),
            (PlacementState.IN_LINE, True, False),
            (None, False, False),
        ],
    )
    def test_who_is_held(self, state: PlacementState | None, holds_in_line: bool, holds_a_new_one: bool) -> None:
        found = Places()
        found.put("a", named("a", state, 1.0))
        assert bool(found.competition(named("b", PlacementState.IN_LINE, 2.0)).held_by) == holds_in_line
        assert bool(found.competition(named("b", None, 2.0)).held_by) == holds_a_new_one

    def test_the_first_in_line_goes_first(self) -> None:
        found = Places()
        first, second = named("a", PlacementState.IN_LINE, 1.0), named("b", PlacementState.IN_LINE, 2.0)
        for each in (first, second):
            found.put(each.uid, each)
        assert (found.competition(first).held_by, found.competition(second).held_by) == ("", "job a")
        assert found.competition(named("c", PlacementState.SHORT, 0.0)).followed

    def test_the_next_is_woken(self) -> None:
        found = Places()
        for each in (
            named("a", PlacementState.IN_PART, 1.0),
            *(named(uid, PlacementState.IN_LINE, 2.0) for uid in "bcd"),
        ):
            found.put(each.uid, each)
        assert found.put("a", None) == ["b"]
        assert found.put("b", None) == ["c"]
        assert found.put("b", None) == []

    def test_of_many_that_have_a_turn_the_next_is_woken(self) -> None:
        """All others would be reconciled for nothing, at each change of each of them."""
        line = Places()
        for number in range(3):
            line.put(f"line-{number}", named(f"line-{number}", PlacementState.IN_LINE, number))
        for number in range(3):
            uid = f"part-{number}"
            line.put(uid, named(uid, PlacementState.IN_PART, 10.0))
            line.put(uid, replace(named(uid, None, 10.0), gave_up=True))
        assert line.put("other", named("other", PlacementState.IN_PART, 20.0)) == ["line-0"]
        assert line.put("other", None) == ["line-0"]
        assert line.put("line-0", None) == ["line-1"]

    def test_a_turn_of_another_device_holds_up_nobody(self) -> None:
        line = Places()
        for uid, pool in (("a", "gpu"), ("b", "cpu")):
            line.put(uid, named(uid, PlacementState.IN_LINE, 1.0, pool=pool))
            line.put(f"{uid}-part", named(f"{uid}-part", PlacementState.IN_PART, 2.0, pool=pool))
            line.put(f"{uid}-part", replace(named(f"{uid}-part", None, 2.0, pool=pool), gave_up=True))
        assert line.competition(named("b", PlacementState.IN_LINE, 1.0)).held_by == ""
        assert line.competition(named("c", PlacementState.IN_LINE, 0.0)).held_by == "job b"
        assert line.put("c", named("c", PlacementState.IN_PART, 0.0)) == ["b"]

    def test_jobs_of_other_namespaces_have_no_names(self) -> None:
        found = Places()
        found.put("a", named("a", PlacementState.IN_PART, 1.0, namespace="secret"))
        assert found.competition(named("b", None, 2.0)).held_by == "a job of another namespace"


def test_jitter_is_each_attempt_s_own() -> None:
    drawn = [jitter("u", attempt) for attempt in range(200)]
    assert jitter("u", 1) == drawn[1]
    assert len(set(drawn)) == 200
    assert 0.0 <= min(drawn) < 0.05
    assert 0.95 < max(drawn) < 1.0


def test_a_queue_s_jobs_are_left_to_it() -> None:
    cluster = Cluster(2)
    cluster.taken = {"node-0"}
    uid = cluster.submit("queued", 2, kubernetes={"queueName": "team"})
    cluster.step()
    cluster.kube.all(JOBSETS)[0]["spec"]["suspend"] = False
    cluster.run(HOUR)
    assert (cluster.operating.phase(uid), cluster.operating.status(uid).attempt) == (Phase.QUEUED, 1)
