"""`./dev wheels FOLDER`: every member of the workspace as a wheel, and a constraint for pip and uv.

The distributions' names are not registered on the public index, and another project may take one. So nothing asks an
index for them: the constraint names the wheel of each member by its place, and an installation has no other choice:

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
    """The folders of the workspace's members."""
    return [ROOT / folder for folder in read_workspace().members]


def build(folder: Path) -> Path:
    """Make the wheels in the folder, in place of older ones; the file of the constraint."""
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
    """Make them in the folder that is named."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("./dev wheels takes the folder to put the wheels into, and nothing else", file=sys.stderr)
        return 2
    constraint = build(Path(sys.argv[1]))
    print(f"pip install --constraint {constraint} penstock-cli")
    return 0


if __name__ == "__main__":
    sys.exit(main())
