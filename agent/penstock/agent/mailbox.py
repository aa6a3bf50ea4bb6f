"""Requests to the supervisor of an attempt, and its reports.

An attempt on this machine has a folder, which a service shares; one in pods has the files of each pod
(`penstock.agent.pod_mailbox`).
"""

from __future__ import annotations

from typing import Protocol

from penstock.core import jsontext
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, Binding, Wish


class Mailbox(Protocol):
    """Polled by the supervisor; a request stays once it is made."""

    def wished(self, wish: Wish) -> bool:
        """Whether there is a request of this kind."""
        ...

    def binding(self) -> Binding | None:
        """Train by this plan, which lies in the run directory; none yet. Raises `PenstockError` if none can come."""
        ...

    def tell(self, report: AttemptReport) -> None:
        """Report the state of the attempt; raises OSError only if its end cannot be reported."""
        ...


class FolderMailbox:
    """The small files of an attempt's folder."""

    def __init__(self, folder: AttemptFolder) -> None:
        self._folder = folder
        self._told: AttemptReport | None = None

    def wished(self, wish: Wish) -> bool:
        return self._folder.wish(wish).exists()

    def binding(self) -> Binding | None:
        if not self._folder.binding.exists():
            return None
        return Binding.from_manifest(jsontext.load(self._folder.binding.read_text()))

    def tell(self, report: AttemptReport) -> None:
        """Write the report. A full disk ends no running attempt: the next report is a retry."""
        if report == self._told and self._folder.report.exists():
            return
        try:
            write_json(self._folder.report, report.to_manifest())
        except OSError:
            if report.ended:
                raise
            return
        self._told = report
