"""Service on a cluster: it runs no jobs itself, but mirrors and submits them, and receives reports of pods."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.membership import Following, ServiceInstance, following, join
from penstock.api.executor.plan_queue import MOST_SECONDS, PlanQueue
from penstock.api.service import Service
from penstock.api.settings import Settings
from penstock.api.start import background
from penstock.api.start.service_files import planner_name
from penstock.api.start.serving import answering, delivering, service_folder
from penstock.api.store import tokens
from penstock.api.webhook import Webhook
from penstock.core.errors import UserError
from penstock.core.host.stopping import StopRequests, listening
from penstock.core.job_policy import JobPolicy
from penstock.kube.allowing import read_policy
from penstock.kube.connecting import connect
from penstock.kube.transport import KubeError
from penstock.planner.worker.process import ProcessPlanner

NUM_CONNECTIONS = 32
RETRY_SECONDS, SAY_SECONDS = 1.0, 60.0
OWN_NAMESPACE = "PENSTOCK_OWN_NAMESPACE"


def serve_cluster(
    settings: Settings,
    namespace: str,
    policy: Path | None,
    webhook: Webhook | None,
    *,
    say: Callable[[str], None],
) -> None:
    """Serve the jobs in ``namespace``, or in all, until SIGINT or SIGTERM.

    ``policy`` is the file of the policy for jobs, and ``say`` prints a line.

    Raises:
        UserError: there is no Kubernetes configuration, the cluster does not answer, or a setting is invalid.
    """
    kube, instance = Cluster(connect(NUM_CONNECTIONS)), service_instance(settings, namespace, os.environ)
    if policy is not None:
        instance = replace(instance, policy=read_policy(policy))

    def joined(service: Service) -> Service:
        for token in service.read(tokens.every):
            if token.valid(service.clock()) and token.identity.confined() != token.identity:
                say(
                    f"token {token.name} ({token.id}) is an editor's without a namespace, and only reads on a cluster; "
                    "make one for each namespace with penstock token create"
                )
        try:
            return replace(service, cluster=join(service, kube, instance))
        except KubeError as error:
            raise UserError(
                what=str(error),
                where="--cluster",
                remedy="check the cluster and the permissions of this account: kubectl get namespace kube-system",
            ) from None

    with listening() as requests:
        waiting = FolderWait(requests, say)
        with service_folder(settings, waiting, socket.gethostname()):
            answering(settings, joined, lambda service: _workers(service, webhook), say)


class FolderWait:
    """Waits for a service folder whose lock another pod still holds, and prints a message now and then.

    The pod that replaces one on a dead node may start while the lock of the old one is held: on a network file system
    until its lease ends. This process cannot know whether that pod is dead, and two services must not write one SQLite
    file. If it ended with an error instead, the kubelet would restart it with backoffs of up to five minutes.
    """

    def __init__(
        self, requests: StopRequests, say: Callable[[str], None], pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._requests, self._say, self._pause = requests, say, pause
        self._tries = 0

    def __call__(self, what: str) -> None:
        """Sleep for the interval; raises `StopRequestedError` after a stop request."""
        if self._tries % round(SAY_SECONDS / RETRY_SECONDS) == 0:
            self._say(
                f"{what}; waiting until its pod or its node has ended (kubectl get pods -o wide shows where it is)"
            )
        self._tries += 1
        with self._requests.cutting():
            self._pause(RETRY_SECONDS)


def service_instance(settings: Settings, namespace: str, environment: Mapping[str, str]) -> ServiceInstance:
    """Return this instance. Its name is unique, because no two replicas share a folder of a host."""
    own = environment.get(OWN_NAMESPACE, "penstock-system")
    name, policy = f"{socket.gethostname()}:{settings.folder}", JobPolicy(own_namespace=own)
    return ServiceInstance(own_namespace=own, name=name, namespace=namespace, policy=policy)


def _workers(service: Service, webhook: Webhook | None) -> Iterator[AbstractContextManager[None]]:
    """Yield the parts of the background work, each of which runs during its block."""
    member = service.cluster
    assert member is not None, "the service has joined the cluster"
    named = replace(service.settings, machine=socket.gethostname())  # replicas have folders of the same name
    plan_queue = PlanQueue(service, ProcessPlanner(seconds=MOST_SECONDS), name=planner_name(named))
    yield background.polling("plan-queue", plan_queue.run_once, plan_queue.close)
    yield background.enforcing_retention(service)
    yield from delivering(service, webhook)
    yield _following(following(service, member))


@contextmanager
def _following(part: Following) -> Iterator[None]:
    """Run leader election and reports in two threads: reports may take longer than the Lease lasts."""
    with background.polling("lease", part.run_once, part.close), background.polling("reports", part.report):
        yield
