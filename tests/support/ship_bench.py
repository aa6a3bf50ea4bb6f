"""A shipper on simulated time, between real outbox files and a service that keeps by sequence."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.agent.record_upload import Reply
from penstock.agent.shipping import Shipper

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
