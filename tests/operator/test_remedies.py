"""Whatever the scheduler or the kubelet says of a pod that waits is told with what to do."""

from __future__ import annotations

import pytest

from penstock.operator.pending_reasons import clocks_differ, with_remedy


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ('Unschedulable: 0/2 nodes are available: persistentvolumeclaim "x" not found.', "make the claim"),
        ("Unschedulable: 0/2 nodes are available: 2 Insufficient cpu.", "add nodes or free some"),
        ("ErrImagePull: not found", "push the image"),
        ("ImagePullBackOff: Back-off pulling image", "push the image"),
        ("ErrImageNeverPull: Container image is not present with pull policy of Never", "push the image"),
        ("InvalidImageName: couldn't parse image name", "fix kubernetes.image; a spec cannot be changed"),
        ('CreateContainerConfigError: secret "x" not found', "make the objects that kubernetes.env names"),
    ],
)
def test_what_to_do(said: str, remedy: str) -> None:
    assert with_remedy(said).startswith(f"{said}; {remedy}")


def test_what_nobody_foresaw_is_told_as_it_was_said() -> None:
    assert with_remedy("SchedulingGated: waiting") == "SchedulingGated: waiting"


@pytest.mark.parametrize(
    ("ahead", "told"), [(40.0, "1 min ahead of"), (-40.0, "1 min behind"), (7_200.0, "120 min ahead of")]
)
def test_clocks(ahead: float, told: str) -> None:
    assert f"about {told} the cluster's" in clocks_differ(ahead)
    assert clocks_differ(0.0) == ""
