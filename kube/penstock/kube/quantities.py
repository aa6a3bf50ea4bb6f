"""Amounts as Kubernetes writes them: ``500m`` cores, ``2Gi`` bytes."""

from __future__ import annotations

from decimal import Decimal

from kubernetes.utils import parse_quantity


def amount(text: str) -> Decimal:
    """The number; raises ValueError if ``text`` is not a quantity."""
    quantity: Decimal = parse_quantity(text)  # type: ignore[no-untyped-call]
    return quantity
