"""A cluster that `./dev cluster` creates, with kind or as a lab, and common operations on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import kind
from tools.lab import build, state
from tools.lab.console import plain_environ, run
from tools.lab.volumes import SHARED


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster, and the client programs for it.

    ``volumes`` is the folder on this machine with the cluster's shared volumes. ``lab`` is none for a kind cluster.
    """

    kubeconfig: Path
    kubectl_program: str
    helm_program: str
    volumes: Path
    lab: state.State | None = None

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Return the output of kubectl; raises `LabError` with its error."""
        return run(self.kubectl_program, *words, stdin=stdin, environ=self.environ)

    def get(self, *words: str) -> Any:
        """Return the output of `kubectl get` as data."""
        return json.loads(self.kubectl("get", *words, "--output", "json"))

    def helm(self, *words: str | Path, stdin: str | None = None) -> str:
        """Return the output of helm; raises `LabError` with its error."""
        return run(self.helm_program, *words, stdin=stdin, environ=self.environ)

    @property
    def environ(self) -> dict[str, str]:
        """Environment of both programs, with their caches next to the kubeconfig."""
        return plain_environ() | {"KUBECONFIG": str(self.kubeconfig), "HOME": str(self.kubeconfig.parent)}

    def folder_of_claim(self, namespace: str, claim: str) -> Path:
        """Return the folder on this machine that stores the volume of a claim of the storage class `SHARED`."""
        spec = self.get("pvc", claim, "--namespace", namespace)["spec"]
        assert spec["storageClassName"] == SHARED, f"{claim} is not shared"
        return self.volumes / str(spec["volumeName"])


def site_of_lab(lab: state.State) -> Site:
    """Return the site of a running lab."""
    return Site(
        kubeconfig=lab.kubeconfig,
        kubectl_program=str(lab.programs / "kubectl"),
        helm_program=str(build.built(build.HELM) / "helm"),
        volumes=lab.folder / "volumes",
        lab=lab,
    )


def site_of(name: str) -> Site | None:
    """Return the cluster of that name, if it is running."""
    if not kind.fits():
        return site_of_lab(state.read(name)) if name in state.names() else None
    if name not in kind.names():
        return None
    kubeconfig, volumes = kind.kubeconfig(name), kind.volumes_folder(name)
    return Site(kubeconfig=kubeconfig, kubectl_program="kubectl", helm_program="helm", volumes=volumes)
