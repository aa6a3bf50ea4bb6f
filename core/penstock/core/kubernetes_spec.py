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
from typing import Any

from penstock.core import names
from penstock.core.errors import UserError, check_all
from penstock.core.manifest import Manifest, require_all, require_limits
from penstock.core.names import require_labels, require_name
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
class Toleration(Manifest):
    """Lets pods onto nodes with a taint; without ``key`` and with ``Exists`` onto all."""

    key: str = ""
    operator: Operator = Operator.EQUAL
    value: str = ""
    effect: Effect | None = None
    toleration_seconds: int | None = None

    def __post_init__(self) -> None:
        require_all(
            self,
            lambda: require_name(self.key, "key", names.QUALIFIED, may_be_empty=True),
            lambda: require_name(self.value, "value", names.LABEL_VALUE),
            self._check_key,
            self._check_value,
            self._check_time,
        )

    def _check_key(self) -> None:
        if not self.key and self.operator is Operator.EQUAL:
            raise UserError(what="Equal needs a key", where="key", remedy="add the taint's key, or operator: Exists")

    def _check_value(self) -> None:
        if self.value and self.operator is Operator.EXISTS:
            raise UserError(what="Exists compares no value", where="value", remedy="leave value out")

    def _check_time(self) -> None:
        if self.toleration_seconds is not None and self.effect is not Effect.NO_EXECUTE:
            raise UserError(
                what="only NoExecute is tolerated for a time",
                where="tolerationSeconds",
                remedy="write effect: NoExecute, or leave tolerationSeconds out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRef(Manifest):
    """One key of a Secret or ConfigMap in the job's namespace."""

    name: str
    key: str
    optional: bool = False

    def __post_init__(self) -> None:
        require_all(
            self,
            lambda: require_name(self.name, "name", names.SUBDOMAIN),
            lambda: require_name(self.key, "key", names.DATA_KEY),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRef(Manifest):
    """A field of the pod itself, such as ``metadata.name``."""

    field_path: str

    def __post_init__(self) -> None:
        require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSource(Manifest):
    """Source of a variable's value: exactly one of the three."""

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None

    def __post_init__(self) -> None:
        given = [
            source for source in (self.secret_key_ref, self.config_map_key_ref, self.field_ref) if source is not None
        ]
        if len(given) != 1:
            raise UserError(
                what="needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
                where="",
                remedy="write secretKeyRef: {name: my-secret, key: token}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvVar(Manifest):
    """A variable of the ranks' environment: its ``value``, or where that is read from."""

    name: str
    value: str = ""
    value_from: EnvSource | None = None

    def __post_init__(self) -> None:
        require_all(self, lambda: require_name(self.name, "name", names.VARIABLE), self._check_value)

    def _check_value(self) -> None:
        if self.value and self.value_from is not None:
            raise UserError(what="has value and valueFrom", where="valueFrom", remedy="keep one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimTemplate(Manifest):
    """A claim to be made for the job; without a ``storageClass`` of the cluster's default one."""

    size: int = field(metadata=BYTES)
    storage_class: str = ""
    access_modes: tuple[AccessMode, ...] = (AccessMode.READ_WRITE_MANY,)

    def __post_init__(self) -> None:
        require_all(self, lambda: require_name(self.storage_class, "storageClass", names.SUBDOMAIN, may_be_empty=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeSpec(Manifest):
    """Volume of a root: an existing ``claim``, or one that is created from ``template``.

    ``reclaim: Delete`` deletes a created claim together with the job.
    """

    claim: str | None = None
    template: ClaimTemplate | None = None
    reclaim: Reclaim = Reclaim.RETAIN

    def __post_init__(self) -> None:
        require_all(self, self._check_kind, self._check_claim)

    def _check_kind(self) -> None:
        if (self.claim is None) == (self.template is None):
            raise UserError(
                what="needs exactly one of claim and template",
                where="",
                remedy="write {claim: NAME}, or {template: {size: 10Gi}}",
            )

    def _check_claim(self) -> None:
        if self.claim is not None:
            require_name(self.claim, "claim", names.SUBDOMAIN)
            if self.reclaim is Reclaim.DELETE:
                raise UserError(
                    what="a claim that was there before the job is not deleted with it",
                    where="reclaim",
                    remedy="leave reclaim out, or write a template instead of a claim",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesSpec(Manifest):
    """Settings for clusters. Other executors validate and ignore them."""

    image: str = ""
    queue_name: str = ""
    ranks_per_pod: int = 1
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    accelerator_resource: str = "nvidia.com/gpu"
    volumes: dict[str, VolumeSpec] = field(default_factory=dict)
    env: tuple[EnvVar, ...] = ()

    def __post_init__(self) -> None:
        require_all(self, *(partial(check, self) for check in self.checks()))

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Checks of names and of agreement between fields, which are also made if another field is wrong."""
        return (
            lambda spec: require_name(spec.queue_name, "queueName", names.SUBDOMAIN, may_be_empty=True),
            lambda spec: require_labels(spec.node_selector, "nodeSelector"),
            lambda spec: require_name(spec.accelerator_resource, "acceleratorResource", names.QUALIFIED),
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
