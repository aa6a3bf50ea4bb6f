"""Pairwise covering arrays: few cases in which every pair of values of two factors occurs together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def covering_array(
    factors: Mapping[str, Sequence[Any]], is_allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Allowed cases, greedily chosen, in which every pair that some allowed case has occurs.

    Looks at every combination of values, so it suits some ten thousand of them.
    """
    combinations = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    allowed = [(case, _pairs(case)) for case in combinations if is_allowed(case)]
    missing = frozenset().union(*(pairs for _, pairs in allowed))
    chosen: list[Case] = []
    while missing:
        case, pairs = max(allowed, key=lambda each: len(each[1] & missing))
        chosen.append(case)
        missing -= pairs
    return chosen


def _pairs(case: Case) -> frozenset[tuple[tuple[str, Any], tuple[str, Any]]]:
    return frozenset(itertools.combinations(case.items(), 2))
