"""Upload of records from a run's outbox to a service: in order, at least once, and without delaying the run.

Acknowledged positions are written next to the outbox, so a new shipper continues where the last one stopped. The
service ignores duplicates, so positions need not be exact.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from penstock.agent.following import Follower, is_read
from penstock.agent.record_upload import HttpPost, Post
from penstock.core import jsontext
from penstock.core.host.stopping import StopRequests
from penstock.core.run.attempt_folder import AttemptFolder, shipping_lock
from penstock.core.run.folder import RunDir
from penstock.core.run.outbox import last_sequence, sequence_of
from penstock.core.run.rank_status import read_status
from penstock.core.serialization.files import write_json

MOST_RECORDS = 500
MOST_BYTES = 2**20
POLL_SECONDS = 1.0
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
DRAIN_SECONDS = 3600.0
RANKS_SECONDS = 20.0
LEFT_BEHIND_SECONDS = 30.0
_POLL_SECONDS = 0.1

STALE = 409
UNKNOWN_JOB = 404
EARLY = 425
REFUSED = frozenset({400, 413, 422})


@dataclass
class _Box:
    """One outbox file: its first line, the read position, and the last acknowledged sequence number."""

    path: Path
    first: bytes = b""
    offset: int = 0
    sequence: int = -1
    closed: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    text: bytes
    sequence: int
    stop: int


@dataclass
class Shipper:
    """Uploads the files of ``outbox`` with ``post``, and prints warnings with ``say``.

    The drain at the end takes ``drain_seconds`` at most.
    """

    outbox: Path
    post: Post
    say: Callable[[str], None]
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    drain_seconds: float = DRAIN_SECONDS
    _boxes: dict[str, _Box] = field(default_factory=dict)
    _most_records: int = MOST_RECORDS

    def run(self, ended: Callable[[], bool]) -> bool:
        """Upload until ``ended``, then drain; return whether everything was acknowledged."""
        wait, deadline = FIRST_WAIT_SECONDS, None
        while True:
            last = ended()
            if last and deadline is None:
                deadline = self.clock() + self.drain_seconds
            if self.ship():
                wait = FIRST_WAIT_SECONDS
                if last:
                    return True
                self.pause(POLL_SECONDS)
                continue
            if deadline is not None and self.clock() >= deadline:
                return False
            self.pause(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS if deadline is None else FIRST_WAIT_SECONDS)

    def ship(self) -> bool:
        """Send all records; return false if the service cannot accept some of them now.

        Records of an attempt that the service does not know yet stay in their file, and other files are still sent.
        """
        taken = True
        for path in sorted(self.outbox.glob("*.jsonl")):
            box = self._boxes.setdefault(path.name, _remembered(path))
            while not box.closed and (lines := self._next(box)):
                sent = self._send(box, lines)
                if sent is None:
                    taken = False
                    break
                if not sent:
                    return False
        return taken

    def _next(self, box: _Box) -> list[_Line]:
        """Return the next batch.

        A file that was rewritten is read from its start, and acknowledged lines are skipped.
        """
        batch: list[_Line] = []
        size = 0
        with box.path.open("rb") as file:
            first = file.readline()
            if first != box.first:  # not by inode: its number may be reused
                box.first, box.offset = first, 0
            for line in _lines(file, box.offset):
                if line.sequence <= box.sequence:
                    box.offset = line.stop
                    continue
                if batch and (len(batch) == self._most_records or size + len(line.text) > MOST_BYTES):
                    break
                batch.append(line)
                size += len(line.text)
        return batch

    def _send(self, box: _Box, lines: list[_Line]) -> bool | None:
        """Send a batch of one file.

        Return true if the upload of the file can continue, false if the service cannot accept records now, and none if
        it does not know the attempt yet.
        """
        body = b'{"records":[' + b",".join(line.text for line in lines) + b"]}"
        reply = self.post(gzip.compress(body, compresslevel=5))
        if reply.status == 200:
            self._most_records = min(2 * self._most_records, MOST_RECORDS)
            self._acknowledge(box, lines)
            return True
        if reply.status == EARLY:
            return None
        if reply.status == STALE:
            self.say(f"{box.path.name}: the service has closed the attempt, so its remaining records are not sent")
            box.closed = True
            return True
        if reply.status in REFUSED and len(lines) > 1:
            self._most_records = len(lines) // 2  # bisect until the rejected record is alone
            return True
        if reply.status in REFUSED or reply.status == UNKNOWN_JOB:
            self.say(f"{box.path.name}: the service rejected {len(lines)} records, which are skipped: {reply.detail}")
            self._acknowledge(box, lines)
            return True
        return False

    def _acknowledge(self, box: _Box, lines: list[_Line]) -> None:
        box.sequence, box.offset = lines[-1].sequence, lines[-1].stop
        write_json(_memory(box.path), {"sequence": box.sequence})


def _memory(path: Path) -> Path:
    return path.with_suffix(".shipped")


def _remembered(path: Path) -> _Box:
    try:
        return _Box(path=path, sequence=int(jsontext.load(_memory(path).read_text())["sequence"]))
    except (OSError, ValueError, KeyError, TypeError):
        return _Box(path=path)


def _lines(file: BinaryIO, offset: int) -> Iterator[_Line]:
    """Yield the complete lines from ``offset`` on; a line that is no record, as after a power failure, is skipped."""
    file.seek(offset)
    for text in file:
        if not text.endswith(b"\n"):
            return  # its rest may be written at this moment: the next iteration would yield that as a line of its own
        offset += len(text)
        sequence = sequence_of(text)
        if sequence is not None:
            yield _Line(text=text.rstrip(), sequence=sequence, stop=offset)


class Requested:
    """Condition that ends the upload, after which only the drain follows: a stop was requested."""

    def __init__(self, requests: StopRequests) -> None:
        self._requests = requests

    @property
    def over(self) -> bool:
        """Whether the upload is to end."""
        return bool(self._requests.received)

    def wait(self, seconds: float) -> None:
        """Sleep for that long, or until the upload is to end."""
        end, was_over = time.monotonic() + seconds, self.over
        while (left := end - time.monotonic()) > 0 and self.over == was_over:
            time.sleep(min(left, _POLL_SECONDS))


class Orphaned(Requested):
    """Condition that also holds once the other end of a stream is closed.

    The parent process holds the other end, so the stream is closed even if the parent is killed. Its ranks may then run
    a little longer to save their state; `ship` waits for them.
    """

    def __init__(self, requests: StopRequests, stream: TextIO) -> None:
        super().__init__(requests)
        self._stream, self._is_closed = stream, False

    @property
    def over(self) -> bool:
        if not self._is_closed:
            readable, _, _ = select.select([self._stream], [], [], 0)
            self._is_closed = bool(readable) and not self._stream.read(1)
        return self._is_closed or super().over


def ship(
    run: RunDir,
    address_file: Path,
    token_file: Path,
    say: Callable[[str], None],
    until: Requested,
    drain_seconds: float = DRAIN_SECONDS,
    earlier: Callable[[], list[Path]] = list,
) -> bool:
    """Upload the outbox of ``run`` to a service; return whether every record was acknowledged.

    The upload continues until ``until`` is over and the ranks have ended. The remaining records are then drained, for
    ``drain_seconds`` at most. Before the drain, the outboxes that ``earlier`` returns are uploaded too, unless another
    shipper holds their lock. Each host of a run has its own outbox. A second shipper of an outbox waits for the first.
    ``address_file`` contains the service's `penstock.core.supervision.Address`.
    """
    run.outbox.mkdir(parents=True, exist_ok=True)
    with shipping_lock(run.outbox.parent).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (
            contextlib.closing(Follower(run, say, time.time)) as follower,
            contextlib.closing(HttpPost(address_file, token_file)) as post,
        ):
            ranks, all_read = _Ranks(run), True
            others = _EarlierOutboxes(earlier, post, say)

            def ended() -> bool:
                """Whether the upload is over. First reads new log lines: the last ones of a run matter most."""
                nonlocal all_read
                over = until.over and not ranks.live()
                all_read = follower.poll(last=over)
                if not over:
                    others.poll()
                return over

            def pause(seconds: float) -> None:
                """Sleep, and read new log lines meanwhile: too many would accumulate while the service is down."""
                end, was_over = time.monotonic() + seconds, until.over
                while (left := end - time.monotonic()) > 0 and until.over == was_over:
                    until.wait(min(left, POLL_SECONDS))
                    follower.poll()

            shipper = Shipper(outbox=run.outbox, post=post, say=say, pause=pause, drain_seconds=drain_seconds)
            return shipper.run(ended) and all_read


class _EarlierOutboxes:
    """Outboxes of pods of earlier attempts. They are polled until none has an unsent record."""

    def __init__(self, outboxes: Callable[[], list[Path]], post: Post, say: Callable[[str], None]) -> None:
        self._outboxes, self._post, self._say = outboxes, post, say
        self._next_at: float | None = 0.0

    def poll(self) -> None:
        """Upload them if the interval is over."""
        if self._next_at is None or time.monotonic() < self._next_at:
            return
        waiting = [outbox for outbox in self._outboxes() if num_unsent(outbox)]
        done = [outbox for outbox in waiting if self._ship(outbox)]
        self._next_at = None if done == waiting else time.monotonic() + LEFT_BEHIND_SECONDS

    def _ship(self, outbox: Path) -> bool:
        with shipping_lock(outbox.parent).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return Shipper(outbox=outbox, post=self._post, say=self._say).ship()


def num_unsent(outbox: Path) -> int:
    """Number of records of an outbox that were not acknowledged."""
    paths = sorted(outbox.glob("*.jsonl"))
    return sum(max(0, last_sequence(path) - _remembered(path).sequence) for path in paths)


def is_acknowledged(folder: AttemptFolder, is_newest: bool) -> bool:
    """Whether every record of an ended attempt was acknowledged, and no rank can write another one.

    Running ranks matter only if the attempt is the newest: otherwise they belong to the newest one.
    """
    run = RunDir(folder.root)
    if is_newest and _Ranks(run).live():
        return False
    boxes = run.outbox.glob(f"a{folder.attempt}-*.jsonl")
    return is_read(run, folder.attempt) and all(last_sequence(path) <= _remembered(path).sequence for path in boxes)


class _Ranks:
    """Ranks of a run directory that were running at the first call of `live`."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._pids: set[int] | None = None
        self._deadline = 0.0

    def live(self) -> bool:
        """Whether one of them still runs; false once `RANKS_SECONDS` have passed since the first call."""
        if self._pids is None:
            statuses = (read_status(path) for path in self._run.status.glob("rank-*") if not path.suffix)
            self._pids = {status.pid for status in statuses if status is not None}
            self._deadline = time.monotonic() + RANKS_SECONDS
        self._pids = {pid for pid in self._pids if self._runs(pid)}
        return bool(self._pids) and time.monotonic() < self._deadline

    def _runs(self, pid: int) -> bool:
        """Whether the process still is the rank: its id may be reused, and a zombie has no command line."""
        try:
            return str(self._run.root).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
