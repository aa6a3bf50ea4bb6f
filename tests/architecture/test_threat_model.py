"""The threat model against the tests: every row names one, and every one that is named exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.repository import ROOT

TEXT = (ROOT / "docs" / "threat-model.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows(last_column: str) -> Iterator[str]:
    """The rows of every table whose last column is called so."""
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        head, _, *found = table.splitlines()
        if head.split("|")[-2].strip() == last_column:
            yield from found


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", list(rows("shown by")), ids=lambda row: " ".join(row.split("|")[1:3]).strip()[:60])
def test_every_row_names_tests_that_exist(row: str) -> None:
    named = NAMED.findall(row.split("|")[-2])
    assert named, "no test shows it"
    assert row.split("|")[-2].count("`") == 2 * len(named)
    assert [f"{path}::{test}" for path, test in named if test not in functions_of(path)] == []


def test_both_tables_are_seen() -> None:
    """All that must be held off has its row: see the service's must-holds on bad input."""
    told = "\n".join(rows("shown by")).lower()
    for word in (
        "oversized", "malformed", "yaml bombs", "unknown fields", "wrong types", "nan", "bad cursor", "path tricks",
        "decompression bombs", "trickles", "another version", "full disk", "dns rebinding", "another site",
    ):  # fmt: skip
        assert word in told, word
