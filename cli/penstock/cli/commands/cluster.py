"""What runs in the pods of a cluster: `pod`, which an operator starts and nobody types."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.core.pod import ATTEMPT_FILES, POD_FILES, POD_UID_VARIABLE, TERMINATION_FILE, TOKEN_FILE


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(hidden=True)(pod)


def pod(
    attempt: Annotated[int, typer.Option(min=1, help="The attempt's number.")],
    out: Annotated[Path, typer.Option(help="The folder that all pods share.")],
    data: Annotated[Path, typer.Option(help="The folder of the roots of data://.")],
    local: Annotated[Path, typer.Option(help="A folder of this pod alone, on its node.")],
    attempt_files: Annotated[Path, typer.Option(help="Job, address and plan.")] = Path(ATTEMPT_FILES),
    pod_files: Annotated[Path, typer.Option(help="What is told to this pod.")] = Path(POD_FILES),
    token_file: Annotated[Path, typer.Option(help="The file that holds the token.")] = Path(TOKEN_FILE),
    termination_log: Annotated[Path, typer.Option(help="Where to say how it ended.")] = Path(TERMINATION_FILE),
) -> None:
    """Be a pod of an attempt; the operator starts this."""
    from penstock.cli.pod import Pod, run_pod
    from penstock.cli.pod_mailbox import PodFiles
    from penstock.core.errors import UserError

    uid = os.environ.get(POD_UID_VARIABLE, "")
    if not uid:
        raise UserError(what="is not set", where=POD_UID_VARIABLE, remedy="let the pod's own uid be there")
    files = PodFiles(attempt=attempt_files, pod=pod_files, token=token_file, termination=termination_log)
    here = Pod(uid=uid, attempt=attempt, files=files, out=out.absolute(), data=data.absolute(), local=local.absolute())
    raise typer.Exit(run_pod(here, output.say))
