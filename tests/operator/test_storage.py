"""Jobs whose pods could not share their output are refused before anything is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.operator.podspec import require_shared_output
from tests.support.manifests import example

CLAIMS: dict[str, Sequence[str]] = {"shared": ["ReadWriteOnce", "ReadWriteMany"], "single": ["ReadWriteOnce"]}


def job(**out: Any) -> PipelineJob:
    return PipelineJob.from_manifest(example(kubernetes={"volumes": {"out": out}} if out else {}))


@pytest.mark.parametrize(
    ("out", "num_pods"),
    [
        ({}, 1),
        ({"claim": "single"}, 1),
        ({"claim": "shared"}, 2),
        ({"claim": "not-there-yet"}, 2),
        ({"template": {"size": "1Gi"}}, 2),
    ],
)
def test_what_pods_can_share(out: dict[str, Any], num_pods: int) -> None:
    require_shared_output(job(**out), num_pods, CLAIMS.get)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ({}, "is missing, but 2 pods"),
        ({"claim": "single"}, "offers ReadWriteOnce"),
        ({"template": {"size": "1Gi", "accessModes": ["ReadWriteOnce"]}}, "offers ReadWriteOnce"),
    ],
)
def test_what_they_cannot(out: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        require_shared_output(job(**out), 2, CLAIMS.get)
    assert caught.value.where == "spec.kubernetes.volumes.out"
    assert "ReadWriteMany" in caught.value.remedy
