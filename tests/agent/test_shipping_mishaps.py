"""Records that are shipped while anything may happen: whatever was not dropped is acknowledged, in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.agent import shipping
from penstock.agent.record_upload import Reply
from penstock.core.run.outbox import read_records
from tests.support.outboxes import log, opened, reply
from tests.support.ship_bench import LOST, Bench


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
