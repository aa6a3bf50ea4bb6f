"""A cluster in memory behind the operator's seam, and the hands of those who would act in a real one.

It keeps what the operator's step_predictions rest on: names are given once, uids are checked, what is applied replaces
what the same hand applied before, and owned objects go with their owner. Controllers and kubelets are the test's to
play.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from penstock.core.instants import format_instant
from penstock.kube.names import INDEX_LABEL, RANKS_JOB, REPORTER_CONTAINER, TRAINER_CONTAINER
from penstock.kube.resources import BATCH_JOBS, CONFIG_MAPS, JOBS, JOBSETS, NODES, PODS, Resource
from penstock.kube.transport import Change, KubeError, Listing, Object
from penstock.operator.kube import KINDS

Key = tuple[str, str, str]
Objects = list[dict[str, Any]]


P = ParamSpec("P")
R = TypeVar("R")


def _told(write: Callable[Concatenate[FakeKube, P], R]) -> Callable[Concatenate[FakeKube, P], R]:
    """A write that was made, and may not be heard of."""

    def recorded(self: FakeKube, /, *args: P.args, **kwargs: P.kwargs) -> R:
        done = write(self, *args, **kwargs)
        self.after(self._said.word)
        return done

    return recorded


class FakeKube:
    """See the module. ``hook`` is called before every write, ``after`` after it, with a word for it; both may raise.

    ``refusals`` are what a cluster says that makes nothing of a kind, or does not know it. What it makes it dates by
    ``clock``, if it has one.
    """

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.writes: list[str] = []
        self.reads: list[str] = []
        self.hook: Callable[[str], None] = lambda write: None
        self.after: Callable[[str], None] = lambda write: None
        self.refusals: dict[str, KubeError] = {}
        self.hidden: set[str] = set()
        self.failure: KubeError | None = None
        self.clock: Callable[[], float] | None = None
        self._numbers = itertools.count(1)
        self._said = threading.local()

    # What the operator calls

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """See `penstock.operator.kube.Kube`, as for all that follow."""
        self.reads.append(f"get {resource.plural} {name}")
        if self.failure is not None:
            raise self.failure
        found = self.objects.get((resource.plural, namespace, name))
        if found is None:
            raise KubeError(404, "NotFound", f"{resource.plural} {name}")
        return copy.deepcopy(found)

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        self.reads.append(f"list {resource.plural}")
        refusal = self.refusals.get(resource.plural)
        if refusal is not None and refusal.is_missing:
            raise refusal
        label, _, value = selector.partition("=")
        found = [
            copy.deepcopy(each)
            for (plural, space, _), each in sorted(self.objects.items())
            if plural == resource.plural
            and plural not in self.hidden
            and namespace in ("", space)
            and (not label or (label in _labels(each) and value in ("", _labels(each)[label])))
        ]
        return Listing(objects=tuple(found), version=str(next(self._numbers)))

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        yield from ()

    @_told
    def create(self, manifest: Mapping[str, Any]) -> Object:
        made = copy.deepcopy(dict(manifest))
        metadata = made["metadata"]
        name = metadata.setdefault("name", f"{metadata.pop('generateName', '')}{next(self._numbers)}")
        self._write(f"create {manifest['kind']} {name}")
        key = (KINDS[manifest["kind"]].plural, metadata.get("namespace", ""), name)
        if key[0] in self.refusals:
            raise self.refusals[key[0]]
        if key in self.objects:
            raise KubeError(409, "AlreadyExists", name)
        return self.add(KINDS[manifest["kind"]], made)

    @_told
    def apply(self, manifest: Mapping[str, Any], subresource: str = "") -> Object:
        metadata = manifest["metadata"]
        self._write(f"apply {manifest['kind']} {metadata['name']} {subresource}".strip())
        key = (KINDS[manifest["kind"]].plural, metadata.get("namespace", ""), metadata["name"])
        found = self.objects.get(key)
        if found is None:
            if subresource:
                raise KubeError(404, "NotFound", metadata["name"])
            return self.add(KINDS[manifest["kind"]], copy.deepcopy(dict(manifest)))
        for field in ("resourceVersion",) if subresource == "status" else ("resourceVersion", "uid"):
            if metadata.get(field, found["metadata"][field]) != found["metadata"][field]:
                raise KubeError(409, "Conflict", f"{field} is another")
        if subresource == "status":
            progress = found.get("status", {}).get("progress")
            found["status"] = copy.deepcopy(manifest["status"]) | ({"progress": progress} if progress else {})
        else:
            found.update({k: copy.deepcopy(v) for k, v in manifest.items() if k != "metadata"})
        return self.touch(found)

    @_told
    def annotate(self, pod: tuple[str, str, str], annotations: Mapping[str, str]) -> Object:
        namespace, name, uid = pod
        self._write(f"annotate {name}")
        found = self.objects.get((PODS.plural, namespace, name))
        if found is None or found["metadata"]["uid"] != uid:
            raise KubeError(404, "NotFound", name) if found is None else KubeError(422, "Invalid", "metadata.uid")
        found["metadata"].setdefault("annotations", {}).update(annotations)
        return self.touch(found)

    @_told
    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        self._write(f"delete {resource.plural} {name}")
        found = self.objects.get((resource.plural, namespace, name))
        if found is not None and found["metadata"]["uid"] == uid:
            self.remove(found)

    def _write(self, word: str) -> None:
        self._said.word = word
        self.hook(word)
        self.writes.append(word)

    # What others do

    def add(self, resource: Resource, found: dict[str, Any]) -> Object:
        """An object comes to be, by whomever."""
        metadata = found["metadata"]
        metadata.setdefault("uid", f"uid-{next(self._numbers)}")
        metadata.setdefault("generation", 1)
        if self.clock is not None:
            metadata.setdefault("creationTimestamp", format_instant(int(self.clock())))
        self.objects[(resource.plural, metadata.get("namespace", ""), metadata["name"])] = found
        return self.touch(found)

    def touch(self, found: dict[str, Any]) -> Object:
        """An object has changed."""
        found["metadata"]["resourceVersion"] = str(next(self._numbers))
        return copy.deepcopy(found)

    def remove(self, gone: Mapping[str, Any]) -> None:
        """An object is gone, and what it owns with it."""
        uid = gone["metadata"]["uid"]
        self.objects = {key: each for key, each in self.objects.items() if each["metadata"]["uid"] != uid}
        for each in tuple(self.objects.values()):
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", ())):
                self.remove(each)

    def hide(self, resource: Resource) -> None:
        """Lists hold none of these, as those of a watch that lags behind."""
        self.hidden.add(resource.plural)

    def all(self, resource: Resource) -> Objects:
        """The objects themselves, to be changed."""
        return [each for (plural, _, _), each in sorted(self.objects.items()) if plural == resource.plural]

    def submit(self, manifest: Mapping[str, Any]) -> str:
        """Somebody applies a job; its uid."""
        job = copy.deepcopy(dict(manifest))
        job["metadata"].setdefault("namespace", "default")
        return str(self.add(JOBS, job)["metadata"]["uid"])

    def change_spec(self, uid: str, **parts: Any) -> None:
        """Somebody edits a job."""
        job = next(each for each in self.all(JOBS) if each["metadata"]["uid"] == uid)
        for name, values in parts.items():
            job["spec"][name] = {**job["spec"].get(name, {}), **values}
        job["metadata"]["generation"] += 1
        self.touch(job)

    def report(self, uid: str, **progress: Any) -> None:
        """The service tells how far a job is."""
        job = next(each for each in self.all(JOBS) if each["metadata"]["uid"] == uid)
        job.setdefault("status", {})["progress"] = progress
        self.touch(job)

    def add_node(self, name: str, *, ready: bool = True, at: float = 0.0) -> None:
        """A node comes, or becomes ready or not."""
        condition = {"type": "Ready", "status": "True" if ready else "Unknown"}
        condition["lastTransitionTime"] = str(format_instant(at))
        status = {"nodeInfo": {"bootID": f"boot-{name}"}, "conditions": [condition]}
        self.add(NODES, {"metadata": {"name": name, "uid": f"node-{name}"}, "status": status})

    def start_pods(self, *nodes: str) -> None:
        """The newest JobSet that is not suspended gets its pods, on these nodes, and they run."""
        jobset = max(self.all(JOBSETS), key=lambda each: int(each["metadata"]["resourceVersion"]))
        job = self.start_job(jobset)
        for index, node in enumerate(nodes):
            pod = self.make_pod(job, index)
            state = {"name": TRAINER_CONTAINER, "imageID": "image@1", "state": {"running": {}}}
            reporter = {**state, "name": REPORTER_CONTAINER}
            containers = {"initContainerStatuses": [reporter], "containerStatuses": [state]}
            pod["spec"]["nodeName"] = node
            pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{index + 1}", **containers}
            self.touch(pod)

    def start_job(self, jobset: Mapping[str, Any]) -> dict[str, Any]:
        """The Job that the JobSet controller makes, which may have been there before."""
        metadata = jobset["metadata"]
        name, namespace = f"{metadata['name']}-{RANKS_JOB}-0", metadata["namespace"]
        if (BATCH_JOBS.plural, namespace, name) not in self.objects:
            template = jobset["spec"]["replicatedJobs"][0]["template"]
            owner = _controller("jobset.x-k8s.io/v1alpha2", "JobSet", jobset)
            labels = dict(template["metadata"]["labels"])
            own = {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owner]}
            self.add(BATCH_JOBS, {"metadata": own, "spec": copy.deepcopy(template["spec"])})
        return self.objects[(BATCH_JOBS.plural, namespace, name)]

    def make_pod(self, job: Mapping[str, Any], index: int, suffix: str = "") -> dict[str, Any]:
        """The pod that the Job controller makes for a completion index, which nobody has placed yet."""
        metadata = job["metadata"]
        own = {
            "name": f"{metadata['name']}-{index}{suffix}",
            "namespace": metadata["namespace"],
            "labels": {**job["spec"]["template"]["metadata"]["labels"], INDEX_LABEL: str(index)},
            "ownerReferences": [_controller("batch/v1", "Job", job)],
        }
        self.add(PODS, {"metadata": own, "spec": {}, "status": {"phase": "Pending"}})
        return self.objects[(PODS.plural, own["namespace"], own["name"])]

    def hinder_pod(self, index: int, reason: str, message: str, at: float) -> None:
        """The scheduler finds no node for a pod."""
        pod = self.all(PODS)[index]
        pod["spec"] = {}
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
        pod["status"] = {"phase": "Pending", "conditions": [{**condition, "lastTransitionTime": format_instant(at)}]}
        self.touch(pod)

    def end_pod(self, index: int, *, code: int, word: str = "", at: float = 0.0) -> None:
        """A pod's ranks end with an exit code and a termination message, and what reports after them."""
        pod = self.all(PODS)[index]
        ended = {"exitCode": code, "message": word, "finishedAt": format_instant(at)}
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
        pod["status"]["initContainerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
        self.touch(pod)

    def config_map(self, name: str) -> dict[str, Any]:
        """A ConfigMap, as it is."""
        return self.objects[(CONFIG_MAPS.plural, "default", name)]


def _labels(found: Mapping[str, Any]) -> Mapping[str, str]:
    labels: Mapping[str, str] = found["metadata"].get("labels", {})
    return labels


def _controller(api_version: str, kind: str, owner: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    return {"apiVersion": api_version, "kind": kind, **named, "controller": True}
