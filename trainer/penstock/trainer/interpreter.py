"""Interpreter of one rank's Program: a table from action kind to method, resolved once, then a loop of calls.

An executor implements the actions: on real tensors (`penstock.trainer.executor`), or by waiting for the predicted time
(`penstock.trainer.rehearse`). Transfers and waits for reductions are the same for both and live here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from penstock.core.errors import RunError, UserError
from penstock.core.program import Channel, Instruction
from penstock.core.run.rank_status import BETWEEN_STEPS, Cursor
from penstock.core.schedule import Group, Kind, Part
from penstock.trainer.comm import Messages
from penstock.trainer.units.collectives import Work

_Collective = tuple[Kind, Group, int, Part | None]

Operation = Callable[[], object]
"""An action bound to all its arguments, called once per step."""


class Executor(Protocol):
    """The actions of one rank. Every method binds: it is called once per instruction, before the first step."""

    def compute(self, instruction: Instruction) -> Operation:
        """Bind F, B, I, W or R, or a pair of a forward and a backward."""

    def message(self, slot: int) -> Tensor:
        """The tensor to send from, or to receive into, one of the rank's slots."""

    def free(self, instruction: Instruction) -> Operation:
        """Bind the end of live ranges of slots."""

    def reduction(self, instruction: Instruction) -> Callable[[], Work]:
        """Return a function that starts the sum over a group's ranks."""

    def step(self, instruction: Instruction) -> Operation:
        """Bind the optimizer step."""

    def gather(self, instruction: Instruction) -> Callable[[], Work]:
        """Return a function that starts the gather of parameters over replicas."""


class Recorder(Protocol):
    """Records the times at which instructions begin and end."""

    def mark(self, position: int) -> None:
        """The instruction before ``position`` has ended and the one at ``position`` begins."""


class _Silent:
    def mark(self, position: int) -> None:
        pass


SILENT: Recorder = _Silent()
"""Records nothing."""


class Interpreter:
    """Some instructions of one rank, bound; ``(index, instruction)`` pairs, so that a part of a Program can run.

    ``rank`` is the global one, for messages. ``cursor`` receives the step and the index of the current instruction.
    """

    def __init__(
        self,
        instructions: Iterable[tuple[int, Instruction]],
        *,
        rank: int,
        executor: Executor,
        transport: Messages,
        cursor: Cursor,
    ) -> None:
        self._rank = rank
        self._executor = executor
        self._transport = transport
        self._cursor = cursor
        self._in_flight: dict[tuple[Channel, int] | _Collective, Work] = {}
        self._instructions = tuple(instructions)
        self._calls = tuple((index, self._bind(instruction)) for index, instruction in self._instructions)

    def run(self, step: int, recorder: Recorder = SILENT) -> None:
        """Run all instructions once, in order; raises `RunError` naming the failed action and its channel.

        A `UserError` stays one, with rank and step added: another attempt would fail in the same way.
        """
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
            raise self._failure(self._instructions[position - 1][1], step, error) from error
        cursor[1] = BETWEEN_STEPS

    def _failure(self, instruction: Instruction, step: int, error: Exception) -> RunError | UserError:
        if isinstance(error, UserError):
            what = f"rank {self._rank}, step {step}: {error.what}"
            return UserError(what=what, where=error.where, remedy=error.remedy)
        channel = f" on channel {instruction.channel}" if instruction.channel else ""
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return RunError(f"rank {self._rank}, step {step}: {instruction.action}{channel} failed: {reason}")

    def _bind(self, instruction: Instruction) -> Operation:
        return _TABLE[instruction.action.kind](self, instruction)

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

    def _free(self, instruction: Instruction) -> Operation:
        return self._executor.free(instruction)

    def _start_reduce(self, instruction: Instruction) -> Operation:
        return self._begin_collective(self._executor.reduction(instruction), instruction)

    def _start_gather(self, instruction: Instruction) -> Operation:
        return self._begin_collective(self._executor.gather(instruction), instruction)

    def _begin_collective(self, start: Callable[[], Work], instruction: Instruction) -> Operation:
        key, in_flight = _collective(instruction.action.kind, instruction), self._in_flight

        def begin() -> None:
            in_flight[key] = start()

        return begin

    def _wait_reduce(self, instruction: Instruction) -> Operation:
        return self._wait_collective(Kind.START_REDUCE, instruction)

    def _wait_gather(self, instruction: Instruction) -> Operation:
        return self._wait_collective(Kind.START_GATHER, instruction)

    def _wait_collective(self, start: Kind, instruction: Instruction) -> Operation:
        key, in_flight = _collective(start, instruction), self._in_flight
        return lambda: in_flight.pop(key).wait()

    def _step(self, instruction: Instruction) -> Operation:
        return self._executor.step(instruction)


_TABLE: dict[Kind, Callable[[Interpreter, Instruction], Operation]] = {
    Kind.F: Interpreter._compute,
    Kind.B: Interpreter._compute,
    Kind.I: Interpreter._compute,
    Kind.W: Interpreter._compute,
    Kind.R: Interpreter._compute,
    Kind.OVERLAP: Interpreter._compute,
    Kind.POST_RECV_F: Interpreter._post_recv,
    Kind.POST_RECV_B: Interpreter._post_recv,
    Kind.WAIT_RECV_F: Interpreter._wait,
    Kind.WAIT_RECV_B: Interpreter._wait,
    Kind.SEND_F: Interpreter._send,
    Kind.SEND_B: Interpreter._send,
    Kind.WAIT_SEND_F: Interpreter._wait,
    Kind.WAIT_SEND_B: Interpreter._wait,
    Kind.FREE: Interpreter._free,
    Kind.START_REDUCE: Interpreter._start_reduce,
    Kind.WAIT_REDUCE: Interpreter._wait_reduce,
    Kind.STEP: Interpreter._step,
    Kind.START_GATHER: Interpreter._start_gather,
    Kind.WAIT_GATHER: Interpreter._wait_gather,
}


def nothing() -> None:
    """The operation of an instruction without work."""


def _channel(instruction: Instruction) -> Channel:
    assert instruction.channel is not None, f"{instruction.action} names no channel"
    return instruction.channel


def _transfer(instruction: Instruction) -> tuple[Channel, int]:
    return _channel(instruction), instruction.sequence


def _collective(start: Kind, instruction: Instruction) -> _Collective:
    """The kind that starts the collective, its group, stage and part: unique among the collectives of a rank."""
    action = instruction.action
    assert action.group is not None, f"{action} names no group"
    return start, action.group, action.stage, action.part
