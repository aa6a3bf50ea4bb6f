"""The range of every number, string, list and mapping that a person writes, in one place.

By the type's name and the field's name in manifests, in the terms of JSON Schema. Types check the ranges when they are
built (`penstock.core.manifest.require_limits`), reading checks the lengths of lists before it reads their items, and
the schemas of the API, of editors and of the CustomResourceDefinitions include them.

A maximum is at or above what version 0.1.0 could run. It prevents building anything from an unchecked number: ten
million layers are ten gigabytes of units. Numbers from which nothing is built, such as steps, are limited to what JSON
keeps exactly. Bytes stay within 10^18, so that sums of them fit 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core import names

Limit = Mapping[str, Any]

EXACT = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly."""
MOST_LAYERS = 16_384
MOST_WIDTH = 2**24
"""Of an MLP, a vocabulary, a sequence."""
MOST_RANKS = 2**20
MOST_BATCH = 2**30
MOST_BYTES = 10**18
"""So that sums fit 64 bits. Helm prints integers as floats with 16 digits, which would change 2^60."""
MOST_NODES = 2**16
MOST_DEVICES_PER_NODE = 1024
MOST_LINKS = 100_000
MOST_COSTS = 10_000
MOST_SLICES = 65_536
MOST_STAGES = 1024
MOST_ZERO = 1
"""The highest supported stage of ZeRO: 0 is none, 1 divides the optimizer state."""
MOST_OPERATIONS = 8
MOST_AHEAD = 64
"""Largest distance in actions of its rank from a recomputation to its backward."""
MOST_REMAKES = 2 * 2**MOST_OPERATIONS
"""Of a stage: each set of operations of both kinds of a layer's units, once."""
MOST_CHARACTERS = 1024
MOST_PATH_CHARACTERS = 4096
MOST_ITEMS = MOST_PROPERTIES = 65_536
"""Of a pod's variables, tolerations and node labels. An apiserver stores no object above 1.5 MiB, which holds 65,536
items of 24 bytes, such as `{"name":"A","value":""}`: no cluster can run a job with more.
"""
MOST_VARIABLE_CHARACTERS = 131_072
"""Linux starts no program with a longer string (MAX_ARG_STRLEN, execve(2))."""
MOST_LABELS = 1024
MOST_ANNOTATION_CHARACTERS = 262_144
MOST_SCHEDULE_CHARACTERS = 16 * 2**20

_LARGEST = 10**18
"""Of a number without a narrower range. The apiserver compares integers with bounds in 64 bits, so larger ones wrap."""


def _count(most: int) -> Limit:
    return {"minimum": 1, "maximum": most}


def _up_to(most: float) -> Limit:
    return {"minimum": 0, "maximum": most}


def _positive(most: float) -> Limit:
    return {"exclusiveMinimum": 0, "maximum": most}


def _text(most: int = MOST_CHARACTERS) -> Limit:
    return {"maxLength": most}


def _list(most: int = MOST_ITEMS, **more: Any) -> Limit:
    return {"maxItems": most, **more}


def _name(pattern: str, *, may_be_empty: bool = False) -> Limit:
    whole = f"^({pattern})?$" if may_be_empty else f"^({pattern})$"
    return {"pattern": whole, "maxLength": names.MOST_CHARACTERS[pattern]}


_SHARE: Limit = {"minimum": 0, "maximum": 1}
_SOME_SHARE: Limit = {"exclusiveMinimum": 0, "maximum": 1}
_BELOW_ONE: Limit = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
_BYTES: Limit = {"minimum": 0, "maximum": MOST_BYTES}
_SOME_BYTES: Limit = _count(MOST_BYTES)
_SIGNED: Limit = {"minimum": -EXACT, "maximum": EXACT}
_INT64: Limit = {"minimum": 1 - 2**63, "maximum": 2**63 - 1}
_NODE_SELECTOR: Limit = {
    "maxProperties": MOST_PROPERTIES,
    "additionalProperties": {"type": "string", **_name(names.LABEL_VALUE)},
}

LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "Metadata": {
        "name": _name(names.LABEL),
        "namespace": _name(names.LABEL),
        "labels": {"maxProperties": MOST_LABELS, "additionalProperties": _text(MOST_CHARACTERS)},
        "annotations": {
            "maxProperties": MOST_LABELS,
            "additionalProperties": _text(MOST_ANNOTATION_CHARACTERS),
        },
        "uid": _text(),
    },
    "JobSpec": {"pricePerDeviceHour": _up_to(1e12)},
    "ModelSpec": {
        "layers": _count(MOST_LAYERS),
        "hidden": _count(2**18),
        "heads": _count(2**17),
        "vocab": _count(MOST_WIDTH),
        "kvHeads": _up_to(2**17),
        "ffnHidden": _up_to(MOST_WIDTH),
        "positions": _count(MOST_WIDTH),
        "normEpsilon": _positive(_LARGEST),
        "ropeTheta": _positive(_LARGEST),
    },
    "DataSpec": {
        "source": _text(MOST_PATH_CHARACTERS),
        "sequenceLength": _count(MOST_WIDTH),
        "textField": _text(),
        "limitBytes": _BYTES,
    },
    "TokenizerSpec": {
        "train": {"enum": ["bpe", "bytes", None]},
        "vocab": _count(MOST_WIDTH),
        "file": _text(MOST_PATH_CHARACTERS),
    },
    "TrainingSpec": {
        "globalBatch": _count(MOST_BATCH),
        "steps": _count(EXACT),
        **dict.fromkeys(("warmupSteps", "validateEvery"), _up_to(EXACT)),
        **dict.fromkeys(("minLearningRate", "decayShare"), _SHARE),
        "clip": _positive(_LARGEST),
        "seed": _INT64,
    },
    "OptimizerSpec": {
        "kind": {"enum": ["adamw"]},
        **dict.fromkeys(("learningRate", "epsilon"), _positive(_LARGEST)),
        "betas": {"prefixItems": [_BELOW_ONE, _BELOW_ONE]},
        "weightDecay": _up_to(_LARGEST),
    },
    "ResourcesSpec": {
        **dict.fromkeys(("ranks", "minRanks"), _count(MOST_RANKS)),
        "memoryPerRank": _SOME_BYTES,
        "threadsPerRank": _count(65_536),
    },
    "ParallelismSpec": {
        **dict.fromkeys(("dp", "tp", "pp", "headParts"), _count(MOST_RANKS)),
        "zero": _up_to(MOST_ZERO),
        "microBatch": _count(MOST_BATCH),
        "slices": {**_count(MOST_SLICES), "minItems": 1, "maxItems": MOST_SLICES, "items": _count(MOST_WIDTH)},
        "recompute": _list(2 * MOST_LAYERS + 2, items=_list(MOST_REMAKES)),
        "schedule": _text(MOST_PATH_CHARACTERS),
        "stages": {
            "minItems": 1,
            "maxItems": MOST_STAGES,
            "items": {"type": "number", "minimum": 0, "maximum": MOST_LAYERS, "multipleOf": 0.5},
        },
    },
    "ScheduleSpec": {
        "generator": _text(),
        "version": _up_to(EXACT),
        "text": _text(MOST_SCHEDULE_CHARACTERS),
    },
    "CheckpointSpec": {
        **dict.fromkeys(("everySteps", "keep"), _count(EXACT)),
        "resumeFrom": _text(MOST_PATH_CHARACTERS),
    },
    "RunPolicySpec": {
        **dict.fromkeys(("backoffLimit", "ttlSecondsAfterFinished", "activeDeadlineSeconds"), _up_to(EXACT)),
        "priority": _INT64,
    },
    "KubernetesSpec": {
        "image": _text(),
        "queueName": _name(names.SUBDOMAIN, may_be_empty=True),
        "ranksPerPod": _count(MOST_RANKS),
        "nodeSelector": _NODE_SELECTOR,
        "tolerations": _list(),
        "acceleratorResource": _name(names.QUALIFIED),
        "volumes": {"maxProperties": MOST_PROPERTIES},
        "env": _list(),
    },
    "Toleration": {
        "key": _name(names.QUALIFIED, may_be_empty=True),
        "value": _name(names.LABEL_VALUE),
        "tolerationSeconds": _SIGNED,
    },
    "KeyRef": {"name": _name(names.SUBDOMAIN), "key": _name(names.DATA_KEY)},
    "FieldRef": {"fieldPath": _text()},
    "EnvVar": {"name": _name(names.VARIABLE), "value": _text(MOST_VARIABLE_CHARACTERS)},
    "ClaimTemplate": {
        "size": _SOME_BYTES,
        "storageClass": _name(names.SUBDOMAIN, may_be_empty=True),
        "accessModes": {"minItems": 1, "maxItems": MOST_ITEMS},
    },
    "VolumeSpec": {"claim": _name(names.SUBDOMAIN)},
    "ClusterProfileSpec": {
        "sequenceLength": _count(MOST_WIDTH),
        **dict.fromkeys(("ranks", "ranksPerPod"), _count(MOST_RANKS)),
        "memoryPerRank": _SOME_BYTES,
        "threadsPerRank": _count(65_536),
        "maxAgeSeconds": _up_to(EXACT),
        "nodeSelector": _NODE_SELECTOR,
        "tolerations": _list(),
        "acceleratorResource": _name(names.QUALIFIED),
        "image": _text(),
    },
    "ClusterSpec": {
        "name": _text(),
        "numNodes": _count(MOST_NODES),
        "devicesPerNode": _count(MOST_DEVICES_PER_NODE),
        "links": _list(MOST_LINKS),
        "nicsPerNode": _count(MOST_DEVICES_PER_NODE),
        "error": _SHARE,
        "costs": _list(MOST_COSTS),
    },
    "CostRow": {
        "tokens": _count(EXACT),
        "pairs": _up_to(EXACT),
        "seconds": _up_to(1e12),
    },
    "SoftwareSpec": {"allocatorSlack": _SHARE, "launchSeconds": _up_to(1e12)},
    "KernelSpec": {
        **dict.fromkeys(
            (
                "productShare",
                "productMemoryShare",
                "attentionShare",
                "attentionBackwardShare",
                "streamShare",
                "rowShare",
            ),
            _SOME_SHARE,
        ),
        **dict.fromkeys(
            ("productEdge", "productDepth", "attentionEdge", "attentionDepth", "attentionRows"), _up_to(EXACT)
        ),
        "kernelSeconds": _up_to(1e12),
    },
    "DeviceSpec": {
        "name": _text(),
        "peakFlops": _positive(1e30),
        "memoryBytes": _BYTES,
        "efficiency": _list(minItems=1, items={"prefixItems": [_count(EXACT), {"exclusiveMinimum": 0, "maximum": 1}]}),
        "memoryBandwidth": _positive(1e30),
        "constantBytes": _BYTES,
        "actionOverheadSeconds": _up_to(1e12),
        "pricePerHour": _up_to(1e12),
    },
    "LinkSpec": {"latencySeconds": _up_to(1e12), "bytesPerSecond": _positive(1e30)},
    "LinkOverride": dict.fromkeys(("source", "target"), _up_to(MOST_NODES - 1)),
    "Plan": {
        **dict.fromkeys(("dp", "tp", "pp", "headParts"), _count(MOST_RANKS)),
        "zero": _up_to(MOST_ZERO),
        **dict.fromkeys(("microbatch", "numMicrobatches", "receiveAhead"), _count(MOST_BATCH)),
        "recomputeAhead": _up_to(MOST_AHEAD),
        "slices": _list(MOST_SLICES, minItems=1, items=_count(MOST_WIDTH)),
        "remainder": _up_to(MOST_BATCH),
        "remainderSlices": _list(MOST_SLICES, items=_count(MOST_WIDTH)),
        "stages": _list(2 * MOST_LAYERS + 2),
        "recompute": _list(2 * MOST_LAYERS + 2, items=_list(MOST_REMAKES)),
        "placement": _list(MOST_RANKS),
        "reasons": _list(MOST_LABELS),
        "alternatives": _list(MOST_LABELS),
    },
    "Remake": {"count": _count(2 * MOST_LAYERS + 2), "operations": _list(MOST_OPERATIONS)},
    "CheckpointName": dict.fromkeys(("attempt", "step"), _up_to(EXACT)),
    "AgentReport": dict.fromkeys(("attempt", "done", "total"), _up_to(EXACT)),
    "PodBinding": {
        **dict.fromkeys(("epoch", "nodeRank"), _up_to(EXACT)),
        **dict.fromkeys(("numNodes", "ranksPerPod"), _count(MOST_RANKS)),
    },
    "Prediction": dict.fromkeys(("peakBytes", "slotBytes"), _list(MOST_RANKS)),
}
"""By the type's name and the field's name in manifests."""
