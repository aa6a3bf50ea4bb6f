"""Writes that a stolen token of the operator or the service can do on a real apiserver, under the chart's policies.

Each test acts as the program's service account with the rights that the chart gives it. All but what a test prepares is
sent as a dry run: admission judges it, and nothing stays.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.core.job import PipelineJob
from penstock.kube.names import ranks_job_name
from penstock.operator import manifests
from penstock.operator.settings import Settings
from tests.support import helm as helm_support
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.helm import helm_of
from tests.support.kubectl import Kubectl, kubectl_of, with_crds
from tests.support.manifests import example

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

NAMESPACE = f"{helm_support.NAMESPACE}-held"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:penstock-operator"
SERVICE = f"system:serviceaccount:{NAMESPACE}:penstock-service"
CREATE = ("create", "--dry-run=server", "-f", "-")
LATE = "the chart's policies have no effect"
ONE_LEASE = "and no other"
"""In the message of the policy for Leases; without the rights, which may be as late, the refusal is another."""

UID = "u"
OWNER = {"apiVersion": "penstock.dev/v1alpha1", "kind": "PipelineJob", "name": "a", "uid": UID, "controller": True}
NAMES = {"name": "a-a1", "namespace": NAMESPACE, "labels": {"penstock.dev/job-uid": UID}}
PROFILE_OWNER = {**OWNER, "kind": "ClusterProfile", "name": "pool"}


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Iterator[Kubectl]:
    """With all of the chart but its programs applied."""
    found = with_crds(kubectl_of(cluster))
    found.ask("create", "namespace", NAMESPACE)
    helm = replace(helm_of(cluster), namespace=NAMESPACE)
    rest = [each for (kind, _), each in helm.objects("crds.install=false").items() if kind != "Deployment"]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": rest})
    found.ask("apply", "-f", "-", text=text)
    other = json.dumps(lease("other"))
    cluster.wait(lambda: ONE_LEASE in found.run(*CREATE, f"--as={SERVICE}", text=other).stderr, LATE)
    yield found
    found.ask("delete", "--wait=false", "-f", "-", text=text)
    found.ask("delete", "--wait=false", "namespace", NAMESPACE)


def job_manifest(**metadata: Any) -> dict[str, Any]:
    manifest = example(resources__ranks=2)
    return {**manifest, "metadata": {"name": "a", "namespace": NAMESPACE, **metadata}}


def changed(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a dotted path; None removes it."""
    found = copy.deepcopy(manifest)
    *parents, name = path.split(".")
    place: Any = found
    for parent in parents:
        place = place[int(parent)] if parent.isdigit() else place.setdefault(parent, {})
    place[name] = value
    if value is None:
        del place[name]
    return found


def refusal(kubectl: Kubectl, account: str, manifest: dict[str, Any]) -> str:
    return kubectl.refusal(*CREATE, f"--as={account}", text=json.dumps(manifest))


def accept(kubectl: Kubectl, account: str, manifest: dict[str, Any]) -> None:
    kubectl.ask(*CREATE, f"--as={account}", text=json.dumps(manifest))


def lease(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}


# Pods

POD_LABELS = {"penstock.dev/job": "j", "penstock.dev/job-uid": UID, "penstock.dev/attempt": "1"}
RANKS_JOB = {"apiVersion": "batch/v1", "kind": "Job", "name": ranks_job_name("j", 1), "controller": True}
OWNERS: dict[str, dict[str, Any]] = {
    "rank": RANKS_JOB,
    "stranger": {},
    "copied-labels": {},
    "other-controller": {**RANKS_JOB, "kind": "ConfigMap", "apiVersion": "v1"},
    "other-job": {**RANKS_JOB, "name": "backup"},
    "other-attempt": {**RANKS_JOB, "name": ranks_job_name("j", 2)},
    "owner-that-does-not-control": {**RANKS_JOB, "controller": False},
}
"""Pods by name, and what owns each; all but the stranger have a rank's labels."""


def owner_manifest(owner: dict[str, Any]) -> dict[str, Any]:
    """An object that is there, or the pod would be collected as garbage; no controller of the cluster looks at it."""
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "none"}]}}
    spec = {"spec": {"managedBy": "penstock.dev/tests", "template": template}} if owner["kind"] == "Job" else {}
    metadata = {"name": owner["name"], "namespace": NAMESPACE}
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "metadata": metadata, **spec}


@pytest.fixture
def pod(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    """One of `OWNERS`, by its name, without a scheduler."""
    name = str(request.param)
    owner, owners = OWNERS[name], []
    if owner:
        made = json.loads(kubectl.ask("create", "-o", "json", "-f", "-", text=json.dumps(owner_manifest(owner))))
        owners = [{**owner, "uid": made["metadata"]["uid"]}]
    labels = {"app": "x", **(POD_LABELS if name != "stranger" else {})}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels, "ownerReferences": owners}
    spec = {"schedulerName": "nobody", "containers": [{"name": "c", "image": "none"}]}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    if kubectl.run("get", "sa", "default", "-n", NAMESPACE).returncode:
        kubectl.ask("create", "serviceaccount", "default", "-n", NAMESPACE)
    kubectl.ask("create", "-f", "-", text=json.dumps(manifest))
    yield name
    kubectl.ask("delete", "pod", name, "-n", NAMESPACE, "--force", "--grace-period=0")
    if owner:
        kubectl.ask("delete", owner["kind"], owner["name"], "-n", NAMESPACE)


BINDING = {"metadata": {"annotations": {"penstock.dev/binding": "{}"}}}
CHANGES: list[tuple[dict[str, Any], str]] = [
    (BINDING, ""),
    (
        {"metadata": {"annotations": {"penstock.dev/binding": "{}", "other": "x"}}},
        "annotations of a pod except penstock.dev/...",
    ),
    ({"metadata": {"labels": {"app": "y"}}}, "labels, owners and finalizers"),
    ({"metadata": {"finalizers": ["penstock.dev/x"]}}, "labels, owners and finalizers"),
    ({"spec": {"containers": [{"name": "c", "image": "other"}]}}, "spec"),
]


def patch_pod(name: str, change: dict[str, Any]) -> tuple[str, ...]:
    words = ("patch", "pod", name, "-n", NAMESPACE, "--type=strategic", "--dry-run=server", f"--as={OPERATOR}")
    return (*words, "-p", json.dumps(change))


@pytest.mark.parametrize("pod", ["rank"], indirect=True)
@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_the_operator_annotates_ranks(kubectl: Kubectl, pod: str, change: dict[str, Any], told: str) -> None:
    if told:
        assert told in kubectl.refusal(*patch_pod(pod, change))
    else:
        kubectl.ask(*patch_pod(pod, change))


@pytest.mark.parametrize("pod", [name for name in OWNERS if name != "rank"], indirect=True)
def test_labels_make_no_pod_a_job_s(kubectl: Kubectl, pod: str) -> None:
    """Anybody who may make pods copies them: the controller has to be the Job of that attempt."""
    assert "pods of its jobs alone" in kubectl.refusal(*patch_pod(pod, BINDING))


# ConfigMaps

STRAY: dict[str, dict[str, Any]] = {
    "no owner": {"ownerReferences": None},
    "another kind's": {"ownerReferences": [{**OWNER, "kind": "Deployment", "apiVersion": "apps/v1"}]},
    "another job's": {"ownerReferences": [{**OWNER, "uid": "other"}]},
    "another name": {"name": "coredns"},
    "another number": {"name": "a-a1x"},
    "a profile's, elsewhere": {"name": "pool-profile", "namespace": "default", "ownerReferences": [PROFILE_OWNER]},
}


def config_map(metadata: dict[str, Any]) -> dict[str, Any]:
    named = {name: value for name, value in metadata.items() if value is not None}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named}


@pytest.mark.parametrize("stray", STRAY)
def test_the_operator_makes_config_maps_of_jobs_alone(kubectl: Kubectl, stray: str) -> None:
    own = {**NAMES, "ownerReferences": [OWNER]}
    for name in ("a-a1", "a-profile-a1"):
        accept(kubectl, OPERATOR, config_map({**own, "name": name}))
    accept(kubectl, OPERATOR, config_map({**own, "name": "pool-profile", "ownerReferences": [PROFILE_OWNER]}))
    assert "attempts of its jobs" in refusal(kubectl, OPERATOR, config_map({**own, **STRAY[stray]}))


def test_the_operator_changes_no_config_map_of_others(kubectl: Kubectl) -> None:
    metadata = {"name": "somebody-s", "namespace": NAMESPACE}
    kubectl.ask("create", "-f", "-", text=json.dumps(config_map(metadata)))
    place = ("configmap", metadata["name"], "-n", NAMESPACE, f"--as={OPERATOR}", "--dry-run=server")
    change = {"metadata": {"ownerReferences": [OWNER], "labels": NAMES["labels"]}}
    assert "attempts of its jobs" in kubectl.refusal("patch", *place, "--type=merge", "-p", json.dumps(change))
    assert "attempts of its jobs" in kubectl.refusal("delete", *place)


def test_the_service_makes_config_maps_of_measurements_alone(kubectl: Kubectl) -> None:
    metadata = {**NAMES, "name": "a-profile-a1", "ownerReferences": [{**OWNER, "controller": False}]}
    accept(kubectl, SERVICE, config_map(metadata))
    assert "what attempts of jobs measured" in refusal(kubectl, SERVICE, config_map({**metadata, "name": "a-a1"}))


# JobSets


def jobset() -> dict[str, Any]:
    """One as the operator makes it."""
    job = PipelineJob.from_manifest(job_manifest(uid=UID))
    return manifests.jobset(job, 1, 2, Settings(image="ranks:1", service="http://service"), 30)


POD = "spec.replicatedJobs.0.template.spec.template.spec"
TRAINER = f"{POD}.containers.0"
SECRET_VOLUME = [{"name": "x", "secret": {"secretName": "y"}}]
HOST_VOLUME = [{"name": "x", "hostPath": {"path": "/"}}]
TOKEN = {"serviceAccountToken": {"path": "token"}}
JOBSETS: list[tuple[str, Any, str]] = [
    ("metadata.ownerReferences", None, "attempts of its jobs"),
    ("metadata.ownerReferences", [{**OWNER, "uid": "other"}], "attempts of its jobs"),
    ("metadata.name", "coredns", "attempts of its jobs"),
    (f"{POD}.serviceAccountName", "admin", "the account default"),
    (f"{POD}.automountServiceAccountToken", True, "the account default"),
    (f"{POD}.hostNetwork", True, "no part of their host"),
    (f"{TRAINER}.securityContext.privileged", True, "no part of their host"),
    (f"{TRAINER}.securityContext.capabilities", {"drop": ["ALL"], "add": ["NET_ADMIN"]}, "no capabilities"),
    (f"{TRAINER}.securityContext.capabilities", None, "no capabilities"),
    (f"{TRAINER}.securityContext.runAsUser", 0, "no part of their host"),
    (f"{TRAINER}.securityContext.seccompProfile", {"type": "Unconfined"}, "no part of their host"),
    (f"{TRAINER}.securityContext.appArmorProfile", {"type": "Unconfined"}, "no part of their host"),
    (f"{POD}.initContainers.0.securityContext.capabilities", None, "no capabilities"),
    (f"{TRAINER}.ports", [{"containerPort": 22, "hostPort": 22}], "no part of their host"),
    (f"{TRAINER}.envFrom", [{"secretRef": {"name": "x"}}], "no part of their host"),
    (f"{POD}.securityContext", None, "not root"),
    (f"{POD}.securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}], "not root"),
    (f"{POD}.securityContext.seLinuxOptions", {"type": "spc_t"}, "not root"),
    (f"{POD}.nodeName", "control-plane", "the scheduler"),
    (f"{POD}.priorityClassName", "system-node-critical", "the scheduler"),
    (f"{POD}.volumes", SECRET_VOLUME, "neither Secrets nor host paths"),
    (f"{POD}.volumes", HOST_VOLUME, "neither Secrets nor host paths"),
    (f"{POD}.volumes", [{"name": "x", "projected": {"sources": [TOKEN]}}], "neither Secrets nor host paths"),
    ("metadata.namespace", "kube-system", "in a namespace kube-..."),
]


def test_the_operator_makes_job_sets_of_attempts(kubectl: Kubectl) -> None:
    accept(kubectl, OPERATOR, jobset())


@pytest.mark.parametrize(("path", "value", "told"), JOBSETS)
def test_a_job_set_with_more_is_refused(kubectl: Kubectl, path: str, value: Any, told: str) -> None:
    assert told in refusal(kubectl, OPERATOR, changed(jobset(), path, value))


# Claims


def claim(reclaim: str) -> dict[str, Any]:
    """One as the operator makes it."""
    template = {"size": "1Gi", "accessModes": ["ReadWriteMany"]}
    manifest = job_manifest(uid=UID)
    manifest["spec"]["kubernetes"] = {"volumes": {"out": {"template": template, "reclaim": reclaim}}}
    (found,) = manifests.claims(PipelineJob.from_manifest(manifest))
    return found


CLAIMS: list[tuple[str, Any, str]] = [
    ("metadata.labels", None, "claims of its jobs"),
    ("metadata.name", "database", "claims of its jobs"),
    ("metadata.ownerReferences", [{**OWNER, "uid": "other"}], "claims of its jobs"),
    ("metadata.namespace", "kube-system", "in a namespace kube-..."),
    ("spec.volumeName", "somebody-s", "names no volume"),
    ("spec.dataSource", {"kind": "PersistentVolumeClaim", "name": "database"}, "no source of data"),
]


@pytest.mark.parametrize(("path", "value", "told"), CLAIMS)
def test_the_operator_makes_empty_claims_of_jobs(kubectl: Kubectl, path: str, value: Any, told: str) -> None:
    for reclaim in ("Delete", "Retain"):
        accept(kubectl, OPERATOR, claim(reclaim))
    assert told in refusal(kubectl, OPERATOR, changed(claim("Delete"), path, value))


# Events


def event() -> dict[str, Any]:
    about = {"apiVersion": OWNER["apiVersion"], "kind": "PipelineJob", "name": "a", "namespace": NAMESPACE, "uid": UID}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": "a.", "namespace": NAMESPACE},
        "involvedObject": about,
        "type": "Normal",
        "reason": "Tried",
        "message": "tried",
        "source": {"component": "penstock-operator"},
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [("involvedObject.kind", "Pod"), ("involvedObject.apiVersion", "v1"), ("source.component", "kubelet")],
)
def test_the_operator_reports_events_of_jobs_alone(kubectl: Kubectl, path: str, value: str) -> None:
    accept(kubectl, OPERATOR, event())
    assert "events of PipelineJobs" in refusal(kubectl, OPERATOR, changed(event(), path, value))


# PipelineJobs


def measuring() -> dict[str, Any]:
    owner = {**PROFILE_OWNER, "blockOwnerDeletion": False}
    return job_manifest(name="pool-profile", labels={"penstock.dev/measures": "pool"}, ownerReferences=[owner])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.ownerReferences", None),
        ("metadata.ownerReferences", [OWNER]),
        ("metadata.labels", None),
        ("metadata.name", "other-profile"),
    ],
)
def test_the_operator_makes_jobs_that_measure_alone(kubectl: Kubectl, path: str, value: Any) -> None:
    accept(kubectl, OPERATOR, measuring())
    assert "measure for ClusterProfiles" in refusal(kubectl, OPERATOR, changed(measuring(), path, value))


@pytest.fixture
def stored(kubectl: Kubectl) -> Iterator[str]:
    """A PipelineJob's name."""
    manifest = job_manifest(name="kept", labels={"team": "x"})
    del manifest["spec"]["runPolicy"]["ttlSecondsAfterFinished"]
    kubectl.ask("create", "-f", "-", text=json.dumps(manifest))
    yield "kept"
    kubectl.ask("delete", "pj", "kept", "-n", NAMESPACE, "--wait=false", "--ignore-not-found")


def delete_job(name: str) -> tuple[str, ...]:
    return ("delete", "pj", name, "-n", NAMESPACE, "--dry-run=server", f"--as={OPERATOR}")


def patch_job(name: str, change: dict[str, Any], *options: str) -> tuple[str, ...]:
    return ("patch", "pj", name, "-n", NAMESPACE, "--type=merge", "-p", json.dumps(change), *options)


def test_the_operator_deletes_jobs_whose_time_is_over(kubectl: Kubectl, stored: str) -> None:
    """It writes phases, but not the time to live: a job without one stays, whatever its status says."""
    ended = {"status": {"phase": "Succeeded", "observedGeneration": 1}}
    kept = "that ended and have ttlSecondsAfterFinished"
    assert kept in kubectl.refusal(*delete_job(stored))
    kubectl.ask(*patch_job(stored, ended, "--subresource=status"))
    assert kept in kubectl.refusal(*delete_job(stored))
    kubectl.ask(*patch_job(stored, {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 5}}}))
    kubectl.ask(*delete_job(stored))
    kubectl.ask(*patch_job(stored, {"status": {"phase": "Running"}}, "--subresource=status"))
    assert kept in kubectl.refusal(*delete_job(stored))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"spec": {"runPolicy": {"suspend": True}}}, ""),
        ({"spec": {"runPolicy": {"suspend": False}}}, ""),
        ({"spec": {"runPolicy": {"suspend": True, "priority": 7}}}, ".spec.runPolicy.suspend"),
        ({"spec": {"runPolicy": {"ttlSecondsAfterFinished": 0}}}, ".spec.runPolicy.suspend"),
        ({"spec": {"resources": {"ranks": 4}}}, ".spec.runPolicy.suspend"),
        ({"metadata": {"labels": {"team": "y"}}}, "labels, annotations, owners and finalizers"),
        ({"metadata": {"annotations": {"penstock.dev/submitted-by": "y"}}}, "labels, annotations"),
        ({"metadata": {"finalizers": ["penstock.dev/x"]}}, "labels, annotations, owners and finalizers"),
        ({"metadata": {"ownerReferences": [PROFILE_OWNER]}}, "labels, annotations, owners and finalizers"),
    ],
)
def test_the_service_suspends_jobs_and_changes_nothing_else(
    kubectl: Kubectl, stored: str, change: dict[str, Any], told: str
) -> None:
    arguments = patch_job(stored, change, "--dry-run=server", f"--as={SERVICE}")
    if told:
        assert told in kubectl.refusal(*arguments)
    else:
        kubectl.ask(*arguments)


def test_the_service_writes_the_progress_of_a_status_alone(kubectl: Kubectl, stored: str) -> None:
    metadata = {"name": stored, "namespace": NAMESPACE}
    head = {"apiVersion": OWNER["apiVersion"], "kind": "PipelineJob", "metadata": metadata}
    options = ("apply", "--server-side", "--field-manager=x", "--subresource=status", "--dry-run=server", "-f", "-")
    for status, told in (
        ({"progress": {"attempt": 1, "step": 1}}, ""),
        ({"phase": "Succeeded"}, "nothing else of a status"),
    ):
        text = json.dumps({**head, "status": status})
        if told:
            assert told in kubectl.refusal(*options, f"--as={SERVICE}", text=text)
        else:
            kubectl.ask(*options, f"--as={SERVICE}", text=text)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"namespace": NAMESPACE}, "no PipelineJob in penstock's namespace"),
        ({"namespace": "kube-system"}, "no PipelineJob in penstock's namespace"),
        ({"namespace": "team", "ownerReferences": [PROFILE_OWNER]}, "without owners"),
    ],
)
def test_the_service_submits_jobs_where_jobs_may_run(kubectl: Kubectl, metadata: dict[str, Any], told: str) -> None:
    accept(kubectl, SERVICE, job_manifest(namespace="team"))
    assert told in refusal(kubectl, SERVICE, job_manifest(**metadata))


def test_the_service_has_one_lease(kubectl: Kubectl) -> None:
    accept(kubectl, SERVICE, lease("penstock-service"))
    assert ONE_LEASE in refusal(kubectl, SERVICE, lease("other"))
