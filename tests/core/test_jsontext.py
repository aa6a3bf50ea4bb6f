"""JSON from outside: read, or refused by one error."""

from __future__ import annotations

import json

import pytest

from penstock.core import jsontext

DEEP = 100_000


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, null, "x"]}', b'"\xc3\xa4"', "NaN"])
def test_reads_what_json_reads(text: str | bytes) -> None:
    assert repr(jsontext.load(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "[" * DEEP + "]" * DEEP])
def test_depth_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        jsontext.load(text)


def test_constants_can_be_refused() -> None:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number")

    with pytest.raises(ValueError, match="Infinity is no number"):
        jsontext.load("[Infinity]", parse_constant=refuse)
