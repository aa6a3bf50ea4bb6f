"""Counts the statements of each component, as ``ast`` has them and without docstrings: ``python -m tools.statements``.

A statement is one thing to read, however it is formatted. With a commit as argument its code is counted instead.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from tools.dev.environments import ROOT


def num_statements(source: str) -> int:
    """Statements of a module, without its docstrings."""
    nodes = [*ast.walk(ast.parse(source))]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = sum(ast.get_docstring(node) is not None for node in nodes if isinstance(node, documented))
    return sum(isinstance(node, ast.stmt) for node in nodes) - docstrings


def modules_of(commit: str) -> Iterator[tuple[str, str]]:
    """The component and the source of every module at the commit; of the working tree if that is empty."""
    if not commit:
        for path in sorted(ROOT.glob("*/penstock/**/*.py")):
            yield path.relative_to(ROOT).parts[0], path.read_text()
        return
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            component, *folders = PurePosixPath(member.name).parts
            if folders[:1] == ["penstock"] and member.name.endswith(".py"):
                content = files.extractfile(member)
                assert content is not None, "a module is a plain file"
                yield component, content.read().decode()


def main() -> int:
    """Print the statements of each component."""
    counts = Counter[str]()
    for component, source in modules_of(*sys.argv[1:2] or [""]):
        counts[component] += num_statements(source)
    sys.stdout.writelines(f"{component:10}{count:7,}\n" for component, count in sorted(counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
