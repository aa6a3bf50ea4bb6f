"""Draws which component imports which, as the code has it: ``python -m tools.tower`` renews ``docs/architecture.md``.

The picture has the arrows that no other way of arrows implies; the table has all, with how many modules import.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grimp

from tools.dev.environments import ROOT

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- made by: python -m tools.tower -->\n", "<!-- end of what python -m tools.tower made -->\n"
OLD_NAMES = frozenset({"planning"})
"""Packages that are there to be started by and nothing else."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """One component's imports of another: in so many modules when they are loaded, and in so many only when called."""

    at_once: int
    late: int


Arrows = Mapping[tuple[str, str], Arrow]


def components() -> dict[str, Path]:
    """The folder of every component's package, by its name."""
    found = {path.parent.name: path.parent for path in sorted(ROOT.glob("*/penstock/*/__init__.py"))}
    return {name: folder for name, folder in found.items() if name not in OLD_NAMES}


def arrows() -> Arrows:
    """Between all components; what is imported for type checkers alone is none."""
    folders = components()
    graph = grimp.build_graph(
        *(f"penstock.{name}" for name in folders), exclude_type_checking_imports=True, cache_dir=None
    )
    at_once: dict[tuple[str, str], set[str]] = {}
    late: dict[tuple[str, str], set[str]] = {}
    for module in graph.modules:
        inside = _lines_in_functions(folders, module)
        for imported in graph.find_modules_directly_imported_by(module):
            pair = (component_of(module), component_of(imported))
            if pair[0] != pair[1]:
                lines = {each["line_number"] for each in graph.get_import_details(importer=module, imported=imported)}
                (late if lines <= inside else at_once).setdefault(pair, set()).add(module)
    return {
        pair: Arrow(at_once=len(at_once.get(pair, ())), late=len(late.get(pair, set()) - at_once.get(pair, set())))
        for pair in sorted(at_once.keys() | late.keys())
    }


def component_of(module: str) -> str:
    """The component of a module's name."""
    return module.split(".")[1]


def _lines_in_functions(folders: Mapping[str, Path], module: str) -> set[int]:
    _, component, *rest = module.split(".")
    path = folders[component].joinpath(*rest)
    package = path / "__init__.py"
    text = (package if package.exists() else path.with_suffix(".py")).read_text()
    functions = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for each in functions for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}


def implied(pairs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs that a longer way of others connects; they must have no circle."""
    direct = set(pairs)
    names = sorted({name for pair in direct for name in pair})
    reached = set(direct)
    for between in names:
        reached |= {(a, b) for a in names for b in names if (a, between) in reached and (between, b) in reached}
    return {(a, b) for a, b in direct if any((a, c) in reached and (c, b) in reached for c in names)}


def picture(found: Arrows) -> str:
    """As Mermaid, which GitHub draws: dotted where every import is inside a function."""
    left_out = implied(found)
    lines = [
        f"    {a} {'-->' if arrow.at_once else '-.->'} {b}" for (a, b), arrow in found.items() if (a, b) not in left_out
    ]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```", ""])


def table(found: Arrows) -> str:
    """All of them. What is imported by most comes last."""
    users = Counter(b for _, b in found)
    columns = sorted(users, key=lambda name: (users[name], name))
    rows = sorted({a for a, _ in found}, key=lambda name: (users[name], name))
    lines = [f"| imports | {' | '.join(f'`{name}`' for name in columns)} |", "|---|" + "--:|" * len(columns)]
    for row in rows:
        cells = [_cell(found.get((row, column))) for column in columns]
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(arrow: Arrow | None) -> str:
    if arrow is None:
        return ""
    return f"{arrow.at_once}" + (f" + {arrow.late}" if arrow.late else "")


def renewed(page: str, found: Arrows) -> str:
    """The page with the picture and the table as they are now."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no place between {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{picture(found)}\n{table(found)}\n{end}{after}"


def main() -> int:
    """Write the page."""
    PAGE.write_text(renewed(PAGE.read_text(), arrows()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
