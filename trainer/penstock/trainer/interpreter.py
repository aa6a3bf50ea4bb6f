"""Running one rank's Program: a table from action kind to method, resolved once, then a loop of calls.

What an action does is the executor's business: real tensors (`penstock.trainer.executor`) or waiting for the predicted
time (`penstock.trainer.rehearse`). Transfers are the same for both and live here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.core.errors import RunError
from penstock.core.program import Channel, Instruction
from penstock.core.schedule import Group, Kind
from penstock.core.timeline import Activity
from penstock.trainer.comm import Transport, Work
from penstock.trainer.status import BETWEEN_STEPS, Cursor

Operation = Callable[[], object]
"""An action with everything it needs, ready to be called once per step."""


class Executor(Protocol):
    """What the actions of one rank do. Every method binds: it is called once per instruction, before the first step."""

    def compute(self, instruction: Instruction) -> Operation:
        """F, B, I, W or R."""

    def message(self, slot: int) -> Tensor:
        """The tensor that is sent from, or received into, one of the rank's slots."""

    def free(self, slots: tuple[int, ...]) -> Operation | None:
        """The end of the slots' lives; none if nothing has to be done."""

    def reduce(self, group: Group) -> Operation:
        """The sum over a group's ranks."""

    def step(self) -> Operation:
        """The optimizer's step."""


class Recorder(Protocol):
    """Keeps the times at which operations begin and end."""

    def mark(self, position: int) -> None:
        """The operation before ``position`` ended and the one at ``position`` begins."""


class _Silent:
    def mark(self, position: int) -> None:
        pass


SILENT: Recorder = _Silent()
"""Keeps nothing."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One operation: the place of its instruction in the Program, and what its time counts as."""

    index: int
    instruction: Instruction
    activity: Activity
    operation: Operation


class Interpreter:
    """The given instructions of one rank, bound; ``(index, instruction)`` pairs, so that a part of a Program can run.

    ``rank`` is the global one, for messages. ``cursor`` is told which instruction is at hand.
    """

    def __init__(
        self,
        instructions: Iterable[tuple[int, Instruction]],
        *,
        rank: int,
        executor: Executor,
        transport: Transport,
        cursor: Cursor,
    ) -> None:
        self._rank = rank
        self._executor = executor
        self._transport = transport
        self._cursor = cursor
        self._in_flight: dict[tuple[Channel, int], Work] = {}
        found = [self._bind(index, instruction) for index, instruction in instructions]
        self.bound = tuple(bound for bound in found if bound is not None)
        self._calls = tuple((bound.index, bound.operation) for bound in self.bound)

    def run(self, step: int, recorder: Recorder = SILENT) -> None:
        """Run all operations once, in order; raises `RunError` naming the action that failed, and its channel."""
        cursor, mark = self._cursor, recorder.mark
        cursor[0] = step
        position = 0
        try:
            mark(0)
            for position, (index, operation) in enumerate(self._calls, start=1):
                cursor[1] = index
                operation()
                mark(position)
        except Exception as error:
            raise self._failure(self.bound[position - 1], step, error) from error
        cursor[1] = BETWEEN_STEPS

    def _failure(self, bound: Bound, step: int, error: Exception) -> RunError:
        channel = bound.instruction.channel
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f" on channel {channel}" if channel else ""
        return RunError(f"rank {self._rank}, step {step}: {bound.instruction.action}{where} failed: {reason}")

    def _bind(self, index: int, instruction: Instruction) -> Bound | None:
        activity, bind = _TABLE[instruction.action.kind]
        operation = bind(self, instruction)
        return None if operation is None else Bound(index, instruction, activity, operation)

    def _compute(self, instruction: Instruction) -> Operation:
        return self._executor.compute(instruction)

    def _post_recv(self, instruction: Instruction) -> Operation:
        (slot,) = instruction.writes
        return self._begin(self._transport.post_recv, instruction, self._executor.message(slot))

    def _send(self, instruction: Instruction) -> Operation:
        (slot,) = instruction.reads
        return self._begin(self._transport.send, instruction, self._executor.message(slot))

    def _begin(self, start: Callable[[Channel, Tensor], Work], instruction: Instruction, tensor: Tensor) -> Operation:
        channel, key = _channel(instruction), _transfer(instruction)
        in_flight = self._in_flight

        def begin() -> None:
            in_flight[key] = start(channel, tensor)

        return begin

    def _wait(self, instruction: Instruction) -> Operation:
        key, in_flight = _transfer(instruction), self._in_flight
        return lambda: in_flight.pop(key).wait()

    def _free(self, instruction: Instruction) -> Operation | None:
        return self._executor.free(instruction.frees)

    def _reduce(self, instruction: Instruction) -> Operation:
        group = instruction.action.group
        assert group is not None, "a REDUCE names its group"
        return self._executor.reduce(group)

    def _step(self, instruction: Instruction) -> Operation:
        return self._executor.step()


_COMPUTE = (Activity.COMPUTE, Interpreter._compute)
_POST_RECV = (Activity.TRANSFER, Interpreter._post_recv)
_SEND = (Activity.TRANSFER, Interpreter._send)
_WAIT = (Activity.WAIT, Interpreter._wait)

_TABLE: dict[Kind, tuple[Activity, Callable[[Interpreter, Instruction], Operation | None]]] = {
    Kind.F: _COMPUTE,
    Kind.B: _COMPUTE,
    Kind.I: _COMPUTE,
    Kind.W: _COMPUTE,
    Kind.R: _COMPUTE,
    Kind.POST_RECV_F: _POST_RECV,
    Kind.POST_RECV_B: _POST_RECV,
    Kind.WAIT_RECV_F: _WAIT,
    Kind.WAIT_RECV_B: _WAIT,
    Kind.SEND_F: _SEND,
    Kind.SEND_B: _SEND,
    Kind.WAIT_SEND_F: _WAIT,
    Kind.WAIT_SEND_B: _WAIT,
    Kind.FREE: (Activity.WAIT, Interpreter._free),
    Kind.REDUCE: (Activity.REDUCE, Interpreter._reduce),
    Kind.STEP: (Activity.STEP, Interpreter._step),
}


def _channel(instruction: Instruction) -> Channel:
    assert instruction.channel is not None, f"{instruction.action} names no channel"
    return instruction.channel


def _transfer(instruction: Instruction) -> tuple[Channel, int]:
    return _channel(instruction), instruction.sequence
