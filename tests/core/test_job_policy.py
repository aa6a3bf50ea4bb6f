"""Policy for jobs on a cluster: the default, its extensions, and errors that name every reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.job_policy import CONTROL_PLANE, SECRETS_LABEL, Allowance, JobPolicy, combined, refusals
from penstock.core.kubernetes_spec import KubernetesSpec
from tests.support.manifest_strategies import valid

IMAGE = "registry.example/penstock/trainer:1"
POLICY = JobPolicy.from_manifest(
    {
        "ownNamespace": "penstock-system",
        "everywhere": {
            "images": [IMAGE],
            "claims": ["*"],
            "storageClasses": ["*"],
            "tolerations": ["*"],
            "nodeSelectors": ["*"],
        },
    }
)
SECRET = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "penstock-db", "key": "url"}}}]
LABELLED = {SECRETS_LABEL: "true"}


def reasons(
    spec: dict[str, Any], namespace: str = "team", policy: JobPolicy = POLICY, labels: dict[str, str] | None = None
) -> list[str]:
    found = refusals(KubernetesSpec.from_manifest(spec), namespace, policy, labels)
    assert all(each.remedy for each in found)
    return [each.where for each in found]


def allowing(**lists: list[str]) -> JobPolicy:
    return JobPolicy.from_manifest({"everywhere": lists})


class TestDefault:
    @pytest.mark.parametrize(
        "spec",
        [
            {},
            {"image": IMAGE},
            {"volumes": {"out": {"claim": "shared"}, "data/a": {"template": {"size": "1Gi"}}}},
            {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "nodeSelector": {"pool": "gpu"}},
            {"env": [{"name": "A", "value": "b"}, {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]},
            {"env": [{"name": "C", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}]},
        ],
    )
    def test_fields_that_jobs_need_are_allowed(self, spec: dict[str, Any]) -> None:
        assert reasons(spec) == []

    @pytest.mark.parametrize("namespace", ["kube-system", "kube-public", "kube-flannel", "penstock-system"])
    def test_system_namespaces_are_refused(self, namespace: str) -> None:
        assert reasons({}, namespace) == ["metadata.namespace"]

    @pytest.mark.parametrize(
        "image", ["evil:1", f"{IMAGE}-evil", f"{IMAGE}@sha256:0", "registry.example/penstock/trainer", IMAGE.upper()]
    )
    def test_other_images_are_refused(self, image: str) -> None:
        assert reasons({"image": image}) == ["spec.kubernetes.image"]

    def test_secrets_are_refused_unless_the_namespace_is_labelled(self) -> None:
        assert reasons({"env": SECRET}) == ["spec.kubernetes.env[0].valueFrom.secretKeyRef"]
        assert reasons({"env": SECRET}, labels={SECRETS_LABEL: "false"}) != []
        assert reasons({"env": SECRET}, labels=LABELLED) == []

    def test_a_label_allows_secrets_only(self) -> None:
        assert reasons({"env": SECRET, "image": "evil:1"}, "kube-system", labels=LABELLED) == [
            "metadata.namespace",
            "spec.kubernetes.image",
        ]

    @pytest.mark.parametrize("key", sorted(CONTROL_PLANE))
    def test_jobs_may_not_run_on_the_control_plane(self, key: str) -> None:
        assert reasons({"nodeSelector": {key: ""}}) == ["spec.kubernetes.nodeSelector"]
        assert reasons({"tolerations": [{"key": key, "operator": "Exists"}]}) == ["spec.kubernetes.tolerations[0]"]

    def test_a_toleration_of_everything_includes_the_control_plane(self) -> None:
        assert reasons({"tolerations": [{"operator": "Exists"}]}) == ["spec.kubernetes.tolerations[0]"]
        assert reasons({"tolerations": [{"operator": "Exists", "effect": "NoSchedule"}]}) != []


class TestExtended:
    @pytest.mark.parametrize(
        ("pattern", "image", "is_allowed"),
        [
            ("*", "anything", True),
            ("reg.example/team/*", "reg.example/team/a:1", True),
            ("reg.example/team/*", "reg.example/team-b/a:1", False),
            ("reg.example/team/*", "reg.example/team", False),
            ("trainer:*", "trainer:2", True),
            ("trainer:*", "trainer:5000/evil/image", False),
            ("reg.example/a@*", "reg.example/a@sha256:1", True),
            ("reg.example/a@*", "reg.example/a:1", False),
            ("reg.example/a:1", "reg.example/a:1", True),
            ("reg.example/a:1", "reg.example/a:12", False),
        ],
    )
    def test_images(self, pattern: str, image: str, is_allowed: bool) -> None:
        assert (reasons({"image": image}, policy=allowing(images=[pattern])) == []) is is_allowed

    def test_a_system_name_is_allowed_only_in_full(self) -> None:
        for pattern in ("*", "kube-*", "kube-syste*"):
            assert reasons({}, "kube-system", JobPolicy(namespaces=(pattern,))) != []
        assert reasons({}, "kube-system", JobPolicy(namespaces=("kube-system",))) == []
        assert reasons({}, "penstock-system", JobPolicy(namespaces=("*", "penstock-system"))) == []

    def test_the_control_plane_s_taints(self) -> None:
        every = ["*", *sorted(CONTROL_PLANE)]
        assert reasons({"tolerations": [{"operator": "Exists"}]}, policy=allowing(tolerations=every)) == []
        assert reasons({"tolerations": [{"operator": "Exists"}]}, policy=allowing(tolerations=every[:-1])) != []
        policy = allowing(tolerations=["node-role.kubernetes.io/*"])
        assert reasons({"tolerations": [{"key": "node-role.kubernetes.io/etcd", "value": "a"}]}, policy=policy) != []

    def test_lists_may_also_be_shorter(self) -> None:
        nothing = allowing()
        spec = {
            "volumes": {"out": {"claim": "shared"}, "data/a": {"template": {"size": "1Gi"}}},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "nodeSelector": {"pool": "gpu"},
        }
        assert reasons(spec, policy=nothing) == [
            "spec.kubernetes.volumes.out.claim",
            "spec.kubernetes.volumes.data/a.template.storageClass",
            "spec.kubernetes.nodeSelector",
            "spec.kubernetes.tolerations[0]",
        ]
        assert reasons({}, "other", JobPolicy(namespaces=("team-*",))) == ["metadata.namespace"]

    def test_one_namespace_may_have_more(self) -> None:
        policy = JobPolicy.from_manifest({"inNamespaces": {"team": {"images": ["own:1"], "secrets": ["wandb-*"]}}})
        env = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "wandb-key", "key": "k"}}}]
        assert reasons({"image": "own:1", "env": env}, "team", policy) == []
        assert reasons({"image": "own:1", "env": env}, "other", policy) == [
            "spec.kubernetes.image",
            "spec.kubernetes.env[0].valueFrom.secretKeyRef",
        ]
        assert reasons({"env": SECRET}, "team", policy) != []


class TestPolicies:
    @pytest.mark.parametrize(
        ("manifest", "where"),
        [
            ({"everywhere": {"images": ["reg/team*"]}}, "everywhere.images"),
            ({"everywhere": {"images": ["*/trainer"]}}, "everywhere.images"),
            ({"namespaces": ["*-prod"]}, "namespaces"),
            ({"inNamespaces": {"a": {"tolerations": ["a*b"]}}}, "inNamespaces.a.tolerations"),
            ({"everywhere": {"imagez": []}}, "everywhere.imagez"),
        ],
    )
    def test_an_ambiguous_pattern_is_refused(self, manifest: dict[str, Any], where: str) -> None:
        with pytest.raises(UserError) as raised:
            JobPolicy.from_manifest(manifest)
        assert raised.value.where == where

    def test_all_reasons_are_reported_at_once(self) -> None:
        spec = KubernetesSpec.from_manifest({"image": "evil:1", "env": SECRET})
        error = combined(refusals(spec, "kube-system", POLICY))
        assert error.where == "metadata.namespace"
        for word in ("'kube-system'", "'evil:1'", "'penstock-db'"):
            assert word in error.what
        for word in ("jobPolicy.namespaces", "jobPolicy.images", SECRETS_LABEL):
            assert word in error.remedy


@given(spec=valid(KubernetesSpec), namespace=st.sampled_from(["team", "kube-system", "penstock-system"]))
def test_a_longer_list_refuses_nothing_more(spec: KubernetesSpec, namespace: str) -> None:
    def fields_of(policy: JobPolicy) -> set[str]:
        return {str(each) for each in refusals(spec, namespace, policy)}

    every = ("*", *sorted(CONTROL_PLANE))
    wide = Allowance(
        images=("*",),
        secrets=("*",),
        claims=("*",),
        storage_classes=("*",),
        tolerations=every,
        node_selectors=every,
    )
    assert fields_of(JobPolicy(namespaces=("*", "kube-system", "penstock-system"), everywhere=wide)) == set()
    assert fields_of(JobPolicy(in_namespaces={namespace: Allowance(images=("*",))})) <= fields_of(JobPolicy())
