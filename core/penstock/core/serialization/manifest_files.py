"""Small files that one side writes and the other reads, always complete, also after a power cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.manifest import Manifest
from penstock.core.serialization.files import write_atomically

M = TypeVar("M", bound=Manifest)


def read(path: Path, kind: type[M]) -> M | None:
    """The contents; None if the file is missing, or damaged so that it is not JSON.

    JSON of another form is an error, since another version of penstock may have written it: a claim of that form may
    be of a supervisor that runs.

    Raises:
        UserError: the file has JSON of another form.
        OSError: the file may not be read.
    """
    try:
        return kind.from_manifest(jsontext.load(path.read_text()))
    except (FileNotFoundError, ValueError):
        return None
    except UserError as error:
        remedy = "end the processes of this run, and delete the file if another version of penstock wrote it"
        raise UserError(what=error.what, where=f"{path}: {error.where}", remedy=remedy) from None


def write(path: Path, value: Manifest) -> None:
    """Replace the contents."""
    write_atomically(path, json.dumps(value.to_manifest()) + "\n")
