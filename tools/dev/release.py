"""`./dev release VERSION`: set the version of all members, of their requirements on each other, and of the chart.

All have the same version. The next `./dev` recreates the environment, since programs read their version from the
installed package.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tools.dev.environments import ROOT
from tools.dev.wheels import members

VERSION = re.compile(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}")
"""Three numbers: a form that Python packages and charts sort in the same way."""

CHART = Path("helm") / "penstock"
IN_MEMBERS = (r'^(version = ")[^"]*', r'("penstock-[a-z]+(?:\[[a-z,]+\])?==)[^"]*')
IN_CHART = (r"^(version: )\S+", r"^(appVersion: )\S+")
IN_VALUES = (r"^( +image: ghcr\.io/penstock/[a-z]+:)\S+",)
"""Patterns of a version; the first group is the text before it."""


def write(version: str, root: Path = ROOT) -> list[Path]:
    """Write the version into all files below ``root`` and return the changed files."""
    patterns_by_file: dict[Path, tuple[str, ...]] = {
        member.relative_to(ROOT) / "pyproject.toml": IN_MEMBERS for member in members()
    }
    patterns_by_file |= {CHART / "Chart.yaml": IN_CHART, CHART / "values.yaml": IN_VALUES}
    return [root / path for path, patterns in patterns_by_file.items() if _update(root / path, patterns, version)]


def _update(path: Path, patterns: tuple[str, ...], version: str) -> bool:
    """Replace the version in a file; return whether that changed it."""
    old = new = path.read_text()
    for pattern in patterns:
        new = re.sub(pattern, rf"\g<1>{version}", new, flags=re.MULTILINE)
    if new != old:
        path.write_text(new)
    return new != old


def main() -> int:
    """Write the version of the command line, and print the remaining steps."""
    if len(sys.argv) != 2 or VERSION.fullmatch(sys.argv[1]) is None:
        print("./dev release takes one version of three numbers: for example ./dev release 0.2.0", file=sys.stderr)
        return 2
    for path in write(sys.argv[1]):
        print(path.relative_to(ROOT))
    print("Rename [Unreleased] in CHANGELOG.md to this version with a date, and renew docs/openapi.json:")
    print("PENSTOCK_RENEW=1 ./dev test tests/api/test_openapi.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
