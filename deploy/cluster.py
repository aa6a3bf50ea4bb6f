"""`./dev cluster`: a Kubernetes for development, by kind where Docker runs and kind is there, else by the lab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deploy import kind
from tools.lab.__main__ import carried_out, do


def carry_out(said: argparse.Namespace) -> None:
    """Do what was said by whichever fits; raises `LabError` where the user has to do something first."""
    (kind.do if kind.fits() else do)(said)


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say; the exit code is 2 where the user has to do something first."""
    return carried_out(arguments, carry_out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
