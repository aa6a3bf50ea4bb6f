"""Names as Kubernetes allows them, checked when a type is built; the patterns are also in schemas.

See https://kubernetes.io/docs/concepts/overview/working-with-objects/names and .../labels
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from penstock.core.errors import MOST_SHOWN, UserError, check_all, shown

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""A job, a namespace, a root of data."""
SUBDOMAIN = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
"""A claim, a storage class, a queue, a secret."""
QUALIFIED = rf"({SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
"""The key of a label or a taint, a resource."""
LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
DATA_KEY = r"[-._A-Za-z0-9]{1,253}"
"""The key of a secret or a ConfigMap."""
VARIABLE = r"[A-Za-z_][-._A-Za-z0-9]{0,252}"
VOLUME_ROOT = rf"out|data/{LABEL}"
STORED_VOLUME_ROOT = rf"out|(data|models)/{LABEL}"
"""Version 0.1.0 accepted `models/NAME`, too, which nothing reads. New jobs may not have it; existing ones continue."""

MOST_CHARACTERS = {
    LABEL: 63,
    SUBDOMAIN: 253,
    QUALIFIED: 253 + 1 + 63,
    LABEL_VALUE: 63,
    DATA_KEY: 253,
    VARIABLE: 253,
    VOLUME_ROOT: len("data/") + 63,
}

REMEDIES = {
    LABEL: "use at most 63 lower-case letters, digits and dashes, no dash first or last",
    SUBDOMAIN: "use lower-case letters, digits, dashes and dots, a letter or digit first and last",
    QUALIFIED: "write a name such as nvidia.com/gpu: letters, digits, dashes, dots, and at most one slash",
    LABEL_VALUE: "use at most 63 letters, digits, dashes, dots and underscores",
    DATA_KEY: "use letters, digits, dashes, dots and underscores",
    VARIABLE: "use letters, digits, underscores, dashes and dots, a letter or underscore first",
    VOLUME_ROOT: "write out or data/NAME",
    STORED_VOLUME_ROOT: "write out or data/NAME",
}


def whole(pattern: str, *, may_be_empty: bool = False) -> str:
    """``pattern`` as schemas have it, which search for a pattern anywhere in a string."""
    return f"^({pattern})?$" if may_be_empty else f"^({pattern})$"


REMEDIES |= {whole(pattern, may_be_empty=empty): text for pattern, text in REMEDIES.items() for empty in (True, False)}


def require_name(text: str, where: str, pattern: str) -> None:
    """Raise `UserError` unless ``text`` is a name by ``pattern``, one of those above or its `whole` form."""
    if not re.fullmatch(pattern, text):
        raise UserError(what=f"{shown(text)} is not a name", where=where, remedy=REMEDIES[pattern])


def require_labels(labels: Mapping[str, str], where: str) -> None:
    """Raise `UserError` unless keys and values of ``labels`` are valid on a Kubernetes object."""
    checks: list[Callable[[], None]] = []
    for key, value in labels.items():
        place = f"{where}.{key[:MOST_SHOWN]}"
        checks += partial(require_name, key, place, QUALIFIED), partial(require_name, value, place, LABEL_VALUE)
    check_all(*checks)
