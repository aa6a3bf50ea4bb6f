"""Cluster resources that a job may use: the service checks them before it submits a job, and the operator before it
launches one.

An editor names a namespace, an image, Secrets, claims, tolerations and node selectors. The service and the operator act
with rights of their own, so the cluster does not check whether the editor may use these. A policy therefore states what
is allowed: allow-lists that hold everywhere, and additional ones for single namespaces. Each list has names, or
prefixes of names that end with ``*``.

Some names are reserved, because they lead to the control plane or to penstock itself: the namespaces ``kube-*`` and
penstock's own, and the control plane's taints and labels. Only their full name in a list allows them; ``*`` does not.

A job cannot name a service account, a host path or a further container, so they need no list:
`penstock.core.kubernetes_spec` has all possible fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from penstock.core.errors import UserError
from penstock.core.kubernetes_spec import KubernetesSpec
from penstock.core.manifest import Manifest, camel

SECRETS_LABEL = "penstock.dev/allow-secret-references"
"""A namespace with this label and the value ``true`` allows its jobs to refer to its Secrets."""

CONTROL_PLANE = frozenset(
    f"node-role.kubernetes.io/{role}" for role in ("control-plane", "master", "controlplane", "etcd")
)
"""Taints and labels of control plane nodes."""

ANY = "*"
_VALUE = "have an administrator add it to the chart's value jobPolicy"


class NotAllowedError(UserError):
    """The policy refuses a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance(Manifest):
    """Lists of the names that jobs may use.

    A pattern of ``images`` is ``*``, or ends with ``/*``, ``:*`` or ``@*``, so that ``registry/team*`` does not let in
    another team. ``:*`` and ``@*`` stand for a tag or a digest only.
    """

    images: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    storage_classes: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    node_selectors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (allowance_field.name for allowance_field in fields(self)):
            _require_patterns(getattr(self, name), camel(name))
        for pattern in self.images:
            if pattern.endswith(ANY) and pattern != ANY and pattern[-2] not in "/:@":
                remedy = "end it with /*, :* or @*, or write the whole image"
                raise UserError(what=f"{pattern!r} ends in the middle of a name", where="images", remedy=remedy)

    def __add__(self, other: Allowance) -> Allowance:
        names = [allowance_field.name for allowance_field in fields(self)]
        return Allowance(**{name: getattr(self, name) + getattr(other, name) for name in names})


def _default_allowance() -> Allowance:
    return Allowance(claims=(ANY,), storage_classes=(ANY,), tolerations=(ANY,), node_selectors=(ANY,))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPolicy(Manifest):
    """``everywhere`` holds in all of ``namespaces``, and ``in_namespaces`` adds to it in single ones."""

    own_namespace: str = "penstock-system"
    namespaces: tuple[str, ...] = (ANY,)
    everywhere: Allowance = field(default_factory=_default_allowance)
    in_namespaces: dict[str, Allowance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_patterns(self.namespaces, "namespaces")

    def in_namespace(self, namespace: str) -> Allowance:
        """The names that jobs in this namespace may use."""
        return self.everywhere + self.in_namespaces.get(namespace, Allowance())


def refers_to_secrets(spec: KubernetesSpec) -> bool:
    """Whether the result of `refusals` depends on the labels of the job's namespace."""
    return bool(_secrets(spec))


def refusals(
    spec: KubernetesSpec, namespace: str, policy: JobPolicy, labels: Mapping[str, str] | None = None
) -> list[UserError]:
    """All reasons why a job with this ``spec`` may not run in ``namespace``, which has ``labels``; empty if it may."""
    allowed = policy.in_namespace(namespace)
    if (labels or {}).get(SECRETS_LABEL) == "true":
        allowed += Allowance(secrets=(ANY,))
    namespace_refusals = {*_namespace(namespace, policy)}
    refused = [_image(spec, allowed), *_secret_references(spec, allowed), *_volumes(spec, allowed)]
    refused += [*_node_selectors(spec, allowed), *_tolerations(spec, allowed)]
    return [*namespace_refusals, *(refusal for refusal in refused if refusal is not None)]


def combined(reasons: Sequence[UserError]) -> NotAllowedError:
    """All reasons as one error: the place of the first, and each distinct remedy."""
    first, *others = reasons
    what = "; ".join([first.what, *(f"{reason.where}: {reason.what}" for reason in others)])
    remedy = "; ".join(dict.fromkeys(reason.remedy for reason in reasons))
    return NotAllowedError(what=what, where=first.where, remedy=remedy)


def _namespace(namespace: str, policy: JobPolicy) -> Iterator[UserError]:
    def is_reserved(name: str) -> bool:
        return name.startswith("kube-") or name == policy.own_namespace

    if _is_allowed(namespace, policy.namespaces, is_reserved):
        return
    what = "is the cluster's or penstock's own" if is_reserved(namespace) else "is none for jobs"
    remedy = f"submit to another namespace, or {_VALUE}.namespaces"
    yield UserError(what=f"{namespace!r} {what}", where="metadata.namespace", remedy=remedy)


def _image(spec: KubernetesSpec, allowed: Allowance) -> UserError | None:
    """Check the image. The job's own image runs any code with the pod's access; without one the administrator's is
    used.
    """
    image = spec.image
    if not image or any(_matches_image(image, pattern) for pattern in allowed.images):
        return None
    remedy = f"leave image out, or {_VALUE}.images"
    return UserError(what=f"{image!r} is not an allowed image", where="spec.kubernetes.image", remedy=remedy)


def _matches_image(image: str, pattern: str) -> bool:
    """Whether an image matches. A port looks like a tag, so after ``:`` or ``@`` a ``*`` stands for no slash."""
    if not pattern.endswith(ANY) or pattern == ANY:
        return pattern in (ANY, image)
    beginning = pattern.removesuffix(ANY)
    rest = image.removeprefix(beginning)
    return image.startswith(beginning) and (beginning.endswith("/") or "/" not in rest)


def _secrets(spec: KubernetesSpec) -> list[tuple[int, str]]:
    """Index in ``env`` and name of every Secret."""
    secrets = []
    for i, variable in enumerate(spec.env):
        source = variable.value_from
        if source is not None and source.secret_key_ref is not None:
            secrets.append((i, source.secret_key_ref.name))
    return secrets


def _secret_references(spec: KubernetesSpec, allowed: Allowance) -> Iterator[UserError]:
    remedy = f"label the namespace {SECRETS_LABEL}=true, or {_VALUE}.secrets"
    for i, name in _secrets(spec):
        if not _is_allowed(name, allowed.secrets):
            where = f"spec.kubernetes.env[{i}].valueFrom.secretKeyRef"
            yield UserError(what=f"refers to the Secret {name!r}, which is not allowed", where=where, remedy=remedy)


def _volumes(spec: KubernetesSpec, allowed: Allowance) -> Iterator[UserError]:
    for root, volume in spec.volumes.items():
        where = f"spec.kubernetes.volumes.{root}"
        if volume.claim is not None and not _is_allowed(volume.claim, allowed.claims):
            remedy = f"use an allowed claim, or {_VALUE}.claims"
            yield UserError(what=f"{volume.claim!r} is not an allowed claim", where=f"{where}.claim", remedy=remedy)
        if volume.template is not None and not _is_allowed(volume.template.storage_class, allowed.storage_classes):
            remedy = f"use an allowed storage class, or {_VALUE}.storageClasses"
            name = volume.template.storage_class
            what = f"{name!r} is not an allowed storage class" if name else "the default storage class is not allowed"
            yield UserError(what=what, where=f"{where}.template.storageClass", remedy=remedy)


def _node_selectors(spec: KubernetesSpec, allowed: Allowance) -> Iterator[UserError]:
    for key in spec.node_selector:
        if not _is_allowed(key, allowed.node_selectors, CONTROL_PLANE.__contains__):
            remedy = f"select nodes by another label, or {_VALUE}.nodeSelectors"
            where = "spec.kubernetes.nodeSelector"
            yield UserError(what=f"{key!r} is not an allowed label to select nodes by", where=where, remedy=remedy)


def _tolerations(spec: KubernetesSpec, allowed: Allowance) -> Iterator[UserError]:
    """Check the tolerations. One without a key tolerates every taint, so it needs all entries that a list may have."""
    remedy = f"tolerate another taint by its key, or {_VALUE}.tolerations"
    for i, toleration in enumerate(spec.tolerations):
        where, key = f"spec.kubernetes.tolerations[{i}]", toleration.key
        if key and not _is_allowed(key, allowed.tolerations, CONTROL_PLANE.__contains__):
            yield UserError(what=f"{key!r} is not a taint that jobs may tolerate", where=where, remedy=remedy)
        if not key and not {ANY, *CONTROL_PLANE} <= {*allowed.tolerations}:
            yield UserError(what="tolerates every taint, the control plane's too", where=where, remedy=remedy)


def _is_allowed(name: str, patterns: Sequence[str], is_reserved: Callable[[str], bool] = lambda name: False) -> bool:
    if name in patterns:
        return True
    beginnings = [pattern.removesuffix(ANY) for pattern in patterns if pattern.endswith(ANY)]
    return not is_reserved(name) and any(name.startswith(beginning) for beginning in beginnings)


def _require_patterns(patterns: Sequence[str], where: str) -> None:
    """Raise `UserError` for a star before the end: it would count as a part of the name."""
    for pattern in patterns:
        if ANY in pattern[:-1]:
            raise UserError(what=f"{pattern!r} has * before its end", where=where, remedy="write * only at the end")
