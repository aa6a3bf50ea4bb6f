"""What ranks print becomes records: every line once, whenever the follower is killed, and never too many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.agent import following
from penstock.agent.following import MOST_BYTES, MOST_CHARACTERS, MOST_LINES, Follower, is_read, level_of, log_files
from penstock.core.job import PipelineJob
from penstock.core.records import NO_RANK, LogLine
from penstock.core.run.folder import RunDir
from penstock.core.run.outbox import Outbox, read_records
from penstock.core.serialization import yamltext
from tests.support.service import job_manifest

STDOUT, STDERR = "logs/a1/none_x/attempt_0/0/stdout.log", "logs/a1/none_x/attempt_0/1/stderr.log"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return laid_out(tmp_path)


def laid_out(root: Path) -> RunDir:
    made = RunDir(root)
    made.create()
    job = PipelineJob.from_manifest(job_manifest(uid="u-1"))
    made.job.write_text(yamltext.dump(job.to_manifest()))
    return made


def write(run: RunDir, name: str, text: str | bytes, *, at: int = 0) -> None:
    """``at`` is the time of the file, in seconds: those written within one tick of the clock have the same."""
    path = run.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    os.utime(path, (at, at))


Follow = Callable[..., Follower]


@pytest.fixture
def follow(run: RunDir) -> Iterator[Follow]:
    """Makes followers, and closes them in the end."""
    with contextlib.ExitStack() as stack:

        def made(said: list[str] | None = None) -> Follower:
            return stack.enter_context(contextlib.closing(follower(run, said)))

        yield made


def follower(run: RunDir, said: list[str] | None = None) -> Follower:
    return Follower(run, ([] if said is None else said).append, lambda: 5.0)


def lines(run: RunDir, attempt: int = 1) -> list[LogLine]:
    records = read_records(run.outbox / f"a{attempt}-logs.jsonl")
    assert [record.sequence for record in records] == list(range(len(records)))
    return [record.log for record in records if record.log is not None]


def messages(run: RunDir, attempt: int = 1) -> list[str]:
    return [line.message for line in lines(run, attempt)]


def test_every_host_of_a_run_is_a_source_of_its_own(run: RunDir) -> None:
    """Its numbers begin at 0, as those of the others do. Its processes are the ranks that the launch says."""
    for host, names in (("a", "[0, 3]"), ("b", "[2, 1]")):
        own = RunDir(run.root, run.root / "hosts" / host)
        own.create()
        write(run, f"hosts/{host}/{STDOUT}", f"first of {host}\n")
        write(run, f"hosts/{host}/{STDERR}", f"second of {host}\n")
        write(run, f"hosts/{host}/logs/a1/ranks.json", names)
        with contextlib.closing(follower(own)) as following_it:
            following_it.poll()
    found = {host: read_records(run.root / "hosts" / host / "outbox" / f"a1-logs-{host}.jsonl") for host in "ab"}
    assert [(r.source, r.sequence, r.log.rank, r.log.message) for r in found["a"] if r.log] == [
        ("logs-a", 0, 0, "first of a"),
        ("logs-a", 1, 3, "second of a"),
    ]
    assert [(r.source, r.log.rank, r.log.message) for r in found["b"] if r.log] == [
        ("logs-b", 1, "second of b"),
        ("logs-b", 2, "first of b"),
    ]
    assert not list(run.outbox.iterdir())


def test_lines_of_every_rank_and_of_who_started_them(run: RunDir, follow: Follow) -> None:
    write(run, STDOUT, "ready\n")
    write(run, STDERR, "ready too\n")
    write(run, "logs/a1/torchrun.log", "W1121 23:22:51.123 12 torch/x.py] slow\n")
    write(run, "logs/a1-profile/none_y/attempt_0/0/stdout.log", "measuring\n")
    write(run, "attempts/1/supervisor.log", "what happened\n")
    write(run, "logs/a2/none_z/attempt_0/0/stdout.log", "again\n")
    write(run, "logs/rehearse/none_z/attempt_0/0/stdout.log", "not of an attempt\n")
    write(run, "logs/a1/notes.log", "not a rank's\n")
    follow().poll()
    assert [(line.rank, line.level, line.message) for line in lines(run)] == [
        (0, "info", "ready"),
        (0, "info", "measuring"),
        (1, "info", "ready too"),
        (NO_RANK, "warning", "W1121 23:22:51.123 12 torch/x.py] slow"),
        (NO_RANK, "info", "what happened"),
    ]
    assert messages(run, 2) == ["again"]
    record = read_records(run.outbox / "a2-logs.jsonl")[0]
    assert (record.uid, record.attempt, record.source, record.recorded_at) == ("u-1", 2, "logs", 5.0)


def test_what_was_printed_last_comes_last(run: RunDir, follow: Follow) -> None:
    """Also if all of a short job is seen at one look."""
    write(run, STDERR, "rank 1 is ready\n", at=2)
    write(run, STDOUT, "rank 0 is ready\nstep 60 of 60\n", at=3)
    write(run, "logs/a1-profile/none_y/attempt_0/0/stdout.log", "measuring\n", at=1)
    watching = follow()
    watching.poll()
    assert messages(run) == ["measuring", "rank 1 is ready", "rank 0 is ready", "step 60 of 60"]
    write(run, STDERR, "cannot end\n", at=5)
    write(run, STDOUT, "ending\n", at=4)
    watching.poll()
    assert messages(run)[4:] == ["ending", "cannot end"]


def test_only_what_is_new_is_taken(run: RunDir, follow: Follow) -> None:
    watching = follow()
    for i in range(3):
        write(run, STDOUT, f"line {i}\n")
        watching.poll()
        watching.poll()
    assert messages(run) == ["line 0", "line 1", "line 2"]


def test_all_is_read_also_where_one_file_got_nothing_new(run: RunDir, follow: Follow) -> None:
    """Or the attempt would never be closed: each file without news counted as a line."""
    watching = follow()
    write(run, STDOUT, "starting\n")
    write(run, STDERR, "warning\n")
    watching.poll()
    assert is_read(run, 1)
    write(run, STDOUT, "step 1\n")
    assert not is_read(run, 1)
    watching.poll(last=True)
    assert is_read(run, 1)


def test_a_line_that_is_no_record_stops_nothing(run: RunDir, follow: Follow) -> None:
    """As a lost power leaves it."""
    write(run, "outbox/a1-logs.jsonl", b"\0\0\0\n")
    write(run, STDOUT, "line\n")
    follow().poll()
    kept = (run.outbox / "a1-logs.jsonl").read_bytes()
    assert b'"line"' in kept


def test_a_line_is_waited_for_until_the_last_look(run: RunDir, follow: Follow) -> None:
    watching = follow()
    write(run, STDOUT, "whole\nhal")
    watching.poll()
    assert messages(run) == ["whole"]
    write(run, STDOUT, "f\nlast wor")
    watching.poll()
    assert messages(run) == ["whole", "half"]
    watching.poll(last=True)
    assert messages(run) == ["whole", "half", "last wor"]


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        (b"  indented\n", "  indented"),
        (b"0 %\r50 %\r100 %\n", "100 %"),
        (b"dos\r\n", "dos"),
        (b"\xff\x00\n", "\ufffd\ufffd"),
        ("naïve\n".encode(), "naïve"),
        (b"x" * 5000 + b"\n", "x" * (MOST_CHARACTERS - 1) + "…"),
        (b"\n", ""),
    ],
)
def test_a_line_is_made_readable(run: RunDir, follow: Follow, written: bytes, seen: str) -> None:
    write(run, STDOUT, written)
    follow().poll()
    assert messages(run) == [seen]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("hello", "info"),
        ("an ERROR is mentioned", "info"),
        ("ERROR: no", "error"),
        ("2026-11-21 23:22:51,123 WARNING slow", "warning"),
        ("[DEBUG] x", "debug"),
        ("INFORMATION", "info"),
        ("E1121 23:22:51.123 12 torch/x.py] bad", "error"),
        ("Traceback (most recent call last):", "error"),
        ("ValueError: no", "error"),
        ("torch.OutOfMemoryError: CUDA out of memory", "error"),
        ("KeyboardInterruptError", "error"),
        ("/a/b.py:12: UserWarning: old", "warning"),
    ],
)
def test_levels_are_those_that_are_marked(line: str, level: str) -> None:
    assert level_of(line) == level


def test_of_many_lines_the_newest_are_taken(run: RunDir, follow: Follow) -> None:
    watching = follow()
    write(run, STDOUT, "".join(f"{i}\n" for i in range(MOST_LINES + 5)))
    watching.poll()
    assert messages(run)[1:] == [str(i) for i in range(5, MOST_LINES + 5)]
    assert messages(run)[0].endswith(f"{STDOUT} has all of them")
    assert lines(run)[0].level == "warning"


def test_a_million_lines_fill_nothing(run: RunDir, follow: Follow) -> None:
    write(run, STDOUT, b"a line that is repeated\n" * 1_000_000)
    follow().poll()
    assert len(messages(run)) == MOST_LINES + 1
    assert sum(path.stat().st_size for path in run.outbox.iterdir()) < 2**18


def test_an_outbox_of_lines_is_bounded(run: RunDir, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "OUTBOX_BYTES", 10_000)
    watching = follow()
    for i in range(100):
        write(run, STDOUT, f"line {i}\n" * 10)
        watching.poll()
    path = run.outbox / "a1-logs.jsonl"
    assert path.stat().st_size < 11_000
    assert [record.sequence for record in read_records(path)][-1] == 999


def test_a_line_without_end_is_cut(run: RunDir, follow: Follow) -> None:
    write(run, STDOUT, b"x" * (2 * MOST_BYTES))
    watching = follow()
    watching.poll()
    assert len(messages(run)[-1]) == MOST_CHARACTERS


def test_a_file_that_was_made_anew_is_no_trouble(run: RunDir, follow: Follow) -> None:
    watching = follow()
    write(run, STDOUT, "first\n")
    watching.poll()
    (run.root / STDOUT).write_text("x\n")
    watching.poll()
    write(run, STDOUT, "second\n")
    watching.poll()
    assert messages(run) == ["first", "x", "second"]


def test_what_goes_wrong_is_said_once_and_made_up_for(run: RunDir, follow: Follow) -> None:
    said: list[str] = []
    watching = follow(said)
    manifest = run.job.read_text()
    run.job.unlink()
    write(run, STDOUT, "early\n")
    watching.poll()
    watching.poll()
    assert len(said) == 1
    assert "log lines of attempt 1 cannot be read" in said[0]
    run.job.write_text(manifest)
    watching.poll()
    watching.close()
    assert messages(run) == ["early"]


def test_files_outside_of_ranks_are_not_followed(run: RunDir) -> None:
    write(run, "logs/a1/none_x/attempt_0/0/error.json", "{}")
    write(run, "attempts/1/other.log", "no\n")
    assert log_files(run.root) == []


class Killed(BaseException):
    """Nothing on the way catches it."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=8))
def test_every_line_comes_once_whenever_the_follower_is_killed(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[tuple[int, int, int]]
) -> None:
    """In each round both ranks print, one or the other last, and the follower dies before it appends a certain record,
    if it comes to that.
    """
    run = laid_out(tmp_path_factory.mktemp("run"))
    number = 0
    for first, second, kill_after in rounds:
        for name, count in ((STDOUT, first), (STDERR, second)):
            for _ in range(count):
                write(run, name, f"line {number}\n", at=(number * 7) % 5)
                number += 1
        watching = follower(run)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Outbox, "put", killing(Outbox.put, kill_after))
            try:
                watching.poll()
            except Killed:
                pass
            finally:
                watching.close()
    with contextlib.closing(follower(run)) as watching:
        watching.poll()
    assert sorted(messages(run), key=lambda text: int(text.split()[1])) == [f"line {i}" for i in range(number)]


def killing(put: Callable[..., None], after: int) -> Callable[..., None]:
    left = [after]

    def wrapped(*arguments: Any, **options: Any) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        put(*arguments, **options)

    return wrapped
