"""Reads fuzzed inputs in a separate process under a memory limit: ``python -m benchmarks.soak.reading``.

Before each case, the process writes the case's number to a file, so that its parent knows which input ended it. For
every violation it prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import sys
import time
import traceback
from pathlib import Path

from benchmarks.soak.cases import KINDS, case

from penstock.core.errors import PenstockError

ADDRESS_SPACE_BYTES = 4 * 2**30
"""Hard limit. NumPy, Numba and threads reserve far more than they use."""


def main() -> None:
    """Read cases from ``--first`` on, until ``--count`` are read or the process is ended."""
    parser = argparse.ArgumentParser(prog="reading")
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, default=sys.maxsize)
    parser.add_argument("--progress", type=Path, required=True)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    logging.disable(logging.CRITICAL)
    progress = os.open(options.progress, os.O_WRONLY | os.O_CREAT)
    with KINDS[options.kind].reading() as read:
        for number in range(options.first, options.first + options.count):
            content = case(options.kind, options.seed, number)
            os.pwrite(progress, f"{number:20d} {time.monotonic():20.6f}".encode(), 0)
            try:
                read(content)
            except PenstockError:
                pass  # refused with a proper error
            except Exception as error:
                what = f"{type(error).__name__}: {str(error)[:300]}"
                print(json.dumps({"number": number, "what": what, "trace": _trace(error)}), flush=True)
        os.pwrite(progress, f"{options.first + options.count:20d} {time.monotonic():20.6f}".encode(), 0)


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-4000:]


if __name__ == "__main__":
    main()
