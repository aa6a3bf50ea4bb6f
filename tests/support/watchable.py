"""A cluster in memory that can be watched."""

from __future__ import annotations

import time
from collections.abc import Iterator

from penstock.kube.resources import Resource
from penstock.kube.transport import Change, KubeError, Listing
from tests.support.fake_kube import FakeKube


class Watchable(FakeKube):
    """A watch here ends soon, and is followed by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.unlistable: set[str] = set()
        self.closed: set[str] = set()

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        if resource.plural in self.closed and not namespace:
            raise KubeError(403, "Forbidden", f"{resource.plural} is forbidden at the cluster scope")
        if resource.plural in self.unlistable:
            raise KubeError(500, "Internal", "etcd")
        return super().list(resource, namespace, selector)

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        time.sleep(0.02)
        yield Change(version=version)
        raise KubeError(410, "Expired", "")
