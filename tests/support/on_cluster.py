"""A service on a cluster of one process, with the turns of what follows it in the test's hands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kubernetes.client import ApiClient
from starlette.testclient import TestClient

from penstock.api.app import create_app
from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.membership import Membership, ServiceInstance, join
from penstock.api.cluster.reporter import Reporter
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.api.store.jobs import StoredJob
from penstock.core.instants import format_instant
from penstock.core.records import Record
from penstock.kube.resources import JOBS
from tests.support.fake_apiserver import FakeApiserver, served
from tests.support.service import HOST, Clock, new_service

OWN_NAMESPACE = "penstock-system"


def instant(seconds: float) -> str:
    """As the cluster writes it."""
    return str(format_instant(seconds))


@dataclass
class OnCluster:
    """A service, its cluster, and what is told to the cluster. Nothing happens by itself."""

    service: Service
    fake: FakeApiserver
    member: Membership
    reporter: Reporter
    clock: Clock

    def mirror(self) -> None:
        """A list of all jobs is told."""
        self.member.mirror.replace(self.member.kube.list(JOBS))

    def turn(self, seconds: float = 10.0) -> None:
        """So much later the cluster is told what is due, and what it has is seen."""
        self.clock.now += seconds
        self.reporter.run_once()
        self.mirror()

    def stored(self, name: str = "tiny") -> StoredJob:
        """The job as the store has it."""
        return self.service.read(lambda connection: jobs.find(connection, "default", name))

    def events(self, uid: str) -> list[tuple[str, dict[str, Any]]]:
        """What happened to a job, as kind and body."""
        rows = self.service.read(lambda connection: jobs.history(connection, uid))
        return [(row.kind, row.body) for row in rows]

    def person(self, name: str, *rights: tuple[str, str], token: str = "") -> TestClient:
        """A client of somebody whom the cluster knows, with rights as verb and namespace; in all if that is empty."""
        secret = token or f"a.token.{name}"
        self.fake.tokens[secret] = {"audiences": ["penstock"], "user": {"username": name, "groups": ["people"]}}
        self.fake.rights |= {(name, verb, namespace) for verb, namespace in rights}
        return self.client(secret)

    def client(self, token: str) -> TestClient:
        """A client that bears the token."""
        bearer = {"Authorization": f"Bearer {token}"}
        return TestClient(create_app(self.service), base_url=HOST, headers=bearer, raise_server_exceptions=False)

    def send(self, token: str, records: list[Record]) -> Any:
        """Records as a shipper brings them; the answer."""
        return self.client(token).post("/v1/ingest", json={"records": [each.to_manifest() for each in records]})

    def progress(self, name: str = "tiny") -> dict[str, Any]:
        """What the cluster was told of a job."""
        found: dict[str, Any] = self.fake.job(name).get("status", {}).get("progress", {})
        return found


@contextmanager
def on_cluster(
    folder: Path, database: str, fake: FakeApiserver, clock: Clock, client: ApiClient | None = None
) -> Iterator[OnCluster]:
    """A service on that database and cluster; one of several on it if there is a client already."""
    with _client(fake, client) as connected:
        opened = new_service(folder, database, clock)
        kube = Cluster(connected)
        member = join(opened, kube, ServiceInstance(own_namespace=OWN_NAMESPACE, name="one"))
        service = replace(opened, cluster=member)
        reporter = Reporter(service, kube, member.mirror, clock.seconds)
        try:
            yield OnCluster(service, fake, member, reporter, clock)
        finally:
            reporter.close()
            service.close()


@contextmanager
def _client(fake: FakeApiserver, client: ApiClient | None) -> Iterator[ApiClient]:
    if client is not None:
        yield client
        return
    with served(fake) as made:
        yield made
