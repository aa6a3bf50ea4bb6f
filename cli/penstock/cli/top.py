"""Table of all jobs and their changes, for `penstock top`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cli import output
from penstock.cli.remote import job_table
from penstock.client import Client, Message
from penstock.client.types import Job

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 200


@dataclass
class Board:
    """Jobs of a stream by uid, newest first."""

    jobs: dict[str, Job] = field(default_factory=dict)

    def replace(self, jobs: list[Job]) -> None:
        """Replace all jobs."""
        self.jobs = {job.uid: job for job in jobs}

    def update(self, row: dict[str, Any]) -> bool:
        """Update a job's row; return false if the board does not have the job."""
        job = self.jobs.get(row["uid"])
        if row["deletedAt"] is not None:
            self.jobs.pop(row["uid"], None)
        elif job is not None:
            self.jobs[job.uid] = job.updated(row)
        return job is not None or row["deletedAt"] is not None

    def table(self) -> Table:
        """One row for every job, active jobs first."""
        newest = sorted(self.jobs.values(), key=lambda job: job.created_at, reverse=True)
        return job_table(sorted(newest, key=lambda job: job.resting)[:MOST_ROWS])


def show_board(client: Client, namespace: str | None) -> None:
    """Show all jobs until Ctrl-C; without a terminal, print the last table."""
    from rich.live import Live

    board = Board()
    query: dict[str, Any] = {"namespace": namespace} if namespace else {}
    shown = output.terminal()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=shown, auto_refresh=False, screen=shown.is_terminal) as live,
    ):
        for message in client.listen(**query):
            if apply_message(board, client, message, query):
                live.update(board.table(), refresh=True)


def apply_message(board: Board, client: Client, message: Message, query: dict[str, Any]) -> bool:
    """Apply a message; return whether the board changed. ``hello`` and a new job cause a new list."""
    if message.kind == "event":
        return False
    if message.kind == "hello" or not board.update(message.data):
        board.replace(list(client.jobs(**query)))
    return True
