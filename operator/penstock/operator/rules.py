"""The apiserver's checks across fields, and of changes, in CEL.

The rules about several fields are core's own objects (`penstock.core.rules`), whose other form core checks when the
operator reads a job; those below only mean something to an apiserver. They report the error to the user at once, on
`kubectl apply`. `slices` and `schedule` have no type for the apiserver, so CEL cannot read them here: `policy.py`
checks them. Reference: https://kubernetes.io/docs/reference/using-api/cel
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core import job_rules, names
from penstock.core.cluster_profile import ClusterProfileSpec
from penstock.core.job import OptimizerSpec, ResourcesSpec, TokenizerSpec, TrainingSpec
from penstock.core.kubernetes_spec import MOST_NAME_CHARACTERS, EnvSource, EnvVar, Toleration, VolumeSpec
from penstock.core.model import ModelSpec
from penstock.core.rules import ApiserverRule, Rule

FORBIDDEN = "FieldValueForbidden"
CANNOT_CHANGE = "cannot be changed: make a new job, with checkpoint.resumeFrom to go on from this one's checkpoint"


def _of(*rules: Rule) -> tuple[ApiserverRule, ...]:
    return tuple(rule.for_apiserver for rule in rules)


def _same(path: str) -> ApiserverRule:
    return ApiserverRule(
        cel=f"self.{path} == oldSelf.{path}",
        message=CANNOT_CHANGE,
        where=path,
        reason=FORBIDDEN,
    )


def _same_if_any(path: str) -> ApiserverRule:
    both = f"has(self.{path}) == has(oldSelf.{path})"
    equal = f"(!has(self.{path}) || self.{path} == oldSelf.{path})"
    return ApiserverRule(cel=f"{both} && {equal}", message=CANNOT_CHANGE, where=path, reason=FORBIDDEN)


def _keys(field: str, pattern: str) -> ApiserverRule:
    return ApiserverRule(
        cel=f"!has(self.{field}) || self.{field}.all(key, key.matches('^({pattern})$'))",
        message=f"a key is not a name: {names.REMEDIES[pattern]}",
        where=field,
    )


def _in_volumes(path: str, present: str = "true") -> ApiserverRule:
    """The root that ``data://ROOT/...`` names has a volume."""
    root = f"('data/' + {path}.substring(7).split('/')[0])"
    return ApiserverRule(
        cel=f"!({present}) || !{path}.startsWith('data://') || {root} in self.kubernetes.volumes",
        message="names a root of data that kubernetes.volumes lacks",
        message_expression=f"'needs kubernetes.volumes[\"%s\"]: the claim that holds %s'.format([{root}, {path}])",
        where=path.removeprefix("self."),
    )


def _some_bytes(field: str) -> ApiserverRule:
    """A quantity that may also be written as a string is more than zero."""
    return ApiserverRule(
        cel=f"!has(self.{field}) || type(self.{field}) == int || self.{field}.matches('[1-9]')",
        message="is not positive: write an amount such as 4Gi",
        where=field,
    )


JOB = (
    ApiserverRule(
        cel=f"self.metadata.name.matches('^[a-z][-a-z0-9]*$') && self.metadata.name.size() <= {MOST_NAME_CHARACTERS}",
        message=(
            f"metadata.name: on a cluster at most {MOST_NAME_CHARACTERS} lower-case letters, digits and dashes, a "
            "letter first: names of pods are longer by what follows the job's"
        ),
        where="metadata",
    ),
)

RULES: Mapping[str, tuple[ApiserverRule, ...]] = {
    "PipelineJob": JOB,
    "ClusterProfile": JOB,
    "JobSpec": (
        *_of(
            job_rules.POSITIONS,
            job_rules.VOCABULARY,
            job_rules.DEGREES,
            job_rules.GLOBAL_BATCH,
            job_rules.MICRO_BATCH,
            job_rules.STAGES,
        ),
        ApiserverRule(  # not `multipleOf: 0.5`: for a whole number the apiserver takes a factor below one as 0
            cel="!has(self.parallelism.stages) || self.parallelism.stages.all(s, double(int(s * 2.0)) == s * 2.0)",
            message="has a part that is not a multiple of half a block: write numbers such as 4 or 4.5",
            where="parallelism.stages",
        ),
        *_of(job_rules.RANKS_PER_POD, job_rules.PRICE, job_rules.BUDGET_PRICE),
        _in_volumes("self.data.source"),
        _in_volumes("self.data.tokenizer.file", "has(self.data.tokenizer.file)"),
        *map(_same, ("model", "data", "training", "parallelism", "objective", "pricePerDeviceHour", "checkpoint")),
        *map(_same, ("kubernetes", "resources.device", "resources.memoryPerRank", "resources.threadsPerRank")),
        _same("resources.spot"),
        *map(_same_if_any, ("resources.minRanks", "deadlineSeconds", "budget")),
    ),
    "ModelSpec": _of(*ModelSpec.rules),
    "DataSpec": (
        ApiserverRule(
            cel=f"self.source == 'python-stdlib' || self.source.matches('^data://{names.LABEL}(/|$)')",
            message="does not exist on a cluster: write python-stdlib, or data://NAME/PATH with a volume data/NAME",
            where="source",
        ),
    ),
    "TokenizerSpec": (
        *_of(*TokenizerSpec.rules),
        ApiserverRule(
            cel=f"!has(self.file) || self.file.matches('^data://{names.LABEL}/')",
            message="does not exist on a cluster: write data://NAME/PATH with a volume data/NAME",
            where="file",
        ),
    ),
    "ResourcesSpec": (
        *_of(*ResourcesSpec.rules),
        _some_bytes("memoryPerRank"),
    ),
    "CheckpointSpec": (
        ApiserverRule(
            cel="!has(self.resumeFrom) || self.resumeFrom.matches('^out://[^/]+/[0-9]+/[0-9]+/?$')",
            message="names no checkpoint: write out://UID/ATTEMPT/STEP",
            where="resumeFrom",
        ),
    ),
    "KubernetesSpec": (
        _keys("volumes", names.VOLUME_ROOT),
        _keys("nodeSelector", names.QUALIFIED),
    ),
    "TrainingSpec": _of(*TrainingSpec.rules),
    "OptimizerSpec": _of(*OptimizerSpec.rules),
    "Toleration": _of(*Toleration.rules),
    "EnvVar": _of(*EnvVar.rules),
    "EnvSource": _of(*EnvSource.rules),
    "VolumeSpec": _of(*VolumeSpec.rules),
    "ClaimTemplate": (_some_bytes("size"),),
    "ClusterProfileSpec": (
        *_of(*ClusterProfileSpec.rules),
        _some_bytes("memoryPerRank"),
    ),
}
"""Rules by the title of the schema that they belong to, which is the type's name."""
