"""`./dev demo --cluster`: the example on a Kubernetes cluster on this machine, from nothing to its summary.

The cluster and the job stay, so that they can be inspected. The last lines say how, and how to remove them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deploy import cluster, own_images
from deploy.installation import Installation
from deploy.own_images import ROOT
from deploy.site import Site, site_of
from penstock.cli import output
from penstock.cli.summary import rendered, summarise
from penstock.core.lifecycle import Phase
from penstock.core.run.folder import RunDir
from penstock.core.serialization import yamltext
from penstock.core.status import JobStatus
from tools.lab import volumes
from tools.lab.__main__ import parser
from tools.lab.console import LabError
from tools.lab.state import DEFAULT_NAME

EXAMPLE = ROOT / "deploy" / "examples" / "stdlib-llama.yaml"
USAGE = "./dev demo --cluster takes no further arguments: it trains the example on the cluster of ./dev cluster"
NAMESPACE = "default"
OUT_SIZE = "10Gi"
POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A job on a cluster, whose output is printed by kubectl itself, as users see it."""

    site: Site
    manifest: dict[str, Any]
    namespace: str = NAMESPACE

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.manifest["metadata"]["name"])

    def submit(self) -> None:
        """Apply the job; one of that name, from an earlier demonstration, is deleted first."""
        if self._kubectl("get", "pj", self.name, "--ignore-not-found"):
            output.say(f"deleting the job {self.name} of an earlier demonstration")
            self._kubectl("delete", "pj", self.name)
        self._kubectl("apply", "--filename", "-", stdin=yamltext.dump(self.manifest))

    def follow(self) -> JobStatus:
        """Print the output of `kubectl get pj --watch` until the job has ended; return its last status."""
        said = ""
        with self._watching():
            while True:
                status = self.status()
                if status.message not in ("", said):
                    output.say(status.message)
                said = status.message
                if status.phase.terminal:
                    return status
                time.sleep(POLL_SECONDS)

    def status(self) -> JobStatus:
        """Return the job's status on the cluster."""
        found = self.site.get("pj", self.name, "--namespace", self.namespace)
        return JobStatus.from_manifest(found.get("status") or {})

    def run(self, status: JobStatus) -> RunDir:
        """Return the run directory of the newest attempt, on this machine."""
        found = self.site.get("pj", self.name, "--namespace", self.namespace)
        out = self.site.folder_of_claim(self.namespace, f"{self.name}-out")
        return RunDir(out / found["metadata"]["uid"] / f"a{status.attempt}")

    def _kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self.site.kubectl("--namespace", self.namespace, *words, stdin=stdin)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        command = [self.site.kubectl_program, "--namespace", self.namespace, "get", "pj", self.name, "--watch"]
        watch = subprocess.Popen(command, env=self.site.environ)
        try:
            yield
        finally:
            time.sleep(POLL_SECONDS)  # it prints the end, too
            watch.terminate()
            watch.wait()


def with_storage(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the job with a volume claim for its output, which pods of all nodes may write."""
    template = {"size": OUT_SIZE, "storageClass": volumes.SHARED, "accessModes": ["ReadWriteMany"]}
    spec = manifest["spec"]
    kubernetes = spec.get("kubernetes", {})
    mounted = {**kubernetes.get("volumes", {}), "out": {"template": template}}
    return {**manifest, "spec": {**spec, "kubernetes": {**kubernetes, "volumes": mounted}}}


def shown(found: Demonstration) -> bool:
    """Submit the job, follow it to its end, and compare prediction and measurement; return whether it succeeded."""
    output.say(f"kubectl apply -f {EXAMPLE.relative_to(ROOT)}, with a claim for its output; kubectl get pj --watch:")
    found.submit()
    status = found.follow()
    if status.phase is not Phase.SUCCEEDED:
        output.say_failure(status.message, f"kubectl describe pj {found.name}")
        return False
    run = found.run(status)
    output.show(*rendered(summarise(run, status.phase.value, status.attempt)))
    return True


def _cluster() -> Site:
    """Return the running cluster, or start one."""
    found = site_of(DEFAULT_NAME)
    if found is not None:
        output.say(f"using the running cluster {DEFAULT_NAME}")
        return found
    output.say("starting a cluster of two nodes: ./dev cluster up")
    cluster.run_verb(parser().parse_args(["up"]))
    made = site_of(DEFAULT_NAME)
    assert made is not None, "the cluster was started"
    return made


def _farewell(site: Site) -> None:
    output.say(
        f"""
Still running: cluster {DEFAULT_NAME} with JobSet, penstock in penstock-system, the job and its claim in {NAMESPACE}.
  inspect it     export KUBECONFIG={site.kubeconfig}
                 {site.kubectl_program} describe pj; {site.kubectl_program} -n penstock-system get pods
  remove it      ./dev cluster down"""
    )


def demonstrate() -> bool:
    """Run the whole demonstration; return whether the job succeeded."""
    site = _cluster()
    output.say("loading penstock's images into its nodes")
    images = own_images.given(site, DEFAULT_NAME)
    output.say("installing penstock: helm install penstock helm/penstock --namespace penstock-system")
    Installation(site=site, images=images).install({})
    try:
        return shown(Demonstration(site=site, manifest=with_storage(yamltext.load(EXAMPLE.read_text()))))
    finally:
        _farewell(site)


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 trained, 1 failed, 2 the user has to do something first."""
    if arguments:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        return 0 if demonstrate() else 1
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
