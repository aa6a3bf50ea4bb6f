"""The vocabulary in which core's types declare the ranges of their fields, in the terms of JSON Schema.

A field's annotation has all that applies to the field alone: its type, its range and its meaning.

    layers: Annotated[int, one_to(MOST_LAYERS), "blocks"]

`penstock.core.manifest` reads these declarations. Types check the ranges when they are built, and reading checks the
lengths of lists before it reads their items. The schemas of the API, of editors and of the CustomResourceDefinitions
and the guide's page of limits are made from them.

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
MOST_DEVICE_KINDS = 16
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

LARGEST = 10**18
"""Of a number without a narrower range. The apiserver compares integers with bounds in 64 bits, so larger ones wrap."""


def one_to(most: int) -> Limit:
    """A count: 1 to ``most``."""
    return {"minimum": 1, "maximum": most}


def up_to(most: float) -> Limit:
    """0 to ``most``."""
    return {"minimum": 0, "maximum": most}


def above_zero(most: float) -> Limit:
    """More than 0, up to ``most``."""
    return {"exclusiveMinimum": 0, "maximum": most}


def characters(most: int = MOST_CHARACTERS) -> Limit:
    """A string of at most ``most`` characters."""
    return {"maxLength": most}


def list_of(most: int = MOST_ITEMS, **more: Any) -> Limit:
    """A list of at most ``most`` items; ``more`` limits them."""
    return {"maxItems": most, **more}


def named(pattern: str, *, may_be_empty: bool = False) -> Limit:
    """A name by ``pattern``, one of `penstock.core.names`."""
    return {"pattern": names.whole(pattern, may_be_empty=may_be_empty), "maxLength": names.MOST_CHARACTERS[pattern]}


SHARE: Limit = up_to(1)
POSITIVE_SHARE: Limit = above_zero(1)
BELOW_ONE: Limit = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
ANY_BYTES: Limit = up_to(MOST_BYTES)
POSITIVE_BYTES: Limit = one_to(MOST_BYTES)
SIGNED: Limit = {"minimum": -EXACT, "maximum": EXACT}
INT64: Limit = {"minimum": 1 - 2**63, "maximum": 2**63 - 1}
NODE_SELECTOR: Limit = {
    "maxProperties": MOST_PROPERTIES,
    "additionalProperties": {"type": "string", **named(names.LABEL_VALUE)},
}
