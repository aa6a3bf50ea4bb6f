"""Pods that bear a job's labels and are no ranks of it: on a real cluster, next to a job that trains."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import Phase
from penstock.kube.names import BINDING_ANNOTATION
from penstock.kube.resources import PODS
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import paced, small_training, submitted
from tests.support.installed import Installed

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

SLEEP = "import time; time.sleep(600)"


def test_a_copy_of_a_rank_s_labels_is_no_rank(on: Installed) -> None:
    """As `kubectl debug --copy-to --keep-labels` makes one: it is not bound, and its end is not the attempt's."""
    with paced(on):
        job = submitted(on, "debugged", training=small_training(60))
        job.wait_for(Phase.RUNNING)
        job.wait_for_step(1)
        stray = on.cluster.pod("debugged-copy", SLEEP)
        stray["metadata"]["labels"] = dict(job.pods(1)[0]["metadata"]["labels"])
        on.cluster.create(on.namespace, stray)
        on.cluster.wait_for_pod(on.namespace, "debugged-copy", "Running")
        job.wait_for_step(max(job.losses_of(1)) + 3)
        found = on.cluster.get(PODS, "debugged-copy", on.namespace)
        assert BINDING_ANNOTATION not in found["metadata"].get("annotations", {})
        on.kubectl("delete", "pod", "debugged-copy", "--grace-period=0", "--force")
    status = job.wait_for(Phase.SUCCEEDED)
    assert (status.attempt, status.failures) == (1, 0)
