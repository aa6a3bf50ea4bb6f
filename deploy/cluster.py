"""`./dev cluster`: a Kubernetes cluster for development, by kind if Docker and kind are installed, else by the lab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deploy import kind
from tools.lab.__main__ import do, execute


def run_verb(options: argparse.Namespace) -> None:
    """Execute the command with kind or the lab; raises `LabError` if the user has to do something first."""
    (kind.do if kind.fits() else do)(options)


def main(arguments: Sequence[str]) -> int:
    """Execute the arguments; return the exit code, 2 if the user has to do something first."""
    return execute(arguments, run_verb)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
