"""Records from real outbox files to a service that keeps by sequence: in order, again until acknowledged."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli import shipping
from penstock.cli.posting import Reply
from penstock.cli.shipping import (
    DRAIN_SECONDS,
    FIRST_WAIT_SECONDS,
    LONGEST_WAIT_SECONDS,
    MOST_BYTES,
    MOST_RECORDS,
    POLL_SECONDS,
    Shipper,
)
from penstock.trainer.outbox import read_records
from tests.support.outboxes import fill, log, opened, reply

LOST = Reply(status=0, detail="the answer was lost")

Key = tuple[int, str]


@dataclass
class Service:
    """Keeps by sequence, as the real one; ``answers`` come first, one for each post, `LOST` only after keeping."""

    answers: list[Reply | Callable[[], Reply]] = field(default_factory=list)
    kept: dict[Key, list[int]] = field(default_factory=dict)
    posts: list[tuple[Key, list[int]]] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def __call__(self, body: bytes) -> Reply:
        text = gzip.decompress(body)
        records = json.loads(text)["records"]
        sequences = [record["sequence"] for record in records]
        assert sequences == sorted(set(sequences)), "the real one would refuse it"
        (key,) = {(record["attempt"], record["source"]) for record in records}
        self.posts.append((key, sequences))
        self.num_bytes.append(len(text))
        answer = self.answers.pop(0) if self.answers else None
        found = answer() if callable(answer) else answer
        if found in (None, LOST):
            self._keep(key, sequences)
        return found or Reply(status=200, sequence=sequences[-1])

    def _keep(self, key: Key, sequences: list[int]) -> None:
        mine = self.kept.setdefault(key, [])
        last = mine[-1] if mine else -1
        mine.extend(sequence for sequence in sequences if sequence > last)

    @property
    def sent(self) -> list[list[int]]:
        """The sequences of every post."""
        return [sequences for _, sequences in self.posts]


@dataclass
class Bench:
    """A shipper on simulated time."""

    outbox: Path
    service: Service = field(default_factory=Service)
    said: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def shipper(self, **options: Any) -> Shipper:
        return Shipper(
            outbox=self.outbox,
            post=self.service,
            say=self.said.append,
            pause=self.pauses.append,
            clock=lambda: sum(self.pauses),
            **options,
        )

    @property
    def kept(self) -> list[int]:
        return self.service.kept.get((1, "rank-0"), [])


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# Sending


def test_nothing_is_sent_when_there_is_nothing(bench: Bench) -> None:
    assert bench.shipper().ship()
    fill(bench.outbox, 0)
    assert bench.shipper().ship()
    assert bench.service.posts == []


def test_records_arrive_as_they_were_written(bench: Bench) -> None:
    fill(bench.outbox, 3, message="a line\nand another, naïve")
    found: list[Any] = []

    def post(body: bytes) -> Reply:
        found.extend(json.loads(gzip.decompress(body))["records"])
        return Reply(status=200, sequence=2)

    assert Shipper(outbox=bench.outbox, post=post, say=bench.said.append).ship()
    assert found == [record.to_manifest() for record in read_records(bench.outbox / "a1-rank-0.jsonl")]


def test_everything_arrives_in_order_and_in_bounded_batches(bench: Bench) -> None:
    fill(bench.outbox, 2 * MOST_RECORDS + 7)
    assert bench.shipper().ship()
    assert bench.kept == list(range(2 * MOST_RECORDS + 7))
    assert [len(sequences) for sequences in bench.service.sent] == [MOST_RECORDS, MOST_RECORDS, 7]


def test_batches_of_large_records_are_bounded_by_bytes(bench: Bench) -> None:
    fill(bench.outbox, 7, message="x" * (MOST_BYTES * 3 // 10))
    assert bench.shipper().ship()
    assert bench.service.sent == [[0, 1, 2], [3, 4, 5], [6]]
    assert max(bench.service.num_bytes) <= MOST_BYTES


def test_a_record_that_is_a_batch_by_itself_is_sent_alone(bench: Bench) -> None:
    fill(bench.outbox, 1)
    fill(bench.outbox, 1, message="x" * MOST_BYTES)
    fill(bench.outbox, 1)
    assert bench.shipper().ship()
    assert bench.service.sent == [[0], [1], [2]]


def test_what_comes_later_is_sent_later_and_alone(bench: Bench) -> None:
    shipper = bench.shipper()
    fill(bench.outbox, 2)
    assert shipper.ship()
    assert shipper.ship()
    fill(bench.outbox, 3)
    assert shipper.ship()
    assert bench.service.sent == [[0, 1], [2, 3, 4]]


def test_a_batch_is_of_one_source_of_one_attempt(bench: Bench) -> None:
    for attempt, source in ((1, "rank-0"), (1, "rank-1"), (2, "rank-0")):
        fill(bench.outbox, 2, attempt=attempt, source=source)
    assert bench.shipper().ship()
    assert bench.service.kept == {(1, "rank-0"): [0, 1], (1, "rank-1"): [0, 1], (2, "rank-0"): [0, 1]}
    assert len(bench.service.posts) == 3


def test_a_line_cut_short_is_not_sent_before_it_is_whole(bench: Bench) -> None:
    fill(bench.outbox, 2)
    path = bench.outbox / "a1-rank-0.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:-1])
    shipper = bench.shipper()
    assert shipper.ship()
    assert bench.kept == [0]
    with path.open("ab") as file:
        file.write(b"\n")
    assert shipper.ship()
    assert bench.kept == [0, 1]


class Hurried(io.BufferedReader):
    """The writer ends its line just after the reader found it cut short."""

    def __init__(self, path: Path, rest: bytes) -> None:
        super().__init__(io.FileIO(path))
        self.path, self.rest = path, rest

    def __next__(self) -> bytes:
        text = super().__next__()
        if not text.endswith(b"\n"):
            with self.path.open("ab") as file:
                file.write(self.rest)
            self.rest = b""
        return text


def test_a_line_that_is_ended_while_it_is_read_is_not_torn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(bench.outbox, 2)
    path = bench.outbox / "a1-rank-0.jsonl"
    text = path.read_bytes()
    path.write_bytes(text[:-20])
    hurried = [Hurried(path, text[-20:])]
    plain = Path.open

    def open_hurried(self: Path, *arguments: Any, **options: Any) -> Any:
        return hurried.pop() if self == path and hurried else plain(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_hurried)
        assert bench.shipper().ship()
    assert path.read_bytes() == text
    assert bench.shipper().ship()
    assert bench.kept == [0, 1]


@pytest.mark.parametrize("spoiled", [b"\0\0\0\n", b"{}\n", b"[]\n", b'{"sequence": null}\n', b"\xff\n", b"\n"])
def test_a_spoiled_line_is_left_out_and_blocks_nothing(bench: Bench, spoiled: bytes) -> None:
    """A machine that lost its power leaves such."""
    fill(bench.outbox, 2)
    with (bench.outbox / "a1-rank-0.jsonl").open("ab") as file:
        file.write(spoiled)
        file.write(json.dumps({"attempt": 1, "source": "rank-0", "sequence": 2}).encode() + b"\n")
    fill(bench.outbox, 1, attempt=2)
    assert bench.shipper().ship()
    assert bench.service.kept == {(1, "rank-0"): [0, 1, 2], (2, "rank-0"): [0]}


# A file that is halved


def test_a_file_that_was_halved_is_read_from_its_start(bench: Bench) -> None:
    box = opened(bench.outbox)
    shipper = bench.shipper()
    for _ in range(10):
        log(box)
    assert shipper.ship()
    for _ in range(4):
        log(box)
    box._halve()
    log(box)
    assert shipper.ship()
    box.close()
    assert bench.kept == list(range(15))
    assert bench.service.sent[1:] == [[10, 11, 12, 13, 14]]


def test_a_file_is_known_anew_although_its_number_was_given_again(bench: Bench) -> None:
    """A file system may give the inode of the file before last, when one was halved twice."""
    fill(bench.outbox, 10)
    shipper = bench.shipper()
    assert shipper.ship()
    fill(bench.outbox, 10)
    path = bench.outbox / "a1-rank-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[12:]))
    assert shipper.ship()
    assert bench.kept == [*range(10), *range(12, 20)]


# Answers


@pytest.mark.parametrize("answer", [LOST, *map(reply, (0, 401, 403, 429, 500, 503, 507, 302))], ids=str)
def test_after_a_lost_answer_the_same_is_sent_again(bench: Bench, answer: Reply) -> None:
    fill(bench.outbox, MOST_RECORDS + 2)
    bench.service.answers = [answer, answer]
    shipper = bench.shipper()
    assert [shipper.ship() for _ in range(3)] == [False, False, True]
    first = list(range(MOST_RECORDS))
    assert bench.service.sent == [first, first, first, [MOST_RECORDS, MOST_RECORDS + 1]]
    assert bench.kept == list(range(MOST_RECORDS + 2))
    assert bench.said == []


def test_a_followed_attempt_is_not_sent_any_more_and_that_is_said_once(bench: Bench) -> None:
    fill(bench.outbox, 3, attempt=1)
    fill(bench.outbox, 3, attempt=2)
    bench.service.answers = [reply(409)]
    shipper = bench.shipper()
    assert shipper.ship()
    fill(bench.outbox, 3, attempt=1)
    fill(bench.outbox, 3, attempt=2)
    assert shipper.ship()
    assert bench.service.kept == {(2, "rank-0"): list(range(6))}
    assert [key for key, _ in bench.service.posts] == [(1, "rank-0"), (2, "rank-0"), (2, "rank-0")]
    assert bench.said == ["a1-rank-0.jsonl: another attempt has followed; the rest of this one is not sent"]


@dataclass
class Narrow(Service):
    """Takes at most ``most`` records at once, and none in ``never``."""

    most: int = 1
    never: tuple[int, ...] = ()
    status: int = 413

    def __call__(self, body: bytes) -> Reply:
        sequences = [record["sequence"] for record in json.loads(gzip.decompress(body))["records"]]
        if len(sequences) > self.most or set(sequences) & set(self.never):
            self.answers = [reply(self.status, "too large")]
        return super().__call__(body)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_what_is_too_large_is_sent_in_halves(bench: Bench, most: int) -> None:
    bench.service = Narrow(most=most)
    fill(bench.outbox, 30)
    assert bench.shipper().ship()
    assert bench.kept == list(range(30))
    assert [len(sequences) for sequences in bench.service.sent][:3] == [30, 15, 7]
    assert bench.said == []


def test_one_record_that_is_too_large_is_left_out_and_said(bench: Bench) -> None:
    bench.service = Narrow(most=MOST_RECORDS, never=(5,))
    fill(bench.outbox, 30)
    assert bench.shipper().ship()
    assert bench.kept == [sequence for sequence in range(30) if sequence != 5]
    assert bench.said == ["a1-rank-0.jsonl: 1 records were refused and are left out: too large"]


def test_batches_grow_again_after_a_success(bench: Bench) -> None:
    bench.service.answers = [reply(413), reply(413)]
    fill(bench.outbox, 4 * MOST_RECORDS)
    assert bench.shipper().ship()
    lengths = [len(sequences) for sequences in bench.service.sent]
    assert lengths[:6] == [500, 250, 125, 250, 500, 500]
    assert bench.kept == list(range(4 * MOST_RECORDS))


def test_records_of_a_job_that_is_forgotten_are_left_out_and_said(bench: Bench) -> None:
    fill(bench.outbox, MOST_RECORDS + 3)
    bench.service.answers = [reply(404, "there is no job")]
    assert bench.shipper().ship()
    assert bench.kept == [MOST_RECORDS, MOST_RECORDS + 1, MOST_RECORDS + 2]
    assert bench.said == ["a1-rank-0.jsonl: 500 records were refused and are left out: there is no job"]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_one_record_that_is_refused_is_left_out_alone(bench: Bench, status: int) -> None:
    bench.service = Narrow(most=MOST_RECORDS, never=(5,), status=status)
    fill(bench.outbox, 30)
    assert bench.shipper().ship()
    assert bench.kept == [sequence for sequence in range(30) if sequence != 5]
    assert len(bench.said) == 1


# A new shipper


def test_a_new_shipper_goes_on_where_the_last_one_stopped(bench: Bench) -> None:
    fill(bench.outbox, 3)
    assert bench.shipper().ship()
    fill(bench.outbox, 2)
    assert bench.shipper().ship()
    assert bench.service.sent == [[0, 1, 2], [3, 4]]


def test_a_new_shipper_does_not_try_again_what_was_refused(bench: Bench) -> None:
    fill(bench.outbox, 1)
    bench.service.answers = [reply(422)]
    assert bench.shipper().ship()
    assert bench.shipper().ship()
    assert bench.service.sent == [[0]]


@pytest.mark.parametrize("memory", ["", "{", "null", "[]", "{}", '{"sequence": null}', '{"sequence": "x"}'])
def test_a_spoiled_memory_means_sending_again(bench: Bench, memory: str) -> None:
    fill(bench.outbox, 3)
    assert bench.shipper().ship()
    (bench.outbox / "a1-rank-0.shipped").write_text(memory)
    assert bench.shipper().ship()
    assert bench.service.sent == [[0, 1, 2], [0, 1, 2]]
    assert bench.kept == [0, 1, 2]


# Whatever happens


class World:
    """A writer, a shipper and a service to which things happen; what may be missing in the end is remembered."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.path = folder / "a1-rank-0.jsonl"
        self.box = opened(folder)
        self.num_written = 0
        self.dropped: set[int] = set()
        self.refused: set[int] = set()
        self.restart()

    def restart(self) -> None:
        self.shipper = self.bench.shipper(_most_records=shipping.MOST_RECORDS)

    def write(self) -> None:
        for _ in range(3):
            log(self.box, "x" * (self.num_written % 7))
            self.num_written += 1

    def halve(self) -> None:
        before = {record.sequence for record in read_records(self.path)}
        self.box._halve()
        self.dropped |= before - {record.sequence for record in read_records(self.path)}

    def halve_twice(self) -> None:
        """The file system may give the second one the number that the first one had."""
        self.halve()
        self.write()
        self.halve()

    def reopen(self) -> None:
        self.box.close()
        self.box = opened(self.bench.outbox)

    def cut(self) -> None:
        """The writer dies while it writes."""
        self.box.close()
        with self.path.open("ab") as file:
            file.write(b'{"uid": "u-1", "attem')
        self.box = opened(self.bench.outbox)

    def ship(self, answers: list[tuple[str, int]]) -> None:
        self.bench.service.answers = [self._answering(*answer) for answer in answers]
        self.shipper.ship()
        self.bench.service.answers = []

    def _answering(self, meanwhile: str, status: int) -> Callable[[], Reply]:
        def answer() -> Reply:
            DOINGS[meanwhile](self)
            sequences = self.bench.service.sent[-1]
            if status == 413 and len(sequences) == 1:
                self.refused.update(sequences)
            return LOST if status < 0 else reply(status)

        return answer


DOINGS: dict[str, Callable[[World], None]] = {
    "nothing": lambda world: None,
    "write": World.write,
    "halve": World.halve,
    "halve twice": World.halve_twice,
    "reopen": World.reopen,
    "cut": World.cut,
    "restart": World.restart,
}
during = st.sampled_from(["nothing", "write", "halve", "halve twice", "reopen", "cut"])
answers = st.lists(st.tuples(during, st.sampled_from([-1, 0, 500, 503, 429, 413])), max_size=4)
happenings = st.lists(st.sampled_from(sorted(DOINGS)) | st.just("write") | answers, max_size=40)


@settings(max_examples=200)
@given(happenings)
def test_every_record_that_was_not_dropped_is_acknowledged_in_order(
    tmp_path_factory: pytest.TempPathFactory, happenings: list[str | list[tuple[str, int]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipping, "MOST_RECORDS", 4)
        world = World(tmp_path_factory.mktemp("outbox"))
        for happening in happenings:
            if isinstance(happening, str):
                DOINGS[happening](world)
            else:
                world.ship(happening)
        assert world.shipper.ship()
        world.box.close()
    kept = world.bench.kept
    assert kept == sorted(set(kept))
    assert set(range(world.num_written)) - set(kept) <= world.dropped | world.refused
    assert len(world.bench.said) == len(world.refused)


# Going on until the end


def ending_after(looks: int) -> Callable[[], bool]:
    """Ended from that look on."""
    counter = itertools.count()
    return lambda: next(counter) >= looks


def test_what_was_written_before_the_end_is_sent_after_it(bench: Bench) -> None:
    def ended() -> bool:
        fill(bench.outbox, 2)
        return len(bench.pauses) == 3

    assert bench.shipper().run(ended)
    assert bench.kept == list(range(8))
    assert bench.pauses == [POLL_SECONDS] * 3


def test_it_ends_only_when_all_is_acknowledged(bench: Bench) -> None:
    fill(bench.outbox, 2)
    bench.service.answers = [reply(503), LOST, reply(500)]
    assert bench.shipper().run(lambda: True)
    assert bench.service.sent == [[0, 1]] * 4
    assert len(bench.pauses) == 3


def test_it_does_not_end_before_it_is_asked(bench: Bench) -> None:
    fill(bench.outbox, 2)
    assert bench.shipper().run(ending_after(50))
    assert len(bench.pauses) == 50


def test_it_waits_longer_after_each_failure_and_not_after_a_success(bench: Bench) -> None:
    fill(bench.outbox, 2)
    bench.service.answers = [reply(503)] * 8
    bench.service.answers += [lambda: Reply(status=200, sequence=1)]

    def ended() -> bool:
        if len(bench.pauses) == 9:
            fill(bench.outbox, 1)
            bench.service.answers = [reply(503)]
        return len(bench.pauses) == 10

    assert bench.shipper().run(ended)
    doubled = [FIRST_WAIT_SECONDS * 2**n for n in range(5)]
    assert bench.pauses == [*doubled, *[LONGEST_WAIT_SECONDS] * 3, POLL_SECONDS, FIRST_WAIT_SECONDS]


def test_it_gives_up_some_time_after_the_end(bench: Bench) -> None:
    fill(bench.outbox, 2)
    bench.service.answers = [reply(503)] * 10_000
    assert not bench.shipper().run(lambda: True)
    assert DRAIN_SECONDS <= sum(bench.pauses) <= DRAIN_SECONDS + LONGEST_WAIT_SECONDS
    assert max(bench.pauses) <= LONGEST_WAIT_SECONDS


def test_it_does_not_give_up_before_the_end(bench: Bench) -> None:
    fill(bench.outbox, 2)
    bench.service.answers = [reply(503)] * 500
    assert bench.shipper().run(ending_after(400))
    assert sum(bench.pauses) > DRAIN_SECONDS
