"""Times messages between every two ranks, sums over all of them, the optimizer and the start of a transfer."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from penstock.core.job import TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import ModelSpec
from penstock.core.profile import CollectiveRecord, LinkRecord, OptimizerRecord
from penstock.trainer.clock import Clock
from penstock.trainer.comm import GroupName, ProcessGroups
from penstock.trainer.optimizer import AdamW
from penstock.trainer.parameters import StageParameters
from penstock.trainer.profiling.units import mean_and_spread

MESSAGE_BYTES = (64, 2**16, 2**19, 2**21)
REDUCED_BYTES = (16, 2**18, 2**22)
REPEATS = 9
LEAST_SECONDS_PER_BYTE = 1e-15
"""What a link is taken to need if the messages were too small to show it."""


def tournament(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every two ranks meet once (the circle method)."""
    players: list[int | None] = list(range(num_ranks)) + ([None] if num_ranks % 2 else [])
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def undisturbed(pairs: Sequence[tuple[int, int]], nodes: Sequence[Hashable]) -> list[list[tuple[int, int]]]:
    """The pairs in as few rounds as go one after the other, in which no two share a node's network card."""
    rounds: list[tuple[set[Hashable], list[tuple[int, int]]]] = [(set(), [])]
    for pair in pairs:
        ends = {nodes[rank] for rank in pair}
        cards = ends if len(ends) > 1 else set()
        free = next((each for each in rounds if not each[0] & cards), None)
        if free is None:
            rounds.append(free := (set(), []))
        free[0].update(cards)
        free[1].append(pair)
    return [chosen for _, chosen in rounds]


def measure_links(groups: ProcessGroups, rank: int, nodes: Sequence[Hashable], clock: Clock) -> list[LinkRecord]:
    """The rank's outgoing channels: half the round trip of several sizes, fitted to latency + bytes / bandwidth.

    ``nodes`` says of every rank behind which network card it is.
    """
    records: list[LinkRecord] = []
    rounds = (undisturbed(pairs, nodes) for pairs in tournament(len(nodes)))
    for pairs in itertools.chain.from_iterable(rounds):
        groups.open(GroupName("F", pair) for pair in pairs)
        records.extend(_link(groups, pair, rank, clock) for pair in pairs if rank in pair)
        dist.barrier()
    return records


def _link(groups: ProcessGroups, pair: tuple[int, int], rank: int, clock: Clock) -> LinkRecord:
    group, peer = groups[GroupName("F", pair)], pair[1] if rank == pair[0] else pair[0]
    seconds = []
    for size in MESSAGE_BYTES:
        message = torch.zeros(size, dtype=torch.uint8, device=groups.device)
        trips = [_round_trip(message, peer, group, rank == pair[0], clock) for _ in range(REPEATS + 2)]
        seconds.append(statistics.median(trips[2:]) / 2)
    latency, per_byte = fit_line(MESSAGE_BYTES, seconds)
    predicted = [latency + size * per_byte for size in MESSAGE_BYTES]
    error = float(np.mean([abs(p - s) / s for p, s in zip(predicted, seconds, strict=True)]))
    return LinkRecord(
        source=rank,
        target=peer,
        latency_seconds=latency,
        bytes_per_second=1.0 / max(per_byte, LEAST_SECONDS_PER_BYTE),
        error=error,
        sizes_bytes=MESSAGE_BYTES,
        seconds=tuple(seconds),
    )


def _round_trip(message: torch.Tensor, peer: int, group: dist.ProcessGroup, first: bool, clock: Clock) -> float:
    begin = clock()
    if first:
        dist.send(message, peer, group)
        dist.recv(message, peer, group)
    else:
        dist.recv(message, peer, group)
        dist.send(message, peer, group)
    return clock() - begin


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency, seconds per byte), neither below nothing, by least squares of relative errors."""
    design = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=np.float64)], axis=1) / np.array(seconds)[:, None]
    latency, per_byte = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0]
    if latency < 0 or per_byte < 0:  # the best of the edges, where one of them is nothing
        alone = design.sum(axis=0) / np.square(design).sum(axis=0)
        errors = np.square(design * alone - 1).sum(axis=0)
        latency, per_byte = (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
    return float(latency), float(per_byte)


def measure_collectives(num_ranks: int, device: torch.device, clock: Clock) -> list[CollectiveRecord]:
    """Sums over all ranks."""
    records = []
    for size in REDUCED_BYTES:
        tensor = torch.zeros(size // 4, device=device)
        seconds, spread = _repeated(partial(dist.all_reduce, tensor), clock)
        records.append(CollectiveRecord(num_ranks=num_ranks, num_bytes=size, seconds=seconds, spread=spread))
    return records


def measure_optimizer(
    spec: ModelSpec, precision: Precision, training: TrainingSpec, device: torch.device, clock: Clock
) -> list[OptimizerRecord]:
    """Clipping and AdamW over one block, and over as many as fit half the model, all ranks at once."""
    records = []
    for blocks in sorted({1, max(spec.layers // 2, 1)}):
        parameters = StageParameters(spec, 1, 1 + 2 * blocks, precision=precision, device=device, seed=0)
        optimizer = AdamW(parameters, training)
        seconds, spread = _repeated(partial(_step, parameters, optimizer), clock)
        count = parameters.master_flat.numel()
        records.append(OptimizerRecord(num_parameters=count, seconds=seconds, spread=spread))
    return records


def _step(parameters: StageParameters, optimizer: AdamW) -> None:
    norm = float(torch.dot(parameters.gradient_flat, parameters.gradient_flat))
    optimizer.step(0, norm)


def measure_instruction(groups: ProcessGroups, rank: int, num_ranks: int, clock: Clock) -> float:
    """Seconds that starting a send and a receive keeps a rank, waiting for the peer apart; zero for a single rank."""
    if num_ranks < 2:
        return 0.0
    pair = (0, 1)
    groups.open(iter([GroupName("F", pair)]))
    if rank not in pair:
        return math.nan
    group, peer = groups[GroupName("F", pair)], 1 - rank
    sent, received = torch.zeros(1, device=groups.device), torch.zeros(1, device=groups.device)
    taken = []
    for _ in range(50):
        begin = clock()
        works = (dist.irecv(received, peer, group), dist.isend(sent, peer, group))
        taken.append(clock() - begin)
        for work in works:
            assert work is not None
            work.wait()
    return statistics.median(taken)


def _repeated(action: Callable[[], object], clock: Clock) -> tuple[float, float]:
    """Mean and spread of an action that all ranks begin together."""
    taken = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        begin = clock()
        action()
        taken.append(clock() - begin)
    return mean_and_spread(taken[1:])
