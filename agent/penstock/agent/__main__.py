"""Entry point of `penstock-agent`, which other programs start.

``pod`` and ``report-pod`` are the two containers of a pod on a cluster. ``supervise`` and ``ship`` belong to an attempt
under a service on one machine. ``export`` writes a checkpoint as a model for other programs.

Exit codes: 0 done, 1 failed, 2 a mistake of the user, 130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.agent.console import say, say_error
from penstock.agent.pod_files import PodFiles, PodFolders
from penstock.core.errors import PenstockError, UserError
from penstock.core.host.members import absent_member
from penstock.core.host.stopping import StopRequestedError
from penstock.core.pod import (
    AGENT_ADDRESS_VARIABLE,
    ATTEMPT_FILES,
    POD_FILES,
    POD_UID_VARIABLE,
    TERMINATION_FILE,
    TOKEN_FILE,
)
from penstock.core.run.folder import RunDir

FAILED, USER_MISTAKE = 1, 2

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = _parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except StopRequestedError as stop:
        return 128 + stop.signal
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        return _explain(error)


def _explain(error: Exception) -> int:
    """Print the cause of the failure on the last lines; return the exit code."""
    error = absent_member(error) or error
    if isinstance(error, UserError):
        say_error(error)
        return USER_MISTAKE
    if isinstance(error, PenstockError):
        say(f"failed {error}")
    else:
        traceback.print_exception(error)  # an unexpected error: the log is its only record
        say(f"failed {type(error).__name__}: {error}")
    return FAILED


def _pod(options: argparse.Namespace) -> int:
    from penstock.agent.pod import Pod, run_pod

    files = PodFiles(attempt=options.attempt_files, pod=options.pod_files, termination=options.termination_log)
    return run_pod(Pod(folders=_folders(options), files=files, data=options.data), say)


def _report_pod(options: argparse.Namespace) -> int:
    from penstock.agent.reporter import report

    address = os.environ.get(AGENT_ADDRESS_VARIABLE, "")
    return 0 if report(_folders(options), options.attempt_files, options.token_file, say, address) else FAILED


def _folders(options: argparse.Namespace) -> PodFolders:
    uid = os.environ.get(POD_UID_VARIABLE, "")
    if not uid:
        remedy = "set it from metadata.uid with the downward API, as the operator does"
        raise UserError(what="is not set", where=POD_UID_VARIABLE, remedy=remedy)
    return PodFolders(uid=uid, attempt=options.attempt, out=options.out, local=options.local)


def _supervise(options: argparse.Namespace) -> int:
    from penstock.agent.plans import LocalDecider
    from penstock.agent.probe import identify
    from penstock.agent.profiles import Profiles
    from penstock.agent.supervisor import read_order, supervise
    from penstock.agent.workers import LocalWorkers

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    order = read_order(options.root, options.attempt)
    here = functools.partial(identify, devices=order.devices)
    return supervise(
        options.root,
        order,
        workers=LocalWorkers(order.devices),
        decider=lambda job, run: LocalDecider(job, run, Profiles(), identify=here, clock=time.time),
    )


def _ship(options: argparse.Namespace) -> int:
    from penstock.agent.shipping import Orphaned, ship
    from penstock.core.host.stopping import listening

    run = RunDir(options.root)
    with listening() as requests:
        is_done = ship(run, options.address_file, options.token_file, say, Orphaned(requests, sys.stdin))
    return 0 if is_done else FAILED


def _export(options: argparse.Namespace) -> int:
    from penstock.trainer.writing import exported

    written = exported(RunDir(options.root), options.to, attempt=options.attempt, step=options.step)
    say(f"wrote the model of step {written.step} to {options.to}")
    return 0


class _Parser(argparse.ArgumentParser):
    """Parser without abbreviated options, whose errors are two lines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the mistake and where help is; exit with code 2."""
        say_error(UserError(what=message, where=self.prog, remedy=f"{self.prog} --help lists the arguments"))
        sys.exit(USER_MISTAKE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="penstock-agent", description="Start, watch and stop ranks. Other programs start this one.")
    commands = parser.add_subparsers(required=True, parser_class=_Parser)
    pod = commands.add_parser("pod", help="run the ranks of a pod; the operator starts this")
    _add_pod_options(pod)
    pod.add_argument("--data", type=_path, required=True, help="folder with one folder for each root of data://")
    pod.add_argument("--pod-files", type=Path, default=Path(POD_FILES), help="folder with the annotations of this pod")
    pod.add_argument("--termination-log", type=Path, default=Path(TERMINATION_FILE), help="file for the result")
    pod.set_defaults(command=_pod)
    report = commands.add_parser("report-pod", help="upload a pod's records to the service; the operator starts this")
    _add_pod_options(report)
    report.add_argument("--token-file", type=Path, default=Path(TOKEN_FILE), help="the file that holds the token")
    report.set_defaults(command=_report_pod)
    supervise = commands.add_parser("supervise", help="supervise an attempt; the service starts this")
    supervise.add_argument("root", type=Path, help="the run directory")
    supervise.add_argument("attempt", type=int, help="the attempt's number")
    supervise.set_defaults(command=_supervise)
    ship = commands.add_parser("ship", help="upload a run's records to a service")
    ship.add_argument("root", type=_path, help="the run directory")
    ship.add_argument("--address-file", type=Path, required=True, help="file with the address of the service")
    ship.add_argument("--token-file", type=Path, required=True, help="the file that holds the token")
    ship.set_defaults(command=_ship)
    export = commands.add_parser("export", help="write a checkpoint's weights in the format of transformers")
    export.add_argument("root", type=Path, help="the run directory")
    export.add_argument("--to", type=Path, required=True, help="the folder to write")
    export.add_argument("--attempt", type=_positive, default=None, help="use only checkpoints of this attempt")
    export.add_argument("--step", type=_natural, default=None, help="use the checkpoint of this step")
    export.set_defaults(command=_export)
    return parser


def _add_pod_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attempt", type=_positive, required=True, help="the attempt's number")
    parser.add_argument("--out", type=_path, required=True, help="folder that all pods share")
    parser.add_argument("--local", type=_path, required=True, help="folder on the node, for this pod only")
    parser.add_argument(
        "--attempt-files",
        type=Path,
        default=Path(ATTEMPT_FILES),
        help="folder with the job, the service's address and the plan",
    )


def _path(text: str) -> Path:
    return Path(text).absolute()


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


_positive, _natural = functools.partial(_at_least, 1), functools.partial(_at_least, 0)


if __name__ == "__main__":
    sys.exit(main())
