"""Manifests that somebody wrote wrong, or just so: a good one with a field or two changed, for Hypothesis."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from penstock.core.job import Metadata, PipelineJob, TokenizerSpec
from tests.support.manifests import loaded

VALUES: list[Any] = [
    *(True, False, 0, -1, 1, 2, 3, 7, 256, 1024, 2**31, 2**62, 2.5, 0.5, -0.5, 1e300, 1e-300),
    *("", "4Gi", "0", "1e3", "cosine", "bytes", "bpe", "gpt2", "llama", "cost", "a b", "A", "data://corpus", "x/y/z"),
    *([], [1], [0.5, 7.5], [512, 512], [1024], ["ReadWriteOnce"], {}, {"a": "b"}, {"train": "bytes"}, {"claim": "c"}),
    *({"file": "data://corpus/t"}, {"generator": "zb"}, {"template": {"size": 1}}, {"": ""}, [[]], [{}], {"out": {}}),
]


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in it."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for name, value in items:
        yield (*path, name)
        if isinstance(value, dict | list):
            yield from places(value, (*path, name))


@st.composite
def changed(draw: st.DrawFn, text: str) -> dict[str, Any]:
    """A manifest with one or two fields of its spec replaced, left out or renamed."""
    document = copy.deepcopy(loaded(text))
    for _ in range(draw(st.integers(1, 2))):
        *parents, last = draw(st.sampled_from([*places(document["spec"])]))
        place: Any = document["spec"]
        for step in parents:
            place = place[step]
        match draw(st.sampled_from(["replace", "replace", "drop", "rename"])):
            case "replace":
                place[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "drop":
                place.pop(last)
            case _ if isinstance(place, dict):
                place[f"{last}x"] = place.pop(last)
    return document


def for_a_cluster(job: PipelineJob) -> PipelineJob:
    """The same job where it says what means something there."""
    tokenizer = job.spec.data.tokenizer
    if tokenizer.file is not None:
        tokenizer = TokenizerSpec(train="bytes")
    data = dataclasses.replace(job.spec.data, source="python-stdlib", tokenizer=tokenizer)
    checkpoint = dataclasses.replace(job.spec.checkpoint, resume_from=None)
    changed = job.with_spec(data=data, checkpoint=checkpoint)
    return dataclasses.replace(changed, metadata=Metadata(name="fuzzed"))
