"""Logs and files of a job, downloaded from a service."""

from __future__ import annotations

import contextlib
import fnmatch
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from penstock.cli import output
from penstock.cli.lines import working
from penstock.cli.output import Format, printable
from penstock.client import Artifact, Checkpoint, Client, Line, Place
from penstock.core.errors import RunError, UserError
from penstock.core.records import NO_RANK
from penstock.core.units import format_age, format_bytes

POLL_SECONDS = 1.0
QUIET_POLLS = 3
"""Polls without new lines after the end of a job: a pod's last lines may still be in transit to the service."""
INCOMPLETE_QUIET_POLLS = 120
"""Limit of polls for lines that an ended job has recorded and the service has not received."""
STYLES = {"error": "red", "warning": "yellow"}


def show_logs(
    client: Client,
    place: Place,
    *,
    rank: int | None,
    tail: int | None,
    follow: bool,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Print the output of ranks; with ``follow``, continue until the job has ended and all output has arrived."""
    page = client.logs(place, rank=rank, tail=tail)
    quiet = 0
    while True:
        _print(page.items)
        if page.items and (tail is None or follow):
            quiet = 0
        elif not follow:
            return
        elif client.get(place).resting:
            quiet += 1
            if quiet >= (QUIET_POLLS if page.complete else INCOMPLETE_QUIET_POLLS):
                break
            pause(POLL_SECONDS)
        else:
            pause(POLL_SECONDS)
        page = client.logs(place, rank=rank, cursor=page.next)
    if not page.complete:
        output.say(
            f"{place}: the service has not received all lines of the job yet and keeps collecting them; "
            f"show them later with: penstock logs {place}"
        )


def _print(lines: Iterable[Line]) -> None:
    for line in sorted(lines, key=lambda line: (line.at, line.rank, line.number)):
        name = "run" if line.rank == NO_RANK else str(line.rank)
        output.show(f"{name:>3} | {printable(line.message)}", style=STYLES.get(line.level))


def show_artifacts(artifacts: Sequence[Artifact], form: Format) -> None:
    """Print a line for each file, or all files as data."""
    table = output.table("file", "size", "age", pad_edge=False)
    for artifact in artifacts:
        table.add_row(artifact.name, format_bytes(artifact.bytes), format_age(output.age_seconds(artifact.modified_at)))
    output.present(form, lambda: [table], lambda: [artifact.to_manifest() for artifact in artifacts])


def download(client: Client, place: Place, patterns: Sequence[str], folder: Path) -> list[Path]:
    """Write the files that match the patterns below ``folder``, each of them atomically.

    Raises:
        UserError: a pattern matches no file, or a file cannot be written.
    """
    artifacts = client.artifacts(place)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(artifact.name, pattern) for artifact in artifacts):
            remedy = f"penstock download {place} lists its files"
            raise UserError(what=f"{pattern} matches no file of {place}", remedy=remedy)
    matching = [
        artifact for artifact in artifacts if any(fnmatch.fnmatchcase(artifact.name, pattern) for pattern in patterns)
    ]
    return [_download(client, place, artifact.name, folder) for artifact in matching]


def _download(client: Client, place: Place, name: str, folder: Path) -> Path:
    target = folder / local_name(name)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            for chunk in client.download(place, name):
                file.write(chunk)
        partial.replace(target)
    except OSError as error:
        raise UserError(
            what=f"cannot be written: {error.strerror}", where=str(target), remedy="choose a writable folder with --to"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return target


def local_name(name: str) -> PurePosixPath:
    """Return the name as a path below the target folder; raises `UserError` for a name that leads out of it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        remedy = "check the URL of the service: no penstock service sends such names"
        raise UserError(what=f"{name!r} leads out of the folder", remedy=remedy)
    return path


def export_newest(client: Client, place: Place, pause: Callable[[float], None] = time.sleep) -> str:
    """Export the newest complete checkpoint, wait for it, and return the pattern of its files.

    Raises:
        UserError: there is no complete checkpoint.
        RunError: the export failed.
    """
    newest = next((checkpoint for checkpoint in client.checkpoints(place) if checkpoint.complete), None)
    if newest is None:
        remedy = f"wait for its first checkpoint: penstock watch {place}"
        raise UserError(what=f"{place} has no checkpoint yet", remedy=remedy)
    exported = client.export(place, newest)
    with working(f"exporting step {newest.step}"):
        while exported.export is None or exported.export.state not in ("done", "failed"):
            pause(POLL_SECONDS)
            exported = _refresh_checkpoint(client, place, newest)
    if exported.export.state == "failed":
        raise RunError(f"step {newest.step} was not exported: {exported.export.message}")
    return f"{exported.export.folder}/*"


def _refresh_checkpoint(client: Client, place: Place, exported: Checkpoint) -> Checkpoint:
    for checkpoint in client.checkpoints(place):
        if (checkpoint.attempt, checkpoint.step) == (exported.attempt, exported.step):
            if checkpoint.export is None:
                raise RunError("the service restarted and lost the export; request it again")
            return checkpoint
    raise RunError(f"the checkpoint of step {exported.step} was pruned meanwhile; request the export again")
