"""The range of each field that has one, for schemas; the types themselves refuse what lies outside.

Written as in JSON Schema, and only what one field says alone. `tests/core/test_limits.py` holds both to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core import names
from penstock.core.cluster_profile import ClusterProfileSpec
from penstock.core.job import (
    CheckpointSpec,
    DataSpec,
    JobSpec,
    Metadata,
    OptimizerSpec,
    ParallelismSpec,
    ResourcesSpec,
    RunPolicySpec,
    TokenizerSpec,
    TrainingSpec,
)
from penstock.core.kubernetes_spec import ClaimTemplate, EnvVar, KeyRef, KubernetesSpec, Toleration, VolumeSpec
from penstock.core.model import ModelSpec

Limit = Mapping[str, Any]

_COUNT: Limit = {"minimum": 1}
_NOT_NEGATIVE: Limit = {"minimum": 0}
_POSITIVE: Limit = {"exclusiveMinimum": 0}
_SHARE: Limit = {"minimum": 0, "maximum": 1}
_BELOW_ONE: Limit = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}


def _name(pattern: str, *, may_be_empty: bool = False) -> Limit:
    return {"pattern": f"^({pattern})?$" if may_be_empty else f"^({pattern})$"}


LIMITS: Mapping[type, Mapping[str, Limit]] = {
    Metadata: {"name": _name(names.LABEL), "namespace": _name(names.LABEL)},
    JobSpec: {"pricePerDeviceHour": _NOT_NEGATIVE},
    ModelSpec: {
        **dict.fromkeys(("layers", "hidden", "heads", "vocab", "positions"), _COUNT),
        **dict.fromkeys(("kvHeads", "ffnHidden"), _NOT_NEGATIVE),
        **dict.fromkeys(("normEpsilon", "ropeTheta"), _POSITIVE),
    },
    DataSpec: {"sequenceLength": _COUNT},
    TokenizerSpec: {"train": {"enum": ["bpe", "bytes", None]}, "vocab": _COUNT},
    TrainingSpec: {
        **dict.fromkeys(("globalBatch", "steps"), _COUNT),
        **dict.fromkeys(("warmupSteps", "validateEvery"), _NOT_NEGATIVE),
        **dict.fromkeys(("minLearningRate", "decayShare"), _SHARE),
        "clip": _POSITIVE,
    },
    OptimizerSpec: {
        "kind": {"enum": ["adamw"]},
        **dict.fromkeys(("learningRate", "epsilon"), _POSITIVE),
        "betas": {"prefixItems": [_BELOW_ONE, _BELOW_ONE]},
        "weightDecay": _NOT_NEGATIVE,
    },
    ResourcesSpec: dict.fromkeys(("ranks", "minRanks", "memoryPerRank", "threadsPerRank"), _COUNT),
    ParallelismSpec: {
        **dict.fromkeys(("dp", "tp", "pp", "microBatch"), _COUNT),
        "slices": {"minimum": 1, "minItems": 1, "items": _COUNT},
        "stages": {"minItems": 1, "items": {"type": "number", "minimum": 0, "multipleOf": 0.5}},
    },
    CheckpointSpec: dict.fromkeys(("everySteps", "keep"), _COUNT),
    RunPolicySpec: dict.fromkeys(("backoffLimit", "ttlSecondsAfterFinished", "activeDeadlineSeconds"), _NOT_NEGATIVE),
    KubernetesSpec: {
        "queueName": _name(names.SUBDOMAIN, may_be_empty=True),
        "ranksPerPod": _COUNT,
        "nodeSelector": {"additionalProperties": {"type": "string", **_name(names.LABEL_VALUE)}},
        "acceleratorResource": _name(names.QUALIFIED),
    },
    Toleration: {"key": _name(names.QUALIFIED, may_be_empty=True), "value": _name(names.LABEL_VALUE)},
    KeyRef: {"name": _name(names.SUBDOMAIN), "key": _name(names.DATA_KEY)},
    EnvVar: {"name": _name(names.VARIABLE)},
    ClaimTemplate: {
        "size": _COUNT,
        "storageClass": _name(names.SUBDOMAIN, may_be_empty=True),
        "accessModes": {"minItems": 1},
    },
    VolumeSpec: {"claim": _name(names.SUBDOMAIN)},
    ClusterProfileSpec: {
        **dict.fromkeys(("sequenceLength", "ranks", "ranksPerPod", "memoryPerRank", "threadsPerRank"), _COUNT),
        "maxAgeSeconds": _NOT_NEGATIVE,
        "nodeSelector": {"additionalProperties": {"type": "string", **_name(names.LABEL_VALUE)}},
        "acceleratorResource": _name(names.QUALIFIED),
    },
}
"""By type and the field's name in manifests."""
