"""The kinds of objects that penstock reads or writes, and where a cluster serves them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.job import API_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """A kind of object and where the cluster serves it."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The path of one object, or of all of a namespace or the cluster if no ``name`` is given."""
        root = "/api" if "/" not in self.api_version else "/apis"
        scope = ["namespaces", namespace] if self.namespaced and namespace else []
        parts = [root, self.api_version, *scope, self.plural, name, subresource]
        return "/".join(part for part in parts if part)


JOBS = Resource(api_version=API_VERSION, plural="pipelinejobs")
CLUSTER_PROFILES = Resource(api_version=API_VERSION, plural="clusterprofiles", namespaced=False)
JOBSETS = Resource(api_version="jobset.x-k8s.io/v1alpha2", plural="jobsets")
BATCH_JOBS = Resource(api_version="batch/v1", plural="jobs")
CONFIG_MAPS = Resource(api_version="v1", plural="configmaps")
CLAIMS = Resource(api_version="v1", plural="persistentvolumeclaims")
PODS = Resource(api_version="v1", plural="pods")
NODES = Resource(api_version="v1", plural="nodes", namespaced=False)
NAMESPACES = Resource(api_version="v1", plural="namespaces", namespaced=False)
EVENTS = Resource(api_version="v1", plural="events")
LEASES = Resource(api_version="coordination.k8s.io/v1", plural="leases")
TOKEN_REVIEWS = Resource(api_version="authentication.k8s.io/v1", plural="tokenreviews", namespaced=False)
ACCESS_REVIEWS = Resource(api_version="authorization.k8s.io/v1", plural="subjectaccessreviews", namespaced=False)
