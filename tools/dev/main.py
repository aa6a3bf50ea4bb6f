"""Sets up, tests, checks and demonstrates penstock. Needs Python 3.11 or newer and nothing else.

    ./dev setup            make or refresh .venv (every other verb does so by itself)
    ./dev demo [ARG...]    measure this machine, plan and train a small llama on it; ARGs go to `penstock demo`
    ./dev demo --cluster   the same on a Kubernetes of this machine, which `./dev cluster` makes
    ./dev test [ARG...]    every test, the checks among them; with ARGs only what pytest selects by them,
                           with long options alone every test (--random-order-seed=7: in another order)
    ./dev check            lint, formatting, types and import rules
    ./dev cluster VERB     a Kubernetes on this machine: up, down, ...; --help shows all
    ./dev bench [NAME...]  run the named benchmarks, or all; --list shows them
    ./dev wheels FOLDER    make the wheels of all members there, and the constraint that installs them
    ./dev release VERSION  give all members and the chart this version
    ./dev gpu [PART...]    check and measure on a machine with a GPU, in parts; --list shows them
    ./dev soak [PART...]   kills, fuzz, queue, plans, small-plans: does anything break, for hours; see --help
    ./dev clean            remove environments and caches; runs/ stays

Exit codes: 0 done; 1 a check or benchmark failed; 2 something only you can fix, with what to do;
3 the installation failed; otherwise that of pytest or penstock.
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
            raise SetupError(f"no verb {verb}: one of {', '.join(VERBS)}.")
        return VERBS[verb](rest)
    except SetupError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
