"""Which compute actions of a rank become CUDA graphs: the rule by which the trainer records and the planner counts.

Graphs may take `most_graph_bytes` of a device. Actions are recorded in `recording_order`, those of most tokens first,
until their graphs take as much. All others are launched kernel by kernel, so a plan of many short slices pays their
launches.

Example: a device of 80 GiB allows graphs 640 MiB. A rank has 64 actions of 1,024 tokens and 64 of 512, and a graph
takes 8 MiB. Those of 1,024 tokens take 512 MiB, so they all have graphs, and of the others 16, a quarter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

SHARE = 128
"""Graphs of a rank use at most this fraction, ``1 / SHARE``, of device memory besides their pool."""

Action = TypeVar("Action")


def most_graph_bytes(device_bytes: int) -> int:
    """Most bytes that graphs of a rank may take on a device with this memory, in addition to their pool."""
    return device_bytes // SHARE


def recording_order(actions: Iterable[Action], num_tokens: Callable[[Action], int]) -> list[Action]:
    """The actions in the order in which they are recorded: of most tokens first, equals as they come."""
    return sorted(actions, key=lambda action: -num_tokens(action))


def recorded_shares(graph_bytes: Mapping[int, int], most_bytes: int) -> dict[int, float]:
    """The share of a rank's actions that have a graph, by their number of tokens. ``graph_bytes`` has the bytes of the
    graphs of all actions with this number of tokens.
    """
    shares, left_bytes = {}, most_bytes
    for num_tokens in recording_order(graph_bytes, lambda num_tokens: num_tokens):
        num_bytes = graph_bytes[num_tokens]
        shares[num_tokens] = left_bytes / num_bytes if num_bytes > left_bytes else 1.0
        left_bytes = max(left_bytes - num_bytes, 0)
    return shares
