"""The cluster: real nodes, pods, links and volumes, and whether a stopped lab leaves anything behind."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.kube.resources import JOBSETS, NODES, PODS
from tests.support.cluster import COLD_SECONDS, SERVICES, Cluster, end_orphans, of
from tests.support.repository import ROOT
from tools.lab import build, control_plane, images, lab, machines, network, processes, state
from tools.lab.addresses import free_slot
from tools.lab.console import LabError, run

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

NOTICE_SECONDS = 30.0
PORT = 5000
MEGABYTE = 10**6

SERVE = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(int(connection.recv(20))))
"""
"""Server that sends the requested number of bytes."""


def client_code(address: str, num_bytes: int) -> str:
    """Return code that requests bytes from the server and prints their number and the seconds."""
    return f"""
import socket, time
for attempt in range(100):
    try:
        connection = socket.create_connection(("{address}", {PORT}), timeout=60)
        break
    except OSError:
        time.sleep(0.2)
begin, received = time.monotonic(), 0
connection.sendall(b"{num_bytes}")
while part := connection.recv(1 << 20):
    received += len(part)
print(received, time.monotonic() - begin)
"""


def fetch(cluster: Cluster, namespace: str, name: str, node: str, address: str, num_bytes: int) -> tuple[int, float]:
    """Fetch bytes in a pod on that node; return the number of received bytes and the seconds."""
    cluster.create(namespace, cluster.pod(name, client_code(address, num_bytes), node=node))
    received, seconds = cluster.printed(namespace, name).split()
    return int(received), float(seconds)


def two_nodes(cluster: Cluster) -> tuple[str, str]:
    first, second, *_ = sorted(node for node in cluster.ready() if "control" not in node)
    return first, second


def start_server(cluster: Cluster, namespace: str, node: str) -> str:
    """Start the server in a pod on that node and return its address."""
    cluster.create(namespace, cluster.pod("server", SERVE, node=node))
    pod = cluster.wait_for_pod(namespace, "server", "Running")
    return str(pod["status"]["podIP"])


def test_all_nodes_are_ready(cluster: Cluster) -> None:
    nodes = {node["metadata"]["name"] for node in cluster.all(NODES)}
    assert len(nodes) >= 3
    cluster.wait(lambda: cluster.ready() == nodes, f"not all of {nodes} are ready")


def test_a_jobset_of_two_pods_completes_on_two_nodes(cluster: Cluster, namespace: str) -> None:
    pod = cluster.pod("", "import platform; print(platform.node())")["spec"]
    term = {"labelSelector": {"matchLabels": {"test": "spread"}}, "topologyKey": "kubernetes.io/hostname"}
    pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    template = {"metadata": {"labels": {"test": "spread"}}, "spec": pod}
    job = {"parallelism": 2, "completions": 2, "backoffLimit": 0, "template": template}
    jobset: dict[str, Any] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "pair"},
        "spec": {"replicatedJobs": [{"name": "workers", "template": {"spec": job}}]},
    }
    cluster.create(namespace, jobset)

    def terminal_state() -> Any:
        return cluster.get(JOBSETS, "pair", namespace).get("status", {}).get("terminalState")

    assert cluster.wait(terminal_state, "the JobSet does not end") == "Completed"
    pods = cluster.all(PODS, namespace)
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2


def test_pods_of_two_nodes_reach_each_other(cluster: Cluster, namespace: str) -> None:
    one, other = two_nodes(cluster)
    received, _ = fetch(cluster, namespace, "client", other, start_server(cluster, namespace, one), MEGABYTE)
    assert received == MEGABYTE


def test_a_service_forwards_to_its_pod(cluster: Cluster, namespace: str) -> None:
    """Clients run on both nodes, one of which has no pod of the service, and on the host."""
    one, other = two_nodes(cluster)
    start_server(cluster, namespace, one)
    cluster.kubectl("--namespace", namespace, "label", "pod", "server", "app=server")
    cluster.kubectl("--namespace", namespace, "create", "service", "clusterip", "server", f"--tcp={PORT}")
    address = cluster.get(SERVICES, "server", namespace)["spec"]["clusterIP"]
    for node in (one, other):
        assert fetch(cluster, namespace, f"from-{node}", node, address, MEGABYTE)[0] == MEGABYTE
    if cluster.lab is not None:
        with socket.create_connection((address, PORT), timeout=10) as connection:
            connection.sendall(b"3")
            assert connection.recv(10) == bytes(3)


def test_a_volume_is_shared_by_nodes(cluster: Cluster, namespace: str) -> None:
    cluster.of_lab()
    one, other = two_nodes(cluster)
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"spec": {**spec, "storageClassName": "lab-shared"}, "metadata": {"name": "shared"}}
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]
    cluster.create(namespace, {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim})
    cluster.create(namespace, cluster.pod("writer", "open('/shared/a', 'w').write('text')", node=one, volumes=volumes))
    cluster.printed(namespace, "writer")
    cluster.create(namespace, cluster.pod("reader", "print(open('/shared/a').read())", node=other, volumes=volumes))
    assert cluster.printed(namespace, "reader") == "text\n"


# Features of the apiserver that this project needs


def test_a_restricted_pod_sees_this_project_s_environment(cluster: Cluster) -> None:
    cluster.of_lab()
    code = f"import numpy, sys; print(sys.prefix, numpy.__version__, open('{ROOT}/core/pyproject.toml').readline())"
    with cluster.namespace("restricted") as namespace:
        with pytest.raises(LabError, match="violates PodSecurity"):
            cluster.create(namespace, cluster.pod("host", "", hostNetwork=True))
        cluster.create(namespace, cluster.pod("python", code))
        assert cluster.printed(namespace, "python").split()[1:3] == [np.__version__, "[build-system]"]


def test_tokens_are_bound_to_an_audience(cluster: Cluster, namespace: str) -> None:
    token = cluster.kubectl("--namespace", namespace, "create", "token", "default", "--audience", "ours").strip()
    for audience, accepted in (("ours", True), ("theirs", False)):
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
        request = json.dumps({**review, "spec": {"token": token, "audiences": [audience]}})
        reply = json.loads(cluster.kubectl("create", "--filename", "-", "--output", "json", stdin=request))
        assert reply["status"].get("authenticated", False) is accepted


def test_admission_policies_refuse(cluster: Cluster, namespace: str) -> None:
    """A policy takes effect a moment after it was created."""
    name = f"no-forbidden-{namespace}"
    group = "admissionregistration.k8s.io/v1"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    refusal = {"expression": "object.metadata.name != 'forbidden'", "message": "not this one"}
    policy = {
        "apiVersion": group,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {"matchConstraints": {"resourceRules": [rule]}, "validations": [refusal]},
    }
    chosen = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    spec = {"policyName": name, "validationActions": ["Deny"], "matchResources": chosen}
    binding = {"apiVersion": group, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}}
    cluster.create(namespace, policy, {**binding, "spec": spec})

    def refused() -> bool:
        try:
            cluster.kubectl("--namespace", namespace, "create", "configmap", "forbidden", "--dry-run=server")
        except LabError as error:
            return "not this one" in str(error)
        return False

    try:
        cluster.wait(refused, "the policy refuses nothing")
        cluster.kubectl("--namespace", namespace, "create", "configmap", "welcome")
    finally:
        cluster.kubectl("delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", name)


# Failures and limits of nodes


def test_a_shaped_link_is_slow_and_an_unlimited_one_fast(cluster: Cluster, namespace: str) -> None:
    """At 20 Mbit/s, 10 MB take four seconds, and far less without the limit."""
    lab_state = cluster.of_lab()
    address = start_server(cluster, namespace, "node1")
    lab.shape(lab_state, "node2", "20mbit")
    try:
        num_bytes, slow_seconds = fetch(cluster, namespace, "slow", "node2", address, 10 * MEGABYTE)
    finally:
        lab.shape(lab_state, "node2", "none")
    assert num_bytes == 10 * MEGABYTE
    assert 3.4 < slow_seconds < 8
    assert fetch(cluster, namespace, "fast", "node2", address, 10 * MEGABYTE)[1] < slow_seconds / 3


@pytest.mark.long
def test_a_killed_node_becomes_not_ready_and_ready_after_its_restart(cluster: Cluster, namespace: str) -> None:
    """The node's pods keep running."""
    lab_state = cluster.of_lab()
    address = start_server(cluster, namespace, "node3")
    lab.kill(lab_state, "node3")
    cluster.wait(lambda: "node3" not in cluster.ready(), "node3 is still ready", NOTICE_SECONDS)
    assert cluster.ready() >= {"node1", "node2"}
    assert fetch(cluster, namespace, "client", "node2", address, MEGABYTE)[0] == MEGABYTE
    lab.bring_back(lab_state, "node3")
    cluster.wait(lambda: "node3" in cluster.ready(), "node3 does not return", NOTICE_SECONDS)
    cluster.create(namespace, cluster.pod("after", "print('here')", node="node3"))
    assert cluster.printed(namespace, "after") == "here\n"


@pytest.mark.long
def test_a_disconnected_node_becomes_not_ready_until_it_is_connected(cluster: Cluster) -> None:
    lab_state = cluster.of_lab()
    lab.set_link(lab_state, "node3", "down")
    try:
        cluster.wait(lambda: "node3" not in cluster.ready(), "node3 is still ready", NOTICE_SECONDS)
    finally:
        lab.set_link(lab_state, "node3", "up")
    cluster.wait(lambda: "node3" in cluster.ready(), "node3 does not return", NOTICE_SECONDS)


def test_an_image_is_loaded_into_every_node(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    lab_state = cluster.of_lab()
    images.layer_of_files(tmp_path / "layer.tar", {"/wait": lab_state.programs / "pause"})
    images.write_image(tmp_path / "image.tar", "test.example/wait:1", tmp_path / "layer.tar", {"Entrypoint": ["/wait"]})
    lab.load(lab_state, tmp_path / "image.tar")
    for node in ("node1", "node3"):
        pod = cluster.pod(f"on-{node}", "", node=node)
        pod["spec"]["containers"][0] |= {"image": "test.example/wait:1", "command": ["/wait"]}
        cluster.create(namespace, pod)
        cluster.wait_for_pod(namespace, f"on-{node}", "Running")


def test_errors_name_the_wrong_value(cluster: Cluster, tmp_path: Path) -> None:
    lab_state = cluster.of_lab()
    with pytest.raises(LabError, match="no node 'node9': use one of node1, node2, node3"):
        lab.kill(lab_state, "node9")
    with pytest.raises(LabError, match="the control-plane is not a node"):
        lab.set_link(lab_state, "control-plane", "down")
    with pytest.raises(LabError, match="'fast' is not a rate"):
        lab.shape(lab_state, "node1", "fast")
    with pytest.raises(LabError, match="there is no file"):
        lab.load(lab_state, tmp_path / "image.tar")
    with pytest.raises(LabError, match="is already up"):
        lab.up(lab.Spec(name=lab_state.name))


# Stop of a lab


@pytest.fixture
def another(cluster: Cluster) -> Iterator[state.State]:
    """A second lab next to the first."""
    cluster.of_lab()
    second = lab.up(lab.Spec(name=f"other-{os.getpid()}", num_nodes=1))
    yield second
    lab.down(second.name)


def traces(lab_state: state.State, namespaces: set[str]) -> list[str]:
    """Return everything of a lab that exists on the host: processes, mounts, interfaces, routes, groups and files."""
    name = lab_state.name
    existing = [f"process {pid}" for pid in processes.pids() if namespaces_of(pid) & namespaces]
    existing += [line for line in Path("/proc/mounts").read_text().splitlines() if str(lab_state.folder) in line]
    links = [link["ifname"] for link in json.loads(run("ip", "-json", "link"))]
    existing += [link for link in links if is_port(link, lab_state)]
    existing += [route for route in run("ip", "route").splitlines() if f"dev {lab_state.addresses.bridge} " in route]
    existing += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/*{name}*")]
    existing += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*{name}*")]
    return existing + [str(path) for path in state.labs().glob(f"*{name}*")]


def namespaces_of(pid: int) -> set[str]:
    try:
        return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("net", "pid", "mnt", "uts")}
    except OSError:
        return set()


def is_port(name: str, lab_state: state.State) -> bool:
    bridge = lab_state.addresses.bridge
    return name == bridge or name.startswith((f"{bridge}n", f"{bridge}cp"))


@pytest.mark.long
def test_two_labs_run_side_by_side_and_a_stopped_one_leaves_no_trace(cluster: Cluster, another: state.State) -> None:
    second = of(another)
    assert second.ready() == {"node1"}
    with second.namespace() as namespace:
        second.create(namespace, second.pod("hello", "print('here')"))
        assert second.printed(namespace, "hello") == "here\n"
    namespaces = {link for init in another.machines.values() for link in namespaces_of(init.pid)}
    namespaces -= namespaces_of(os.getpid())
    assert len(namespaces) == 4 * len(another.machines)
    before = traces(another, namespaces)
    assert any(line.startswith("process") for line in before)
    assert another.addresses.bridge in before
    assert any("cgroup" in line for line in before)
    lab.down(another.name)
    assert traces(another, namespaces) == []
    assert cluster.ready() >= {"node1", "node2"}
    lab.down(another.name)


def test_a_lab_that_cannot_start_leaves_no_trace(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the last log lines of the programs."""
    cluster.of_lab()
    name = f"broken-{os.getpid()}"
    monkeypatch.setattr(control_plane, "READY_SECONDS", 0.4)
    with pytest.raises(LabError, match=r"the apiserver: timed out after 0\.4 s(.|\n)*etcd\.log"):
        lab.up(lab.Spec(name=name, num_nodes=1))
    assert name not in state.names()
    assert not state.folder_of(name).exists()


def test_a_node_offers_more_cores_than_the_host_and_its_pods_keep_running(cluster: Cluster, namespace: str) -> None:
    lab_state = cluster.of_lab()
    name = two_nodes(cluster)[1]
    more = (os.cpu_count() or 1) + 3
    cluster.create(namespace, cluster.pod("older", "import time; time.sleep(600)", node=name))
    cluster.wait_for_pod(namespace, "older", "Running")

    def offered_cores() -> str:
        return str(cluster.get(NODES, name)["status"]["allocatable"]["cpu"])

    initial = offered_cores()
    lab.declare_cores(lab_state, name, more)
    try:
        cluster.wait(lambda: offered_cores() == str(more), "the node does not offer more")
        large = cluster.pod("large", "print('runs')", node=name)
        large["spec"]["containers"][0]["resources"] = {"requests": {"cpu": str(more - 1)}}
        cluster.create(namespace, large)
        assert cluster.printed(namespace, "large") == "runs\n"
        assert cluster.get(PODS, "older", namespace)["status"]["containerStatuses"][0]["restartCount"] == 0
    finally:
        lab.declare_cores(lab_state, name, None)
    cluster.wait(lambda: offered_cores() == initial, "the node still offers more")


def test_a_session_stops_the_labs_of_killed_sessions(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No user of such a lab is a running process; here its machines do not run either."""
    cluster.of_lab()
    gone = processes.Process(pid=2**30, start_ticks=1)
    slot = free_slot("orphan", network.route_destinations())
    assert slot is not None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, user in (("test-1", gone.pid), ("test-2", os.getpid())):
        state.folder_of(name).mkdir(parents=True)
        state.State(name=name, slot=slot, num_nodes=1, kubernetes="", machines={"node1": gone}).write()
        (state.labs() / f"{name}.users").write_text(f"[{user}]")
    end_orphans()
    assert state.names() == ["test-2"]
    assert sorted(path.name for path in state.labs().glob("test-*")) == ["test-2", "test-2.users"]


def test_a_command_in_a_stopped_machine_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    cluster.of_lab()
    machine = machines.start_machine("alone", tmp_path, build.built(build.KUBERNETES) / machines.INIT_PROGRAM)
    assert machine.run("cat", "/proc/sys/kernel/hostname") == "alone\n"
    assert machine.run("sh", "-c", "ls /proc | grep -c '^[0-9]'").strip() < "9"
    machine.stop()
    with pytest.raises(LabError, match="alone is not running"):
        machine.run("true")
