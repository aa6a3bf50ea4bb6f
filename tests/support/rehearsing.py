"""Plans rehearsed over the nodes of a lab: every rank in a pod, on the node where the plan puts it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from pathlib import Path

from penstock.agent.launch import MALLOC
from penstock.cli.local.rehearsing import lay_out
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.run.documents import read_timeline
from penstock.core.run.folder import RunDir
from penstock.core.timeline import Timeline
from penstock.kube.resources import PODS
from penstock.planner.replay import simulated
from tests.support.cluster_jobs import small_training
from tests.support.installed import OUT, TEXT, Installed, components

PORT = 29_501
LOCAL = "local"
WAITS_FOR_LINKS = {
    "data": {"source": f"data://{TEXT}", "tokenizer": {"train": "bytes"}, "sequenceLength": 256},
    "training": {**small_training(6), "globalBatch": 32},
    "resources": {"ranks": 3, "memoryPerRank": "2Gi"},
    "parallelism": {"pp": 3, "microBatch": 8},
    "kubernetes": {"nodeSelector": {}},
}
"""Changes that make a small job one on all three nodes, with messages of half a mebibyte and little work for each."""


def placed_everywhere(plan: Plan, profile: Profile) -> dict[tuple[int, ...], float]:
    """The predicted seconds of a step for every way to put the plan's ranks on the devices that were measured."""
    return {
        devices: simulated(dataclasses.replace(plan, placement=devices), profile).makespan_ns / 1e9
        for devices in itertools.permutations(range(profile.num_ranks), plan.num_ranks)
    }


def nodes_of(profile: Profile) -> list[str]:
    """The node of every device that was measured, of which each node has one."""
    nodes = profile.key.host.split(",")
    assert len(nodes) == profile.num_ranks, f"{profile.num_ranks} ranks measured on {nodes}"
    return nodes


def rehearsed(on: Installed, name: str, plan: Plan, profile: Profile) -> Timeline:
    """A step of the plan with messages between the nodes, at the pace that was measured; ``name`` is for its pods."""
    nodes = nodes_of(profile)
    run = RunDir(on.out / name)
    lay_out(run, plan, profile)
    for folder in (run.root, run.status):
        folder.chmod(0o777)  # ranks are not root
    pods = [f"{name}-{rank}" for rank in range(plan.num_ranks)]
    master = "127.0.0.1"
    for rank, pod in enumerate(pods):
        code = _code(rank, plan.num_ranks, master, Path("/", OUT, name))
        on.cluster.create(on.namespace, on.cluster.pod(pod, code, node=nodes[plan.placement[rank]], volumes=VOLUMES))
        if rank == 0:
            master = on.cluster.wait(lambda: _address(on, pods[0]), f"{pods[0]} has no address")
    for pod in pods:
        on.cluster.printed(on.namespace, pod)
    on.kubectl("delete", "pod", *pods)
    return read_timeline(run.root / "timeline-rehearsed.json")


VOLUMES = [{"name": OUT, "persistentVolumeClaim": {"claimName": OUT}}, {"name": LOCAL, "emptyDir": {}}]


def _address(on: Installed, pod: str) -> str:
    found = on.cluster.get(PODS, pod, on.namespace)
    return str(found["status"].get("podIP", ""))


def _code(rank: int, num_ranks: int, master: str, folder: Path) -> str:
    """A program that becomes one rank, with what torchrun would tell it."""
    environment = {
        **MALLOC,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": f"/{LOCAL}",
        "HOME": f"/{LOCAL}",
        "PYTHONPATH": os.pathsep.join(components()),
    }
    words = [sys.executable, "-m", "penstock.trainer", "rehearse", "--run-dir", str(folder)]
    return f"import os\nos.execve({words[0]!r}, {words!r}, {{**os.environ, **{environment!r}}})\n"
