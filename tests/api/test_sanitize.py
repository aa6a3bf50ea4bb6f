"""What no database keeps, found and replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.store.sanitize import ESCAPED, REPLACEMENT, cleaned, require_storable
from penstock.core.errors import UserError

TEXT = st.text(st.characters(exclude_categories=[]), max_size=5)
DOCUMENTS = st.recursive(
    TEXT | st.integers() | st.floats() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def can_be_kept(document: Any) -> bool:
    """As the databases see it: UTF-8 without NUL, and numbers that standard JSON has."""
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False).encode().decode()
    except ValueError:
        return False
    return "\\u0000" not in text.replace("\\\\", "")


def texts_only(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: texts_only(value) for name, value in document.items()}
    if isinstance(document, list):
        return [texts_only(value) for value in document]
    return document if isinstance(document, str) else None


@given(DOCUMENTS)
def test_what_is_let_pass_can_be_kept(document: Any) -> None:
    try:
        require_storable(document)
    except UserError:
        return
    assert can_be_kept(document)


@given(DOCUMENTS)
def test_text_is_refused_only_if_it_cannot_be_kept(document: Any) -> None:
    texts = texts_only(document)
    if can_be_kept(texts):
        require_storable(texts)
    else:
        with pytest.raises(UserError, match="cannot be stored"):
            require_storable(texts)


@given(DOCUMENTS)
def test_what_is_cleaned_can_be_kept(document: Any) -> None:
    texts = texts_only(document)
    assert can_be_kept(cleaned(texts))
    if can_be_kept(texts):
        assert cleaned(texts) == texts


@given(DOCUMENTS)
def test_what_json_needs_no_escape_for_needs_no_cleaning(document: Any) -> None:
    texts = texts_only(document)
    if not ESCAPED.search(json.dumps(texts).encode()):
        assert can_be_kept(texts)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"a": [1, {"b": "\x00"}]}, r"a\[1\]\.b: holds the character U\+0000"),
        ({"a": {"\ud800": 1}}, r"a: holds the character U\+D800"),
        ({"a": float("nan")}, "a: nan is not a number"),
        ({"a": 2**63}, "a: is a number beyond 64 bits"),
        ([-(2**64)], r"\[0\]: is a number beyond"),
    ],
)
def test_the_place_is_told(document: Any, place: str) -> None:
    with pytest.raises(UserError, match=place):
        require_storable(document)


def test_documents_may_be_deeper_than_calls() -> None:
    document: Any = "end"
    for _ in range(100_000):
        document = [document]
    require_storable(document)


def test_a_sign_stands_for_each() -> None:
    assert cleaned({"a\x00": ["\ud800b\udfff", 1]}) == {f"a{REPLACEMENT}": [f"{REPLACEMENT}b{REPLACEMENT}", 1]}
