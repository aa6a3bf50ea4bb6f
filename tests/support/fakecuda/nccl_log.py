"""What the fake NCCL logged, and what a Program says that a rank's log must hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from penstock.core.plan import Plan
from penstock.core.program import Channel, Program
from penstock.core.schedule import Kind

MADE = "comm"
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_LAUNCHES = (*_SENDS, Kind.POST_RECV_F, Kind.POST_RECV_B)


@dataclass(frozen=True, slots=True)
class Line:
    """One operation of one process; ``peer`` is -1 for a collective, ``max_ctas`` 0 where NCCL chooses.

    It is the process' kernel number ``kernels``, compute included.
    """

    device: int
    stream: str
    communicator: str
    size: int
    rank: int
    max_ctas: int
    operation: str
    peer: int
    num_bytes: int
    kernels: int


@dataclass(frozen=True, slots=True)
class RankLog:
    """One process' log, in the order of its launches."""

    lines: tuple[Line, ...]

    @property
    def rank(self) -> int:
        """Its place in the first communicator that it made, which is that of all ranks."""
        return self.lines[0].rank

    @property
    def communicators(self) -> tuple[str, ...]:
        """In the order in which they were made."""
        return tuple(line.communicator for line in self.lines if line.operation == MADE)

    @property
    def messages(self) -> list[Line]:
        """What was sent and received."""
        return [line for line in self.lines if line.operation in ("send", "recv")]

    def steps(self, num_messages: int) -> Iterator[list[Line]]:
        """The messages of every step, which has so many, after the one that warmed each communicator."""
        messages = self.messages[len({line.communicator for line in self.messages}) :]
        for first in range(0, len(messages) - num_messages + 1, num_messages):
            yield messages[first : first + num_messages]


def read_logs(folder: Path) -> list[RankLog]:
    """Every process' log, the oldest first."""
    paths = sorted(folder.glob("nccl-*.tsv"), key=lambda path: path.stat().st_mtime_ns)
    return [RankLog(tuple(_line(text) for text in path.read_text().splitlines())) for path in paths]


def _line(text: str) -> Line:
    device, stream, communicator, size, rank, max_ctas, operation, peer, num_bytes, kernels = text.split("\t")
    ends = int(size), int(rank), int(max_ctas)
    return Line(int(device), stream, communicator, *ends, operation, int(peer), int(num_bytes), int(kernels))


@dataclass(frozen=True, slots=True)
class Message:
    """A launch that a Program asks for: on which channel, which end of it, how many bytes, the pipeline rank at the
    other end, and how many actions and how many forwards come before.
    """

    channel: Channel
    operation: str
    num_bytes: int
    peer: int
    num_actions: int
    num_forwards: int


def expected_messages(program: Program, pipeline_rank: int) -> Iterator[Message]:
    """A step's launches of one rank in order."""
    rank, num_actions, num_forwards = program.ranks[pipeline_rank], 0, 0
    for instruction in rank.instructions:
        channel = instruction.channel
        num_actions += instruction.action.is_compute
        num_forwards += instruction.action.kind is Kind.F
        if channel is not None and instruction.action.kind in _LAUNCHES:
            sends = instruction.action.kind in _SENDS
            (index,) = instruction.reads if sends else instruction.writes
            operation, peer = ("send", channel.target) if sends else ("recv", channel.source)
            yield Message(channel, operation, rank.slots[index].num_bytes, peer, num_actions, num_forwards)


def check(logs: Sequence[RankLog], plan: Plan, program: Program, num_steps: int) -> None:
    """Compare all ranks' logs of ``num_steps`` training steps with the Program.

    Every channel of a replica has one communicator, shared by its two ranks and by no other channel, on a stream of its
    own. Each rank launches what the Program says, in its order, with its bytes, to and from the ranks that it names. It
    computes between two launches only where the Program does, and wherever that has a forward (of a stage that is only
    the head, backward launches nothing). All of that is on the rank's own device, whose number is the rank's.
    """
    assert sorted(log.rank for log in logs) == list(range(plan.num_ranks))
    owners: dict[str, set[tuple[int, Channel]]] = {}
    for log in logs:
        replica, pipeline_rank = divmod(log.rank, plan.pp)
        assert {line.device for line in log.lines} == {log.rank}, f"rank {log.rank} used another device than its own"
        used = _check_rank(log, program, pipeline_rank, num_steps)
        for communicator, channel in used.items():
            owners.setdefault(communicator, set()).add((replica, channel))
        streams = {line.stream for line in log.messages}
        assert len(streams) == len(used), f"rank {log.rank}: {len(used)} channels on {len(streams)} streams"
    assert len(owners) == plan.dp * len(program.channels)
    assert all(len(channels) == 1 for channels in owners.values()), f"a communicator is shared by channels: {owners}"


def _check_rank(log: RankLog, program: Program, pipeline_rank: int, num_steps: int) -> dict[str, Channel]:
    """The channel of every communicator that carried messages; asserts that the messages are the Program's."""
    order = list(expected_messages(program, pipeline_rank))
    wanted = [(message.operation, message.num_bytes, *_ends(pipeline_rank, message.peer)) for message in order]
    steps = list(log.steps(len(order)))[:num_steps]
    assert len(steps) == num_steps
    pairs = set()
    for lines in steps:
        found = [(line.operation, line.num_bytes, line.rank, line.peer) for line in lines]
        assert found == wanted, f"rank {log.rank} launched {found}, its Program says {wanted}"
        for (line, first), (later, second) in pairwise(zip(lines, order, strict=True)):
            computed = later.kernels > line.kernels + 1
            may_compute, must_compute = second.num_actions > first.num_actions, second.num_forwards > first.num_forwards
            assert must_compute <= computed <= may_compute, f"rank {log.rank}: {line}, {later}"
        pairs |= {(line.communicator, message.channel) for line, message in zip(lines, order, strict=True)}
    assert len(pairs) == len(dict(pairs)), f"rank {log.rank} mixes channels on a communicator: {pairs}"
    return dict(pairs)


def most_receives_in_a_row(lines: Sequence[Line]) -> int:
    """The most receives that a rank launches in a step with no compute between them."""
    most = number = 0
    before = lines[0].kernels
    for line in lines:
        number = number + 1 if line.kernels <= before + 1 else 1
        number = number if line.operation == "recv" else 0
        most, before = max(most, number), line.kernels
    return most


def _ends(rank: int, peer: int) -> tuple[int, int]:
    """Both by their places in the communicator of the two, which are in the order of ranks."""
    return (0, 1) if rank < peer else (1, 0)
