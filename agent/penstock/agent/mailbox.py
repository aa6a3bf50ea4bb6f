"""Requests to the supervisor of an attempt, and its reports.

On one machine, a supervisor and its service share the attempt's folder. In a pod, the supervisor uses the pod's files
(`penstock.agent.pod_mailbox`).
"""

from __future__ import annotations

from typing import Protocol

from penstock.core import jsontext
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, Binding, SupervisorRequest


class Mailbox(Protocol):
    """Interface that the supervisor polls. A request is never withdrawn."""

    def is_requested(self, request: SupervisorRequest) -> bool:
        """Whether there is a request of this kind."""

    def binding(self) -> Binding | None:
        """Return the binding to a plan, which is in the run directory; none before the binding has arrived.

        Raises `PenstockError` if no binding can arrive.
        """

    def report(self, report: AttemptReport) -> None:
        """Report the state of the attempt; raises OSError only if its end cannot be reported."""


class FolderMailbox:
    """Mailbox in the files of an attempt's folder."""

    def __init__(self, folder: AttemptFolder) -> None:
        self._folder = folder
        self._last_report: AttemptReport | None = None

    def is_requested(self, request: SupervisorRequest) -> bool:
        return self._folder.request(request).exists()

    def binding(self) -> Binding | None:
        if not self._folder.binding.exists():
            return None
        return Binding.from_manifest(jsontext.load(self._folder.binding.read_text()))

    def report(self, report: AttemptReport) -> None:
        """Write the report. A full disk does not end a running attempt: the next report is a retry."""
        if report == self._last_report and self._folder.report.exists():
            return
        try:
            write_json(self._folder.report, report.to_manifest())
        except OSError:
            if report.ended:
                raise
            return
        self._last_report = report
