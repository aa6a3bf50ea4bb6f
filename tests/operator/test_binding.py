"""Which pod becomes which node: the same hosts give the same places, in whatever order pods came up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import PipelineJob
from penstock.core.pod import MEASURE_EPOCH, TRAIN_EPOCH
from penstock.operator.binding import bindings, in_order, profile_key
from penstock.operator.snapshots import NodeSnapshot, PodSnapshot
from tests.support.manifests import example

JOB = PipelineJob.from_manifest(example())
HOSTS = "abcdef"
NODES = {name: NodeSnapshot(name=name, uid=f"uid-{name}", boot_id="1") for name in HOSTS}


def pods(hosts: list[str]) -> list[PodSnapshot]:
    return [
        PodSnapshot(
            namespace="team",
            name=f"pod-{index}",
            uid=f"uid-{index}",
            job_uid="u",
            attempt=1,
            index=index,
            node=host,
            address=f"10.0.0.{index}",
            running=True,
            being_deleted=False,
            image_id="image@1",
        )
        for index, host in enumerate(hosts)
    ]


hosts = st.lists(st.sampled_from(HOSTS), min_size=1, max_size=8)


@given(hosts, st.randoms())
def test_the_order_in_which_pods_are_told_of_does_not_matter(names: list[str], chance: object) -> None:
    found = pods(names)
    shuffled = list(found)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert in_order(found, NODES) == in_order(shuffled, NODES)


@given(hosts.flatmap(lambda names: st.tuples(st.just(names), st.permutations(names))))
def test_the_same_hosts_give_the_same_places_and_the_same_measurement(names: tuple[list[str], list[str]]) -> None:
    one, two = (in_order(pods(list(each)), NODES) for each in names)
    assert [pod.node for pod in one] == [pod.node for pod in two]
    assert profile_key(JOB, one, NODES) == profile_key(JOB, two, NODES)


@given(hosts)
def test_pods_of_a_host_are_neighbours(names: list[str]) -> None:
    placed = [pod.node for pod in in_order(pods(names), NODES)]
    changes = sum(1 for before, after in pairwise(placed) if before != after)
    assert changes == len(set(names)) - 1


@given(hosts)
def test_every_pod_has_one_place_and_all_the_same_master(names: list[str]) -> None:
    found = in_order(pods(names), NODES)
    made = bindings(JOB, 3, TRAIN_EPOCH, found, "digest")
    assert [each.node_rank for each in made] == list(range(len(found)))
    assert [each.pod_uid for each in made] == [pod.uid for pod in found]
    assert {each.master for each in made} == {found[0].address}
    assert {(each.attempt, each.epoch, each.num_nodes, each.plan_digest) for each in made} == {
        (3, 1, len(found), "digest")
    }


def test_measuring_names_no_plan() -> None:
    assert {(each.epoch, each.plan_digest) for each in bindings(JOB, 1, MEASURE_EPOCH, pods(["a", "b"]))} == {(0, "")}


def test_what_makes_a_measurement_another() -> None:
    base = pods(["a", "b"])
    rebooted = {**NODES, "b": replace(NODES["b"], boot_id="2")}
    replaced = {**NODES, "b": replace(NODES["b"], uid="another")}
    part = {"acceleratorResource": "nvidia.com/mig-1g.10gb"}
    keys = {
        profile_key(JOB, base, NODES),
        profile_key(JOB, base, rebooted),
        profile_key(JOB, base, replaced),
        profile_key(JOB, pods(["a", "c"]), NODES),
        profile_key(JOB, [base[0], replace(base[1], image_id="image@2")], NODES),
        profile_key(PipelineJob.from_manifest(example(model__hidden=512)), base, NODES),
        profile_key(PipelineJob.from_manifest(example(training__precision="bf16")), base, NODES),
        profile_key(PipelineJob.from_manifest(example(kubernetes=part)), base, NODES),
    }
    assert len(keys) == 8


def test_what_does_not() -> None:
    base = pods(["a", "b"])
    longer = PipelineJob.from_manifest(example(training__steps=7, runPolicy={"backoffLimit": 9}))
    elsewhere = [replace(pod, address="10.1.1.1", uid="other", attempt=9) for pod in base]
    assert profile_key(JOB, base, NODES) == profile_key(longer, elsewhere, NODES)
