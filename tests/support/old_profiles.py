"""ClusterProfiles and what belongs to them on a cluster, as the operator of commit 16853cd left them.

``tests/fixtures/profiles_16853cd`` was made from a work tree of that commit, with this file and ``old_cluster.py``,
which says more, copied into it:

    python -m tests.support.old_profiles tests/fixtures/profiles_16853cd
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.core.lifecycle import Phase
from penstock.kube.resources import CLUSTER_PROFILES, JOBS
from tests.support.old_cluster import make, put
from tests.support.one_job import NODES as HOSTS
from tests.support.one_job import example
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile

FOLDER = Path(__file__).parents[1] / "fixtures" / "profiles_16853cd"
MEASURING, USING = "pool-profile", "stdlib-llama"
"""The job that measures the profile, and the one that uses it."""
MODEL = {"family": "llama", "layers": 8, "hidden": 256, "heads": 8, "kvHeads": 4, "vocab": 4096}
SPEC = {"model": MODEL, "sequenceLength": 1024, "ranks": 2, "maxAgeSeconds": 86_400}


# Using


def restored(scene: str, operating: Operating) -> None:
    """Put the scene's objects on the cluster, at its time."""
    put(FOLDER / f"{scene}.json", operating)


def uid_of(operating: Operating, name: str) -> str | None:
    """Of the job with that name; none if there is no such job."""
    return next(
        (str(job["metadata"]["uid"]) for job in operating.kube.all(JOBS) if job["metadata"]["name"] == name), None
    )


# Making


def _applied(operating: Operating) -> None:
    for host in HOSTS:
        operating.kube.add_node(host)
    operating.kube.add(CLUSTER_PROFILES, {"metadata": {"name": "pool"}, "spec": SPEC})


def _measuring(operating: Operating) -> str:
    _applied(operating)
    operating.turn()
    operating.kube.start_pods(*HOSTS)
    operating.turn()
    uid = uid_of(operating, MEASURING)
    assert uid is not None
    assert operating.phase(uid) is Phase.PROFILING
    return uid


def _measured(operating: Operating) -> None:
    operating.measured(_measuring(operating), sample_profile())
    operating.turn(12)
    assert uid_of(operating, MEASURING) is None


def _used(operating: Operating) -> None:
    _measured(operating)
    uid = operating.kube.submit(example())
    operating.turn()
    operating.kube.start_pods(*HOSTS)
    operating.turn(12)
    status = operating.status(uid)
    assert status.profile is not None
    assert (status.phase, status.profile.ref) == (Phase.RUNNING, f"default/{MEASURING}")


def _failed(operating: Operating) -> None:
    _applied(operating)
    operating.turn()
    for _ in range(4):
        operating.kube.start_pods(*HOSTS)
        operating.turn()
        operating.kube.end_pod(0, code=1, word="no luck", at=operating.now)
        operating.turn()
        operating.now += 10.0
        operating.turn()


SCENES: Mapping[str, Callable[[Operating], object]] = {
    "measuring": _measuring,
    "measured": _measured,
    "used": _used,
    "failed": _failed,
}


if __name__ == "__main__":
    make(SCENES, Path(sys.argv[1]))
