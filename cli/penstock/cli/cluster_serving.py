"""The service on a cluster: no jobs of its own; it mirrors, submits, and hears from pods."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.api.cluster.following import Following
from penstock.api.cluster.kube import HttpCluster
from penstock.api.cluster.membership import Place, following, join
from penstock.api.executor.requests import MOST_SECONDS, Desk
from penstock.api.service import Service
from penstock.api.settings import Settings
from penstock.api.store import tokens
from penstock.api.webhook.message import Webhook
from penstock.cli import background
from penstock.cli.output import say
from penstock.cli.service_files import desk_name
from penstock.cli.serving import answering, delivering, service_folder
from penstock.core.errors import UserError
from penstock.core.job_policy import JobPolicy
from penstock.kube.allowing import read_policy
from penstock.kube.connecting import connect
from penstock.kube.transport import KubeError
from penstock.planning.process import ProcessPlanner

NUM_CONNECTIONS = 32
OWN_NAMESPACE = "PENSTOCK_OWN_NAMESPACE"


def serve_cluster(settings: Settings, namespace: str, policy: Path | None, webhook: Webhook | None = None) -> None:
    """Answer for the jobs in ``namespace``, or in all, until SIGINT or SIGTERM; ``policy`` is the file of theirs.

    Raises:
        UserError: no cluster is meant, or it does not answer, or something of the settings cannot be used.
    """
    kube, place = HttpCluster(connect(NUM_CONNECTIONS)), place_of(settings, namespace, os.environ)
    if policy is not None:
        place = replace(place, policy=read_policy(policy))

    def joined(service: Service) -> Service:
        for token in service.read(tokens.every):
            if token.valid(service.clock()) and token.identity.confined() != token.identity:
                say(f"token {token.name} ({token.id}) is an editor's without a namespace, and only reads on a cluster")
        try:
            return replace(service, cluster=join(service, kube, place))
        except KubeError as error:
            remedy = "see that the cluster answers, and that this service's account may get the namespace kube-system"
            raise UserError(what=str(error), where="--cluster", remedy=remedy) from None

    with service_folder(settings):
        answering(settings, joined, lambda service: _workers(service, webhook))


def place_of(settings: Settings, namespace: str, environment: Mapping[str, str]) -> Place:
    """Where it is among its replicas: no two have the same folder of a host at a time."""
    own = environment.get(OWN_NAMESPACE, "penstock-system")
    name, policy = f"{socket.gethostname()}:{settings.folder}", JobPolicy(own_namespace=own)
    return Place(own_namespace=own, name=name, namespace=namespace, policy=policy)


def _workers(service: Service, webhook: Webhook | None) -> Iterator[AbstractContextManager[None]]:
    """What goes on beside answering."""
    member = service.cluster
    assert member is not None, "the service has joined the cluster"
    named = replace(service.settings, machine=socket.gethostname())  # replicas have folders of the same name
    desk = Desk(service, ProcessPlanner(seconds=MOST_SECONDS), name=desk_name(named))
    yield background.looking("desk", desk.turn, desk.close)
    yield background.forgetting(service)
    yield from delivering(service, webhook)
    yield _following(following(service, member))


@contextmanager
def _following(part: Following) -> Iterator[None]:
    """The Lease has a thread of its own: reports may take longer than it holds."""
    with background.looking("lease", part.turn, part.close), background.looking("reports", part.report):
        yield
