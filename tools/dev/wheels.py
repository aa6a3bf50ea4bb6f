"""`./dev wheels FOLDER`: build a wheel of every member of the workspace, and a constraints file for pip and uv.

The distributions' names are not registered on the public index, so another project may register one. The constraints
file pins each member to the URL of its wheel, so that an installation never downloads a member from an index:

    pip install --constraint FOLDER/penstock.txt penstock-cli penstock-agent penstock-trainer

The Dockerfile does the same in its first stage.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.dev.environments import ROOT, read_workspace

CONSTRAINT = "penstock.txt"


def members() -> list[Path]:
    """Return the folders of the workspace's members."""
    return [ROOT / folder for folder in read_workspace().members]


def build(folder: Path) -> Path:
    """Build the wheels in the folder, replacing older ones; return the path of the constraints file."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("penstock_*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    for member in members():
        subprocess.run(command, cwd=member, capture_output=True, text=True, check=True)
    wheels = sorted(folder.glob("penstock_*.whl"))
    lines = [f"{wheel.name.partition('-')[0].replace('_', '-')} @ {wheel.as_uri()}\n" for wheel in wheels]
    constraint = folder / CONSTRAINT
    constraint.write_text("".join(lines))
    return constraint


def main() -> int:
    """Build the wheels in the folder of the command line."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("./dev wheels takes one folder for the wheels: for example ./dev wheels dist", file=sys.stderr)
        return 2
    constraint = build(Path(sys.argv[1]))
    print(f"pip install --constraint {constraint} penstock-cli")
    return 0


if __name__ == "__main__":
    sys.exit(main())
