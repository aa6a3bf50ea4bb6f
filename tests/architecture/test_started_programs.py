"""A program of one component that another starts is in the architecture's table, and the other way round."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.repository import ROOT, packages

PAGE = ROOT / "docs" / "architecture.md"
SCRIPTS = frozenset({"penstock", "penstock-agent", "penstock-operator"})
MAIN = re.compile(r'^if __name__ == "__main__":$', re.MULTILINE)
OLD_NAMES = frozenset({"planning"})
"""Packages that are there to be started by and nothing else."""


class Start(NamedTuple):
    """One line of the table: a component, the module or script that it starts, and that program's verb, if any."""

    who: str
    program: str
    verb: str


def programs() -> frozenset[str]:
    """The modules of ours that `python -m` can start."""
    found = set()
    for package, folder in packages().items():
        for path in folder.rglob("*.py"):
            module = ".".join(("penstock", package, *path.relative_to(folder).with_suffix("").parts))
            if path.name == "__main__.py":
                found.add(module.removesuffix(".__main__"))
            elif MAIN.search(path.read_text()):
                found.add(module)
    return frozenset(found)


def started(package: str, text: str, known: frozenset[str]) -> Iterator[Start]:
    """What a module starts: a program after `-m` in a command, or one with a name, to be put into a command later."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.List | ast.Tuple):
            for option, word, following in itertools.zip_longest(node.elts, node.elts[1:], node.elts[2:]):
                if _text(option) == "-m" and _text(word) in known:
                    yield Start(package, _text(word), _verb(following))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and _text(node.value) in known:
            yield Start(package, _text(node.value), "")
        elif isinstance(node, ast.Dict):
            yield from _container(package, node)


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _verb(word: ast.expr | None) -> str:
    return _text(word) if _text(word).replace("-", "").isalpha() else ""


def _container(package: str, node: ast.Dict) -> Iterator[Start]:
    """The script of a container. Its verb is in `args`, often elsewhere."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == "command" and isinstance(value, ast.List) and value.elts:
            first = _text(value.elts[0])
            if first in SCRIPTS:
                yield Start(package, first, "")


def table() -> set[Start]:
    """What the page says, but for images and chart."""
    section = PAGE.read_text().partition("### Who starts what\n")[2].partition("\n## ")[0]
    found = set()
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 3 or "`" not in cells[0] or cells[0].startswith("images"):
            continue
        [who] = re.findall(r"^`(\w+)`", cells[0])
        for command in re.findall(r"`([^`]+)`", cells[2]):
            program, *verb = command.removeprefix("python -m ").split()
            found.add(Start(who, program, " ".join(verb)))
    return found


def everything_started() -> set[Start]:
    known = programs()
    return {
        start
        for package, folder in packages().items()
        if package not in OLD_NAMES
        for path in folder.rglob("*.py")
        for start in started(package, path.read_text(), known)
    }


def test_programs_are_found() -> None:
    expected = {
        "penstock.agent",
        "penstock.cli",
        "penstock.planner.worker",
        "penstock.trainer",
        "penstock.trainer.probe",
    }
    assert expected <= programs()


def test_the_table_says_who_starts_what() -> None:
    assert everything_started() == table()


def test_images_start_what_the_table_says() -> None:
    text = Path(ROOT / "Dockerfile").read_text()
    entries = set(re.findall(r'^ENTRYPOINT \["([\w-]+)"\]', text, re.MULTILINE))
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith("| images")]
    assert entries == {command.split()[0] for command in re.findall(r"`(penstock[^`]*)`", row)}


def test_every_way_of_starting_is_seen() -> None:
    text = """
COMMAND = (sys.executable, "-m", "penstock.agent", "ship")
MODULE = "penstock.trainer"
def container(): return {"image": "x", "command": ["penstock"], "args": ["pod"]}
def run(root): return [sys.executable, "-m", "penstock.agent", str(root)]
"""
    found = set(started("cli", text, frozenset({"penstock.agent", "penstock.trainer"})))
    assert found == {
        Start("cli", "penstock.agent", "ship"),
        Start("cli", "penstock.agent", ""),
        Start("cli", "penstock.trainer", ""),
        Start("cli", "penstock", ""),
    }
