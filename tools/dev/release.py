"""`./dev release VERSION`: give every member, what members ask of each other, and the chart a version.

All have the same, and nothing else writes it. The next `./dev` makes the environment again, since programs read their
version from what is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tools.dev.environments import ROOT
from tools.dev.wheels import members

VERSION = re.compile(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}")
"""Of the three numbers that Python packages and charts both order in the same way."""

CHART = Path("helm") / "penstock"
IN_MEMBERS = (r'^(version = ")[^"]*', r'("penstock-[a-z]+(?:\[[a-z,]+\])?==)[^"]*')
IN_CHART = (r"^(version: )\S+", r"^(appVersion: )\S+")
IN_VALUES = (r"^( +image: ghcr\.io/penstock/[a-z]+:)\S+",)
"""What stands before a version, and the version itself."""


def write(version: str, root: Path = ROOT) -> list[Path]:
    """Write the version everywhere below ``root``; the files that changed."""
    wanted: dict[Path, tuple[str, ...]] = {
        member.relative_to(ROOT) / "pyproject.toml": IN_MEMBERS for member in members()
    }
    wanted |= {CHART / "Chart.yaml": IN_CHART, CHART / "values.yaml": IN_VALUES}
    return [root / path for path, patterns in wanted.items() if _written(root / path, patterns, version)]


def _written(path: Path, patterns: tuple[str, ...], version: str) -> bool:
    old = new = path.read_text()
    for pattern in patterns:
        new = re.sub(pattern, rf"\g<1>{version}", new, flags=re.MULTILINE)
    if new != old:
        path.write_text(new)
    return new != old


def main() -> int:
    """Write the version that is named, and say what remains to be done."""
    if len(sys.argv) != 2 or VERSION.fullmatch(sys.argv[1]) is None:
        print("./dev release takes one version of three numbers, such as 0.2.0", file=sys.stderr)
        return 2
    for path in write(sys.argv[1]):
        print(path.relative_to(ROOT))
    print("Give [Unreleased] in CHANGELOG.md this version and a date, and write docs/openapi.json again:")
    print("PENSTOCK_RENEW=1 ./dev test tests/api/test_openapi.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
