"""Cost tables as users write them: what is read, and what is said of mistakes."""

from __future__ import annotations

import pytest

from penstock.core.cost_table import CostRow, Pass, parse_cost_table
from penstock.core.errors import UserError, mistakes_in
from penstock.core.limits import MOST_COSTS
from penstock.core.model import UnitKind

HEADER = "unit,pass,tokens,pairs,seconds\n"


def test_columns_have_any_order_and_empty_lines_are_ignored() -> None:
    rows = parse_cost_table("seconds, unit,pass,tokens,pairs\n\n0.5,mlp,W,16,136\n", "t.csv")
    assert rows == (CostRow(unit=UnitKind.MLP, pass_=Pass.W, tokens=16, pairs=136, seconds=0.5),)
    assert rows[0].to_manifest() == {"unit": "mlp", "pass": "W", "tokens": 16, "pairs": 136, "seconds": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv, line 1: lacks the column 'unit'"),
        (HEADER, "t.csv: holds no costs"),
        ("unit,pass,tokens,pairs,second\n", "the column 'second' is unknown\n  remedy: did you mean seconds?"),
        ("unit,pass,tokens,seconds\n", "lacks the column 'pairs'"),
        (HEADER + "mlp,F,1\n", "t.csv, line 2: has 3 cells, not 5"),
        (HEADER + "mlp,F,1,1,fast\n", "t.csv, line 2, seconds: 'fast' is not a number"),
        (HEADER + "mlp,F,1,1,nan\n", "'nan' is not a number"),
        (HEADER + "mpl,F,1,1,1\n", "did you mean mlp?"),
        (HEADER + "mlp,B,1,1,1\n", "'B' is not one of F, I, W"),
        (HEADER + "mlp,F,0,1,1\n", "t.csv, line 2.tokens: 0 is less than 1"),
        (HEADER + "mlp,F,1,1,-1\n", "t.csv, line 2.seconds: -1.0 is negative"),
    ],
)
def test_an_error_has_its_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_cost_table(text, "t.csv")
    assert message in str(caught.value)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_cost_table(HEADER + "mlp,F,1,1,x\nmlp,F,1,1,1\nmlp,G,1,1,1\n", "t.csv")
    assert [mistake.where for mistake in mistakes_in(caught.value)] == ["t.csv, line 2, seconds", "t.csv, line 4.pass"]


def test_a_table_has_a_limit() -> None:
    with pytest.raises(UserError, match=f"more than {MOST_COSTS}"):
        parse_cost_table(HEADER + "mlp,F,1,1,1\n" * (MOST_COSTS + 1), "t.csv")
