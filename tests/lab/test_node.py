"""What the programs of a node are configured with."""

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
from tools.lab.processes import children, command, descendants, process
from tools.lab.rooms import Room, require

FOLDER = Path("/state/node1")
CRI = "io.containerd.grpc.v1.cri"


def test_containerd_reads_its_configuration_and_writes_below_its_folder() -> None:
    config = tomllib.loads(node.containerd_config(FOLDER))
    assert config["version"] == 2
    assert Path(config["root"]).is_relative_to(FOLDER)
    assert Path(config["plugins"]["io.containerd.internal.v1.opt"]["path"]).is_relative_to(FOLDER)
    cri = config["plugins"][CRI]
    assert cri["sandbox_image"] == PAUSE
    assert cri["restrict_oom_score_adj"] is True
    assert Path(cri["cni"]["conf_dir"]) == FOLDER / "cni"
    assert cri["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is False


def test_containers_read_folders_of_the_host_and_keep_what_they_had() -> None:
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


def test_pods_get_addresses_of_their_node() -> None:
    config = json.loads(node.network_config(IPv4Network("198.18.2.0/24")))
    (plugin,) = config["plugins"]
    assert plugin["ipam"]["ranges"] == [[{"subnet": "198.18.2.0/24"}]]
    assert plugin["bridge"] == node.BRIDGE


def test_kubelets_share_nothing() -> None:
    one, other = (json.loads(node.kubelet_config(FOLDER, Path("/ca.crt"), group)) for group in ("lab-1", "lab-2"))
    assert one["cgroupRoot"] == "/lab-1"
    assert other["cgroupRoot"] == "/lab-2"
    assert Path(one["resolvConf"]).is_relative_to(FOLDER)
    assert Path(one["volumePluginDir"]).is_relative_to(FOLDER)


def test_a_kubelet_trusts_those_whom_the_cluster_knows() -> None:
    config = json.loads(node.kubelet_config(FOLDER, Path("/ca.crt"), "lab"))
    assert config["authentication"] == {"anonymous": {"enabled": False}, "x509": {"clientCAFile": "/ca.crt"}}
    assert config["authorization"] == {"mode": "Webhook"}


def test_names_are_unknown_at_once() -> None:
    """Nothing of a pod listens at this address of its own, and no other address is asked."""
    assert json.loads(node.kubelet_config(FOLDER, Path("/ca.crt"), "lab"))["clusterDNS"] == ["127.0.0.1"]


def test_a_full_disk_of_this_machine_evicts_nothing() -> None:
    config = json.loads(node.kubelet_config(FOLDER, Path("/ca.crt"), "lab"))
    assert set(config["evictionHard"].values()) == {"0%"}
    assert config["imageGCHighThresholdPercent"] == 100


def test_what_does_not_come_from_pods_is_answered_through_the_node() -> None:
    config = json.loads(node.proxy_config(Path("/config"), "node1"))
    assert config["detectLocalMode"] == "BridgeInterface"
    assert config["detectLocal"] == {"bridgeInterface": node.BRIDGE}
    assert config["mode"] == "nftables"


class Ending:
    """A room whose kubelet ends so many times before it stays."""

    name, folder = "node1", FOLDER

    def __init__(self, times: int) -> None:
        self.times, self.starts = times, 0

    def programs(self, names: Sequence[str]) -> list[str]:
        return [*names] if self.starts > self.times else []

    def start(self, program: Path, arguments: Sequence[str]) -> None:
        self.starts += 1


def test_a_kubelet_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where the runtime answers, and is not done with what it found."""
    room = Ending(2)
    monkeypatch.setattr(node, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(node, "listens", lambda server: bool(room.programs(node.KUBELET)))
    node.start_kubelet(cast(Any, room), FOLDER, "127.0.0.1")
    assert room.starts == 3


class Mounting:
    """A room that notes what is run in it, and finds at a place what it mounted there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[tuple[str, ...]] = []
        self.mounted: dict[str, str] = {}
        self.refuses = ""

    def run(self, *words: str | Path) -> str:
        line = tuple(map(str, words))
        if line[0] == "stat":
            *_, folder, place = line
            return f"1:{folder}\n1:{self.mounted.get(place, place)}\n"
        if line[-1] == self.refuses:
            raise LabError("this failed")
        self.lines.append(line)
        if line[0] == "mount":
            self.mounted[line[-1]] = line[-2]
        else:
            del self.mounted[line[-1]]
        return ""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for sysfs."""
    folder = tmp_path / "sys"
    for name in ("cpu", "node"):
        (folder / name).mkdir(parents=True)
    monkeypatch.setattr(node, "SYSFS", str(folder))
    return folder


def test_cores_are_declared_as_sysfs_has_them_and_mounted_once(tmp_path: Path, own: Path) -> None:
    room = Mounting(tmp_path / "room")
    for count in (5, 3):
        node.declare_cores(cast(Any, room), count)
        sysfs = room.folder / "sysfs"
        assert sorted(path.name for path in (sysfs / "cpu").iterdir()) == [f"cpu{number}" for number in range(count)]
        assert {path.read_text() for path in sysfs.glob("cpu/*/topology/core_id")} == {f"{n}\n" for n in range(count)}
        assert not list((sysfs / "node").iterdir())
    assert [line[-1] for line in room.lines] == [f"{own}/node", f"{own}/cpu"]


def test_declared_cores_are_taken_back_where_there_are_any(tmp_path: Path, own: Path) -> None:
    room = Mounting(tmp_path / "room")
    node.declare_cores(cast(Any, room), None)
    assert room.lines == []
    node.declare_cores(cast(Any, room), 3)
    node.declare_cores(cast(Any, room), None)
    assert room.mounted == {}
    node.declare_cores(cast(Any, room), 4)
    assert room.mounted == {f"{own}/{name}": str(room.folder / "sysfs" / name) for name in ("node", "cpu")}


def test_cores_that_could_not_be_mounted_are_mounted_by_the_next(tmp_path: Path, own: Path) -> None:
    room = Mounting(tmp_path / "room")
    room.refuses = f"{own}/cpu"
    with pytest.raises(LabError):
        node.declare_cores(cast(Any, room), 3)
    assert room.mounted.keys() == {f"{own}/node"}
    room.refuses = ""
    node.declare_cores(cast(Any, room), 3)
    assert [line[-1] for line in room.lines] == [f"{own}/node", f"{own}/cpu"]


def test_a_room_s_own_programs_find_the_declared_cores_until_they_are_taken_back(tmp_path: Path, own: Path) -> None:
    """With real mounts, in namespaces as a room has them."""
    try:
        require()
    except LabError as error:
        pytest.skip(f"{BEGINNING}mounts of a room: {error}")
    words = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc", "sleep", "300"]
    with subprocess.Popen(words) as outer:
        try:
            wait_until(lambda: bool(children(outer.pid)), "the start of the room", 20.0)
            (inner,) = children(outer.pid)
            first = process(inner)
            assert first is not None
            wait_until(lambda: command(inner) == "sleep", "the start of the room", 20.0)
            room = Room(name="room", folder=tmp_path / "room", first=first)
            for count, found in ((3, 3), (5, 5), (None, 0), (2, 2), (None, 0)):
                node.declare_cores(room, count)
                assert len(room.run("ls", own / "cpu").split()) == found
                assert not list((own / "cpu").iterdir())
            assert str(own) not in room.run("cat", "/proc/self/mountinfo")
        finally:
            for each in descendants(outer.pid):
                each.kill()
            outer.kill()
