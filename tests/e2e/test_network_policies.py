"""The chart's NetworkPolicies where something enforces them: who reaches whom, tried by connecting.

kind's own network enforces them since 0.24; the lab's does not, and there nothing of this is run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from penstock.core.pod import AGENT_PORT
from tests.support.cluster import COLD_SECONDS, SERVICES, Cluster
from tests.support.helm import CHART, helm_of
from tests.support.not_run import BEGINNING
from tools.lab.console import LabError

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

RELEASE = "penstock"
SERVICE_PORT, METRICS_PORT, HEALTH_PORT, RANK_PORT = 8470, 8080, 8081, 29500
PORTS = [SERVICE_PORT, METRICS_PORT, HEALTH_PORT, RANK_PORT, AGENT_PORT]
SECONDS = 3.0
POLICY_SECONDS = 60.0
UNREACHED = ("timed out", "refused", "unreachable")

LISTEN = f"""
import socket, threading
def accept(port):
    with socket.create_server(("0.0.0.0", port)) as server:
        while True:
            server.accept()[0].close()
for port in {PORTS}:
    threading.Thread(target=accept, args=(port,)).start()
"""

COMPONENT = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": RELEASE}
ROLES: dict[str, tuple[str, dict[str, str]]] = {
    "operator": ("system", {**COMPONENT, "app.kubernetes.io/component": "operator"}),
    "service": ("system", {**COMPONENT, "app.kubernetes.io/component": "service"}),
    "rank": ("jobs", {"penstock.dev/job-uid": "u"}),
    "peer": ("jobs", {"penstock.dev/job-uid": "u"}),
    "neighbour": ("jobs", {}),
    "stranger": ("elsewhere", {}),
}
"""The namespace that each is in, and the labels that the policies know it by."""

REACHED = {
    ("rank", "peer", RANK_PORT),
    ("rank", "service", SERVICE_PORT),
    ("neighbour", "service", SERVICE_PORT),
    ("stranger", "service", SERVICE_PORT),
    ("neighbour", "operator", METRICS_PORT),
    ("stranger", "operator", METRICS_PORT),
    ("neighbour", "stranger", RANK_PORT),
    ("operator", "peer", AGENT_PORT),
    ("service", "apiserver", 0),
    ("operator", "apiserver", 0),
    ("stranger", "apiserver", 0),
}
CLOSED = {
    ("neighbour", "peer", RANK_PORT),
    ("stranger", "peer", RANK_PORT),
    ("service", "peer", RANK_PORT),
    ("service", "peer", AGENT_PORT),
    ("stranger", "peer", AGENT_PORT),
    ("operator", "peer", RANK_PORT),
    ("operator", "stranger", AGENT_PORT),
    ("rank", "neighbour", RANK_PORT),
    ("rank", "stranger", RANK_PORT),
    ("rank", "operator", METRICS_PORT),
    ("rank", "service", RANK_PORT),
    ("rank", "apiserver", 0),
    ("stranger", "service", HEALTH_PORT),
    ("stranger", "operator", HEALTH_PORT),
    ("service", "stranger", RANK_PORT),
    ("operator", "service", SERVICE_PORT),
}


@dataclass(frozen=True)
class Network:
    """Pods of every role, with namespaces and addresses."""

    cluster: Cluster
    namespaces: dict[str, str]
    addresses: dict[str, tuple[str, int]]

    def reaches(self, who: str, whom: str, port: int) -> bool:
        """Whether a connection comes about."""
        address, own_port = self.addresses[whom]
        code = f"import socket; socket.create_connection(({address!r}, {port or own_port}), {SECONDS}).close()"
        place = ("--namespace", self.namespaces[ROLES[who][0]])
        try:
            self.cluster.kubectl(*place, "exec", who, "--", "python3", "-c", code)
        except LabError as error:
            if any(word in str(error) for word in UNREACHED):
                return False
            raise
        return True


@pytest.fixture(scope="module")
def network(cluster: Cluster) -> Iterator[Network]:
    if cluster.lab is not None:
        pytest.skip(BEGINNING + "NetworkPolicies are tried on kind, which enforces them, and not in the lab")
    yield from opened(cluster)


def opened(cluster: Cluster) -> Iterator[Network]:
    """With the chart's policies at work."""
    with cluster.namespace() as system, cluster.namespace() as jobs, cluster.namespace() as elsewhere:
        namespaces = {"system": system, "jobs": jobs, "elsewhere": elsewhere}
        found = Network(cluster, namespaces, {"apiserver": apiserver(cluster)})
        for name, (place, labels) in ROLES.items():
            pod = cluster.pod(name, LISTEN)
            cluster.create(namespaces[place], {**pod, "metadata": {"name": name, "labels": labels}})
        for name, (place, _) in ROLES.items():
            running = cluster.wait_for_pod(namespaces[place], name, "Running")
            found.addresses[name] = (running["status"]["podIP"], 0)
        policies = helm_of(cluster).act(
            cluster.kubeconfig,
            *("template", RELEASE, str(CHART), "--namespace", system),
            *("--show-only", "templates/network-policies.yaml"),
            *("--set-json", f'networkPolicies.jobNamespaces=["{jobs}"]'),
        )
        assert found.reaches("stranger", "peer", RANK_PORT), "nothing is closed before the policies are there"
        cluster.kubectl("apply", "--filename", "-", stdin=policies)
        yield found


def apiserver(cluster: Cluster) -> tuple[str, int]:
    """Where pods find it: its Service, which leads to the port that the policies name."""
    spec = cluster.get(SERVICES, "kubernetes", "default")["spec"]
    return str(spec["clusterIP"]), int(spec["ports"][0]["port"])


def test_the_policies_are_enforced(network: Network) -> None:
    network.cluster.wait(
        lambda: not network.reaches("stranger", "peer", RANK_PORT), "nothing enforces policies here", POLICY_SECONDS
    )


@pytest.mark.parametrize(("who", "whom", "port"), sorted(REACHED))
def test_what_is_needed_is_open(network: Network, who: str, whom: str, port: int) -> None:
    network.cluster.wait(lambda: network.reaches(who, whom, port), f"{who} does not reach {whom}", POLICY_SECONDS)


@pytest.mark.parametrize(("who", "whom", "port"), sorted(CLOSED))
def test_all_else_is_closed(network: Network, who: str, whom: str, port: int) -> None:
    network.cluster.wait(lambda: not network.reaches(who, whom, port), f"{who} reaches {whom}", POLICY_SECONDS)


def test_nothing_is_both() -> None:
    assert not REACHED & CLOSED
    assert {role for row in itertools.chain(REACHED, CLOSED) for role in row[:2]} >= ROLES.keys()
