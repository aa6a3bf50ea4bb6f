"""The guide's table of what can go wrong on a cluster: every row says what to do, and names a test that shows it."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.repository import ROOT

GUIDE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
TABLE = GUIDE.partition("### What went wrong\n")[2].partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| `")]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_says_what_to_do_and_names_a_test_that_exists(row: list[str]) -> None:
    assert len(row) == 4
    assert all(row)
    named = NAMED.fullmatch(row[3])
    assert named, f"{row[3]} names no test"
    assert named[2] in functions_of(named[1])


def test_all_that_is_foreseen_has_a_row() -> None:
    told = " ".join(" ".join(row) for row in ROWS)
    for words in (
        "the image cannot be pulled", "no node fits", "device resource", "while measuring", "ServiceUnavailable",
        "ConfigMap was deleted", "JobSetMissing", "no Kueue", "a claim is missing", "ReadWriteMany", "clock",
    ):  # fmt: skip
        assert words in told, words
