"""Manifests whose fields are right one by one, and may disagree; and the rules that they break in Python."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from penstock.core import job_rules
from penstock.core.cluster_profile import ClusterProfile
from penstock.core.job import PipelineJob
from penstock.core.manifest import Manifest, declarations
from penstock.core.rules import Rule
from tests.support.manifest_strategies import manifest_types

Broken = set[tuple[str, str]]
"""Places of objects, and ids of the rules that they break."""

TYPES: dict[str, type[Manifest]] = {"PipelineJob": PipelineJob, "ClusterProfile": ClusterProfile}


def core_rules() -> Iterator[tuple[str, Rule]]:
    """Every rule of core, with the type that has it."""
    for cls in manifest_types():
        for rule in cls.rules:
            yield cls.__name__, rule
    yield "JobSpec", job_rules.VOCABULARY


# Manifests


def _some(required: Mapping[str, Any], optional: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(dict(required), optional=dict(optional))


SMALL = st.integers(1, 8)
HALVES = st.integers(0, 8).map(lambda halves: halves / 2)
MODELS = _some(
    {
        "family": st.sampled_from(["llama", "gpt2"]),
        "layers": st.integers(1, 4),
        "hidden": st.integers(1, 48),
        "heads": SMALL,
    },
    {"kvHeads": st.integers(0, 8), "vocab": st.integers(1, 600), "positions": st.integers(1, 64)},
)
TOKENIZERS = _some(
    {}, {"train": st.sampled_from(["bpe", "bytes"]), "vocab": st.integers(1, 600), "file": st.just("data://a/t.json")}
)
DATA = _some({"source": st.just("python-stdlib"), "sequenceLength": st.integers(1, 64)}, {"tokenizer": TOKENIZERS})
DEGREES = dict.fromkeys(("dp", "tp", "pp"), st.integers(1, 4))
PARALLELISM = _some(
    {},
    {**DEGREES, "microBatch": SMALL, "stages": st.lists(HALVES, min_size=1, max_size=3), "headParts": st.just(1)},
)
TOLERATIONS = _some(
    {},
    {
        "key": st.sampled_from(["", "a"]),
        "operator": st.sampled_from(["Equal", "Exists"]),
        "value": st.sampled_from(["", "b"]),
        "effect": st.sampled_from(["NoSchedule", "NoExecute"]),
        "tolerationSeconds": st.integers(0, 9),
    },
)
KEY = st.just({"name": "a", "key": "b"})
SOURCES = _some({}, {"secretKeyRef": KEY, "configMapKeyRef": KEY, "fieldRef": st.just({"fieldPath": "status.podIP"})})
VARIABLES = _some(
    {"name": st.sampled_from(["A", "B", "C"])}, {"value": st.sampled_from(["", "x"]), "valueFrom": SOURCES}
)
VOLUMES = _some(
    {},
    {
        "claim": st.just("c"),
        "template": st.just({"size": "1Gi"}),
        "reclaim": st.sampled_from(["Retain", "Delete"]),
    },
)
KUBERNETES = _some(
    {},
    {
        "ranksPerPod": st.integers(1, 4),
        "tolerations": st.lists(TOLERATIONS, max_size=2),
        "env": st.lists(VARIABLES, max_size=2, unique_by=lambda variable: variable["name"]),
        "volumes": st.dictionaries(st.sampled_from(["out", "data/a"]), VOLUMES, max_size=2),
    },
)
BETAS = st.sampled_from([0.9, 0.99, 0.9901])
OPTIMIZERS = _some({}, {"betas": st.tuples(BETAS, BETAS).map(list), "momentType": st.sampled_from(["fp32", "bf16"])})
TRAINING = {
    "optimizer": OPTIMIZERS,
    "precision": st.sampled_from(["fp32", "bf16", "fp64"]),
    "gradientReductionType": st.sampled_from(["fp32", "bf16"]),
}
JOB_SPECS = _some(
    {
        "model": MODELS,
        "data": DATA,
        "training": _some({"globalBatch": st.integers(1, 12), "steps": st.just(1)}, TRAINING),
        "resources": _some({"ranks": st.integers(1, 12)}, {"minRanks": st.integers(1, 12)}),
    },
    {
        "parallelism": PARALLELISM,
        "objective": st.sampled_from(["time", "cost"]),
        "budget": st.sampled_from([1, 0.5]),
        "pricePerDeviceHour": st.sampled_from([0, 0.0, 1, 2.5]),
        "kubernetes": KUBERNETES,
    },
)
PROFILE_SPECS = _some(
    {"model": MODELS.filter(lambda model: "vocab" in model), "sequenceLength": st.just(8)},
    {"ranks": st.integers(1, 12), "ranksPerPod": st.integers(1, 4), "tolerations": st.lists(TOLERATIONS, max_size=2)},
)


def _manifest(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "penstock.dev/v1alpha1", "kind": kind, "metadata": {"name": "rules"}, "spec": spec}


MANIFESTS = st.one_of(
    JOB_SPECS.map(lambda spec: _manifest("PipelineJob", spec)),
    PROFILE_SPECS.map(lambda spec: _manifest("ClusterProfile", spec)),
)


def broken_in_python(manifest: Mapping[str, Any]) -> Broken:
    """The rules whose predicates are false."""
    whole = copy.deepcopy(dict(manifest))
    spec, broken = whole["spec"], Broken()
    if whole["kind"] == "PipelineJob" and not job_rules.VOCABULARY.holds(spec):
        broken = {("spec", job_rules.VOCABULARY.id)}
        spec["model"]["vocab"] = 600
    with mock.patch("penstock.core.manifest.require_all"), mock.patch("penstock.core.model.require_all"):
        instance = TYPES[whole["kind"]].from_manifest(whole)
    return broken | {
        (path, rule.id) for path, part in _parts(instance) for rule in part.rules if rule.cel and not rule.holds(part)
    }


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Manifest]]:
    if isinstance(value, Manifest):
        yield path, value
        for name, field in declarations(type(value)).items():
            yield from _parts(getattr(value, field.declared.name), f"{path}.{name}".removeprefix("."))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _parts(item, f"{path}[{i}]")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _parts(item, f"{path}[{name}]")
