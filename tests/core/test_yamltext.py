"""YAML by version 1.2, with nothing in it that version 1.1 silently reads otherwise; `tests/e2e` asks kubectl."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from penstock.core.errors import UserError
from penstock.core.serialization import yamltext

READ: list[tuple[str, Any]] = [
    ("1e-3", 0.001),
    ("1e3", 1000.0),
    ("0o17", 15),
    ("0x1F", 31),
    ("no", "no"),
    ("2026-01-31", "2026-01-31"),
    ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00Z"),
    ("=", "="),
    ("1:30", "1:30"),
    ("0", 0),
    ("0.5", 0.5),
]


@pytest.mark.parametrize(("text", "value"), READ)
def test_scalars(text: str, value: Any) -> None:
    (read,) = yamltext.load(f"[{text}]")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["017", "-017", "08", "0_7", "00"])
def test_a_number_that_may_be_octal_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        yamltext.load(f"a: 1\nb: {text}", "job.yaml")
    assert (caught.value.where, text in caught.value.what) == ("job.yaml, line 2", True)
    assert yamltext.load(f"'{text}'") == text


TEXTS = st.text(max_size=8) | st.text("0123456789-+.:_eExXobTZ yYnNofFOn~=<", max_size=8)


@given(st.lists(TEXTS, max_size=20))
def test_strings_round_trip_with_both_versions(texts: list[str]) -> None:
    written = yamltext.dump({"texts": texts, **dict.fromkeys(texts)})
    assert yamltext.load(written) == {"texts": texts, **dict.fromkeys(texts)}
    older = YAML(typ="safe", pure=True)
    older.version = (1, 1)
    assert older.load(written)["texts"] == texts
