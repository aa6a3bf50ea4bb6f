"""The part of a PipelineJob that only clusters use: placement and environment of its pods, and its volumes.

Toleration and EnvVar are written as in a pod (https://kubernetes.io/docs/reference/kubernetes-api), so that they can be
passed on unchanged. All of it is validated everywhere, because a job is written before it is known where it runs.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from penstock.core import names
from penstock.core.errors import UserError, check_all
from penstock.core.limits import (
    MOST_ITEMS,
    MOST_PROPERTIES,
    MOST_RANKS,
    MOST_VARIABLE_CHARACTERS,
    NODE_SELECTOR,
    POSITIVE_BYTES,
    SIGNED,
    characters,
    list_of,
    named,
    one_to,
)
from penstock.core.manifest import Checked
from penstock.core.names import require_labels, require_name
from penstock.core.rules import Rule, exactly_one
from penstock.core.units import BYTES

MOST_NAME_CHARACTERS = 40
"""Longest name of a job on a cluster: a pod's name has the job's, the attempt's number, the group's name, two indices
and five characters, within 63.
"""


class Operator(enum.StrEnum):
    """Comparison of a toleration."""

    EQUAL = "Equal"
    EXISTS = "Exists"


class Effect(enum.StrEnum):
    """Effect of a taint on pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class AccessMode(enum.StrEnum):
    """Nodes and pods that may mount a volume at once."""

    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"
    READ_ONLY_MANY = "ReadOnlyMany"


class Reclaim(enum.StrEnum):
    """Handling of a claim that was made for a job when the job is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration(Checked):
    """Lets pods onto nodes with a taint; without ``key`` and with ``Exists`` onto all."""

    key: Annotated[
        str,
        named(names.QUALIFIED, may_be_empty=True),
        "the taint's key; empty with `Exists`: every taint",
    ] = ""
    operator: Annotated[Operator, "`Equal` compares the value, `Exists` takes any"] = Operator.EQUAL
    value: Annotated[str, named(names.LABEL_VALUE), "the taint's value"] = ""
    effect: Annotated[Effect | None, "`NoSchedule`, `PreferNoSchedule` or `NoExecute`; none: all of them"] = None
    toleration_seconds: Annotated[int | None, SIGNED, "how long `NoExecute` is tolerated; none: indefinitely"] = None

    rules = (
        Rule(
            id="toleration-key",
            where="key",
            holds=lambda toleration: toleration.key or toleration.operator is not Operator.EQUAL,
            what="Equal needs a key",
            remedy="add the taint's key, or operator: Exists",
            cel="self.key != '' || self.operator == 'Exists'",
        ),
        Rule(
            id="toleration-value",
            where="value",
            holds=lambda toleration: not toleration.value or toleration.operator is not Operator.EXISTS,
            what="Exists compares no value",
            remedy="leave value out",
            cel="self.value == '' || self.operator != 'Exists'",
        ),
        Rule(
            id="toleration-seconds",
            where="tolerationSeconds",
            holds=lambda toleration: toleration.toleration_seconds is None or toleration.effect is Effect.NO_EXECUTE,
            what="only NoExecute is tolerated for a time",
            remedy="write effect: NoExecute, or leave tolerationSeconds out",
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        ),
    )


NodeSelector = Annotated[dict[str, str], NODE_SELECTOR, "labels that a node must have, as in a pod"]
Tolerations = Annotated[tuple[Toleration, ...], list_of(), "taints that are tolerated, as in a pod"]
AcceleratorResource = Annotated[str, named(names.QUALIFIED), "the resource that a rank requests on cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRef(Checked):
    """One key of a Secret or ConfigMap in the job's namespace."""

    name: Annotated[str, named(names.SUBDOMAIN), "of the Secret or ConfigMap"]
    key: Annotated[str, named(names.DATA_KEY), "in it"]
    optional: Annotated[bool, "whether pods start without it"] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRef(Checked):
    """A field of the pod itself, such as ``metadata.name``."""

    field_path: Annotated[str, characters(), "such as `metadata.name` or `status.podIP`"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSource(Checked):
    """Source of a variable's value: exactly one of the three."""

    secret_key_ref: Annotated[KeyRef | None, "a key of a Secret"] = None
    config_map_key_ref: Annotated[KeyRef | None, "a key of a ConfigMap"] = None
    field_ref: Annotated[FieldRef | None, "a field of the pod"] = None

    rules = (
        exactly_one(
            "write secretKeyRef: {name: my-secret, key: token}",
            secret_key_ref="secretKeyRef",
            config_map_key_ref="configMapKeyRef",
            field_ref="fieldRef",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvVar(Checked):
    """A variable of the ranks' environment: its ``value``, or where that is read from."""

    name: Annotated[
        str,
        named(names.VARIABLE),
        "letters, digits, underscores, dashes and dots, a letter or an underscore first",
    ]
    value: Annotated[str, characters(MOST_VARIABLE_CHARACTERS), "the value as a string"] = ""
    value_from: Annotated[EnvSource | None, "another source of the value"] = None

    rules = (
        Rule(
            id="one-value",
            where="valueFrom",
            holds=lambda variable: not variable.value or variable.value_from is None,
            what="has value and valueFrom",
            remedy="keep one of them",
            cel="self.value == '' || !has(self.valueFrom)",
            message="is set together with value: keep one of them",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimTemplate(Checked):
    """A claim to be made for the job, without ``storageClass`` from the cluster's default class."""

    size: Annotated[int, POSITIVE_BYTES, "bytes, or a quantity such as `10Gi`"] = field(metadata=BYTES)
    storage_class: Annotated[str, named(names.SUBDOMAIN, may_be_empty=True), "empty: the cluster's default"] = ""
    access_modes: Annotated[
        tuple[AccessMode, ...],
        {"minItems": 1, "maxItems": MOST_ITEMS},
        "ranks on several nodes need `ReadWriteMany`",
    ] = (AccessMode.READ_WRITE_MANY,)


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeSpec(Checked):
    """Volume of a root: an existing ``claim``, or one that is created from ``template``.

    ``reclaim: Delete`` deletes a created claim together with the job.
    """

    claim: Annotated[str | None, named(names.SUBDOMAIN), "a PersistentVolumeClaim of the job's namespace"] = None
    template: Annotated[ClaimTemplate | None, "a claim to create for the job"] = None
    reclaim: Annotated[
        Reclaim,
        "treatment of a created claim: `Retain` keeps it, `Delete` deletes it with the job",
    ] = Reclaim.RETAIN

    rules = (
        exactly_one("write {claim: NAME}, or {template: {size: 10Gi}}", claim="claim", template="template"),
        Rule(
            id="reclaim",
            where="reclaim",
            holds=lambda volume: volume.reclaim is not Reclaim.DELETE or volume.template is not None,
            what="a claim that was there before the job is not deleted with it",
            remedy="leave reclaim out, or write a template instead of a claim",
            cel="self.reclaim != 'Delete' || has(self.template)",
            message="an existing claim is not deleted with the job: leave reclaim out",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesSpec(Checked):
    """Settings for clusters. Other executors validate and ignore them."""

    image: Annotated[str, characters(), "container image; empty: the one that the operator was installed with"] = ""
    queue_name: Annotated[
        str,
        named(names.SUBDOMAIN, may_be_empty=True),
        "Kueue queue; empty: the job waits for none",
    ] = ""
    ranks_per_pod: Annotated[int, one_to(MOST_RANKS), "ranks that share a pod; must divide `ranks`"] = 1
    node_selector: NodeSelector = field(default_factory=dict)
    tolerations: Tolerations = ()
    accelerator_resource: AcceleratorResource = "nvidia.com/gpu"
    volumes: Annotated[
        dict[str, VolumeSpec],
        {"maxProperties": MOST_PROPERTIES},
        "by `out` or `data/NAME`: the storage of `out://` and `data://NAME`",
    ] = field(default_factory=dict)
    env: Annotated[tuple[EnvVar, ...], list_of(), "variables of the ranks' environment, as in a pod"] = ()

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Check keys, and that no variable is there twice."""
        return (
            lambda spec: require_labels(spec.node_selector, "nodeSelector"),
            cls._check_volumes,
            cls._check_variables,
        )

    def _check_volumes(self) -> None:
        pattern = names.STORED_VOLUME_ROOT
        check_all(*(partial(require_name, root, f"volumes.{root}", pattern) for root in self.volumes))

    def _check_variables(self) -> None:
        counts = Counter(variable.name for variable in self.env)
        if doubled := [name for name, count in counts.items() if count > 1]:
            raise UserError(what=f"names {', '.join(doubled[:3])} twice", where="env", remedy="keep one of each")
