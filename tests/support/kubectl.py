"""The real kubectl against a real apiserver."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.serialization import yamltext
from tests.support.cluster import Cluster
from tests.support.manifests import example
from tests.support.repository import ROOT
from tools.lab.console import plain_environ

MOST_POLICY_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Kubectl:
    """A kubectl and the cluster it talks to."""

    program: str
    kubeconfig: Path

    def run(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Whatever comes of it; ``text`` is its standard input."""
        command = [self.program, f"--kubeconfig={self.kubeconfig}", *arguments]
        environ = plain_environ() | {"HOME": str(self.kubeconfig.parent)}  # where it keeps what it discovered
        return subprocess.run(command, input=text, env=environ, capture_output=True, text=True, timeout=60, check=False)

    def ask(self, *arguments: str, text: str | None = None) -> str:
        """Its standard output; fails if it does."""
        done = self.run(*arguments, text=text)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def refusal(self, *arguments: str, text: str | None = None) -> str:
        """Its standard error; fails unless it does."""
        done = self.run(*arguments, text=text)
        assert done.returncode != 0, f"kubectl {' '.join(arguments)} did it: {done.stdout}"
        return done.stderr

    def get(self, *arguments: str) -> dict[str, Any]:
        """An object as the apiserver has it."""
        found: dict[str, Any] = json.loads(self.ask("get", *arguments, "-o", "json"))
        return found

    def apply(self, manifest: dict[str, Any], *arguments: str) -> str:
        """Apply plain data."""
        return self.ask("apply", "-f", "-", *arguments, text=yamltext.dump(manifest))


def kubectl_of(cluster: Cluster) -> Kubectl:
    """The one that belongs to a cluster."""
    return Kubectl(program=cluster.program, kubeconfig=cluster.kubeconfig)


def with_crds(kubectl: Kubectl) -> Kubectl:
    """With what lies in `deploy/crds` applied, and the namespace of `tests.support.manifests.FULL`."""
    kubectl.ask("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "deploy" / "crds"))
    for name in ("pipelinejobs", "clusterprofiles"):
        kubectl.ask("wait", "--for=condition=Established", f"crd/{name}.penstock.dev", "--timeout=30s")
    if kubectl.run("get", "namespace", "team").returncode != 0:
        kubectl.ask("create", "namespace", "team")
    _await_policy(kubectl)
    return kubectl


def _await_policy(kubectl: Kubectl) -> None:
    """A policy counts some moments after it was taken."""
    wrong = yamltext.dump(example(parallelism={"slices": "many"}))
    deadline = time.monotonic() + MOST_POLICY_SECONDS
    while kubectl.run("apply", "--dry-run=server", "-f", "-", text=wrong).returncode == 0:
        assert time.monotonic() < deadline, "the policy does not count"
        time.sleep(0.1)
