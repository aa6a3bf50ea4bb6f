"""All mistakes of a manifest at once, also several within one object and between objects of which others are wrong."""

from __future__ import annotations

import pytest

from penstock.core.cluster_profile import ClusterProfile
from penstock.core.errors import UserError, mistakes_in
from penstock.core.job import PipelineJob
from tests.support.manifests import CLUSTER_PROFILE, example, loaded

MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: PipelineJob
metadata: {name: A_b, namespace: "c d"}
spec:
  model: {family: gpt2, layers: 4, hidden: 100, heads: 3, kvHeads: 2, vocab: 512}
  data: {source: python-stdlib, sequenceLength: 128, tokenizer: {train: foo, file: x, vocab: 5}}
  training: {globalBatch: 3, steps: 10, optimizer: {kind: sgd, betas: [2, 3], learningRate: 0}}
  resources: {ranks: 4}
  parallelism: {dp: 3, slices: 4, pp: 5}
  objective: cost
  kubernetes:
    ranksPerPod: 3
    queueName: "no name"
    acceleratorResource: "-"
    nodeSelector: {"a b": c, d: "e f"}
    tolerations: [{value: x, operator: Exists, tolerationSeconds: 5}, {operator: Equal}]
    env: [{name: 1b, value: x, valueFrom: {fieldRef: {fieldPath: a}}}]
    volumes: {out: {claim: A_, template: {size: 0, storageClass: "a b"}}}
"""
WHERE = {
    "metadata.name",
    "metadata.namespace",
    "spec.model.heads",
    "spec.model.kvHeads",
    "spec.data.tokenizer",
    "spec.data.tokenizer.train",
    "spec.training.optimizer.kind",
    "spec.training.optimizer.betas[0]",
    "spec.training.optimizer.learningRate",
    "spec.parallelism",
    "spec.pricePerDeviceHour",
    "spec.kubernetes.queueName",
    "spec.kubernetes.acceleratorResource",
    "spec.kubernetes.nodeSelector.a b",
    "spec.kubernetes.nodeSelector.d",
    "spec.kubernetes.tolerations[0].value",
    "spec.kubernetes.tolerations[0].tolerationSeconds",
    "spec.kubernetes.tolerations[1].key",
    "spec.kubernetes.env[0].name",
    "spec.kubernetes.env[0].valueFrom",
    "spec.kubernetes.volumes.out.claim",
    "spec.kubernetes.volumes.out.template.size",
    "spec.kubernetes.volumes.out.template.storageClass",
}


def test_all_mistakes_of_a_job_are_reported_at_once() -> None:
    with pytest.raises(UserError) as error:
        PipelineJob.from_manifest(loaded(MANIFEST))
    assert {mistake.where for mistake in mistakes_in(error.value)} == WHERE
    assert all(mistake.remedy for mistake in mistakes_in(error.value))


def test_parts_that_disagree_are_reported_next_to_a_part_that_is_wrong() -> None:
    manifest = loaded(MANIFEST)
    manifest["spec"] |= {"resources": {"ranks": 4, "threadsPerRank": 0}, "training": {"globalBatch": 4, "steps": 1}}
    manifest["spec"]["parallelism"] = {"slices": [64, 65], "dp": 3}
    with pytest.raises(UserError) as error:
        PipelineJob.from_manifest(manifest)
    told = [str(mistake) for mistake in mistakes_in(error.value)]
    assert not any("slices sum to 129, the sequence length is 128" in each for each in told), "data is wrong too"
    manifest["spec"]["data"] = {"source": "python-stdlib", "sequenceLength": 128}
    with pytest.raises(UserError) as error:
        PipelineJob.from_manifest(manifest)
    told = [str(mistake) for mistake in mistakes_in(error.value)]
    assert any("slices sum to 129, the sequence length is 128" in each for each in told)
    assert any("dp 3 does not divide globalBatch 4" in each for each in told)
    assert not any("does not divide ranks" in each for each in told), "nothing is said of ranks that are not known"


@pytest.mark.parametrize(("tp", "most"), [(None, 301), (1, 301), (2, 150)])
def test_a_head_has_no_more_parts_than_its_vocabulary_has_tokens(tp: int | None, most: int) -> None:
    """No measurement could ever have such parts: each try would end with another."""
    pinned = {"headParts": most, **({} if tp is None else {"tp": tp})}
    manifest = example(data__tokenizer__vocab=301, parallelism=pinned)
    assert PipelineJob.from_manifest(manifest).spec.model.vocab == 301
    manifest["spec"]["parallelism"]["headParts"] = most + 1
    with pytest.raises(UserError) as error:
        PipelineJob.from_manifest(manifest)
    assert error.value.where == "spec.parallelism.headParts"
    assert f"does not give each of {most + 1} x {tp or 1} parts a token" in str(error.value)
    assert error.value.remedy == f"pin at most {most}"


def test_of_a_field_beyond_its_range_nothing_else_is_said() -> None:
    manifest = loaded(MANIFEST)
    manifest["metadata"] = {"name": "a" * 64 + "_"}
    with pytest.raises(UserError) as error:
        PipelineJob.from_manifest(manifest)
    places = [mistake.where for mistake in mistakes_in(error.value)]
    assert places.count("metadata.name") == 1


def test_all_mistakes_of_a_cluster_profile_are_reported_at_once() -> None:
    manifest = loaded(CLUSTER_PROFILE)
    manifest["spec"] |= {"ranksPerPod": 3, "acceleratorResource": "-", "nodeSelector": {"a b": "c"}}
    with pytest.raises(UserError) as error:
        ClusterProfile.from_manifest(manifest)
    assert {mistake.where for mistake in mistakes_in(error.value)} == {
        "spec.ranksPerPod",
        "spec.acceleratorResource",
        "spec.nodeSelector.a b",
    }


def test_a_missing_vocabulary_hides_no_other_mistake() -> None:
    manifest = loaded(MANIFEST)
    del manifest["spec"]["model"]["vocab"]
    manifest["spec"]["data"]["tokenizer"] = {"file": "tokenizer.json"}
    with pytest.raises(UserError) as error:
        PipelineJob.from_manifest(manifest)
    places = [mistake.where for mistake in mistakes_in(error.value)]
    assert places.count("spec.model.vocab") == 1
    assert "spec.training.optimizer.kind" in places


def test_a_wrong_version_and_kind_are_reported_together() -> None:
    with pytest.raises(UserError) as error:
        PipelineJob.from_manifest({"apiVersion": "v1", "kind": "Pod"})
    assert [mistake.where for mistake in mistakes_in(error.value)] == ["apiVersion", "kind"]
