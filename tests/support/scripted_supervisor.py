"""A real supervisor in a process of its own, whose workers follow the scripts of a case of the engine's table."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from penstock.agent.supervisor import read_order, supervise
from tests.support.engine_cases import End
from tests.support.fake_workers import FakeWorkers, Script, killed, refused
from tests.support.supervised import FakeDecider

NUM_STEPS = 3


SCRIPTS = {
    End.SUCCEEDS: Script(until=10),
    End.FAILS: Script(until=NUM_STEPS, end=killed()),
    End.IS_REFUSED: Script(until=NUM_STEPS, end=refused("checkpoint x is corrupt", "start again")),
    End.FALLS_SILENT: Script(until=NUM_STEPS, end=None),
    End.RUNS_ON: Script(until=10**6, end=None),
    End.VANISHES: Script(until=10**6, end=None),  # until it is killed
}


def main() -> int:
    """Arguments: the ends of the attempts, the run directory, the attempt's number."""
    ends, root, number = [End(end) for end in sys.argv[1].split(",")], Path(sys.argv[2]), int(sys.argv[3])
    order = dataclasses.replace(read_order(root, number), address_file="", token_file="")
    workers = FakeWorkers(scripts=[SCRIPTS[ends[number - 1]]])
    return supervise(root, order, workers=workers, decider=lambda job, run: FakeDecider())


if __name__ == "__main__":
    sys.exit(main())
