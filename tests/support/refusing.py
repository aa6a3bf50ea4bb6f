"""Processes that find a part of what is installed here: as in an image that holds some members of the workspace."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

REFUSING = '''
import importlib.machinery
import os

refused = frozenset(os.environ["REFUSED"].split())
find = importlib.machinery.PathFinder.find_spec

class Finding:
    """Not a function, which would become a method of a class that keeps it, as pytest's does."""

    def __call__(self, name, path=None, target=None):
        parts = name.split(".")
        is_refused = any(".".join(parts[:count]) in refused for count in range(1, len(parts) + 1))
        return None if is_refused else find(name, path, target)

importlib.machinery.PathFinder.find_spec = Finding()
'''


def refusing(folder: Path, refused: Collection[str]) -> dict[str, str]:
    """The environment of processes, and of those that they start, in which these modules cannot be found."""
    (folder / "sitecustomize.py").write_text(REFUSING)
    paths = {"PYTHONPATH": str(folder), "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
    told = {"REFUSED": " ".join(sorted(refused)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {"PATH": os.environ["PATH"], **told, **paths}
