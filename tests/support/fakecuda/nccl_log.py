"""What the fake NCCL logged, and what a Program says that a rank's log must hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.plan import Plan
from penstock.core.program import Channel, Program
from penstock.core.schedule import Kind

MADE = "comm"
_LAUNCHES_EARLY = {"F": (Kind.SEND_F, Kind.POST_RECV_F), "B": (Kind.SEND_B, Kind.POST_RECV_B)}
_LAUNCHES_LATE = {"F": (Kind.SEND_F, Kind.WAIT_RECV_F), "B": (Kind.SEND_B, Kind.WAIT_RECV_B)}


@dataclass(frozen=True, slots=True)
class Line:
    """One operation of one process; ``peer`` is -1 for a collective, ``max_ctas`` 0 where NCCL chooses."""

    device: int
    stream: str
    communicator: str
    size: int
    rank: int
    max_ctas: int
    operation: str
    peer: int
    num_bytes: int


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


def read_logs(folder: Path) -> list[RankLog]:
    """Every process' log, the oldest first."""
    paths = sorted(folder.glob("nccl-*.tsv"), key=lambda path: path.stat().st_mtime_ns)
    return [RankLog(tuple(_line(text) for text in path.read_text().splitlines())) for path in paths]


def _line(text: str) -> Line:
    device, stream, communicator, size, rank, max_ctas, operation, peer, num_bytes = text.split("\t")
    return Line(
        int(device), stream, communicator, int(size), int(rank), int(max_ctas), operation, int(peer), int(num_bytes)
    )


@dataclass(frozen=True, slots=True)
class Message:
    """A launch that a Program asks for: on which channel, which end of it, how many bytes, and the pipeline rank at the
    other end.
    """

    channel: Channel
    operation: str
    num_bytes: int
    peer: int


def expected_messages(program: Program, pipeline_rank: int, *, late: bool) -> Iterator[Message]:
    """A step's launches of one rank in order; ``late`` if a receive is launched where it is awaited."""
    rank = program.ranks[pipeline_rank]
    kinds = _LAUNCHES_LATE if late else _LAUNCHES_EARLY
    for instruction in rank.instructions:
        channel = instruction.channel
        if channel is None or instruction.action.kind not in kinds[channel.direction]:
            continue
        sends = instruction.action.kind in (Kind.SEND_F, Kind.SEND_B)
        indices = instruction.reads if sends else _received(program, pipeline_rank, channel, instruction.sequence)
        operation, peer = ("send", channel.target) if sends else ("recv", channel.source)
        yield Message(channel, operation, rank.slots[indices[0]].num_bytes, peer)


def _received(program: Program, pipeline_rank: int, channel: Channel, sequence: int) -> Sequence[int]:
    for instruction in program.ranks[pipeline_rank].instructions:
        is_post = instruction.action.kind in (Kind.POST_RECV_F, Kind.POST_RECV_B)
        if is_post and (instruction.channel, instruction.sequence) == (channel, sequence):
            return instruction.writes
    raise AssertionError(f"message {sequence} of {channel} is not received")


def check(logs: Sequence[RankLog], plan: Plan, program: Program, num_steps: int) -> None:
    """Compare all ranks' logs of ``num_steps`` training steps with the Program.

    Every channel of a replica has one communicator, shared by its two ranks and by no other channel, on a stream of its
    own. Each rank launches what the Program says, in its order, with its bytes, to and from the ranks that it names.
    All of that is on the rank's own device, whose number is the rank's.
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
    orders = [list(expected_messages(program, pipeline_rank, late=late)) for late in (False, True)]
    warmed = len({line.communicator for line in log.messages})
    messages = log.messages[warmed:]
    found = [(line.operation, line.num_bytes, line.rank, line.peer) for line in messages[: num_steps * len(orders[0])]]
    wanted = [
        [(message.operation, message.num_bytes, *_ends(pipeline_rank, message.peer)) for message in order] * num_steps
        for order in orders
    ]
    assert found in wanted, f"rank {log.rank} launched {found[: len(orders[0])]}, its Program says {wanted[0]}"
    order = orders[wanted.index(found)] * num_steps
    pairs = {(line.communicator, message.channel) for line, message in zip(messages, order, strict=False)}
    assert len(pairs) == len(dict(pairs)), f"rank {log.rank} mixes channels on a communicator: {pairs}"
    return dict(pairs)


def _ends(rank: int, peer: int) -> tuple[int, int]:
    """Both by their places in the communicator of the two, which are in the order of ranks."""
    return (0, 1) if rank < peer else (1, 0)
