"""Installation of penstock by its chart, on a cluster of `./dev cluster`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.own_images import ROOT, Images
from deploy.site import Site
from tools.lab import volumes
from tools.lab.state import State

CHART = ROOT / "helm" / "penstock"
SERVICE_PORT = 8470
SERVICE_PLACE = 10
"""Index of the service's cluster IP in a lab's range, in the lower part that the apiserver keeps for fixed ones."""

READY = "300s"


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A release of the Helm chart. `install` takes values, and adds those that the cluster needs."""

    site: Site
    images: Images
    release: str = "penstock"
    namespace: str = "penstock-system"

    def install(self, values: Mapping[str, Any]) -> None:
        """Install or upgrade the release, and wait until all of it is ready."""
        if self.site.lab is not None:
            self._reserve(self._lab_address(self.site.lab))
        settings = [f"{name}={json.dumps(value)}" for name, value in {**self._needed(), **values}.items()]
        words: list[str | Path] = [
            "upgrade",
            self.release,
            CHART,
            "--install",
            "--take-ownership",
            "--wait",
            "--timeout",
            READY,
        ]
        place = ["--namespace", self.namespace, "--create-namespace"]
        self.site.helm(*words, *place, *(word for setting in settings for word in ("--set-json", setting)))

    def uninstall(self) -> None:
        """Uninstall the release, and wait until its pods are gone. CRDs, jobs and the service's volume stay."""
        self.site.helm("uninstall", self.release, "--namespace", self.namespace, "--wait")

    def _needed(self) -> dict[str, Any]:
        images = self.images
        found: dict[str, Any] = {
            "operator.image": images.operator,
            "service.image": images.service,
            "trainer.image": images.trainer,
        }
        if self.site.lab is None:
            return found
        address = self._lab_address(self.site.lab)
        url = {"name": "PENSTOCK_SERVICE_URL", "value": f"http://{address}:{SERVICE_PORT}"}
        named = {"operator.env": [url], "service.hosts": [address], "service.storage.storageClass": volumes.LOCAL}
        return {**found, **named, "service.storage.accessMode": volumes.MODES[volumes.LOCAL]}

    @staticmethod
    def _lab_address(lab: State) -> str:
        return str(lab.addresses.services[SERVICE_PLACE])

    def _reserve(self, address: str) -> None:
        """Create the chart's Service with a fixed cluster IP. A lab has no DNS, so the operator uses the address."""
        metadata = {"name": f"{self.release}-service", "namespace": self.namespace}
        port = {"name": "http", "port": SERVICE_PORT}
        place = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata}
        items = [place, {**service, "spec": {"clusterIP": address, "ports": [port]}}]
        whole = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        self.site.kubectl("apply", "--server-side", "--filename", "-", stdin=whole)
