"""What ConfigMaps hold: documents in little space, and nothing that is taken for one."""

from __future__ import annotations

import base64
import json
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.packing import UnpackError
from penstock.core.plan import Plan
from penstock.core.profile import LinkRecord, Profile
from penstock.kube.packing import packed, unpacked
from tests.support.poison import poison
from tests.support.sample_run import sample_profile
from tests.support.small_plans import small_plan

MOST_BYTES = 2**20
"""That the apiserver takes (https://kubernetes.io/docs/concepts/configuration/configmap/#motivation)."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), JSON))
def test_what_is_packed_comes_back(manifest: dict[str, object]) -> None:
    assert unpacked(packed(manifest)) == json.loads(json.dumps(manifest))
    assert packed(manifest) == packed(manifest)


POISON = poison(small_plan().to_manifest())
MOST_MEMORY = 200 * 2**20


@pytest.mark.parametrize("name", POISON)
def test_what_is_not_packed_is_refused_in_little_memory(name: str) -> None:
    """The bomb of 60 MB in zeros took 34 s and 2.6 GB where its size was not bounded."""
    tracemalloc.start()
    try:
        with pytest.raises((UnpackError, UserError)):
            Plan.from_manifest(unpacked(POISON[name]))
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_change_of_its_bytes_is_another_error(data: st.DataObject) -> None:
    content = bytearray(base64.b64decode(packed(small_plan().to_manifest())))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    text = base64.b64encode(content[: data.draw(st.integers(0, len(content)))]).decode()
    try:
        Plan.from_manifest(unpacked(text))
    except (UnpackError, UserError):
        return


def test_the_links_of_256_ranks_fit() -> None:
    profile = measured_by(256)
    text = packed(profile.to_manifest())
    assert len(base64.b64decode(text)) < MOST_BYTES
    assert Profile.from_manifest(unpacked(text)) == profile


def measured_by(num_ranks: int) -> Profile:
    """As ranks measure it, each figure with five digits that compress no better than chance."""
    pairs = [(source, target) for source in range(num_ranks) for target in range(num_ranks) if source != target]
    links = [
        LinkRecord(
            source=source,
            target=target,
            latency_seconds=float(f"1.{(number * 7919) % 10_000:04d}e-05"),
            bytes_per_second=float(f"1.{(number * 6007) % 10_000:04d}e9"),
            error=float(f"0.0{(number * 3571) % 100_000:05d}"),
        )
        for number, (source, target) in enumerate(pairs)
    ]
    return replace(sample_profile(), num_ranks=num_ranks, links=tuple(links))
