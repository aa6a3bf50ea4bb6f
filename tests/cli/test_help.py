"""The help groups commands by task, and shows an example of each that its parser accepts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from penstock.cli.commands.declarations import EXAMPLE, Group
from penstock.cli.main import app, main

PROGRAM: Any = typer.main.get_command(app)


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that the help lists, with its words, families included."""
    for name, sub in command.commands.items():
        if not sub.hidden:
            yield (*path, name), sub
            if hasattr(sub, "commands"):
                yield from commands(sub, (*path, name))


COMMANDS = dict(commands(PROGRAM))
assert len(COMMANDS) > 30


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_a_group_and_an_example(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    assert command.rich_help_panel in {group.value for group in Group}
    assert command.epilog.startswith(f"{EXAMPLE}penstock {' '.join(words)}")
    node, arguments = PROGRAM, shlex.split(command.epilog.removeprefix(f"{EXAMPLE}penstock"))
    while hasattr(node, "commands"):
        node, arguments = node.commands[arguments[0]], arguments[1:]
    context = node.context_class(node, info_name=words[-1])
    _, rest, _ = node.make_parser(context).parse_args(args=arguments)
    assert not rest


def test_groups_are_in_order_and_cover_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f" {group.value} ") for group in Group]
    assert places == sorted(places)
    assert " Commands " not in shown


@pytest.mark.parametrize("words", [("run",), ("token", "create"), ("database",)], ids=" ".join)
def test_the_help_shows_the_example(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    assert f"{EXAMPLE}penstock {words[0]}" in capsys.readouterr().out
