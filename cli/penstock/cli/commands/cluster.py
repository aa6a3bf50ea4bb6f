"""What runs in the pods of a cluster: `pod` and `report-pod`, which an operator starts and nobody types."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.core.errors import UserError
from penstock.core.pod import (
    AGENT_ADDRESS_VARIABLE,
    ATTEMPT_FILES,
    POD_FILES,
    POD_UID_VARIABLE,
    TERMINATION_FILE,
    TOKEN_FILE,
)

_Attempt = Annotated[int, typer.Option(min=1, help="The attempt's number.")]
_Out = Annotated[Path, typer.Option(help="The folder that all pods share.")]
_Local = Annotated[Path, typer.Option(help="A folder of this pod alone, on its node.")]
_AttemptFiles = Annotated[Path, typer.Option(help="Job, address and plan.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(hidden=True)(pod)
    app.command(hidden=True)(report_pod)


def pod(
    attempt: _Attempt,
    out: _Out,
    data: Annotated[Path, typer.Option(help="The folder of the roots of data://.")],
    local: _Local,
    attempt_files: _AttemptFiles = Path(ATTEMPT_FILES),
    pod_files: Annotated[Path, typer.Option(help="What is told to this pod.")] = Path(POD_FILES),
    termination_log: Annotated[Path, typer.Option(help="Where to say how it ended.")] = Path(TERMINATION_FILE),
) -> None:
    """Be a pod of an attempt; the operator starts this."""
    from penstock.cli.pod import Pod, run_pod
    from penstock.cli.pod_files import PodFiles, PodFolders

    folders = PodFolders(uid=_own_uid(), attempt=attempt, out=out.absolute(), local=local.absolute())
    files = PodFiles(attempt=attempt_files, pod=pod_files, termination=termination_log)
    raise typer.Exit(run_pod(Pod(folders=folders, files=files, data=data.absolute()), output.say))


def report_pod(
    attempt: _Attempt,
    out: _Out,
    local: _Local,
    attempt_files: _AttemptFiles = Path(ATTEMPT_FILES),
    token_file: Annotated[Path, typer.Option(help="The file that holds the token.")] = Path(TOKEN_FILE),
) -> None:
    """Bring what a pod's ranks record to the service, and answer the operator; the operator starts this."""
    from penstock.cli.pod_files import PodFolders
    from penstock.cli.reporter import report

    folders = PodFolders(uid=_own_uid(), attempt=attempt, out=out.absolute(), local=local.absolute())
    address = os.environ.get(AGENT_ADDRESS_VARIABLE, "")
    raise typer.Exit(0 if report(folders, attempt_files, token_file, output.say, address) else 1)


def _own_uid() -> str:
    uid = os.environ.get(POD_UID_VARIABLE, "")
    if not uid:
        raise UserError(what="is not set", where=POD_UID_VARIABLE, remedy="let the pod's own uid be there")
    return uid
