"""The CustomResourceDefinitions in a real apiserver: what it takes, what it refuses and with which words."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.cluster_profile import ClusterProfile
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.serialization import yamltext
from penstock.operator.crd import cluster_profile_crd, pipeline_job_crd
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.defaulting import defaulted
from tests.support.kubectl import Kubectl, kubectl_of, with_crds
from tests.support.manifests import CLUSTER_PROFILE, EXAMPLE, FULL, example, loaded
from tests.support.repository import ROOT

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

JOBS = sorted(path for path in (ROOT / "deploy" / "examples").glob("*.yaml") if "kind: PipelineJob" in path.read_text())
DRY = ("apply", "--dry-run=server", "-f", "-")


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Kubectl:
    return with_crds(kubectl_of(cluster))


def dump(manifest: dict[str, Any]) -> str:
    return yamltext.dump(manifest)


# What is taken


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_examples_are_taken(kubectl: Kubectl, path: Any) -> None:
    assert "created (server dry run)" in kubectl.ask(*DRY, text=path.read_text())


@pytest.mark.parametrize("stages", [[4, 4], [4.0, 4.0], [4.5, 3.5], [8]])
def test_numbers_of_blocks_are_taken_whole_and_halved(kubectl: Kubectl, stages: list[float]) -> None:
    text = dump(example(parallelism={"stages": stages}))
    assert "created (server dry run)" in kubectl.ask(*DRY, text=text)


def of_user(found: dict[str, Any]) -> dict[str, Any]:
    """Without what the apiserver adds to metadata."""
    kept = {key: found["metadata"][key] for key in ("name", "namespace", "labels") if key in found["metadata"]}
    return {**found, "metadata": kept}


@pytest.mark.parametrize("text", [EXAMPLE, FULL], ids=["example", "full"])
def test_a_job_comes_back_with_defaults_as_the_same_job(kubectl: Kubectl, text: str) -> None:
    found = json.loads(kubectl.ask(*DRY, "-o", "json", text=text))
    told = PipelineJob.from_manifest(loaded(text))
    assert PipelineJob.from_manifest(of_user(found)).spec == told.spec
    schema = pipeline_job_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert found["spec"] == defaulted(schema, loaded(text))["spec"]


def test_a_cluster_profile_comes_back_with_defaults_as_the_same(kubectl: Kubectl) -> None:
    found = json.loads(kubectl.ask(*DRY, "-o", "json", text=CLUSTER_PROFILE))
    assert (
        ClusterProfile.from_manifest(of_user(found)).spec == ClusterProfile.from_manifest(loaded(CLUSTER_PROFILE)).spec
    )
    schema = cluster_profile_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert found["spec"] == defaulted(schema, loaded(CLUSTER_PROFILE))["spec"]


def test_the_types_are_structural_and_their_rules_affordable(kubectl: Kubectl) -> None:
    for name in ("pipelinejobs", "clusterprofiles"):
        conditions = kubectl.get(f"crd/{name}.penstock.dev")["status"]["conditions"]
        assert {each["type"]: each["status"] for each in conditions} == {"NamesAccepted": "True", "Established": "True"}


def test_explain_tells_what_a_field_means(kubectl: Kubectl) -> None:
    assert "reclaim" in kubectl.ask("explain", "pj.spec.kubernetes.volumes")
    assert "sequences per step" in kubectl.ask("explain", "pj.spec.training")


# What is refused: by the apiserver and by core, each naming the field

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    # changes below spec -> the field that the apiserver names, a part of what it says
    "layers 0": ({"model__layers": 0}, "spec.model.layers", "greater than or equal to 1"),
    "no model": ({"model": {}}, "spec.model.family", "Required value"),
    "family": ({"model__family": "bert"}, "spec.model.family", '"llama", "gpt2"'),
    "layers text": ({"model__layers": "many"}, "spec.model.layers", "integer"),
    "heads": ({"model__heads": 7}, "spec.model.heads", "hidden 256 is not divisible by heads 7"),
    "odd head": ({"model__heads": 256, "model__kvHeads": 1}, "spec.model.heads", "even head dimension"),
    "kvHeads": ({"model__kvHeads": 3}, "spec.model.kvHeads", "heads 8 is not divisible by kvHeads 3"),
    "gpt2 kvHeads": ({"model__family": "gpt2", "model__kvHeads": 4}, "spec.model.kvHeads", "no grouped-query"),
    "epsilon": ({"model__normEpsilon": 0}, "spec.model.normEpsilon", "greater than 0"),
    "positions": (
        {"model": {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 2, "positions": 512}},
        "spec.data.sequenceLength",
        "exceeds the model's 512 positions: set model.positions to 1024",
    ),
    "no tokens": (
        {"data__tokenizer": {"file": "data://corpus/t.json"}, "kubernetes__volumes": {"data/corpus": {"claim": "c"}}},
        "spec.model.vocab",
        "the tokenizer does not define it",
    ),
    "sequence 0": ({"data__sequenceLength": 0}, "spec.data.sequenceLength", "greater than or equal to 1"),
    "two tokenizers": ({"data__tokenizer": {"train": "bytes", "file": "f"}}, "spec.data.tokenizer", "exactly one"),
    "no tokenizer": ({"data__tokenizer": {"vocab": 300}}, "spec.data.tokenizer", "exactly one of train and file"),
    "small bpe": ({"data__tokenizer": {"train": "bpe", "vocab": 256}}, "spec.data.tokenizer.vocab", "at least 257"),
    "limit": ({"data__limitBytes": "4Gb"}, "spec.data.limitBytes", "should match"),
    "batch 0": ({"training__globalBatch": 0}, "spec.training.globalBatch", "greater than or equal to 1"),
    "clip": ({"training__clip": 0}, "spec.training.clip", "greater than 0"),
    "share": ({"training__minLearningRate": 1.5}, "spec.training.minLearningRate", "less than or equal to 1"),
    "precision": ({"training__precision": "fp8"}, "spec.training.precision", '"bf16"'),
    "betas": ({"training__optimizer__betas": [0.9, 1.0]}, "spec.training.optimizer.betas[1]", "less than 1"),
    "one beta": ({"training__optimizer__betas": [0.9]}, "spec.training.optimizer.betas", "at least 2 items"),
    "optimizer": ({"training__optimizer__kind": "sgd"}, "spec.training.optimizer.kind", '"adamw"'),
    "ranks 0": ({"resources__ranks": 0}, "spec.resources.ranks", "greater than or equal to 1"),
    "minRanks": ({"resources__minRanks": 3}, "spec.resources.minRanks", "more than ranks"),
    "memory": ({"resources__memoryPerRank": "lots"}, "spec.resources.memoryPerRank", "should match"),
    "no memory": ({"resources__memoryPerRank": "0Gi"}, "spec.resources.memoryPerRank", "not positive"),
    "memory 0": ({"resources__memoryPerRank": 0}, "spec.resources.memoryPerRank", "greater than or equal to 1"),
    "dp": ({"parallelism": {"dp": 3}}, "spec.parallelism", "dp x tp x pp = 3 does not divide ranks 2"),
    "microBatch": ({"parallelism": {"microBatch": 5}}, "spec.parallelism", "more than the 4 sequences of a replica"),
    "stages": ({"parallelism": {"stages": [4, 3]}}, "spec.parallelism.stages", "hold 7 blocks, the model has 8"),
    "thirds": ({"parallelism": {"stages": [4.3, 3.7]}}, "spec.parallelism.stages", "multiple of half a block"),
    "slices 0": ({"parallelism": {"slices": 0}}, "spec.parallelism.slices", "greater than or equal to 1"),
    "no slices": ({"parallelism": {"slices": []}}, "spec.parallelism.slices", "at least 1 items"),
    "slices text": ({"parallelism": {"slices": "many"}}, "spec.parallelism.slices", "neither a number of slices"),
    "slices flag": ({"parallelism": {"slices": True}}, "spec.parallelism.slices", "neither a number of slices"),
    "many slices": ({"parallelism": {"slices": 2000}}, "spec.parallelism.slices", "2000 slices of 1024 tokens"),
    "slices sum": (
        {"parallelism": {"slices": [512, 500]}},
        "spec.parallelism.slices",
        "slices sum to 1012, the sequence length is 1024",
    ),
    "empty slice": ({"parallelism": {"slices": [1024, 0]}}, "spec.parallelism.slices", "at least one token"),
    "slices mixed": ({"parallelism": {"slices": [512, "512"]}}, "spec.parallelism.slices", "at least one token"),
    "schedule 3": ({"parallelism": {"schedule": 3}}, "spec.parallelism.schedule", "neither a schedule's name"),
    "no generator": ({"parallelism": {"schedule": {"text": ""}}}, "spec.parallelism.schedule", "its generator"),
    "price": ({"objective": "cost"}, "spec.pricePerDeviceHour", "cost needs a price"),
    "keep": ({"checkpoint__keep": 0}, "spec.checkpoint.keep", "greater than or equal to 1"),
    "backoff": ({"runPolicy__backoffLimit": -1}, "spec.runPolicy.backoffLimit", "greater than or equal to 0"),
    "suspend": ({"runPolicy__suspend": "maybe"}, "spec.runPolicy.suspend", "boolean"),
    "ranksPerPod": ({"kubernetes__ranksPerPod": 3}, "spec.kubernetes.ranksPerPod", "does not divide ranks"),
    "queue": ({"kubernetes__queueName": "Team A"}, "spec.kubernetes.queueName", "should match"),
    "selector": ({"kubernetes__nodeSelector": {"a b": "c"}}, "spec.kubernetes.nodeSelector", "key is not a name"),
    "root": ({"kubernetes__volumes": {"in": {"claim": "c"}}}, "spec.kubernetes.volumes", "out or data/NAME"),
    "no volume": ({"kubernetes__volumes": {"out": {}}}, "spec.kubernetes.volumes[out]", "exactly one of claim and"),
    "reclaim": (
        {"kubernetes__volumes": {"out": {"claim": "c", "reclaim": "Delete"}}},
        "spec.kubernetes.volumes[out].reclaim",
        "an existing claim is not deleted with the job",
    ),
    "size": (
        {"kubernetes__volumes": {"out": {"template": {"size": "0"}}}},
        "spec.kubernetes.volumes[out].template.size",
        "not positive",
    ),
    "variable": ({"kubernetes__env": [{"name": "A B"}]}, "spec.kubernetes.env[0].name", "should match"),
    "variable twice": (
        {"kubernetes__env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        "spec.kubernetes.env",
        "Duplicate value",
    ),
    "two values": (
        {"kubernetes__env": [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]},
        "spec.kubernetes.env[0].valueFrom",
        "keep one of them",
    ),
    "no source": (
        {"kubernetes__env": [{"name": "A", "valueFrom": {}}]},
        "spec.kubernetes.env[0].valueFrom",
        "exactly one of secretKeyRef",
    ),
    "toleration": ({"kubernetes__tolerations": [{}]}, "spec.kubernetes.tolerations[0].key", "Equal needs a key"),
    "seconds": (
        {"kubernetes__tolerations": [{"operator": "Exists", "tolerationSeconds": 5}]},
        "spec.kubernetes.tolerations[0].tolerationSeconds",
        "only NoExecute",
    ),
    "unknown": ({"training__epochs": 3}, "spec.training.epochs", "unknown field"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_refused_by_both_with_the_field(kubectl: Kubectl, name: str) -> None:
    changes, field, said = BAD[name]
    manifest = example(**changes)
    told = kubectl.refusal(*DRY, text=dump(manifest)).replace('\\"', '"')
    assert field in told
    assert said in told
    with pytest.raises(UserError) as caught:
        PipelineJob.from_manifest(manifest)
    place = caught.value.where.replace("volumes.out", "volumes[out]")
    assert place.startswith(field) or field.startswith(place)


ONLY_ON_A_CLUSTER: dict[str, tuple[dict[str, Any], str, str]] = {
    "path": ({"data__source": "/srv/corpus"}, "spec.data.source", "does not exist on a cluster"),
    "tokenizer": (
        {"data__tokenizer": {"file": "t.json"}, "model__vocab": 9},
        "spec.data.tokenizer.file",
        "does not exist",
    ),
    "file": ({"parallelism": {"schedule": "mine.csv"}}, "spec.parallelism.schedule", "no file is uploaded"),
    "resumeFrom": ({"checkpoint__resumeFrom": "runs/a"}, "spec.checkpoint.resumeFrom", "out://UID/ATTEMPT/STEP"),
    "no claim": (
        {"data__source": "data://corpus/train"},
        "spec.data.source",
        'needs kubernetes.volumes["data/corpus"]: the claim that holds data://corpus/train',
    ),
}


@pytest.mark.parametrize("name", ONLY_ON_A_CLUSTER)
def test_what_means_nothing_on_a_cluster_is_refused_there(kubectl: Kubectl, name: str) -> None:
    changes, field, said = ONLY_ON_A_CLUSTER[name]
    manifest = example(**changes)
    told = kubectl.refusal(*DRY, text=dump(manifest)).replace('\\"', '"')
    assert field in told
    assert said in told
    PipelineJob.from_manifest(manifest)


@pytest.mark.parametrize("name", ["a" * 41, "a.b", "1st"])
def test_a_name_that_pods_cannot_bear_is_refused(kubectl: Kubectl, name: str) -> None:
    told = kubectl.refusal(*DRY, text=dump({**example(), "metadata": {"name": name}}))
    assert "metadata" in told
    assert "at most 40 lower-case letters, digits and dashes" in told


def test_a_field_nobody_knows_is_dropped_if_the_client_does_not_ask(kubectl: Kubectl) -> None:
    """As every Kubernetes object has it; kubectl asks, unless it is told not to."""
    text = dump(example(training__epochs=3))
    found = json.loads(kubectl.ask(*DRY, "--validate=false", "-o", "json", text=text))
    assert "epochs" not in found["spec"]["training"]


# What may change


@pytest.fixture
def job(kubectl: Kubectl) -> Iterator[dict[str, Any]]:
    manifest = example(resources__ranks=4, resources__minRanks=2, parallelism={"slices": [512, 512], "pp": 2})
    kubectl.apply(manifest)
    yield manifest
    kubectl.ask("delete", "pj", manifest["metadata"]["name"], "--wait=false")


def changed(manifest: dict[str, Any], **changes: Any) -> str:
    found = copy.deepcopy(manifest)
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = found["spec"]
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return dump(found)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model__layers", 4),
        ("data__sequenceLength", 512),
        ("training__steps", 300),
        ("training__optimizer__learningRate", 0.1),
        ("parallelism__pp", 1),
        ("parallelism__slices", [256, 768]),
        ("parallelism__schedule", "zb"),
        ("objective", "cost"),
        ("checkpoint__keep", 9),
        ("kubernetes__image", "other"),
        ("resources__device", "cuda"),
        ("resources__memoryPerRank", "8Gi"),
        ("resources__threadsPerRank", 2),
        ("resources__minRanks", 1),
    ],
)
def test_what_a_plan_and_its_checkpoints_depend_on_stays(
    kubectl: Kubectl, job: dict[str, Any], path: str, value: Any
) -> None:
    told = kubectl.refusal("apply", "-f", "-", text=changed(job, **{path: value}))
    top, *rest = path.split("__")
    assert f"spec.{top}" in told
    assert top != "resources" or f"spec.resources.{rest[0]}" in told
    assert "make a new job" in told


def test_what_is_asked_of_a_run_may_change(kubectl: Kubectl, job: dict[str, Any]) -> None:
    wanted = {"suspend": True, "backoffLimit": 9, "activeDeadlineSeconds": 60, "priority": 2}
    kubectl.ask("apply", "-f", "-", text=changed(job, runPolicy=wanted, resources__ranks=2))
    found = kubectl.get("pj", job["metadata"]["name"])
    assert found["spec"]["runPolicy"].items() >= wanted.items()
    assert (found["spec"]["resources"]["ranks"], found["metadata"]["generation"]) == (2, 2)


def test_scale(kubectl: Kubectl, job: dict[str, Any]) -> None:
    name = job["metadata"]["name"]
    kubectl.ask("scale", f"pj/{name}", "--replicas=2")
    assert kubectl.get("pj", name)["spec"]["resources"]["ranks"] == 2
    assert "minRanks" in kubectl.refusal("scale", f"pj/{name}", "--replicas=1")
    kubectl.ask("scale", f"pj/{name}", "--replicas=3")  # pp 2 does not divide 3, but 2, which minRanks allows
    assert kubectl.get("pj", name)["spec"]["resources"]["ranks"] == 3
    kubectl.ask("patch", "pj", name, "--subresource=status", "--type=merge", "-p", '{"status": {"ranks": 2}}')
    scale = json.loads(kubectl.ask("get", "pj", name, "--subresource=scale", "-o", "json"))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 2)


def test_columns(kubectl: Kubectl, job: dict[str, Any]) -> None:
    name = job["metadata"]["name"]
    new = kubectl.ask("get", "pj", name).splitlines()
    assert new[0].split() == ["NAME", "PHASE", "PLAN", "STEP", "STEPS", "LOSS", "ATTEMPT", "RANKS", "AGE"]
    assert new[1].split()[:3] == [name, "Pending", "200"]
    status = {
        "phase": "Running",
        "reason": "Bound",
        "attempt": 2,
        "ranks": 4,
        "plan": {"digest": "d", "summary": "pp4,zb"},
        "progress": {"attempt": 2, "step": 7, "loss": "nan"},
    }
    kubectl.ask("patch", "pj", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    _, row = kubectl.ask("get", "penstock", "-o", "wide").splitlines()
    assert row.split()[:8] == [f"pipelinejob.penstock.dev/{name}", "Running", "pp4,zb", "7", "200", "nan", "2", "4"]
    assert row.split()[-1] == "Bound"


def test_columns_of_a_cluster_profile(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(loaded(CLUSTER_PROFILE))
    link = {"source": 0, "target": 1, "latencySeconds": 1e-4, "bytesPerSecond": 1.25e8}
    status = {
        "conditions": [{"type": "Profiled", "status": "True", "reason": "Measured"}],
        "links": {"numLinks": 12, "slowest": link, "fastest": link, "medianBytesPerSecond": 1.25e8},
    }
    patch = ["--subresource=status", "--type=merge", "-p", json.dumps({"status": status})]

    def answer() -> str:
        """An operator of other tests may say between the two that nothing was measured."""
        kubectl.ask("patch", "cprof", "pool", *patch)
        found = kubectl.ask("get", "cprof")
        return found if "True" in found else ""

    head, row = cluster.wait(answer, "its columns do not say what its status says").splitlines()
    kubectl.ask("delete", "cprof", "pool", "--wait=false")
    assert head.split() == ["NAME", "PROFILED", "RANKS", "SLOWEST", "MEASURED", "AGE"]
    assert row.split()[:4] == ["pool", "True", "4", "125000000"]


def test_a_status_goes_to_its_own_subresource(kubectl: Kubectl, job: dict[str, Any]) -> None:
    kubectl.ask("apply", "-f", "-", text=dump({**job, "status": {"phase": "Succeeded"}}))
    assert kubectl.get("pj", job["metadata"]["name"])["status"]["phase"] == "Pending"


def test_two_writers_each_own_their_part_of_a_status(kubectl: Kubectl, job: dict[str, Any]) -> None:
    """Server-side apply: neither takes away what the other said, and conditions are known by their type."""
    name = job["metadata"]["name"]
    head = {key: job[key] for key in ("apiVersion", "kind")} | {"metadata": {"name": name}}

    def said(manager: str, status: dict[str, Any]) -> None:
        arguments = ("apply", "--server-side", f"--field-manager={manager}", "--subresource=status", "-f", "-")
        kubectl.ask(*arguments, text=dump({**head, "status": status}))

    condition = {"type": "Planned", "status": "True", "reason": "Planned"}
    said("operator", {"phase": "Running", "attempt": 1, "conditions": [condition]})
    said("service", {"progress": {"attempt": 1, "step": 3}})
    said("operator", {"phase": "Running", "attempt": 1, "conditions": [{**condition, "type": "Bound"}]})
    status = kubectl.get("pj", name)["status"]
    assert status["progress"]["step"] == 3
    assert [each["type"] for each in status["conditions"]] == ["Bound"]
