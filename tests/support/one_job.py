"""The design's example on a cluster in memory: bringing it to where a test begins, and looking at it."""

from __future__ import annotations

import json
from typing import Any

from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.pod import PodBinding
from penstock.core.status import ConditionStatus, ConditionType
from penstock.core.supervision import AttemptReport
from penstock.kube.names import BINDING_ANNOTATION
from penstock.kube.resources import PODS
from tests.support import manifests
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile

NODES = ("east", "west")


def example(**changes: Any) -> dict[str, Any]:
    """The design's example with an output that its two pods can share."""
    kubernetes = {"volumes": {"out": {"claim": "shared"}}, **changes.pop("kubernetes", {})}
    return manifests.example(kubernetes=kubernetes, **changes)


def running(operating: Operating, **changes: Any) -> str:
    """Submitted, and brought to where it trains; its uid."""
    return operating.running(example(**changes), sample_profile(), *NODES)


def bindings(operating: Operating) -> list[PodBinding]:
    """What each pod was told."""
    texts = [pod["metadata"]["annotations"][BINDING_ANNOTATION] for pod in operating.kube.all(PODS)]
    return [PodBinding.from_manifest(json.loads(text)) for text in texts]


def word(state: AttemptState, **more: Any) -> str:
    """What a pod leaves as its last word."""
    return json.dumps(AttemptReport(state=state, **more).to_manifest())


def end_all(operating: Operating, state: AttemptState) -> None:
    """All pods end so."""
    for index in range(len(operating.kube.all(PODS))):
        operating.kube.end_pod(index, code=0, word=word(state))


def measured_again(operating: Operating, uid: str) -> str:
    """Pods come for a second attempt, of which nothing failed, and which measures; why it does."""
    operating.kube.start_pods(*NODES)
    operating.turn(12)
    status = operating.status(uid)
    assert (status.attempt, status.failures, status.phase) == (2, 0, Phase.PROFILING)
    profiled = status.condition(ConditionType.PROFILED)
    assert profiled is not None
    return profiled.message


def condition(operating: Operating, uid: str, kind: ConditionType) -> tuple[ConditionStatus, str]:
    """Of that kind, and why."""
    found = operating.status(uid).condition(kind)
    assert found is not None
    return found.status, found.reason
