"""What is named as a folder is read within that folder: a link in it that leads out is refused.

Others may write into a folder of data. By a link they would have whoever trains, or the service that trains for
somebody, read any file that it may. A path that is named itself may be a link: who names it means what it leads to.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from penstock.core.errors import UserError


def opened_inside(path: Path, folder: Path | None) -> BinaryIO:
    """The file, open for reading; anywhere if there is no ``folder``, which is to be a real path.

    What was opened is asked where it lies, so it does not help to put the link there a moment later.

    Raises:
        UserError: it lies outside of the folder.
    """
    file = path.open("rb")
    try:
        if folder is not None:
            require_inside(Path(f"/proc/self/fd/{file.fileno()}").readlink(), folder, path)
    except BaseException:
        file.close()
        raise
    return file


def require_inside(real: Path, folder: Path, named: Path) -> None:
    """Raise `UserError` unless the ``real`` path, which is called ``named``, lies in the folder."""
    if not real.is_relative_to(folder):
        raise UserError(
            what="is a link that leads out of the folder",
            where=str(named),
            remedy="copy the file into the folder, or name the folder or the one file that it leads to",
        )
