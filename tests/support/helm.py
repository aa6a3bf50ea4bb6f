"""The chart, rendered by the real helm."""

from __future__ import annotations

import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.support.cluster import Cluster
from tests.support.repository import ROOT
from tools.lab import build
from tools.lab.console import plain_environ

CHART = ROOT / "helm" / "penstock"
RELEASE = "penstock"
NAMESPACE = f"chart-{secrets.token_hex(4)}"
"""Another in each run: one that was deleted is not gone at once."""
KUBERNETES = "1.36.0"
"""The version that is rendered for; without a cluster helm would take the one that it was built with."""


@dataclass(frozen=True, kw_only=True)
class Helm:
    """A helm that renders the chart for ``namespace``."""

    program: str
    namespace: str = NAMESPACE

    def run(self, *values: str) -> subprocess.CompletedProcess[str]:
        """Render with these values (``name=value``), whatever comes of it."""
        options = [word for value in values for word in ("--set-json", value)]
        command = [self.program, "template", RELEASE, str(CHART), "-n", self.namespace, "--kube-version", KUBERNETES]
        return subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)

    def rendered(self, *values: str) -> str:
        """The manifests; fails if helm does."""
        done = self.run(*values)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, *values: str) -> dict[tuple[str, str], dict[str, Any]]:
        """The same by kind and name."""
        documents = YAML(typ="safe", pure=True).load_all(self.rendered(*values))
        return {(each["kind"], each["metadata"]["name"]): each for each in documents if each}

    def act(self, kubeconfig: Path, *words: str) -> str:
        """What it says when it does something to a cluster; fails if it does."""
        environ = plain_environ() | {"HOME": str(kubeconfig.parent), "KUBECONFIG": str(kubeconfig)}
        command = [self.program, *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def helm_of(cluster: Cluster) -> Helm:
    """The lab's; by kind the one on the PATH, which it was set up with."""
    return Helm(program="helm" if cluster.lab is None else str(build.built(build.HELM) / "helm"))
