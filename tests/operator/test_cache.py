"""What the operator knows of the cluster, anyone who tells it in whatever order, and from whatever thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.lifecycle import Phase
from penstock.operator.cache import Cache
from penstock.operator.children import Children, Gone
from penstock.operator.snapshots import JobSetSnapshot, NodeSnapshot, PodSnapshot, RanksJobSnapshot
from tests.support.manifests import example

NOW = 1000.0
NAMES = ("p", "a", "b", "old", "young", "u", "v", *(f"p{number}" for number in range(20)))


def job(version: int, uid: str = "u", **status: Any) -> dict[str, Any]:
    found = example()
    metadata = {"name": "a", "namespace": "team", "uid": uid, "generation": 1, "resourceVersion": str(version)}
    return {**found, "metadata": metadata, "status": status}


def pod(name: str = "p", version: int = 1, job_uid: str = "u", **more: Any) -> PodSnapshot:
    told: dict[str, Any] = {"uid": f"uid-{name}", "node": "east", "address": "", "running": True, **more}
    told = {"namespace": "team", "index": NAMES.index(name), "owner": f"job-of-{job_uid}", **told}
    return PodSnapshot(
        name=name, job_uid=job_uid, attempt=1, being_deleted=False, version=version, owner_name="a-a1-ranks-0", **told
    )


def launched(cache: Cache, *uids: str) -> None:
    """These jobs have their first attempts, of which nothing is known but what is between a job and its pods."""
    for uid in uids:
        cache.put_job(job(1, uid))
        named: dict[str, Any] = {"namespace": "team", "job_uid": uid}
        jobset = JobSetSnapshot(
            **named, name="a-a1", uid=f"jobset-of-{uid}", owner=uid, attempt=1, suspended=False, being_deleted=False
        )
        cache.put_child(jobset)
        ranks_job = RanksJobSnapshot(**named, name="a-a1-ranks-0", uid=f"job-of-{uid}", owner=f"jobset-of-{uid}")
        cache.put_child(ranks_job)


class News(list[str]):
    """What the cache tells, in order."""

    def taken(self) -> list[str]:
        found = list(self)
        self.clear()
        return found


@pytest.fixture
def news() -> News:
    return News()


@pytest.fixture
def cache(news: News) -> Cache:
    return Cache(lambda: NOW, news.append)


class TestJobs:
    def test_what_is_older_changes_nothing(self, cache: Cache, news: News) -> None:
        cache.put_job(job(7, phase="Running"))
        known = cache.put_job(job(5, phase="Queued"))
        assert known is not None
        assert (known.status.phase, known.version, news) == (Phase.RUNNING, 7, ["u"])

    def test_progress_alone_is_no_news(self, cache: Cache, news: News) -> None:
        cache.put_job(job(1, phase="Running", progress={"attempt": 1, "step": 1}))
        news.clear()
        cache.put_job(job(2, phase="Running", progress={"attempt": 1, "step": 2, "loss": "2.5"}))
        assert news.taken() == []
        cache.put_job(job(3, phase="Running", progress={"attempt": 1, "step": 2, "profileRef": "measured"}))
        assert news.taken() == ["u"]

    def test_when_a_step_was_heard_of(self) -> None:
        now = NOW
        cache = Cache(lambda: now)
        cache.put_job(job(1, progress={"attempt": 1, "step": 1, "reportedAt": "2001-01-01T00:00:00Z"}))
        now += 5
        cache.put_job(job(2, progress={"attempt": 1, "step": 1, "reportedAt": "2099-01-01T00:00:00Z"}))
        (known,) = cache.jobs()
        assert known.stepped_at == NOW
        cache.put_job(job(3, progress={"attempt": 1, "step": 2}))
        (known,) = cache.jobs()
        assert known.stepped_at == NOW + 5

    def test_what_is_gone_stays_gone(self, cache: Cache, news: News) -> None:
        cache.put_job(job(1))
        cache.remove_job("u")
        assert cache.put_job(job(2)) is None
        assert (cache.jobs(), news) == ([], ["u", "u"])

    def test_a_list_misses_what_vanished_unseen(self, cache: Cache, news: News) -> None:
        cache.put_job(job(1, "old"))
        cache.put_job(job(9, "new"))
        cache.replace_jobs([job(3, "other")], 5)
        assert sorted(known.uid for known in cache.jobs()) == ["new", "other"]
        assert news == ["old", "new", "other", "old"]

    def test_a_spec_that_core_refuses(self, cache: Cache) -> None:
        wrong = job(1)
        wrong["spec"]["model"]["heads"] = 7
        known = cache.put_job(wrong)
        assert known is not None
        assert known.job is None
        assert "heads" in known.mistake

    @pytest.mark.parametrize(
        "status", [{"phase": "Dreaming"}, {"progress": {"attempt": 1, "loss": "much"}}, {"profile": "old"}]
    )
    def test_a_status_that_nobody_can_read_blinds_nobody(
        self, cache: Cache, status: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        cache.replace_jobs([job(1, "odd", **status), job(1, "good")], 2)
        assert [known.uid for known in cache.jobs()] == ["good"]
        assert "cannot be read" in caplog.text

    def test_a_measurement_of_another_job(self, cache: Cache) -> None:
        cache.put_job(job(1, profile={"ref": "measured", "key": "k"}))
        assert [each.ref for each in cache.profiles("team", "k")] == ["measured"]
        assert cache.profiles("other", "k") == cache.profiles("team", "l") == []

    @settings(max_examples=20)  # each reads jobs, which takes its time
    @given(st.lists(st.tuples(st.sampled_from("uv"), st.sampled_from(("", "k", "l"))), max_size=12))
    def test_measurements_are_those_of_the_jobs_there_are(self, tellings: list[tuple[str, str]]) -> None:
        cache = Cache(lambda: NOW)
        for version, (uid, key) in enumerate(tellings, start=1):
            cache.put_job(job(version, uid, **({"profile": {"ref": f"of-{uid}", "key": key}} if key else {})))
        for key in "kl":
            expected = list(dict.fromkeys(f"of-{uid}" for uid, its in reversed(tellings) if its == key))
            assert [each.ref for each in cache.profiles("team", key)] == expected
        for uid in dict(tellings):
            cache.remove_job(uid)
        assert cache.profiles("team", "k") == cache.profiles("team", "l") == []


class TestChildren:
    def test_an_answer_that_comes_late(self, cache: Cache, news: News) -> None:
        """The watch told of the end before the operator's own call was answered."""
        launched(cache, "u")
        news.clear()
        cache.put_child(pod(version=1))
        cache.remove_child(pod(version=3))
        cache.put_child(pod(version=2))
        assert (cache.pods("u"), news) == ((), ["u", "u"])

    def test_what_is_older_changes_nothing(self, cache: Cache) -> None:
        launched(cache, "u")
        cache.put_child(pod(version=3, running=False))
        cache.put_child(pod(version=2, running=True))
        assert not cache.pods("u")[0].running

    def test_a_list_that_was_made_before(self, cache: Cache) -> None:
        launched(cache, "u")
        cache.put_child(pod("young", version=9))
        cache.replace_children(PodSnapshot, [pod("old", version=3)], 5)
        assert [each.name for each in cache.pods("u")] == ["old", "young"]

    def test_a_list_of_one_job_says_nothing_of_others(self, cache: Cache) -> None:
        launched(cache, "u", "v")
        cache.put_child(pod("a", job_uid="u"))
        cache.put_child(pod("b", job_uid="v"))
        cache.replace_children(PodSnapshot, [], 5, cache.job("u"))
        assert (cache.pods("u"), len(cache.pods("v"))) == ((), 1)

    def test_a_namesake_in_another_namespace_hides_nothing(self, cache: Cache) -> None:
        launched(cache, "u")
        cache.put_child(pod(version=1))
        cache.put_child(pod(version=2, uid="stray", namespace="evil"))
        assert [(each.namespace, each.uid) for each in cache.pods("u")] == [("team", "uid-p")]

    @pytest.mark.parametrize("number", range(6))
    def test_owners_may_be_told_of_in_any_order(self, number: int) -> None:
        whole = Cache(lambda: NOW)
        launched(whole, "u")
        ranks_job = RanksJobSnapshot(
            namespace="team", name="a-a1-ranks-0", uid="job-of-u", job_uid="u", owner="jobset-of-u"
        )
        cache, (jobset,) = Cache(lambda: NOW), whole.jobsets("u")
        tellings: tuple[Callable[[], None], ...] = (
            lambda: cache.put_child(jobset),
            lambda: cache.put_child(ranks_job),
            lambda: cache.put_child(pod()),
        )
        cache.put_job(job(1))
        for telling in list(permutations(tellings))[number]:
            assert cache.pods("u") == ()
            telling()
        assert len(cache.pods("u")) == 1

    def test_what_outlives_its_owners_is_still_the_job_s(self, cache: Cache) -> None:
        launched(cache, "u")
        cache.put_child(pod())
        cache.replace_children(JobSetSnapshot, [], 5)
        cache.replace_children(RanksJobSnapshot, [], 5)
        assert (len(cache.pods("u")), cache.jobsets("u")) == (1, ())

    def test_a_namesake_s_end_is_not_its_own(self, cache: Cache) -> None:
        launched(cache, "u")
        cache.put_child(pod(uid="second", version=5))
        cache.remove_child(pod(uid="first", version=4))
        assert [each.uid for each in cache.pods("u")] == ["second"]

    def test_the_same_again_is_no_news(self, cache: Cache, news: News) -> None:
        for version in range(3):
            cache.put_child(pod(version=version))
        assert news == ["u"]

    def test_the_oldest_ends_are_forgotten(self) -> None:
        gone = Gone(most=2)
        for uid in "abc":
            gone.add(uid)
        assert [uid in gone for uid in "abc"] == [False, True, True]

    @given(st.data())
    def test_order_does_not_matter(self, data: st.DataObject) -> None:
        """Each is told of at its versions and may end; in whatever order that arrives, the last counts."""
        tellings: list[tuple[str, PodSnapshot]] = []
        expected = {}
        for name in "ab":
            versions = data.draw(st.integers(1, 4))
            tellings += [("put", pod(name, version, address=str(version))) for version in range(1, versions + 1)]
            if data.draw(st.booleans()):
                tellings.append(("remove", pod(name, versions + 1)))
            else:
                expected[name] = str(versions)
        children: Children[PodSnapshot] = Children()
        for verb, child in data.draw(st.permutations(tellings)):
            getattr(children, verb)(child)
        assert {each.name: each.address for each in children.of("u")} == expected


class TestNodes:
    NODE = NodeSnapshot(name="east", uid="n", boot_id="b")

    def test_news_for_those_who_have_pods_there(self, cache: Cache, news: News) -> None:
        for uid, node in (("u", "east"), ("v", "west")):
            cache.put_job(job(1, uid))
            cache.put_child(pod(uid, job_uid=uid, node=node))
        news.clear()
        cache.put_node(self.NODE)
        cache.put_node(self.NODE)
        assert news.taken() == ["u"]
        cache.put_node(replace(self.NODE, not_ready_since=1.0))
        cache.remove_node("east")
        assert news.taken() == ["u", "u"]

    def test_a_list(self, cache: Cache, news: News) -> None:
        cache.put_job(job(1))
        cache.put_child(pod())
        news.clear()
        cache.replace_nodes([self.NODE])
        cache.replace_nodes([self.NODE])
        assert (news.taken(), list(cache.nodes())) == (["u"], ["east"])

    def test_since_when_the_service_is_there(self, cache: Cache) -> None:
        for there, now, since in ((True, 1.0, 1.0), (True, 2.0, 1.0), (False, 3.0, None), (True, 4.0, 4.0)):
            cache.set_service(there, now)
            assert cache.service_since == since


def test_threads() -> None:
    """Eight threads tell of the same pods in different orders; all end with what was told last."""
    cache = Cache(lambda: NOW)
    launched(cache, "u")
    tellings = [pod(f"p{number}", version, address=str(version)) for number in range(20) for version in range(1, 21)]

    def tell(seed: int) -> None:
        mine = list(tellings)
        random.Random(seed).shuffle(mine)
        for each in mine:
            cache.put_child(each)
            if each.version == 20 and each.name == "p0":
                cache.remove_child(each)

    threads = [threading.Thread(target=tell, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.name: each.address for each in cache.pods("u")} == {f"p{number}": "20" for number in range(1, 20)}
