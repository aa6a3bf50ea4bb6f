"""Data on stdout, everything else on stderr."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import output
from penstock.cli.output import Format
from penstock.core.errors import UserError
from penstock.core.serialization import yamltext

Captured = pytest.CaptureFixture[str]
DATA = {"name": "a [b]", "numbers": [1, 2.5], "nothing": None, "text": "two\nlines"}


@pytest.mark.parametrize(("form", "read"), [(Format.JSON, json.loads), (Format.YAML, yamltext.load)])
def test_data_is_read_back(form: Format, read: Any, capsys: Captured) -> None:
    output.write_data(DATA, form)
    captured = capsys.readouterr()
    assert read(captured.out) == DATA
    assert captured.err == ""


def test_text_ends_with_one_line_break(capsys: Captured) -> None:
    output.write("a")
    output.write("b\n")
    assert capsys.readouterr().out == "a\nb\n"


def test_what_is_said_is_no_data(capsys: Captured) -> None:
    output.say("stages[0] is [bold]not markup[/bold]")
    output.warn("careful")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "stages[0] is [bold]not markup[/bold]\ncareful\n"


def test_long_lines_are_not_broken(capsys: Captured) -> None:
    output.say("x" * 500)
    output.show("y" * 500)
    captured = capsys.readouterr()
    assert captured.err == "x" * 500 + "\n"
    assert captured.out == "y" * 500 + "\n"


def test_an_error_has_place_and_remedy(capsys: Captured) -> None:
    output.say_error(UserError(what="is wrong", where="spec.parallelism.stages[0]", remedy="write 4"))
    assert capsys.readouterr().err == "error spec.parallelism.stages[0]: is wrong\nremedy write 4\n"


def test_an_error_may_be_brief(capsys: Captured) -> None:
    output.say_error(UserError(what="no"))
    assert capsys.readouterr().err == "error no\n"


def test_a_failure_has_a_hint(capsys: Captured) -> None:
    output.say_failure("rank 1 was killed", "penstock resume runs/1")
    output.say_failure("it broke")
    assert capsys.readouterr().err == "failed rank 1 was killed\nnext penstock resume runs/1\nfailed it broke\n"


@given(st.text())
def test_printable_text_commands_no_terminal(text: str) -> None:
    shown = output.printable(text)
    assert len(shown) == len(text)
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)
    assert all(a in (b, "\N{REPLACEMENT CHARACTER}") for a, b in zip(shown, text, strict=True))


def test_code_stays_as_it_is() -> None:
    code = "def f(x):\n\treturn 'é'\n"
    assert output.printable(code) == code
