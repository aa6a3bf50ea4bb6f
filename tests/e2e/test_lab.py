"""The cluster itself: real nodes, pods, cables and volumes, and what is left of a lab once it has ended."""

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
from tools.lab import build, control_plane, images, lab, network, processes, rooms, state
from tools.lab.addresses import free_slot
from tools.lab.console import LabError, run

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

SOON_SECONDS = 30.0
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
"""Sends as many bytes as it is asked for."""


def fetch(address: str, num_bytes: int) -> str:
    """Code that prints how many bytes came from there, and in how many seconds."""
    return f"""
import socket, time
for attempt in range(100):
    try:
        connection = socket.create_connection(("{address}", {PORT}), timeout=60)
        break
    except OSError:
        time.sleep(0.2)
begin, found = time.monotonic(), 0
connection.sendall(b"{num_bytes}")
while part := connection.recv(1 << 20):
    found += len(part)
print(found, time.monotonic() - begin)
"""


def fetched(cluster: Cluster, namespace: str, name: str, node: str, address: str, num_bytes: int) -> tuple[int, float]:
    """How many bytes a pod on that node got from an address, and in how many seconds."""
    cluster.create(namespace, cluster.pod(name, fetch(address, num_bytes), node=node))
    found, seconds = cluster.printed(namespace, name).split()
    return int(found), float(seconds)


def two_nodes(cluster: Cluster) -> tuple[str, str]:
    first, second, *_ = sorted(node for node in cluster.ready() if "control" not in node)
    return first, second


def served(cluster: Cluster, namespace: str, node: str) -> str:
    """The address of a pod on that node that sends what it is asked for."""
    cluster.create(namespace, cluster.pod("server", SERVE, node=node))
    pod = cluster.wait_for_pod(namespace, "server", "Running")
    return str(pod["status"]["podIP"])


def test_all_nodes_are_ready(cluster: Cluster) -> None:
    nodes = {node["metadata"]["name"] for node in cluster.all(NODES)}
    assert len(nodes) >= 3
    cluster.wait(lambda: cluster.ready() == nodes, f"not all of {nodes} are ready")


def test_a_jobset_of_two_pods_completes_on_two_nodes(cluster: Cluster, namespace: str) -> None:
    pod = cluster.pod("", "import platform; print(platform.node())")["spec"]
    same = {"labelSelector": {"matchLabels": {"test": "spread"}}, "topologyKey": "kubernetes.io/hostname"}
    pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [same]}}
    template = {"metadata": {"labels": {"test": "spread"}}, "spec": pod}
    job = {"parallelism": 2, "completions": 2, "backoffLimit": 0, "template": template}
    jobset: dict[str, Any] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "pair"},
        "spec": {"replicatedJobs": [{"name": "workers", "template": {"spec": job}}]},
    }
    cluster.create(namespace, jobset)

    def end() -> Any:
        return cluster.get(JOBSETS, "pair", namespace).get("status", {}).get("terminalState")

    assert cluster.wait(end, "the JobSet does not end") == "Completed"
    pods = cluster.all(PODS, namespace)
    assert len({each["spec"]["nodeName"] for each in pods}) == 2


def test_pods_of_two_nodes_reach_each_other(cluster: Cluster, namespace: str) -> None:
    one, other = two_nodes(cluster)
    found, _ = fetched(cluster, namespace, "client", other, served(cluster, namespace, one), MEGABYTE)
    assert found == MEGABYTE


def test_a_service_leads_to_its_pod(cluster: Cluster, namespace: str) -> None:
    """From both nodes, one of which has no such pod, and from this machine."""
    one, other = two_nodes(cluster)
    served(cluster, namespace, one)
    cluster.kubectl("--namespace", namespace, "label", "pod", "server", "app=server")
    cluster.kubectl("--namespace", namespace, "create", "service", "clusterip", "server", f"--tcp={PORT}")
    address = cluster.get(SERVICES, "server", namespace)["spec"]["clusterIP"]
    for node in (one, other):
        assert fetched(cluster, namespace, f"from-{node}", node, address, MEGABYTE)[0] == MEGABYTE
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
    cluster.create(namespace, cluster.pod("writer", "open('/shared/a', 'w').write('said')", node=one, volumes=volumes))
    cluster.printed(namespace, "writer")
    cluster.create(namespace, cluster.pod("reader", "print(open('/shared/a').read())", node=other, volumes=volumes))
    assert cluster.printed(namespace, "reader") == "said\n"


# What this project needs of the apiserver


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
        asked = json.dumps({**review, "spec": {"token": token, "audiences": [audience]}})
        told = json.loads(cluster.kubectl("create", "--filename", "-", "--output", "json", stdin=asked))
        assert told["status"].get("authenticated", False) is accepted


def test_admission_policies_refuse(cluster: Cluster, namespace: str) -> None:
    """A policy takes effect a moment after it was made."""
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


# What is done to nodes


def test_a_shaped_card_is_slow_and_a_free_one_fast(cluster: Cluster, namespace: str) -> None:
    """Twenty million bits a second: ten megabytes take four seconds, and far less without."""
    found = cluster.of_lab()
    address = served(cluster, namespace, "node1")
    lab.shape(found, "node2", "20mbit")
    try:
        num_bytes, slow_seconds = fetched(cluster, namespace, "slow", "node2", address, 10 * MEGABYTE)
    finally:
        lab.shape(found, "node2", "none")
    assert num_bytes == 10 * MEGABYTE
    assert 3.4 < slow_seconds < 8
    assert fetched(cluster, namespace, "fast", "node2", address, 10 * MEGABYTE)[1] < slow_seconds / 3


def test_a_killed_node_is_noticed_and_returns(cluster: Cluster, namespace: str) -> None:
    """What ran on it runs on."""
    found = cluster.of_lab()
    address = served(cluster, namespace, "node3")
    lab.kill(found, "node3")
    cluster.wait(lambda: "node3" not in cluster.ready(), "node3 is still ready", SOON_SECONDS)
    assert cluster.ready() >= {"node1", "node2"}
    assert fetched(cluster, namespace, "client", "node2", address, MEGABYTE)[0] == MEGABYTE
    lab.bring_back(found, "node3")
    cluster.wait(lambda: "node3" in cluster.ready(), "node3 does not return", SOON_SECONDS)
    cluster.create(namespace, cluster.pod("again", "print('here')", node="node3"))
    assert cluster.printed(namespace, "again") == "here\n"


def test_a_pulled_cable_is_noticed_and_plugged_in_again(cluster: Cluster) -> None:
    found = cluster.of_lab()
    lab.set_link(found, "node3", "down")
    try:
        cluster.wait(lambda: "node3" not in cluster.ready(), "node3 is still ready", SOON_SECONDS)
    finally:
        lab.set_link(found, "node3", "up")
    cluster.wait(lambda: "node3" in cluster.ready(), "node3 does not return", SOON_SECONDS)


def test_an_image_is_loaded_into_every_node(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    found = cluster.of_lab()
    images.layer_of_files(tmp_path / "layer.tar", {"/wait": found.programs / "pause"})
    images.write_image(tmp_path / "image.tar", "test.example/wait:1", tmp_path / "layer.tar", {"Entrypoint": ["/wait"]})
    lab.load(found, tmp_path / "image.tar")
    for node in ("node1", "node3"):
        pod = cluster.pod(f"on-{node}", "", node=node)
        pod["spec"]["containers"][0] |= {"image": "test.example/wait:1", "command": ["/wait"]}
        cluster.create(namespace, pod)
        cluster.wait_for_pod(namespace, f"on-{node}", "Running")


def test_mistakes_are_named(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.of_lab()
    with pytest.raises(LabError, match="no node 'node9': one of node1, node2, node3"):
        lab.kill(found, "node9")
    with pytest.raises(LabError, match="the control plane is no node"):
        lab.set_link(found, "control-plane", "down")
    with pytest.raises(LabError, match="'fast' is no rate"):
        lab.shape(found, "node1", "fast")
    with pytest.raises(LabError, match="is no file"):
        lab.load(found, tmp_path / "image.tar")
    with pytest.raises(LabError, match="is up already"):
        lab.up(lab.Wanted(name=found.name))


# The end


@pytest.fixture
def another(cluster: Cluster) -> Iterator[state.State]:
    """A second lab next to the first."""
    cluster.of_lab()
    found = lab.up(lab.Wanted(name=f"other-{os.getpid()}", num_nodes=1))
    yield found
    lab.down(found.name)


def traces(found: state.State, namespaces: set[str]) -> list[str]:
    """What of a lab this machine still has."""
    left = [f"process {pid}" for pid in processes.pids() if namespaces_of(pid) & namespaces]
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if str(found.folder) in line]
    left += [link["ifname"] for link in json.loads(run("ip", "-json", "link")) if is_port(link["ifname"], found)]
    left += [route for route in run("ip", "route").splitlines() if f"dev {found.addresses.bridge} " in route]
    left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/*{found.name}*")]
    left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*{found.name}*")]
    return left + [str(path) for path in state.labs().glob(f"*{found.name}*")]


def namespaces_of(pid: int) -> set[str]:
    try:
        return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("net", "pid", "mnt", "uts")}
    except OSError:
        return set()


def is_port(name: str, found: state.State) -> bool:
    bridge = found.addresses.bridge
    return name == bridge or name.startswith((f"{bridge}n", f"{bridge}cp"))


def test_two_labs_run_side_by_side_and_one_ends_without_a_trace(cluster: Cluster, another: state.State) -> None:
    second = of(another)
    assert second.ready() == {"node1"}
    with second.namespace() as namespace:
        second.create(namespace, second.pod("hello", "print('here')"))
        assert second.printed(namespace, "hello") == "here\n"
    inside = {link for room in another.rooms.values() for link in namespaces_of(room.pid)} - namespaces_of(os.getpid())
    assert len(inside) == 4 * len(another.rooms)
    before = traces(another, inside)
    assert any(line.startswith("process") for line in before)
    assert another.addresses.bridge in before
    assert any("cgroup" in line for line in before)
    lab.down(another.name)
    assert traces(another, inside) == []
    assert cluster.ready() >= {"node1", "node2"}
    lab.down(another.name)


def test_a_lab_that_cannot_start_leaves_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message says which program had what to complain about."""
    cluster.of_lab()
    name = f"broken-{os.getpid()}"
    monkeypatch.setattr(control_plane, "READY_SECONDS", 0.4)
    with pytest.raises(LabError, match=r"the apiserver: not within 0 s(.|\n)*etcd\.log"):
        lab.up(lab.Wanted(name=name, num_nodes=1))
    assert name not in state.names()
    assert not state.folder_of(name).exists()


def test_a_node_offers_more_cores_than_the_machine_has_and_its_pods_go_on(cluster: Cluster, namespace: str) -> None:
    found = cluster.of_lab()
    name = two_nodes(cluster)[1]
    more = (os.cpu_count() or 1) + 3
    cluster.create(namespace, cluster.pod("older", "import time; time.sleep(600)", node=name))
    cluster.wait_for_pod(namespace, "older", "Running")

    def offered() -> str:
        return str(cluster.get(NODES, name)["status"]["allocatable"]["cpu"])

    own = offered()
    lab.declare_cores(found, name, more)
    try:
        cluster.wait(lambda: offered() == str(more), "the node does not offer more")
        wants = cluster.pod("wants", "print('runs')", node=name)
        wants["spec"]["containers"][0]["resources"] = {"requests": {"cpu": str(more - 1)}}
        cluster.create(namespace, wants)
        assert cluster.printed(namespace, "wants") == "runs\n"
        assert cluster.get(PODS, "older", namespace)["status"]["containerStatuses"][0]["restartCount"] == 0
    finally:
        lab.declare_cores(found, name, None)
    cluster.wait(lambda: offered() == own, "the node offers more still")


def test_what_a_killed_session_left_is_ended_by_the_next(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its users are processes that are no more; here its rooms are as well."""
    cluster.of_lab()
    gone = processes.Process(pid=2**30, start_ticks=1)
    slot = free_slot("orphan", network.routed())
    assert slot is not None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, user in (("test-1", gone.pid), ("test-2", os.getpid())):
        state.folder_of(name).mkdir(parents=True)
        state.State(name=name, slot=slot, num_nodes=1, kubernetes="", rooms={"node1": gone}).write()
        (state.labs() / f"{name}.users").write_text(f"[{user}]")
    end_orphans()
    assert state.names() == ["test-2"]
    assert sorted(path.name for path in state.labs().glob("test-*")) == ["test-2", "test-2.users"]


def test_a_room_that_ended_says_so(cluster: Cluster, tmp_path: Path) -> None:
    cluster.of_lab()
    room = rooms.open_room("alone", tmp_path, build.built(build.KUBERNETES) / rooms.FIRST)
    assert room.run("cat", "/proc/sys/kernel/hostname") == "alone\n"
    assert room.run("sh", "-c", "ls /proc | grep -c '^[0-9]'").strip() < "9"
    room.close()
    with pytest.raises(LabError, match="alone is not running"):
        room.run("true")
