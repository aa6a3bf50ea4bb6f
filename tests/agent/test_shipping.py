"""Records from real outbox files to a service that keeps by sequence: in order, again until acknowledged."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.agent.record_upload import Reply
from penstock.agent.shipping import MOST_BYTES, MOST_RECORDS, Shipper
from penstock.core.run.outbox import read_records
from tests.support.outboxes import fill, log, opened, reply
from tests.support.ship_bench import LOST, Bench, Service


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
    assert bench.said == ["a1-rank-0.jsonl: the service has closed the attempt, so its remaining records are not sent"]


def test_an_attempt_that_is_not_known_yet_waits_and_holds_up_no_other(bench: Bench) -> None:
    """What the service kept of the job may be older than the attempt."""
    fill(bench.outbox, 3, attempt=1)
    fill(bench.outbox, 3, attempt=2)
    bench.service.answers = [reply(425)]
    shipper = bench.shipper()
    assert not shipper.ship()
    assert bench.service.kept == {(2, "rank-0"): [0, 1, 2]}
    assert shipper.ship()
    assert bench.service.kept == {(1, "rank-0"): [0, 1, 2], (2, "rank-0"): [0, 1, 2]}
    assert bench.said == []


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
    assert bench.said == ["a1-rank-0.jsonl: the service rejected 1 records, which are skipped: too large"]


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
    assert bench.said == ["a1-rank-0.jsonl: the service rejected 500 records, which are skipped: there is no job"]


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
