"""Two passes in turns: what starts when, whose temporaries are whose, and that B by units is I and then W."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from penstock.trainer.units.collectives import TURN, Pass, Request, Sum, run_pair
from penstock.trainer.units.workspace import Workspace
from tests.support.worker_pool import CPU


@dataclass
class LoggingShards:
    """Writes down what starts and what is waited for, by the request's first element."""

    log: list[str] = field(default_factory=list)

    def start(self, request: Request) -> _Logged:
        assert isinstance(request, Sum)
        number = int(request.tensor[0])
        self.log.append(f"start {number}")
        return _Logged(self.log, number)


@dataclass
class _Logged:
    log: list[str]
    number: int

    def wait(self) -> None:
        self.log.append(f"wait {self.number}")


def steps(log: list[str], name: str, *asks: int) -> Pass[None]:
    """Computes before each thing that it asks for, 0: a turn; and after the last."""
    for number in asks:
        log.append(name)
        yield Sum(torch.tensor([number])) if number else TURN
    log.append(name)


def run(first: tuple[int, ...], second: tuple[int, ...]) -> list[str]:
    shards = LoggingShards()
    run_pair(steps(shards.log, "a", *first), steps(shards.log, "b", *second), shards, lambda region: None)
    return shards.log


def test_collectives_of_one_pass_run_while_the_other_computes() -> None:
    assert run((1, 2), (11, 12)) == [
        *("a", "start 1", "b", "start 11"),
        *("wait 1", "a", "start 2", "wait 11", "b", "start 12"),
        *("wait 2", "a", "wait 12", "b"),
    ]


def test_a_pass_that_only_yields_waits_for_no_collective() -> None:
    assert run((0, 1), (11,)) == ["a", "b", "start 11", "a", "start 1", "wait 11", "b", "wait 1", "a"]


def test_the_longer_pass_continues_alone() -> None:
    assert run((), (11, 12)) == ["a", "b", "start 11", "wait 11", "b", "start 12", "wait 12", "b"]


def test_an_error_of_one_pass_ends_both() -> None:
    def broken() -> Pass[None]:
        yield TURN
        raise ValueError("no")

    regions = list[int]()
    with pytest.raises(ValueError, match="no"):
        run_pair(steps([], "a", 1), broken(), LoggingShards(), regions.append)
    assert regions == [0, 1, 0, 1, 0]


def taking(workspace: Workspace, value: int, keep: Callable[[bool], None]) -> Pass[None]:
    """Takes memory in two parts, with a turn after each, and says whether the first part still holds its value."""
    workspace.reset()
    first = workspace.take(16, dtype=torch.float32).fill_(value)
    yield TURN
    workspace.take(16, dtype=torch.float32).fill_(-value)
    yield TURN
    keep(bool((first == value).all()))


def test_passes_have_separate_memory() -> None:
    workspace, kept = Workspace(256, CPU, second_bytes=128), list[bool]()
    run_pair(taking(workspace, 1, kept.append), taking(workspace, 2, kept.append), LoggingShards(), workspace.enter)
    assert kept == [True, True]
    assert workspace.num_bytes == 384
    assert workspace.peak_bytes == 256
    workspace.take(16, dtype=torch.float32)  # in the memory of the first pass
    workspace.enter(1)
    with pytest.raises(MemoryError, match="holds 128 bytes, an action needs 192"):
        workspace.take(16, dtype=torch.float32)
