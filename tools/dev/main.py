"""Set up, test, check and demonstrate penstock. Needs Python 3.11 or newer and nothing else.

Try it:
    ./dev setup            create or update .venv (every other verb does this first)
    ./dev demo [ARG...]    measure this machine, plan and train a small llama on it; ARGs go to `penstock demo`
    ./dev demo --cluster   the same on a Kubernetes cluster on this machine, created by `./dev cluster`
    ./dev cluster VERB     a Kubernetes cluster on this machine: up, down, ...; --help lists all verbs

Change it:
    ./dev test [ARG...]    run all tests and checks; with arguments, what pytest selects by them;
                           with long options only, all tests (--random-order-seed=7: in another order)
    ./dev check            lint, formatting, types and import rules
    ./dev bench [NAME...]  run the named benchmarks, or all; --list lists them
    ./dev gpu [PART...]    checks and measurements on a machine with a GPU, in parts; --list lists them
    ./dev soak [PART...]   long runs that search for failures: kills, fuzz, queue, plans, small-plans, mixed,
                           every-plan; see --help
    ./dev clean            remove environments and caches, but not runs/

Release it:
    ./dev wheels FOLDER    build the wheels of all members in FOLDER, and a constraints file that installs them
    ./dev release VERSION  set the version of all members and of the chart

Example: ./dev test tests/planner -k slicing

Exit codes: 0 success; 1 a check or benchmark failed; 2 an error that you have to fix, with a remedy;
3 the installation failed; otherwise the exit code of pytest or penstock.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tools.dev.console import SetupError
from tools.dev.verbs import VERBS


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(__doc__)
        return 0 if arguments else 2
    verb, *rest = arguments
    try:
        if verb not in VERBS:
            raise SetupError(f"unknown verb {verb}: use one of {', '.join(VERBS)}")
        return VERBS[verb](rest)
    except SetupError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
