"""The interpreter alone: order, cursor, marks, transfers and what it says when an action fails."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.core.errors import RunError, UserError
from penstock.core.program import Channel, Instruction, RankProgram
from penstock.core.run.rank_status import BETWEEN_STEPS
from penstock.core.schedule import Action, Kind
from penstock.planner.compile import program_of
from penstock.trainer.interpreter import Interpreter, Operation
from tests.support.small_plans import small_plan


class Diary:
    """Executor, transport and work in one: records its calls, and fails at the given one."""

    def __init__(self, fail_at: str = "", error: Exception | None = None) -> None:
        self.entries: list[str] = []
        self.bound: list[str] = []
        self.fail_at, self.error = fail_at, error
        self.tensors: dict[int, Tensor] = {}

    def _operation(self, instruction: Instruction) -> Operation:
        self.bound.append(str(instruction.action))
        return lambda: self.write(str(instruction.action))

    compute = free = step = _operation

    def reduction(self, instruction: Instruction) -> Callable[[], DiaryWork]:
        return self._collective(instruction.action, Kind.WAIT_REDUCE)

    def gather(self, instruction: Instruction) -> Callable[[], DiaryWork]:
        return self._collective(instruction.action, Kind.WAIT_GATHER)

    def _collective(self, action: Action, kind: Kind) -> Callable[[], DiaryWork]:
        self.bound.append(str(action))
        wait = replace(action, kind=kind)

        def start() -> DiaryWork:
            self.write(str(action))
            return DiaryWork(self, str(wait))

        return start

    def message(self, slot: int) -> Tensor:
        return self.tensors.setdefault(slot, torch.zeros(1))

    def post_recv(self, channel: Channel, tensor: Tensor) -> DiaryWork:
        return self._transfer("receive", channel, tensor)

    def send(self, channel: Channel, tensor: Tensor) -> DiaryWork:
        return self._transfer("send", channel, tensor)

    def all_reduce(self, group: object, tensor: Tensor) -> DiaryWork:
        raise AssertionError("the executor reduces")

    def _transfer(self, what: str, channel: Channel, tensor: Tensor) -> DiaryWork:
        (slot,) = [slot for slot, known in self.tensors.items() if known is tensor]
        self.write(f"{what} {channel} slot {slot}")
        return DiaryWork(self, f"wait {channel} slot {slot}")

    def write(self, entry: str) -> None:
        self.entries.append(entry)
        if self.error and entry.startswith(self.fail_at):
            raise self.error


class DiaryWork:
    def __init__(self, diary: Diary, entry: str) -> None:
        self.diary, self.entry = diary, entry

    def wait(self) -> None:
        self.diary.write(self.entry)


class Marks:
    """A recorder, which also notes the cursor at every mark."""

    def __init__(self, cursor: array[int]) -> None:
        self.cursor, self.seen = cursor, list[tuple[int, int]]()

    def mark(self, position: int) -> None:
        self.seen.append((position, self.cursor[1]))


@pytest.fixture
def program() -> RankProgram:
    return program_of(small_plan(pp=3, schedule="zb-h1", num_microbatches=2)).ranks[1]


def interpret(program: RankProgram, diary: Diary, cursor: array[int]) -> Interpreter:
    return Interpreter(enumerate(program.instructions), rank=4, executor=diary, transport=diary, cursor=cursor)


def expected_entry(program: RankProgram) -> Callable[[Instruction], str]:
    """What the diary should hold for an instruction; a wait names the slot of its transfer."""
    slots: dict[tuple[Channel, int], int] = {}

    def entry(instruction: Instruction) -> str:
        kind, channel = instruction.action.kind, instruction.channel
        if channel is None:
            return str(instruction.action)
        key = (channel, instruction.sequence)
        if kind in (Kind.POST_RECV_F, Kind.POST_RECV_B):
            (slots[key],) = instruction.writes
            return f"receive {channel} slot {slots[key]}"
        if kind in (Kind.SEND_F, Kind.SEND_B):
            (slots[key],) = instruction.reads
            return f"send {channel} slot {slots[key]}"
        return f"wait {channel} slot {slots[key]}"

    return entry


def test_everything_runs_in_program_order_every_step(program: RankProgram) -> None:
    diary = Diary()
    interpreter = interpret(program, diary, array("q", (0, 0)))
    assert diary.entries == []
    interpreter.run(0)
    once = list(map(expected_entry(program), program.instructions))
    assert diary.entries == once
    num_bound = len(diary.bound)
    interpreter.run(1)
    assert diary.entries == once * 2
    assert len(diary.bound) == num_bound, "a step binds nothing again"


def test_gathers_are_started_and_waited_for_like_reductions() -> None:
    """Those of one stage over one group, too."""
    program = program_of(small_plan(pp=1, dp=2, zero=1)).ranks[0]
    diary = Diary()
    interpret(program, diary, array("q", (0, 0))).run(0)
    assert diary.entries[:3] == ["0START_GATHER(dp)", "0WAIT_GATHER(dp)", "0F0.0"]
    assert diary.entries[-5:] == [
        *("0START_REDUCE(dp)", "0WAIT_REDUCE(dp)", "0START_REDUCE(norm)", "0WAIT_REDUCE(norm)"),
        "0STEP",
    ]


def test_cursor_and_marks_follow(program: RankProgram) -> None:
    cursor = array("q", (0, 0))
    marks = Marks(cursor)
    interpret(program, Diary(), cursor).run(9, marks)
    assert [position for position, _ in marks.seen] == list(range(len(program.instructions) + 1))
    assert [index for _, index in marks.seen[1:]] == list(range(len(program.instructions)))
    assert list(cursor) == [9, BETWEEN_STEPS]


def test_a_part_of_a_program_keeps_its_indices(program: RankProgram) -> None:
    forward = [(i, each) for i, each in enumerate(program.instructions) if each.action.kind is Kind.F]
    cursor = array("q", (0, 0))
    marks = Marks(cursor)
    diary = Diary()
    Interpreter(forward, rank=0, executor=diary, transport=diary, cursor=cursor).run(0, marks)
    assert [index for _, index in marks.seen[1:]] == [index for index, _ in forward]
    assert diary.entries == [str(each.action) for _, each in forward]


@pytest.mark.parametrize(
    ("fail_at", "message"),
    [
        ("1F1.2", r"rank 4, step 3: 1F1\.2 failed: out of memory"),
        ("receive 0->1F", r"rank 4, step 3: 1POST_RECV_F0\.0 on channel 0->1F failed: out of memory"),
        ("wait 2->1B", r"rank 4, step 3: 1WAIT_RECV_B0\.2 on channel 2->1B failed: out of memory"),
        ("send 1->0B", r"rank 4, step 3: 1SEND_B0\.2 on channel 1->0B failed: out of memory"),
    ],
)
def test_a_failure_names_rank_step_action_and_channel(program: RankProgram, fail_at: str, message: str) -> None:
    diary = Diary(fail_at, RuntimeError("out of memory\nwith many\nlines"))
    cursor = array("q", (0, 0))
    interpreter = interpret(program, diary, cursor)
    with pytest.raises(RunError, match=f"^{message}$"):
        interpreter.run(3)
    assert str(program.instructions[cursor[1]].action) in message.replace("\\", "")


def test_an_error_without_words_is_named_by_its_kind(program: RankProgram) -> None:
    diary = Diary("1F0.0", ZeroDivisionError())
    with pytest.raises(RunError, match="failed: ZeroDivisionError"):
        interpret(program, diary, array("q", (0, 0))).run(0)


def test_a_mistake_of_the_user_stays_one_and_says_its_step(program: RankProgram) -> None:
    diary = Diary("1STEP", UserError(what="training diverged", where="spec.training", remedy="lower the rate"))
    with pytest.raises(UserError) as caught:
        interpret(program, diary, array("q", (0, 0))).run(3)
    assert str(caught.value) == "spec.training: rank 4, step 3: training diverged\n  remedy: lower the rate"


def test_signals_are_not_failures(program: RankProgram) -> None:
    diary = Diary()

    def interrupt(entry: str) -> None:
        raise KeyboardInterrupt

    diary.write = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        interpret(program, diary, array("q", (0, 0))).run(0)
