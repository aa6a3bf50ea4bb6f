"""The chart: what it renders, what its values may be, and what its rights allow on a real apiserver."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.serialization import yamltext
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.helm import CHART, NAMESPACE, Helm, helm_of
from tests.support.kubectl import Kubectl, kubectl_of, with_crds
from tests.support.manifests import example
from tests.support.repository import ROOT

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

RIGHTS = ROOT / "deploy" / "rights.txt"
RENEW = "PENSTOCK_RENEW"
PEOPLE = ("penstock-edit ", "penstock-view ")
"""What people may be given, and the chart gives nobody."""
OPERATOR = f"system:serviceaccount:{NAMESPACE}:penstock-operator"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


@pytest.fixture(scope="module")
def helm(cluster: Cluster) -> Helm:
    return helm_of(cluster)


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster, helm: Helm) -> Iterator[Kubectl]:
    """With all of the chart but the operator itself applied, in a namespace that takes restricted pods alone."""
    found = with_crds(kubectl_of(cluster))
    found.ask("create", "namespace", NAMESPACE)
    found.ask("label", "--overwrite", "namespace", NAMESPACE, RESTRICTED)
    rest = [each for (kind, _), each in helm.objects("crds.install=false").items() if kind != "Deployment"]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": rest})
    found.ask("apply", "-f", "-", text=text)
    yield found
    found.ask("delete", "--wait=false", "-f", "-", text=text)
    found.ask("delete", "--wait=false", "namespace", NAMESPACE)


def rights(objects: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """One line a right: who, the resource with its group, and the verbs."""
    return sorted(
        f"{name.removeprefix(f'{NAMESPACE}-')} {resource}{group and f'.{group}'} {' '.join(rule['verbs'])}"
        for (kind, name), each in objects.items()
        if kind in ("ClusterRole", "Role")
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    )


def test_rights_are_those_that_are_committed(helm: Helm) -> None:
    """``PENSTOCK_RENEW=1`` writes them again."""
    text = "\n".join(rights(helm.objects())) + "\n"
    if os.environ.get(RENEW):
        RIGHTS.write_text(text)
    assert RIGHTS.read_text() == text


def test_rights_are_few() -> None:
    words = " ".join(line for line in RIGHTS.read_text().splitlines() if not line.startswith(PEOPLE)).split()
    assert not {word for word in words if "*" in word or "secret" in word}
    assert not {"impersonate", "bind", "escalate", "deletecollection"} & set(words)


def test_definitions_stay_when_the_chart_goes(helm: Helm) -> None:
    kept = [each for (kind, name), each in helm.objects().items() if name.endswith("penstock.dev")]
    assert len(kept) == 4
    assert {each["metadata"]["annotations"]["helm.sh/resource-policy"] for each in kept} == {"keep"}
    assert not [name for _, name in helm.objects("crds.install=false") if name.endswith("penstock.dev")]


def test_definitions_are_rendered_as_they_are_committed(helm: Helm) -> None:
    found = helm.objects()
    for path in sorted((ROOT / "deploy" / "crds").iterdir()):
        committed = yamltext.load(path.read_text())
        rendered = found[committed["kind"], committed["metadata"]["name"]]
        rendered["metadata"].pop("annotations")
        assert rendered == committed


def test_there_is_one_operator_and_never_two(helm: Helm) -> None:
    spec = helm.objects()["Deployment", "penstock-operator"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ('operator.image=""', "operator/image"),
        ("operator.replicas=2", "replicas"),
        ('operator.imagePullPolicy="Sometimes"', "operator/imagePullPolicy"),
        ('crds.install="no"', "crds/install"),
        ('operater={"image": "x"}', "operater"),
    ],
)
def test_a_value_that_means_nothing_is_refused(helm: Helm, value: str, told: str) -> None:
    done = helm.run(value)
    assert done.returncode != 0
    assert told in done.stderr.replace(".", "/") or told in done.stderr


def test_every_value_is_described() -> None:
    def undescribed(schema: dict[str, Any], path: str) -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            if "description" not in inner and not inner.get("properties"):
                yield f"{path}.{name}"
            yield from undescribed(inner, f"{path}.{name}")

    def leaves(values: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
        for name, value in values.items():
            if name not in schema.get("properties", {}):
                yield f"{path}.{name}"
            elif isinstance(value, dict) and schema["properties"][name].get("properties"):
                yield from leaves(value, schema["properties"][name], f"{path}.{name}")

    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yamltext.load((CHART / "values.yaml").read_text())
    assert list(undescribed(schema, "")) == []
    for part in ("operator", "service"):
        assert values[part].pop("resources").keys() == {"requests", "limits"}
    assert list(leaves(values, schema, "")) == []


def test_the_operator_s_pod_is_restricted(helm: Helm, kubectl: Kubectl) -> None:
    template = helm.objects()["Deployment", "penstock-operator"]["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tried", "namespace": NAMESPACE}, **template}
    pod["metadata"] = {"name": "tried", "namespace": NAMESPACE}
    kubectl.ask("apply", "--dry-run=server", "-f", "-", text=json.dumps(pod))
    container = pod["spec"]["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    container["securityContext"] = {}
    assert "PodSecurity" in kubectl.refusal("apply", "--dry-run=server", "-f", "-", text=json.dumps(pod))


@pytest.mark.parametrize(
    "asked",
    [
        ("get", "secrets"),
        ("create", "pods"),
        ("delete", "pods"),
        ("create", "pods/exec"),
        ("create", "pipelinejobs.penstock.dev"),
        ("update", "pipelinejobs.penstock.dev"),
        ("patch", "nodes"),
        ("delete", "persistentvolumeclaims"),
        ("create", "serviceaccounts/token"),
    ],
)
def test_what_the_operator_may_not(kubectl: Kubectl, asked: tuple[str, str]) -> None:
    assert kubectl.run("auth", "can-i", *asked, f"--as={OPERATOR}", "-A").stdout.strip() == "no"


def test_what_it_may(kubectl: Kubectl) -> None:
    for line in RIGHTS.read_text().splitlines():
        who, resource, *verbs = line.split()
        if who not in ("penstock-operator-jobs", "penstock-operator-cluster") or "jobset" in resource:
            continue  # another's, or of a kind that need not be there
        name, _, sub = resource.partition("/")
        asked = f"{name}.penstock.dev" if sub else name
        options = ["--subresource=status"] if sub else []
        for verb in verbs:
            done = kubectl.run("auth", "can-i", verb, asked, *options, f"--as={OPERATOR}", "-A")
            assert done.stdout.strip() == "yes", line


TRIED = f"{NAMESPACE}-tried"
OWNED = ("meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-", "helm.sh/resource-policy-")


@pytest.fixture
def release(kubectl: Kubectl, helm: Helm) -> Iterator[tuple[str, ...]]:
    """Where a release may be installed; what it leaves behind is nobody's afterwards, as before."""
    yield ("tried", "--namespace", TRIED)
    for name in ("pipelinejobs.penstock.dev", "clusterprofiles.penstock.dev"):
        kubectl.ask("annotate", "crd", name, *OWNED)
        kubectl.ask("label", "crd", name, "app.kubernetes.io/managed-by-")
    kubectl.ask("delete", "namespace", TRIED, "--wait=false")


def test_jobs_outlive_upgrade_and_uninstallation(kubectl: Kubectl, helm: Helm, release: tuple[str, ...]) -> None:
    wanted = ("--create-namespace", "--take-ownership", "--set", "operator.image=nowhere/operator:1")
    helm.act(kubectl.kubeconfig, "install", *release, str(CHART), *wanted)
    kubectl.apply(example(resources__ranks=2))
    before = kubectl.get("pj", "stdlib-llama")
    helm.act(kubectl.kubeconfig, "upgrade", *release, str(CHART), "--set", "operator.image=nowhere/operator:2")
    helm.act(kubectl.kubeconfig, "uninstall", *release)
    assert "NotFound" in kubectl.refusal("get", "deployment", "tried-operator", "-n", TRIED)
    assert kubectl.get("pj", "stdlib-llama") == before
    helm.act(kubectl.kubeconfig, "install", *release, str(CHART), *wanted[2:])
    helm.act(kubectl.kubeconfig, "uninstall", *release)
    kubectl.ask("delete", "pj", "stdlib-llama", "--wait=false")
