"""What ConfigMaps hold: documents in little space, and nothing that is taken for one."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.profile import LinkRecord, Profile
from penstock.kube.packing import packed, unpacked
from tests.support.sample_run import sample_profile

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


@pytest.mark.parametrize("text", ["", "no base64!", base64.b64encode(b"no gzip").decode()])
def test_what_is_not_packed_is_none(text: str) -> None:
    with pytest.raises((ValueError, OSError, EOFError)):
        unpacked(text)


def test_the_links_of_256_ranks_fit() -> None:
    assert len(base64.b64decode(packed(measured_by(256).to_manifest()))) < MOST_BYTES


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
