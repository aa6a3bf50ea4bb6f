"""Entry point of `penstock`: its commands, and the handling of their errors.

Exit codes: 0 done, 1 the run failed, 2 a mistake of the user, 130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from penstock import core
from penstock.cli import output
from penstock.cli.commands import old_names, planning, remote, results, running, serving, setup
from penstock.core.errors import PenstockError, UserError
from penstock.core.host.members import absent_member
from penstock.core.host.stopping import StopRequestedError

RUN_FAILED = 1
USER_MISTAKE = 2
INTERRUPTED = 128 + signal.SIGINT

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (setup, planning, running, results, remote, serving, old_names):
    app.add_typer(module.app)  # in the order of the groups in the help


def _show_version(requested: bool) -> None:
    if requested:
        output.write(f"penstock {core.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train language models with token-level pipeline parallelism: measured, planned and run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=given, prog_name="penstock")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except StopRequestedError as stop:
        return 128 + stop.signal
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if given[:1] == ["--debug"]:
            output.terminal().print_exception()
        return _explain(error)
    return 0


def _explain(error: Exception) -> int:
    error = absent_member(error) or error
    if isinstance(error, UserError):
        output.say_error(error)
        return USER_MISTAKE
    if isinstance(error, PenstockError):
        output.say_failure(str(error))
        return RUN_FAILED
    output.say_failure(
        f"{type(error).__name__}: {error}", "run it again as penstock --debug ..., and report the traceback as a bug"
    )
    return RUN_FAILED
