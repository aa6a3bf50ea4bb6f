"""Configuration of the programs of a node, the start of its kubelet, and the cores that it offers."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.not_run import BEGINNING
from tools.lab import node
from tools.lab.console import LabError, wait_until
from tools.lab.images import PAUSE
from tools.lab.machines import Machine, require_namespaces
from tools.lab.processes import children, command, descendants, process

FOLDER = Path("/state/node1")
CRI = "io.containerd.grpc.v1.cri"


def test_the_configuration_of_containerd_is_valid_and_below_its_folder() -> None:
    config = tomllib.loads(node.containerd_config(FOLDER))
    assert config["version"] == 2
    assert Path(config["root"]).is_relative_to(FOLDER)
    assert Path(config["plugins"]["io.containerd.internal.v1.opt"]["path"]).is_relative_to(FOLDER)
    cri = config["plugins"][CRI]
    assert cri["sandbox_image"] == PAUSE
    assert cri["restrict_oom_score_adj"] is True
    assert Path(cri["cni"]["conf_dir"]) == FOLDER / "cni"
    assert cri["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is False


def test_containers_mount_folders_of_the_host_and_keep_their_default_mounts() -> None:
    default = {"root": {"path": "rootfs"}, "mounts": [{"destination": "/proc"}]}
    spec = node.container_spec(default, [Path("/work/.venv"), Path("/work")])
    assert spec["root"] == default["root"]
    assert [mount["destination"] for mount in spec["mounts"]] == [
        "/proc",
        *("/work/.venv", "/work"),
        *("/mnt/work/.venv", "/mnt/work"),
    ]
    assert [mount["source"] for mount in spec["mounts"][1:]] == ["/work/.venv", "/work"] * 2
    assert all("ro" in mount["options"] for mount in spec["mounts"][1:])
    assert default["mounts"] == [{"destination": "/proc"}]


def test_pods_get_addresses_of_the_subnet_of_their_node() -> None:
    config = json.loads(node.network_config(IPv4Network("198.18.2.0/24")))
    (plugin,) = config["plugins"]
    assert plugin["ipam"]["ranges"] == [[{"subnet": "198.18.2.0/24"}]]
    assert plugin["bridge"] == node.BRIDGE


def test_kubelets_have_separate_control_groups_and_folders() -> None:
    one, other = (json.loads(node.kubelet_config(FOLDER, Path("/ca.crt"), group)) for group in ("lab-1", "lab-2"))
    assert one["cgroupRoot"] == "/lab-1"
    assert other["cgroupRoot"] == "/lab-2"
    assert Path(one["resolvConf"]).is_relative_to(FOLDER)
    assert Path(one["volumePluginDir"]).is_relative_to(FOLDER)


def test_a_kubelet_authenticates_clients_of_the_cluster() -> None:
    config = json.loads(node.kubelet_config(FOLDER, Path("/ca.crt"), "lab"))
    assert config["authentication"] == {"anonymous": {"enabled": False}, "x509": {"clientCAFile": "/ca.crt"}}
    assert config["authorization"] == {"mode": "Webhook"}


def test_name_lookups_fail_immediately() -> None:
    """The only name server is the pod itself, where no process listens."""
    assert json.loads(node.kubelet_config(FOLDER, Path("/ca.crt"), "lab"))["clusterDNS"] == ["127.0.0.1"]


def test_a_full_disk_of_the_host_evicts_no_pod() -> None:
    config = json.loads(node.kubelet_config(FOLDER, Path("/ca.crt"), "lab"))
    assert set(config["evictionHard"].values()) == {"0%"}
    assert config["imageGCHighThresholdPercent"] == 100


def test_traffic_from_outside_of_pods_is_detected_by_the_bridge() -> None:
    config = json.loads(node.proxy_config(Path("/config"), "node1"))
    assert config["detectLocalMode"] == "BridgeInterface"
    assert config["detectLocal"] == {"bridgeInterface": node.BRIDGE}
    assert config["mode"] == "nftables"


class FailingMachine:
    """Machine whose kubelet exits ``times`` times before it keeps running."""

    name, folder = "node1", FOLDER

    def __init__(self, times: int) -> None:
        self.times, self.starts = times, 0

    def programs(self, names: Sequence[str]) -> list[str]:
        return [*names] if self.starts > self.times else []

    def start(self, program: Path, arguments: Sequence[str]) -> None:
        self.starts += 1


def test_a_kubelet_that_exits_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet exits if containerd answers but is still restoring its containers."""
    machine = FailingMachine(2)
    monkeypatch.setattr(node, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(node, "listens", lambda server: bool(machine.programs(node.KUBELET)))
    node.start_kubelet(cast(Any, machine), FOLDER, "127.0.0.1")
    assert machine.starts == 3


class FakeMachine:
    """Machine that records the commands run in it, and simulates mounts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[tuple[str, ...]] = []
        self.mounted: dict[str, str] = {}
        self.refuses = ""

    def run(self, *words: str | Path) -> str:
        line = tuple(map(str, words))
        if line[0] == "stat":
            *_, folder, mount_point = line
            return f"1:{folder}\n1:{self.mounted.get(mount_point, mount_point)}\n"
        if line[-1] == self.refuses:
            raise LabError("command failed")
        self.lines.append(line)
        if line[0] == "mount":
            self.mounted[line[-1]] = line[-2]
        else:
            del self.mounted[line[-1]]
        return ""


@pytest.fixture
def host_sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the host's sysfs by a folder and return it."""
    folder = tmp_path / "sys"
    for name in ("cpu", "node"):
        (folder / name).mkdir(parents=True)
    monkeypatch.setattr(node, "SYSFS", str(folder))
    return folder


def test_declared_cores_have_the_layout_of_sysfs_and_are_mounted_once(tmp_path: Path, host_sysfs: Path) -> None:
    machine = FakeMachine(tmp_path / "machine")
    for count in (5, 3):
        node.declare_cores(cast(Any, machine), count)
        sysfs = machine.folder / "sysfs"
        assert sorted(path.name for path in (sysfs / "cpu").iterdir()) == [f"cpu{number}" for number in range(count)]
        assert {path.read_text() for path in sysfs.glob("cpu/*/topology/core_id")} == {f"{n}\n" for n in range(count)}
        assert not list((sysfs / "node").iterdir())
    assert [line[-1] for line in machine.lines] == [f"{host_sysfs}/node", f"{host_sysfs}/cpu"]


def test_a_reset_unmounts_declared_cores_if_there_are_any(tmp_path: Path, host_sysfs: Path) -> None:
    machine = FakeMachine(tmp_path / "machine")
    node.declare_cores(cast(Any, machine), None)
    assert machine.lines == []
    node.declare_cores(cast(Any, machine), 3)
    node.declare_cores(cast(Any, machine), None)
    assert machine.mounted == {}
    node.declare_cores(cast(Any, machine), 4)
    assert machine.mounted == {f"{host_sysfs}/{name}": str(machine.folder / "sysfs" / name) for name in ("node", "cpu")}


def test_a_failed_mount_is_completed_by_the_next_call(tmp_path: Path, host_sysfs: Path) -> None:
    machine = FakeMachine(tmp_path / "machine")
    machine.refuses = f"{host_sysfs}/cpu"
    with pytest.raises(LabError):
        node.declare_cores(cast(Any, machine), 3)
    assert machine.mounted.keys() == {f"{host_sysfs}/node"}
    machine.refuses = ""
    node.declare_cores(cast(Any, machine), 3)
    assert [line[-1] for line in machine.lines] == [f"{host_sysfs}/node", f"{host_sysfs}/cpu"]


def test_programs_of_a_machine_see_the_declared_cores_until_the_reset(tmp_path: Path, host_sysfs: Path) -> None:
    """Real mounts, in the namespaces of a machine."""
    try:
        require_namespaces()
    except LabError as error:
        pytest.skip(f"{BEGINNING}mounts of a machine: {error}")
    words = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc", "sleep", "300"]
    with subprocess.Popen(words) as outer:
        try:
            wait_until(lambda: bool(children(outer.pid)), "the start of the machine", 20.0)
            (inner,) = children(outer.pid)
            init = process(inner)
            assert init is not None
            wait_until(lambda: command(inner) == "sleep", "the start of the machine", 20.0)
            machine = Machine(name="machine", folder=tmp_path / "machine", init=init)
            for count, num_cores in ((3, 3), (5, 5), (None, 0), (2, 2), (None, 0)):
                node.declare_cores(machine, count)
                assert len(machine.run("ls", host_sysfs / "cpu").split()) == num_cores
                assert not list((host_sysfs / "cpu").iterdir())
            assert str(host_sysfs) not in machine.run("cat", "/proc/self/mountinfo")
        finally:
            for descendant in descendants(outer.pid):
                descendant.kill()
            outer.kill()
