"""The code of commit 16853cd, version 0.1.0, to run processes of it next to those of this version.

``tests/fixtures/code_16853cd/penstock.tar.xz`` was made by

    git archive 16853cd PARTS | xz -9e

where PARTS are the folders ``planner/penstock``, ``trainer/penstock``, ``api/penstock``, ``cli/penstock``,
``view/penstock`` and ``operator/penstock``. ``penstock`` is a namespace package: folders that come first on PYTHONPATH
take the place of this version's modules. Its dependencies are those of this version, of which none has changed. It asks
for its version by the name of the one distribution that it was.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command import Command
from tests.support.serving import Served

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "code_16853cd" / "penstock.tar.xz"


METADATA = "Metadata-Version: 2.4\nName: penstock\nVersion: 0.1.0\n"


def unpacked(folder: Path) -> str:
    """Put the code into ``folder``; the PYTHONPATH that names it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    distribution = folder / "planner" / "penstock-0.1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(METADATA)
    return os.pathsep.join(str(path.parent) for path in sorted(folder.glob("*/penstock")))


@dataclass
class OldServed(Served):
    """A service of 0.1.0, whose supervisors, ranks and planners are of 0.1.0 as well."""

    code: str = field(kw_only=True)

    @property
    def command(self) -> Command:
        """`penstock` of 0.1.0."""
        command = super().command
        command.environment["PYTHONPATH"] = self.code
        return command
