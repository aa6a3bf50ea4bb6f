"""Ranges of numbers, checked where a type is built; infinity and what is no number lie in none of them."""

from __future__ import annotations

import math

from penstock.core.errors import UserError, raise_all
from penstock.core.manifest import camel


def require_counts(owner: object, *names: str) -> None:
    """Raise `UserError` unless each of the fields is at least 1, or none."""
    values = {name: getattr(owner, name) for name in names}
    raise_all(
        [
            UserError(what=f"{value} is not positive", where=camel(name), remedy="write at least 1")
            for name, value in values.items()
            if value is not None and value < 1
        ]
    )


def require_positive(value: float, where: str, remedy: str = "write a positive number") -> None:
    """Raise `UserError` unless 0 < ``value``."""
    if not 0 < value < math.inf:
        raise UserError(what=f"{value} is not positive", where=where, remedy=remedy)


def require_not_negative(value: float, where: str) -> None:
    """Raise `UserError` unless 0 <= ``value``."""
    if not 0 <= value < math.inf:
        raise UserError(what=f"{value} is negative, or no number", where=where, remedy="write 0 or more")


def require_share(value: float, where: str) -> None:
    """Raise `UserError` unless 0 <= ``value`` <= 1."""
    if not 0 <= value <= 1:
        raise UserError(what=f"{value} is not a share", where=where, remedy="write a number from 0 to 1")
