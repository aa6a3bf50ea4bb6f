"""Opens the files of a folder and refuses links that lead out of it.

Other users may be able to write to a folder of data. With a link they could make the user who trains, or a service that
trains for its users, read any file that the process may read. A path that the job names itself may be a link, since the
job's author chose its target.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from penstock.core.errors import UserError


def opened_inside(path: Path, folder: Path | None) -> BinaryIO:
    """Open ``path`` for reading. If ``folder``, a real path, is given, the file has to lie within it.

    The check uses the real path of the open file, so replacing the file by a link between check and use has no effect.

    Raises:
        UserError: the file lies outside of the folder.
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
    """Raise `UserError` unless the ``real`` path of the path ``named`` lies within the folder."""
    if not real.is_relative_to(folder):
        raise UserError(
            what="is a link that leads out of the folder",
            where=str(named),
            remedy="copy the file into the folder, or name the folder or the one file that it leads to",
        )
